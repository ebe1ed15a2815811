"""What an engine and its ranks tell each other: orders to all ranks through the ring, answers over each one's socket.

Frames are the link's (quire.ipc.frames: a head with kind and number, then a body), plans and results as everywhere
(quire.protocol.wire). Orders are carried out one after another, so that all ranks do the same in the same order; each
but SEE, FORGET, PLAN and CLOSE has one answer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.ipc.frames import Frame, read_field, read_json, read_uint32, write_json
from quire.ipc.image_frames import read_pixels, write_pixels
from quire.protocol.columns import FrameReader, WireError
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, kv_cache_config_from_json, kv_cache_config_to_json
from quire.protocol.parallel_layout import MOST_RANKS, Shard
from quire.protocol.wire import KEY_BYTES

KINDS = range(1, 18)
(
    INIT,
    BIND,
    WARM_UP,
    ADD_IMAGE,
    REMOVE_IMAGE,
    PLAN,
    COLLECT,
    QUERY,
    CLOSE,
    READY,
    DONE,
    STEP_RESULT,
    QUERY_REPLY,
    FAILED,
    OPEN_DEVICE,
    SLEEP,
    WAKE,
) = KINDS
WARM_UP_BODY = struct.Struct("<II")  # tokens of a step, tokens of a sequence
STEP_RESULT_HEAD = struct.Struct("<QQQ")  # the step, from 1; digests of what was applied, and of what was drawn
MAX_EOS_IDS = 1 << 16  # end tokens
MAX_FAILURE_CHARS = 1 << 12  # characters of a failure


class InitMessage(NamedTuple):
    """What one rank is to build: its `part` of the model of `config`, which is sized and says dtype and device, for
    sequences of up to `max_len` tokens that `eos_ids` end. Others wait for it `seconds` at most. `meeting` are the
    descriptors of the Meeting where ranks meet."""

    config: EngineConfig
    part: Shard
    eos_ids: tuple[int, ...]
    max_len: int
    seconds: float
    meeting: tuple[int, ...] = ()
    progress: bool = False
    log_level: int = 30


class RankFailure(NamedTuple):
    """A rank failed: what it says, what to change (of a start), and whether it's the echo of another one's failure."""

    text: str
    remedy: str = ""
    echo: bool = False


def write_init(hello: InitMessage) -> bytes:
    """The body of a HELLO, the first frame on a rank's socket."""
    return write_json({**hello._asdict(), "config": asdict(hello.config), "part": list(hello.part)})


def read_init(body: memoryview) -> InitMessage:
    """The same, read. WireError for what is none, StartupError for settings that can't be."""
    data = read_json(body)
    part, eos, meeting = (read_field(data, name, list) for name in ("part", "eos_ids", "meeting"))
    if len(part) != 4 or not all(type(one) is int for one in part) or not is_valid_shard(*part):
        raise WireError("part", f"{str(part)[:80]} is no rank and number of ranks, stage and number of stages")
    if len(eos) > MAX_EOS_IDS or not all(type(token) is int for token in eos):
        raise WireError("eos_ids", f"no list of up to {MAX_EOS_IDS} token ids")
    if len(meeting) > 2 + 4 * MOST_RANKS or not all(type(one) is int and one >= 0 for one in meeting):
        raise WireError("meeting", "no list of descriptors")
    try:
        config = EngineConfig(**read_field(data, "config", dict))
    except TypeError as error:
        raise WireError("config", str(error)[:200]) from error
    return InitMessage(
        config, Shard(*part), tuple(eos), read_uint32(data, "max_len"), read_field(data, "seconds", float),
        tuple(meeting), read_field(data, "progress", bool), read_uint32(data, "log_level"),
    )  # fmt: skip


def is_valid_shard(rank: int, ranks: int, stage: int, stages: int) -> bool:
    """Whether there can be a Part of these."""
    return 0 <= rank < ranks and 0 <= stage < stages and ranks * stages <= MOST_RANKS


def write_bind(geometry: KVCacheConfig) -> bytes:
    """The body of a BIND."""
    return write_json(kv_cache_config_to_json(geometry))


def read_bind(body: memoryview) -> KVCacheConfig:
    """The same, read. WireError for what is none."""
    try:
        return kv_cache_config_from_json(read_json(body))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError("geometry", f"{type(error).__name__} {error}"[:200]) from error


def write_add_image(pixels: ImagePixels) -> bytes:
    """The body of a SEE."""
    return b"".join(write_pixels(pixels))


def read_add_image(body: memoryview) -> ImagePixels:
    """The same, read. WireError for what is none."""
    reader = FrameReader(body)
    pixels = read_pixels(reader)
    if reader.offset != reader.end:
        raise reader.error("frame", f"{reader.end - reader.offset} bytes follow its end")
    return pixels


def read_remove_image(body: memoryview) -> bytes:
    """The body of a FORGET: a picture's key."""
    if len(body) != KEY_BYTES:
        raise WireError("key", f"it has {len(body)} bytes, not {KEY_BYTES}")
    return bytes(body)


def read_warm_up(body: memoryview) -> tuple[int, int]:
    """The body of a WARM: the most tokens of a step and of a sequence."""
    tokens, longest = FrameReader(body).unpack(WARM_UP_BODY, "warm-up")
    return tokens, longest


def read_sleep(body: memoryview) -> int:
    """The body of a SLEEP: the level."""
    if len(body) != 1:
        raise WireError("level", f"it has {len(body)} bytes, not 1")
    return body[0]


def read_wake(body: memoryview) -> list[str]:
    """The body of a WAKE: what is taken back."""
    tags = read_field(read_json(body), "tags", list)
    if not all(type(tag) is str for tag in tags):
        raise WireError("tags", "one is no text")
    return tags


class RankStepResult(NamedTuple):
    """The body of an ANSWER: the step, digests of what was applied and of what was drawn, and the result's frame, of
    the rank that tells it."""

    step: int
    applied: int
    drawn: int
    result: memoryview


def read_step_result(body: memoryview) -> RankStepResult:
    """The same, read. WireError for what is none."""
    step, applied, drawn = FrameReader(body).unpack(STEP_RESULT_HEAD, "answer")
    return RankStepResult(step, applied, drawn, body[STEP_RESULT_HEAD.size :])


def write_failure(failed: RankFailure) -> bytes:
    """The body of a FAILED."""
    return write_json(failed._replace(text=failed.text[:MAX_FAILURE_CHARS])._asdict())


def read_failure(frame: Frame) -> RankFailure:
    """The same, read."""
    data: Mapping[str, Any] = read_json(frame.body)
    return RankFailure(
        read_field(data, "text", str)[:MAX_FAILURE_CHARS],
        read_field(data, "remedy", str),
        read_field(data, "echo", bool),
    )
