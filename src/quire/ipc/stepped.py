"""What a step brought, as the body of a frame: columns of numbers, since most outputs are one token of one branch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from quire.core.outputs import BranchOutput, EngineStats
from quire.ipc.messages import EngineMetrics, QueueSizes, RequestProgress, StepOutputs
from quire.memory.answers import Account, Sharing, TypeUsage, Usage
from quire.protocol.columns import (
    FrameReader,
    WireError,
    read_text,
    read_top_logprobs,
    read_vectors,
    tuple_new,
    write_floats,
    write_ints,
    write_run_lengths,
    write_runs,
    write_top_logprobs,
    write_vectors,
)
from quire.protocol.step_plan import MappingStats, RankUsage

# now; waiting, running, swapped, deferred, batches; computed; numbers of progress, outputs, those with more; bytes of
# facts
HEAD = struct.Struct("<d5IIIIII")
PROGRESS = struct.Struct("<IIddII")  # number, max_tokens, scheduled, first_token, cached_tokens, preemptions
DETAILS = struct.Struct("<BBBqI")  # why it ended, done, kind of the reason, reason as a number, bytes of the reason
FINISH_REASONS = (None, "stop", "length", "abort", "error")
NO_REASON, NUMBER, TEXT = range(3)
COUNTERS = ("computed_tokens", "generated_tokens", "prompt_tokens", "restarts", "rows", "steps")


def write_step_outputs(message: StepOutputs) -> bytes:
    """The body."""
    facts = b"" if message.facts is None else json.dumps(metrics_to_json(message.facts), separators=(",", ":")).encode()
    outputs = [output for _, output in message.outputs]
    more = [at for at, output in enumerate(outputs) if _has_details(output)]
    counts = len(message.progress), len(outputs), len(more), len(facts)
    parts = [HEAD.pack(message.now, *message.queues, message.computed, *counts)]
    parts += [_write_progress(progress) for progress in message.progress]
    if outputs:
        parts.append(write_ints([number for number, _ in message.outputs], "numbers"))
        parts.append(write_ints([output.branch for output in outputs], "branches", "b"))
        parts += write_runs([output.tokens for output in outputs], "tokens")
        parts.append(write_floats([output.cumulative_logprob for output in outputs], "logprobs"))
        parts.append(write_ints([output.cached_tokens for output in outputs], "cached tokens", "b"))
    if more:
        parts.append(write_ints(more, "places"))
        parts += _write_details([outputs[at] for at in more])
    parts.append(facts)
    return b"".join(parts)


def _has_details(output: BranchOutput) -> bool:
    return output.finish_reason is not None or bool(output.top_logprobs) or output.prompt_logprobs is not None


def _write_progress(progress: RequestProgress) -> bytes:
    number, most, scheduled, first, cached, preemptions = progress
    none = math.nan
    return PROGRESS.pack(
        number, most, none if scheduled is None else scheduled, none if first is None else first, cached, preemptions
    )


def _write_details(outputs: Sequence[BranchOutput]) -> Iterator[bytes]:
    for output in outputs:
        reason = output.stop_reason
        kind = NO_REASON if reason is None else TEXT if isinstance(reason, str) else NUMBER
        text = reason.encode("utf-8", "surrogatepass") if isinstance(reason, str) else b""
        value = reason if isinstance(reason, int) else 0
        yield DETAILS.pack(FINISH_REASONS.index(output.finish_reason), output.done, kind, value, len(text))
        yield text
    yield bytes((output.prompt_logprobs is not None) + 2 * bool(output.pooled) for output in outputs)
    for tops in ([output.top_logprobs for output in outputs], [output.prompt_logprobs or () for output in outputs]):
        yield write_run_lengths(tops, "numbers of tops")
        yield from write_top_logprobs(list(chain.from_iterable(tops)))
    if pooled := [output.pooled for output in outputs if output.pooled]:
        yield from write_vectors(pooled, "pooled")


def metrics_to_json(facts: EngineMetrics) -> dict[str, Any]:
    """Facts as JSON has them."""
    stats = facts.stats
    counted = {name: getattr(stats, name) for name in COUNTERS}
    return {
        "usage": facts.account.usage, "sharing": facts.account.sharing,
        "types": facts.account.types, "preempted": dict(facts.preempted),
        "counted": counted, "finished": stats.finished, "step_seconds": stats.step_seconds,
        "idle_seconds": stats.idle_seconds, "seconds": facts.seconds, "mapped": facts.mapped,
        "ranks": facts.ranks, "asleep": facts.asleep,
    }  # fmt: skip


def read_step_outputs(body: memoryview) -> StepOutputs:
    """The message in a body. WireError names the field and the byte where it can't be one."""
    reader = FrameReader(body)
    now, *queued, computed, progressed, count, few, size = reader.unpack(HEAD, "head")
    if progressed * PROGRESS.size > reader.end - reader.offset:
        raise reader.error("progress", f"{progressed} are announced, {reader.end - reader.offset} bytes remain")
    progress = [_read_progress(reader) for _ in range(progressed)]
    numbers: Sequence[int] = ()
    outputs: list[BranchOutput] = []
    if reader.check_count(count, "outputs"):
        numbers = reader.read_ints(count, "numbers")
        branches = reader.read_ints(count, "branches")
        tokens = reader.read_runs(count, "tokens")
        logprobs = reader.read_floats(count, "logprobs")
        cached = reader.read_ints(count, "cached tokens")
        columns: Any = zip(
            repeat("", count), branches, tokens, repeat(""), repeat(()), repeat(None), repeat(None), repeat(False),
            logprobs, repeat(None), cached, repeat(()),
        )  # fmt: skip
        outputs = list(map(tuple_new, repeat(BranchOutput), columns))
    if few:
        _read_details(reader, few, outputs)
    at = reader.skip(size, "facts")
    facts = metrics_from_json(_load(bytes(body[at : at + size]))) if size else None
    if reader.offset != reader.end:
        raise reader.error("frame", f"{reader.end - reader.offset} bytes follow its end")
    return StepOutputs(now, QueueSizes(*queued), computed, progress, list(zip(numbers, outputs)), facts)


def _read_progress(reader: FrameReader) -> RequestProgress:
    number, most, scheduled, first, cached, preemptions = reader.unpack(PROGRESS, "progress")
    return RequestProgress(
        number, most, None if math.isnan(scheduled) else scheduled, None if math.isnan(first) else first, cached,
        preemptions,
    )  # fmt: skip


def _read_details(reader: FrameReader, count: int, outputs: list[BranchOutput]) -> None:
    """Complete those outputs that say more than their tokens."""
    if count > len(outputs):
        raise reader.error("places", f"{count} are announced, of {len(outputs)} outputs")
    places = reader.read_ints(count, "places")
    if not all(0 <= at < len(outputs) for at in places):
        raise reader.error("places", f"one is none from 0 to {len(outputs) - 1}")
    ends = [_read_end(reader) for _ in range(count)]
    at = reader.skip(count, "flags")
    flags = bytes(reader.frame[at : at + count])
    if max(flags) > 3:
        raise WireError("flags", f"{max(flags)} is none from 0 to 3", at)
    tops, prompt_tops = (list(read_top_logprobs(reader, count)) for _ in range(2))
    many = sum(flag >> 1 for flag in flags)
    pooled = iter(read_vectors(reader, many, "pooled") if many else ())
    for i, place in enumerate(places):
        finish, done, reason = ends[i]
        outputs[place] = outputs[place]._replace(
            finish_reason=finish, stop_reason=reason, done=done, top_logprobs=tops[i],
            prompt_logprobs=prompt_tops[i] if flags[i] & 1 else None, pooled=next(pooled) if flags[i] & 2 else (),
        )  # fmt: skip


def _read_end(reader: FrameReader) -> tuple[str | None, bool, int | str | None]:
    finish, done, kind, value, size = reader.unpack(DETAILS, "end")
    if finish >= len(FINISH_REASONS) or done > 1 or kind > TEXT:
        raise reader.error("end", f"{finish}, {done} and {kind} are no reason, flag and kind")
    text = read_text(reader, size)
    return FINISH_REASONS[finish], bool(done), {NO_REASON: None, NUMBER: value, TEXT: text}[kind]


def _load(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError("facts", str(error)[:200]) from error
    if not isinstance(found, dict):
        raise WireError("facts", f"a {type(found).__name__}, no object")
    return found


def metrics_from_json(data: dict[str, Any]) -> EngineMetrics:
    """The facts that JSON says. WireError for what are none."""
    try:
        stats = EngineStats()
        for name in COUNTERS:
            setattr(stats, name, _check_count(data["counted"][name]))
        stats.step_seconds, stats.idle_seconds = float(data["step_seconds"]), float(data["idle_seconds"])
        stats.finished = {str(why): _check_count(many) for why, many in data["finished"].items()}
        usage, sharing = Usage(*map(_check_count, data["usage"])), Sharing(*map(_check_count, data["sharing"]))
        types = tuple(TypeUsage(str(name), *map(_check_count, sizes)) for name, *sizes in data["types"])
        preempted = {str(way): _check_count(many) for way, many in data["preempted"].items()}
        *counts, stalled, meanwhile = data["mapped"]
        there, maps, unmaps, ahead = map(_check_count, counts)
        mapped = MappingStats(there, maps, unmaps, ahead, float(stalled), float(meanwhile))
        ranks = tuple(RankUsage(float(seconds), _check_count(used)) for seconds, used in data["ranks"])
        asleep = _check_count(data["asleep"])
        return EngineMetrics(
            Account(usage, sharing, types), stats, preempted, float(data["seconds"]), mapped, ranks, asleep
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WireError("facts", f"{type(error).__name__} {error}"[:200]) from error


def _check_count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is no count")
    return value
