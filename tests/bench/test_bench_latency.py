"""Latency statistics against NumPy over a made-up trace, and the facts about the machine."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from quire.bench.document import short, table
from quire.bench.latency import Trace, latencies, spread, totals
from quire.bench.machine import Others, machine


def fake_traces(rng: random.Random, count: int) -> list[Trace]:
    """Requests whose tokens come one to three at a time."""
    traces = []
    for _ in range(count):
        now = arrival = rng.uniform(0, 100)
        events = []
        for _ in range(rng.randint(1, 12)):
            now += rng.uniform(0.01, 2)
            events.append((now, rng.randint(1, 3)))
        traces.append(Trace(arrival, rng.randint(1, 50), events))
    return traces


def token_times(trace: Trace) -> np.ndarray:
    """When each token is taken to have come: tokens of one event are spread evenly up to it."""
    times = [trace.events[0][0]]
    for (before, _), (now, tokens) in zip(trace.events, trace.events[1:]):
        times += [before + (now - before) * (i + 1) / tokens for i in range(tokens)]
    return np.array(times)


def test_latencies_match_numpy() -> None:
    traces = fake_traces(random.Random(0), 200)
    outputs = np.array([sum(tokens for _, tokens in trace.events) for trace in traces])
    starts = np.array([trace.arrival for trace in traces])
    ends = np.array([trace.events[-1][0] for trace in traces])
    expected = {
        "ttft_s": np.array([trace.events[0][0] for trace in traces]) - starts,
        "inter_token_s": np.concatenate([np.diff(token_times(trace)) for trace in traces]),
        "e2e_s": ends - starts,
        "normalised_s": (ends - starts) / outputs,
    }
    found = latencies(traces)
    assert set(found) == set(expected)
    for name, values in expected.items():
        measured = found[name]
        assert measured is not None
        assert measured["mean"] == pytest.approx(values.mean())
        for which in (50, 90, 99):
            assert measured[f"p{which}"] == pytest.approx(np.percentile(values, which))


def test_totals() -> None:
    traces = [Trace(0.0, 10, [(1.0, 1), (2.0, 3)]), Trace(0.5, 20, [(4.0, 2)])]
    assert totals(traces, 4.0) == {
        "requests": 2,
        "prompt_tokens": 30,
        "output_tokens": 6,
        "seconds": 4.0,
        "output_tokens_per_s": 1.5,
        "total_tokens_per_s": 9.0,
        "requests_per_s": 0.5,
    }


def test_one_token_has_no_gaps() -> None:
    assert latencies([Trace(0.0, 1, [(1.0, 1)])])["inter_token_s"] is None
    assert spread([]) is None


def test_load_of_others_leaves_out_our_own() -> None:
    others = Others()
    own = time.process_time()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    own = (time.process_time() - own) / 0.3
    assert own > 0.02
    cores = machine()["logical_cores"]
    assert 0 <= others.load() <= cores - own + 0.3


def test_table_aligns_numbers_to_the_right() -> None:
    assert table(("name", "n"), [("a", 1), ("long name", 10)]) == "name        n\na           1\nlong name  10"
    assert [short(value) for value in (None, 0.0123456, 12.3456, 12345.6)] == ["-", "0.01235", "12.35", "12,346"]
