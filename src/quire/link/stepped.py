"""What a step brought, as the body of a frame: columns of numbers, since most outputs are one token of one branch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from quire.control.memory import Account
from quire.control.memory.answers import Sharing, TypeUsage, Usage
from quire.control.outcomes import Output, Stats
from quire.link.messages import Facts, Progress, Queues, Stepped
from quire.vocabulary.columns import (
    Reader,
    WireError,
    new,
    read_text,
    read_tops,
    read_vectors,
    write_counts,
    write_floats,
    write_ints,
    write_runs,
    write_tops,
    write_vectors,
)
from quire.vocabulary.plan import Mapped, RankUse

# now; waiting, running, swapped, deferred, batches; computed; numbers of progress, outputs, those with more; bytes of
# facts
HEAD = struct.Struct("<d5IIIIII")
PROGRESS = struct.Struct("<IIddII")  # number, max_tokens, scheduled, first_token, cached_tokens, preemptions
MORE = struct.Struct("<BBBqI")  # why it ended, done, kind of the reason, reason as a number, bytes of the reason
FINISHES = (None, "stop", "length", "abort", "error")
NO_REASON, NUMBER, TEXT = range(3)
COUNTED = ("computed_tokens", "generated_tokens", "prompt_tokens", "restarts", "rows", "steps")


def write_stepped(message: Stepped) -> bytes:
    """The body."""
    facts = b"" if message.facts is None else json.dumps(said_facts(message.facts), separators=(",", ":")).encode()
    outputs = [output for _, output in message.outputs]
    more = [at for at, output in enumerate(outputs) if _has_more(output)]
    counts = len(message.progress), len(outputs), len(more), len(facts)
    parts = [HEAD.pack(message.now, *message.queues, message.computed, *counts)]
    parts += [_progress(progress) for progress in message.progress]
    if outputs:
        parts.append(write_ints([number for number, _ in message.outputs], "numbers"))
        parts.append(write_ints([output.branch for output in outputs], "branches", "b"))
        parts += write_runs([output.tokens for output in outputs], "tokens")
        parts.append(write_floats([output.cumulative_logprob for output in outputs], "logprobs"))
        parts.append(write_ints([output.cached_tokens for output in outputs], "cached tokens", "b"))
    if more:
        parts.append(write_ints(more, "places"))
        parts += _more([outputs[at] for at in more])
    parts.append(facts)
    return b"".join(parts)


def _has_more(output: Output) -> bool:
    return output.finish_reason is not None or bool(output.tops) or output.prompt_tops is not None


def _progress(progress: Progress) -> bytes:
    number, most, scheduled, first, cached, preemptions = progress
    none = math.nan
    return PROGRESS.pack(
        number, most, none if scheduled is None else scheduled, none if first is None else first, cached, preemptions
    )


def _more(outputs: Sequence[Output]) -> Iterator[bytes]:
    for output in outputs:
        reason = output.stop_reason
        kind = NO_REASON if reason is None else TEXT if isinstance(reason, str) else NUMBER
        text = reason.encode("utf-8", "surrogatepass") if isinstance(reason, str) else b""
        value = reason if isinstance(reason, int) else 0
        yield MORE.pack(FINISHES.index(output.finish_reason), output.done, kind, value, len(text))
        yield text
    yield bytes((output.prompt_tops is not None) + 2 * bool(output.pooled) for output in outputs)
    for tops in ([output.tops for output in outputs], [output.prompt_tops or () for output in outputs]):
        yield write_counts(tops, "numbers of tops")
        yield from write_tops(list(chain.from_iterable(tops)))
    if pooled := [output.pooled for output in outputs if output.pooled]:
        yield from write_vectors(pooled, "pooled")


def said_facts(facts: Facts) -> dict[str, Any]:
    """Facts as JSON has them."""
    stats = facts.stats
    counted = {name: getattr(stats, name) for name in COUNTED}
    return {
        "usage": facts.account.usage, "sharing": facts.account.sharing,
        "types": facts.account.types, "preempted": dict(facts.preempted),
        "counted": counted, "finished": stats.finished, "step_seconds": stats.step_seconds,
        "idle_seconds": stats.idle_seconds, "seconds": facts.seconds, "mapped": facts.mapped,
        "ranks": facts.ranks, "asleep": facts.asleep,
    }  # fmt: skip


def read_stepped(body: memoryview) -> Stepped:
    """The message in a body. WireError names the field and the byte where it can't be one."""
    reader = Reader(body)
    now, *queued, computed, progressed, count, few, size = reader.take(HEAD, "head")
    if progressed * PROGRESS.size > reader.end - reader.at:
        raise reader.error("progress", f"{progressed} are announced, {reader.end - reader.at} bytes remain")
    progress = [_read_progress(reader) for _ in range(progressed)]
    numbers: Sequence[int] = ()
    outputs: list[Output] = []
    if reader.bounded(count, "outputs"):
        numbers = reader.ints(count, "numbers")
        branches = reader.ints(count, "branches")
        tokens = reader.runs(count, "tokens")
        logprobs = reader.floats(count, "logprobs")
        cached = reader.ints(count, "cached tokens")
        columns: Any = zip(
            repeat("", count), branches, tokens, repeat(""), repeat(()), repeat(None), repeat(None), repeat(False),
            logprobs, repeat(None), cached, repeat(()),
        )  # fmt: skip
        outputs = list(map(new, repeat(Output), columns))
    if few:
        _read_more(reader, few, outputs)
    at = reader.skip(size, "facts")
    facts = read_facts(_load(bytes(body[at : at + size]))) if size else None
    if reader.at != reader.end:
        raise reader.error("frame", f"{reader.end - reader.at} bytes follow its end")
    return Stepped(now, Queues(*queued), computed, progress, list(zip(numbers, outputs)), facts)


def _read_progress(reader: Reader) -> Progress:
    number, most, scheduled, first, cached, preemptions = reader.take(PROGRESS, "progress")
    return Progress(
        number, most, None if math.isnan(scheduled) else scheduled, None if math.isnan(first) else first, cached,
        preemptions,
    )  # fmt: skip


def _read_more(reader: Reader, count: int, outputs: list[Output]) -> None:
    """Complete those outputs that say more than their tokens."""
    if count > len(outputs):
        raise reader.error("places", f"{count} are announced, of {len(outputs)} outputs")
    places = reader.ints(count, "places")
    if not all(0 <= at < len(outputs) for at in places):
        raise reader.error("places", f"one is none from 0 to {len(outputs) - 1}")
    ends = [_read_end(reader) for _ in range(count)]
    at = reader.skip(count, "flags")
    flags = bytes(reader.frame[at : at + count])
    if max(flags) > 3:
        raise WireError("flags", f"{max(flags)} is none from 0 to 3", at)
    tops, prompt_tops = (list(read_tops(reader, count)) for _ in range(2))
    many = sum(flag >> 1 for flag in flags)
    pooled = iter(read_vectors(reader, many, "pooled") if many else ())
    for i, place in enumerate(places):
        finish, done, reason = ends[i]
        outputs[place] = outputs[place]._replace(
            finish_reason=finish, stop_reason=reason, done=done, tops=tops[i],
            prompt_tops=prompt_tops[i] if flags[i] & 1 else None, pooled=next(pooled) if flags[i] & 2 else (),
        )  # fmt: skip


def _read_end(reader: Reader) -> tuple[str | None, bool, int | str | None]:
    finish, done, kind, value, size = reader.take(MORE, "end")
    if finish >= len(FINISHES) or done > 1 or kind > TEXT:
        raise reader.error("end", f"{finish}, {done} and {kind} are no reason, flag and kind")
    text = read_text(reader, size)
    return FINISHES[finish], bool(done), {NO_REASON: None, NUMBER: value, TEXT: text}[kind]


def _load(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError("facts", str(error)[:200]) from error
    if not isinstance(found, dict):
        raise WireError("facts", f"a {type(found).__name__}, no object")
    return found


def read_facts(said: dict[str, Any]) -> Facts:
    """The facts that JSON says. WireError for what are none."""
    try:
        stats = Stats()
        for name in COUNTED:
            setattr(stats, name, _count(said["counted"][name]))
        stats.step_seconds, stats.idle_seconds = float(said["step_seconds"]), float(said["idle_seconds"])
        stats.finished = {str(why): _count(many) for why, many in said["finished"].items()}
        usage, sharing = Usage(*map(_count, said["usage"])), Sharing(*map(_count, said["sharing"]))
        types = tuple(TypeUsage(str(name), *map(_count, sizes)) for name, *sizes in said["types"])
        preempted = {str(way): _count(many) for way, many in said["preempted"].items()}
        *counts, stalled, meanwhile = said["mapped"]
        there, maps, unmaps, ahead = map(_count, counts)
        mapped = Mapped(there, maps, unmaps, ahead, float(stalled), float(meanwhile))
        ranks = tuple(RankUse(float(seconds), _count(used)) for seconds, used in said["ranks"])
        asleep = _count(said["asleep"])
        return Facts(Account(usage, sharing, types), stats, preempted, float(said["seconds"]), mapped, ranks, asleep)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WireError("facts", f"{type(error).__name__} {error}"[:200]) from error


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is no count")
    return value
