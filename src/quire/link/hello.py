"""The first frames of a connection: what the engine's process is to build, and what came of it; and the pulse that it
is asked for from then on."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.control.edge import Limits
from quire.errors import StartupError
from quire.link.frames import Frame, field, number, read_json, write_json
from quire.link.messages import Ready
from quire.link.pulse import Health
from quire.link.stepped import read_facts, said_facts
from quire.vocabulary.columns import Reader, WireError

PULSE = struct.Struct("<BdI")  # stalled, seconds since the loop's last turn, bytes of why
MOST_EOS = 1 << 16  # end tokens


class Hello(NamedTuple):
    """`named` are the end tokens of the tokenizer, which the engine's process doesn't load. `progress`: show how the
    model loads."""

    config: EngineConfig
    named: tuple[int, ...]
    stall_after: float
    progress: bool
    log_level: int


def write_hello(hello: Hello) -> bytes:
    """The body of a HELLO."""
    return write_json({**hello._asdict(), "config": asdict(hello.config)})


def read_hello(body: memoryview) -> Hello:
    """The same, read. WireError for what is none, StartupError for settings that can't be."""
    data = read_json(body)
    named = field(data, "named", list)
    if len(named) > MOST_EOS or not all(type(token) is int for token in named):
        raise WireError("named", f"no list of up to {MOST_EOS} token ids")
    try:
        config = EngineConfig(**field(data, "config", dict))
    except TypeError as error:
        raise WireError("config", str(error)[:200]) from error
    after = field(data, "stall_after", float)
    return Hello(config, tuple(named), after, field(data, "progress", bool), number(data, "log_level"))


def write_ready(ready: Ready) -> bytes:
    """The body of a READY."""
    return write_json({
        "limits": ready.limits._asdict(), "lines": ready.lines, "notices": ready.notices, "cache": dict(ready.cache),
        "facts": said_facts(ready.facts),
    })  # fmt: skip


def read_ready(body: memoryview) -> Ready:
    """The same, read."""
    data = read_json(body)
    limits = field(data, "limits", dict)
    vocab, longest, queued = (number(limits, name) for name in ("vocab_size", "max_len", "max_queued"))
    hidden = number(limits, "hidden")
    lines, notices = (tuple(map(str, field(data, name, list))) for name in ("lines", "notices"))
    cache: Mapping[str, Any] = field(data, "cache", dict)
    facts = read_facts(field(data, "facts", dict))
    return Ready(Limits(vocab, longest, queued, field(limits, "held_by", str), hidden), lines, notices, cache, facts)


def write_pulse(health: Health, now: float) -> bytes:
    """The body of a PONG."""
    why = health.why.encode()[:4096]
    return PULSE.pack(health.stalled, now - health.beat, len(why)) + why


def read_pulse(body: memoryview, now: float) -> Health:
    """The same, read."""
    reader = Reader(body)
    stalled, lasted, size = reader.take(PULSE, "pulse")
    at = reader.skip(size, "why")
    return Health(True, bool(stalled), now - lasted, bytes(body[at:]).decode("utf-8", "replace"))


def failed(frame: Frame) -> StartupError:
    """Why the engine couldn't be built."""
    data = read_json(frame.body)
    return StartupError(field(data, "text", str), field(data, "remedy", str) if "remedy" in data else "")
