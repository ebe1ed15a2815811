"""The results of a run against a server: latencies as a user observes them and as vLLM's client defines them, refused
and failed requests, and whether the client was the bottleneck.

Times between tokens are derived from times between chunks. With one token a chunk they are the same; otherwise a
chunk's tokens share the time since the chunk before, and `inter_token_from` reports how their number is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.bench.document import short, table
from quire.bench.fleet import Sent
from quire.bench.latency import draft_line, spread
from quire.bench.workloads import Job

BUSIEST = 0.9  # CPU use of a core, in a client's busiest half second
LAG = 0.01  # seconds, 99th percentile of an event loop's lag
LATE = 0.1  # seconds by which the 99th percentile of requests was sent late

Times = npt.NDArray[np.float64]


class Timed:
    """One complete response: the times of its chunks, and the tokens in each. Chunks beyond the number of tokens have
    none, such as one with only a finish reason."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.tokens = sent.tokens
        self.times: Times = np.array(sent.times[: sent.tokens])
        self.gaps: Times = np.diff(self.times)
        self.known = len(sent.counts) == len(sent.times)
        counts = np.diff(sent.counts[: sent.tokens]) if self.known else None
        self.plain = len(self.times) == self.tokens
        if counts is not None and len(counts) == len(self.gaps) and (counts > 0).all():
            self.brought = counts
        else:
            self.known = False
            gaps = len(self.gaps)  # all tokens but the first, distributed evenly over the gaps as whole numbers
            self.brought = np.diff(np.arange(gaps + 1) * (self.tokens - 1) // max(gaps, 1))

    @property
    def between(self) -> Times:
        """Return the seconds between tokens: a gap is divided evenly among the tokens of its chunk."""
        return np.repeat(self.gaps / self.brought, self.brought)

    def first(self, since: float) -> float:
        """Return the seconds to the first chunk."""
        return float(self.times[0]) - since

    def whole(self, since: float) -> float:
        """Return the seconds to the last chunk with tokens."""
        return float(self.times[-1]) - since

    @property
    def each(self) -> float | None:
        """Return the mean seconds per token after the first; None for a single token."""
        return float(self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None


def summary(jobs: Sequence[Job], sent: Sequence[Sent], clients: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a run. Every request is in one of `requests` (answered), `refused` (by status) and `failed` (by
    reason). Latencies start when a request was due; in a closed loop it is due when it is sent."""
    whole = [Timed(one) for one in sent if one.error is None]
    refused = Counter(str(one.status) for one in sent if one.error is not None and one.status not in (0, 200))
    failed = Counter(str(one.error)[:200] for one in sent if one.error is not None and one.status in (0, 200))
    assert len(whole) + refused.total() + failed.total() == len(sent) == len(jobs), "a request is missing"
    seconds = max((float(one.times[-1]) for one in whole), default=0.0)
    late = [one.sent - one.due for one in sent]
    return {
        "attempted": len(sent), **_totals(whole, jobs, seconds), "refused": dict(refused), "failed": dict(failed),
        "other_lengths": sum(one.tokens != jobs[one.sent.number].output for one in whole),
        "chunks": sum(len(one.times) for one in whole), **_latencies(whole), "inter_token_from": _source(whole),
        "sent_late_s": {"p50": _percentile(late, 50), "p99": _percentile(late, 99), "max": max(late)},
        "clients": list(clients), "saturated": saturated(clients, late),
        "as_vllm": as_vllm(whole, len(sent) - len(whole)),
    }  # fmt: skip


def _totals(whole: Sequence[Timed], jobs: Sequence[Job], seconds: float) -> dict[str, Any]:
    prompt = sum(one.sent.prompt or len(jobs[one.sent.number].prompt) for one in whole)
    output = sum(one.tokens for one in whole)
    per_second = 1 / seconds if seconds > 0 else 0.0
    return {
        "requests": len(whole), "prompt_tokens": prompt, "output_tokens": output, "seconds": seconds,
        "output_tokens_per_s": output * per_second, "total_tokens_per_s": (prompt + output) * per_second,
        "requests_per_s": len(whole) * per_second,
    }  # fmt: skip


def _latencies(whole: Sequence[Timed]) -> dict[str, Any]:
    return {
        "ttft_s": spread([one.first(one.sent.due) for one in whole]),
        "tpot_s": spread([one.each for one in whole if one.each is not None]),
        "itl_s": spread(_joined(one.gaps for one in whole)),
        "inter_token_s": spread(_joined(one.between for one in whole)),
        "e2e_s": spread([one.whole(one.sent.due) for one in whole]),
        "normalised_s": spread([one.whole(one.sent.due) / one.tokens for one in whole]),
    }


def _joined(arrays: Iterable[Times]) -> list[float]:
    parts = list(arrays)
    joined: list[float] = np.concatenate(parts).tolist() if parts else []
    return joined


def _source(whole: Sequence[Timed]) -> str:
    """Return the source of the times between tokens."""
    if all(one.plain for one in whole):
        return "one token a chunk"
    return "usage of every chunk" if all(one.known for one in whole) else "mean tokens a chunk"


def _percentile(values: Sequence[float], which: int) -> float:
    return float(np.percentile(values, which))


def saturated(clients: Sequence[dict[str, Any]], late: Sequence[float]) -> list[str]:
    """Return the reasons why latencies may be the client's own; empty if there are none."""
    reasons = []
    busiest = max(client["busiest"] for client in clients)
    if busiest >= BUSIEST:
        reasons.append(f"a client used {busiest:.2f} of a core")
    lag = max(client["lag_p99_s"] for client in clients)
    if lag >= LAG:
        reasons.append(f"a client's event loop was {1000 * lag:.0f} ms late in 1 % of the time")
    sent = _percentile(late, 99)
    if sent >= LATE:
        reasons.append(f"1 % of the requests were sent {1000 * sent:.0f} ms late or more")
    return reasons


def as_vllm(whole: Sequence[Timed], failed: int) -> dict[str, Any]:
    """Return the numbers of vLLM's `bench serve`, by its names and definitions: milliseconds since a request was sent,
    over the answered requests. Refused requests count in `failed`."""
    duration = max((float(one.times[-1]) for one in whole), default=0.0)
    prompt, output = sum(one.sent.prompt for one in whole), sum(one.tokens for one in whole)
    per_second = 1 / duration if duration > 0 else 0.0
    numbers: dict[str, Any] = {
        "duration": duration, "completed": len(whole), "failed": failed, "total_input_tokens": prompt,
        "total_output_tokens": output, "request_throughput": len(whole) * per_second,
        "output_throughput": output * per_second, "total_token_throughput": (prompt + output) * per_second,
    }  # fmt: skip
    for name, values in {
        "ttft": [one.first(one.sent.sent) for one in whole],
        "tpot": [one.each for one in whole if one.each is not None],
        "itl": _joined(one.gaps for one in whole),
        "e2el": [one.whole(one.sent.sent) for one in whole],
    }.items():
        seen = spread(values) or dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)  # vLLM writes 0 for none
        names = {
            "mean": f"mean_{name}_ms",
            "p50": f"median_{name}_ms",
            "p90": f"p90_{name}_ms",
            "p99": f"p99_{name}_ms",
        }
        numbers |= {names[key]: 1000 * seen[key] for key in names}
    return numbers


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the median runs: for each workload its latencies, the client's and the engine's, and its other results."""
    return "\n\n".join(_shown(result) for result in results)


def _shown(result: dict[str, Any]) -> str:
    run = result["median"]
    refused, failed = sum(run["refused"].values()), sum(run["failed"].values())
    lines = [
        f"{result['workload']}, {result['model']} at {result['url']}: {run['requests']} of {run['attempted']} requests "
        f"in {short(run['seconds'])} s ({refused} refused, {failed} failed)",
        f"{short(run['requests_per_s'])} requests/s, {short(run['output_tokens_per_s'])} output tok/s, "
        f"{short(run['total_tokens_per_s'])} total tok/s, {short(run['output_tokens'] / run['chunks'])} tokens a chunk",
        "",
        table(("ms", "mean", "p50", "p90", "p99"), list(_rows(run))),
        "",
        *_sides(run),
    ]
    for what, why in ({**run["refused"], **run["failed"]}).items():
        lines.append(f"warning: {why} requests without an answer: {what}")
    if run["other_lengths"]:
        lines.append(f"warning: {run['other_lengths']} answers have other lengths than were asked for")
    lines += [f"warning: the client was saturated, so latencies may be its own: {why}" for why in run["saturated"]]
    return "\n".join(lines)


def _rows(run: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    server = run["server"] or {}
    for name, seen in (
        ("first token (ttft)", run["ttft_s"]),
        ("  as the engine saw it", server.get("ttft_s")),
        ("each later token of a request (tpot)", run["tpot_s"]),
        ("between chunks (itl)", run["itl_s"]),
        (f"between tokens ({run['inter_token_from']})", run["inter_token_s"]),
        ("  as the engine saw it", server.get("inter_token_s")),
        ("whole request (e2el)", run["e2e_s"]),
    ):
        if seen is not None:
            yield name, *(short(1000 * seen[key]) if key in seen else "-" for key in ("mean", "p50", "p90", "p99"))


def _sides(run: dict[str, Any]) -> Iterable[str]:
    server = run["server"] or {}
    if "cpu_us_per_token" in server:
        each = ", ".join(
            f"{process or 'all'} {short(us)} us a token ({server['cpu_cores'][process]:.2f} cores)"
            for process, us in server["cpu_us_per_token"].items()
        )
        yield f"server's processor time: {each}"
    if "idle_ms_per_step" in server:
        yield f"its {server['steps']:,} steps waited for the host {server['idle_ms_per_step']:.3f} ms each on a GPU"
    if "num_drafts" in server:
        yield draft_line(server)
    if "memory" in server:
        yield from _held(server["memory"])
    clients = run["clients"]
    yield (
        f"client: {len(clients)} process{'es' if len(clients) > 1 else ''}, "
        f"the busiest {max(one['cpu_s'] / one['seconds'] for one in clients):.2f} of a core "
        f"(at most {max(one['busiest'] for one in clients):.2f} in half a second); event loop late "
        f"{1000 * max(one['lag_p99_s'] for one in clients):.1f} ms p99, "
        f"{1000 * max(one['lag_max_s'] for one in clients):.1f} ms at most; requests late "
        f"{1000 * run['sent_late_s']['p99']:.1f} ms p99, {1000 * run['sent_late_s']['max']:.1f} ms at most"
    )


def _held(memory: dict[str, Any]) -> Iterable[str]:
    """Format a line of requests, and a line for each layer type."""
    asked = ", ".join(f"{short(memory[name])} {name}" for name in ("running", "waiting") if name in memory)
    yield f"its memory, the mean of {memory['samples']} looks: {asked or 'no requests told'}"
    for kind, sizes in [("all", memory.get("bytes", {})), *memory.get("layers", {}).items()]:
        if sizes:
            yield f"  {kind}: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items())
