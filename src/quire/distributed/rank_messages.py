"""Messages between an engine and its ranks: orders to all ranks through the ring, replies over each rank's socket.

Frames are those of quire.ipc.frames (a header with kind and number, then a body); plans and results are those of
quire.protocol.wire. Orders are carried out one after another, so all ranks do the same in the same order; each has one
reply, except for ADD_IMAGE, REMOVE_IMAGE, PLAN and CLOSE."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.distributed.rendezvous import Meeting
from quire.ipc.frames import Frame, read_field, read_json, read_uint32, write_json
from quire.ipc.handshake import read_config, read_eos_ids
from quire.ipc.image_frames import read_pixels, write_pixels
from quire.protocol.columns import FrameReader, WireError
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, kv_cache_config_from_json, kv_cache_config_to_json
from quire.protocol.parallel_layout import MAX_RANKS, Shard
from quire.protocol.wire import KEY_BYTES

KINDS = (
    INIT, BIND, WARM_UP, ADD_IMAGE, REMOVE_IMAGE, PLAN, COLLECT, QUERY, CLOSE, READY, DONE, STEP_RESULT, QUERY_REPLY,
    FAILED, OPEN_DEVICE, SLEEP, WAKE,
) = range(1, 18)  # fmt: skip
ANSWERED_BY_DONE = (BIND, WARM_UP, SLEEP, WAKE)
WARM_UP_BODY = struct.Struct("<II")  # maximum tokens of a step, and of a sequence
STEP_RESULT_HEAD = struct.Struct("<QQQ")  # the step, from 1; digests of what was applied, and of the samples
MAX_FAILURE_CHARS = 1 << 12  # characters of a failure's text


class InitMessage(NamedTuple):
    """What one rank is to build: its `part` of the model of `config`, which is sized and has dtype and device resolved,
    for sequences of up to `max_len` tokens that `eos_ids` end. Other ranks wait for it at most `seconds`. RemoteRunner
    adds the `meeting` of the ranks' host."""

    config: EngineConfig
    part: Shard
    eos_ids: tuple[int, ...]
    max_len: int
    seconds: float
    meeting: Meeting = Meeting()
    progress: bool = False
    log_level: int = 30


class RankFailure(NamedTuple):
    """The failure of a rank: its text, a remedy (of a failed start), and whether it only follows from another rank's
    failure."""

    text: str
    remedy: str = ""
    echo: bool = False


def write_init(hello: InitMessage) -> bytes:
    """Return the body of an INIT or OPEN_DEVICE, the first frames on a rank's socket. `part` has no expert_parallel:
    the config has it."""
    return write_json({**hello._asdict(), "config": hello.config.flat(), "part": list(hello.part[:4])})


def read_init(body: memoryview) -> InitMessage:
    """Read the body of an INIT. Raise WireError if it is malformed, StartupError for invalid settings."""
    data = read_json(body)
    part = read_field(data, "part", list)
    if len(part) != 4 or not all(type(one) is int for one in part) or not _is_valid_shard(*part):
        raise WireError("part", f"{str(part)[:80]} is not a rank and number of ranks, stage and number of stages")
    config = read_config(data)
    shard = Shard(*part)._replace(expert_parallel=config.expert_parallel)
    return InitMessage(
        config, shard, read_eos_ids(data, "eos_ids"), read_uint32(data, "max_len"),
        read_field(data, "seconds", float), read_meeting(data, part[3]), read_field(data, "progress", bool),
        read_uint32(data, "log_level"),
    )  # fmt: skip


def read_meeting(data: Mapping[str, Any], num_stages: int) -> Meeting:
    """Read the Meeting in an object, of some of `num_stages` stages. Raise WireError if it is malformed."""
    value = read_field(data, "meeting", list)
    match value:
        case [int(first), int(count), [*descriptors]]:
            if (
                0 <= first < first + count <= num_stages
                and len(descriptors) <= 2 + 4 * MAX_RANKS
                and all(type(one) is int and one >= 0 for one in descriptors)
            ):
                return Meeting(first, count, tuple(descriptors))
    raise WireError("meeting", f"{str(value)[:80]} is not a range of {num_stages} stages with descriptors")


def _is_valid_shard(rank: int, ranks: int, stage: int, stages: int) -> bool:
    """Return True if these are the fields of a valid Shard."""
    return 0 <= rank < ranks and 0 <= stage < stages and ranks * stages <= MAX_RANKS


def write_bind(geometry: KVCacheConfig) -> bytes:
    """Return the body of a BIND."""
    return write_json(kv_cache_config_to_json(geometry))


def read_bind(body: memoryview) -> KVCacheConfig:
    """Read the body of a BIND. Raise WireError if it is malformed."""
    try:
        return kv_cache_config_from_json(read_json(body))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError("geometry", f"{type(error).__name__} {error}"[:200]) from error


def write_add_image(pixels: ImagePixels) -> bytes:
    """Return the body of an ADD_IMAGE."""
    return b"".join(write_pixels(pixels))


def read_add_image(body: memoryview) -> ImagePixels:
    """Read the body of an ADD_IMAGE. Raise WireError if it is malformed."""
    reader = FrameReader(body)
    pixels = read_pixels(reader)
    reader.check_at_end()
    return pixels


def read_remove_image(body: memoryview) -> bytes:
    """Read the body of a REMOVE_IMAGE: the image's key."""
    if len(body) != KEY_BYTES:
        raise WireError("key", f"it has {len(body)} bytes, not {KEY_BYTES}")
    return bytes(body)


def read_warm_up(body: memoryview) -> tuple[int, int]:
    """Read the body of a WARM_UP: the maximum number of tokens of a step and of a sequence."""
    tokens, longest = FrameReader(body).unpack(WARM_UP_BODY, "warm-up")
    return tokens, longest


def read_sleep(body: memoryview) -> int:
    """Read the body of a SLEEP: the level."""
    if len(body) != 1:
        raise WireError("level", f"it has {len(body)} bytes, not 1")
    return body[0]


def read_wake(body: memoryview) -> list[str]:
    """Read the body of a WAKE: the tags of the memory to restore."""
    tags = read_field(read_json(body), "tags", list)
    if not all(type(tag) is str for tag in tags):
        raise WireError("tags", "one is not a string")
    return tags


class RankStepResult(NamedTuple):
    """The body of a STEP_RESULT: the step, digests of what was applied and of what was sampled, and the encoded
    StepResult, empty unless the rank returns it."""

    step: int
    applied: int
    sampled: int
    result: memoryview


def read_step_result(body: memoryview) -> RankStepResult:
    """Read the body of a STEP_RESULT. Raise WireError if it is malformed."""
    step, applied, sampled = FrameReader(body).unpack(STEP_RESULT_HEAD, "answer")
    return RankStepResult(step, applied, sampled, body[STEP_RESULT_HEAD.size :])


def write_failure(failed: RankFailure) -> bytes:
    """Return the body of a FAILED."""
    return write_json(failed._replace(text=failed.text[:MAX_FAILURE_CHARS])._asdict())


def read_failure(frame: Frame) -> RankFailure:
    """Read the body of a FAILED."""
    data: Mapping[str, Any] = read_json(frame.body)
    return RankFailure(
        read_field(data, "text", str)[:MAX_FAILURE_CHARS],
        read_field(data, "remedy", str),
        read_field(data, "echo", bool),
    )
