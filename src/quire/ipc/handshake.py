"""The first frames of a connection (what the engine's process is to build, and the result), and the heartbeat that a
client asks for afterwards."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.core.validation import EngineLimits
from quire.ipc.frames import (
    READY,
    START_FAILED,
    Frame,
    error_from_json,
    metrics_from_json,
    metrics_to_json,
    read_field,
    read_json,
    read_uint32,
    write_json,
)
from quire.ipc.heartbeat import Health
from quire.ipc.messages import EngineReady
from quire.memory.page_keys import KeyChain, PromptKeys
from quire.protocol.columns import FrameReader, WireError
from quire.protocol.shared_host import SharedHostMemory

HEARTBEAT = struct.Struct("<BdI")  # stalled, seconds since the loop's last iteration, bytes of the reason
MAX_EOS_IDS = 1 << 16  # end tokens


class EngineInitMessage(NamedTuple):
    """What the engine's process is to build. `named` are the end tokens of the tokenizer, which the engine's process
    does not load. `stall_after` is in seconds. `progress`: show the progress of loading the model. `report_cache`:
    send a CacheUpdate for every step that changes the cached pages. `replica` is the index of the engine. `shared_host`
    is host memory that the engines of this host share."""

    config: EngineConfig
    named: tuple[int, ...]
    stall_after: float
    progress: bool
    log_level: int
    report_cache: bool = False
    replica: int = 0
    shared_host: SharedHostMemory | None = None


def write_engine_init(hello: EngineInitMessage) -> bytes:
    """Return the body of an INIT frame."""
    return write_json({**hello._asdict(), "config": hello.config.flat()})


def read_engine_init(body: memoryview) -> EngineInitMessage:
    """Read the body of an INIT frame. Raise WireError if it is malformed, StartupError for invalid settings."""
    data = read_json(body)
    return EngineInitMessage(
        read_config(data), read_eos_ids(data, "named"), read_field(data, "stall_after", float),
        read_field(data, "progress", bool), read_uint32(data, "log_level"), read_field(data, "report_cache", bool),
        read_uint32(data, "replica"), _read_shared_host(data.get("shared_host")),
    )  # fmt: skip


def _read_shared_host(numbers: Any) -> SharedHostMemory | None:
    if numbers is None:
        return None
    if type(numbers) is not list or len(numbers) != 4 or not all(type(n) is int and 0 <= n < 2**50 for n in numbers):
        raise WireError("shared_host", "not a descriptor, a part, their number and a size")
    return SharedHostMemory(*numbers)


def read_config(data: Mapping[str, Any]) -> EngineConfig:
    """Return the field `config`. Raise WireError if it is malformed, StartupError for invalid settings."""
    try:
        return EngineConfig.of(**read_field(data, "config", dict))
    except TypeError as error:
        raise WireError("config", str(error)[:200]) from error


def read_eos_ids(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a field of end tokens. Raise WireError if it is malformed."""
    tokens = read_field(data, name, list)
    if len(tokens) > MAX_EOS_IDS or not all(type(token) is int for token in tokens):
        raise WireError(name, f"not a list of at most {MAX_EOS_IDS} token ids")
    return tuple(tokens)


def write_ready(ready: EngineReady) -> bytes:
    """Return the body of a READY frame."""
    return write_json({
        "limits": ready.limits._asdict(), "lines": ready.lines, "notices": ready.notices, "cache": dict(ready.cache),
        "facts": metrics_to_json(ready.facts), "prompt_keys": _keys_to_json(ready.prompt_keys),
        "page_bytes": ready.page_bytes,
    })  # fmt: skip


def read_first_frames(received: Sequence[Frame]) -> tuple[EngineReady, list[Frame]]:
    """Read the first frame of an engine's process, and return it and the frames after it. Raise the StartupError of a
    START_FAILED frame, WireError for any other frame than READY."""
    first, *early = received
    if first.kind == START_FAILED:
        raise error_from_json(read_json(first.body))
    if first.kind != READY:
        raise WireError("kind", f"{first.kind} before READY")
    return read_ready(first.body), early


def read_ready(body: memoryview) -> EngineReady:
    """Read the body of a READY frame."""
    data = read_json(body)
    limits = read_field(data, "limits", dict)
    numbers = {name: read_uint32(limits, name) for name in ("vocab_size", "max_len", "max_queued", "hidden")}
    lines, notices = (tuple(map(str, read_field(data, name, list))) for name in ("lines", "notices"))
    cache: Mapping[str, Any] = read_field(data, "cache", dict)
    facts = metrics_from_json(read_field(data, "facts", dict))
    limits_of_engine = EngineLimits(**numbers, held_by=read_field(limits, "held_by", str))
    return EngineReady(limits_of_engine, lines, notices, cache, facts, _read_keys(data), _read_page_bytes(data))


def _read_page_bytes(data: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = read_field(data, "page_bytes", list)
    if not all(type(size) is int and 0 < size < 2**50 for size in sizes):
        raise WireError("page_bytes", "not a list of sizes")
    return tuple(sizes)


def _keys_to_json(keys: PromptKeys | None) -> dict[str, Any]:
    if keys is None:
        return {}
    chain = keys.chain
    return {
        "root_key": chain.root_key.hex(), "key_tokens": chain.key_tokens, "bidirectional": chain.bidirectional_prompt,
        "run_tokens": keys.run_tokens, "run_pages": keys.run_pages,
    }  # fmt: skip


def _read_keys(data: Mapping[str, Any]) -> PromptKeys | None:
    keys = read_field(data, "prompt_keys", dict)
    if not keys:
        return None
    key_tokens, run_tokens, run_pages = (read_uint32(keys, name) for name in ("key_tokens", "run_tokens", "run_pages"))
    if not key_tokens or not run_tokens or not run_pages or run_tokens % key_tokens:
        raise WireError("prompt_keys", f"{run_pages} pages of {run_tokens} tokens, keys of {key_tokens}")
    try:
        root_key = bytes.fromhex(read_field(keys, "root_key", str))
    except ValueError as error:
        raise WireError("root_key", "not hexadecimal") from error
    chain = KeyChain(root_key, key_tokens, read_field(keys, "bidirectional", bool))
    return PromptKeys(chain, run_tokens, run_pages)


def write_heartbeat(health: Health, now: float) -> bytes:
    """Return the body of a PONG frame. `now` is a monotonic time in seconds."""
    why = health.why.encode()[:4096]
    return HEARTBEAT.pack(health.stalled, now - health.beat, len(why)) + why


def read_heartbeat(body: memoryview, now: float) -> Health:
    """Read the body of a PONG frame."""
    reader = FrameReader(body)
    stalled, lasted, size = reader.unpack(HEARTBEAT, "heartbeat")
    return Health(True, bool(stalled), now - lasted, reader.read_bytes(size, "why").decode("utf-8", "replace"))
