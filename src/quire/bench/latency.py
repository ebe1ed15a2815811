"""Latencies of requests, from arrival times and token times: the numbers that papers and servers report.

Independent of any engine: a trace may come from this process, a server or a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Trace(NamedTuple):
    """The times of one request on one clock, in seconds. `events` are (time, number of tokens)."""

    arrival: float
    prompt: int
    events: list[tuple[float, int]]

    @property
    def output(self) -> int:
        """Return the number of generated tokens."""
        return sum(tokens for _, tokens in self.events)

    @property
    def first_token(self) -> float:
        """Return the TTFT: from arrival to the first token."""
        return self.events[0][0] - self.arrival

    @property
    def whole(self) -> float:
        """Return the end-to-end latency: from arrival to the last token."""
        return self.events[-1][0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Return the inter-token latencies; tokens that arrive together share the time since the previous ones."""
        gaps: list[float] = []
        for (before, _), (now, tokens) in zip(self.events, self.events[1:]):
            gaps += [(now - before) / tokens] * tokens
        return gaps


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean and percentiles (linear interpolation); None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def latencies(traces: Sequence[Trace]) -> dict[str, dict[str, float] | None]:
    """Return the latencies in seconds. `normalised` is PagedAttention's measure (§6.1): end-to-end latency divided by
    output length."""
    return {
        "ttft_s": spread([trace.first_token for trace in traces]),
        "inter_token_s": spread([gap for trace in traces for gap in trace.gaps]),
        "e2e_s": spread([trace.whole for trace in traces]),
        "normalised_s": spread([trace.whole / trace.output for trace in traces]),
    }


def totals(traces: Sequence[Trace], seconds: float) -> dict[str, float | int]:
    """Return counts and rates of a run that took `seconds`."""
    prompt, output = sum(trace.prompt for trace in traces), sum(trace.output for trace in traces)
    return {
        "requests": len(traces), "prompt_tokens": prompt, "output_tokens": output, "seconds": seconds,
        "output_tokens_per_s": output / seconds, "total_tokens_per_s": (prompt + output) / seconds,
        "requests_per_s": len(traces) / seconds,
    }  # fmt: skip


def draft_facts(num_drafts: int, drafted: int, accepted: int) -> dict[str, float | int]:
    """Return the results of speculative decoding from the numbers of verifications, of draft tokens and of accepted
    ones; {} without verifications. The length counts the sample that each verification adds."""
    if not num_drafts:
        return {}
    return {
        "num_drafts": num_drafts, "draft_tokens": drafted, "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted, "mean_accepted_length": 1 + accepted / num_drafts,
    }  # fmt: skip


def draft_line(facts: Mapping[str, Any]) -> str:
    """Describe the results of `draft_facts` in one line."""
    return (
        f"{facts['acceptance_rate']:.1%} of {facts['draft_tokens']:,} draft tokens accepted, mean accepted length "
        f"{facts['mean_accepted_length']:.2f}"
    )
