"""The numbers of a run against a server, beside vLLM's definitions written out over made-up answers;
latencies beside NumPy; and what the server's metrics say of a run, from the texts that prometheus_client writes."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.bench.document import short, table
from quire.bench.fleet import Sent
from quire.bench.latency import Trace, latencies
from quire.bench.scrape import Scrape, Watch, between, quantile
from quire.bench.served import Timed, show, summary
from quire.bench.workloads import Job

IDLE = {"cpu_s": 0.4, "seconds": 4.0, "busiest": 0.2, "lag_p99_s": 0.001, "lag_max_s": 0.004}
LATE = 0.002


def answer(number: int, due: float, times: list[float], tokens: int, counts: list[int] | None = None) -> Sent:
    return Sent(number, due, due + LATE, times, counts or [], 5, tokens, 200, None)


def made_up(rng: random.Random, count: int) -> list[Sent]:
    """Answers of a token a chunk, some with a last chunk that brings none."""
    answers = []
    for number in range(count):
        now = due = rng.uniform(0, 3)
        times = [now := now + rng.uniform(0.01, 0.3) for _ in range(rng.randint(1, 20))]
        answers.append(answer(number, due, [*times, now + 9] if rng.random() < 0.2 else times, len(times)))
    return answers


def jobs(answers: list[Sent]) -> list[Job]:
    return [Job([1] * 5, one.tokens) for one in answers]


def whole(answers: list[Sent], clients: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return summary(jobs(answers), answers, clients or [IDLE])


def test_latencies_are_vllms() -> None:
    answers = made_up(random.Random(5), 300)
    ttfts, tpots, itls, e2els = [], [], [], []
    for one in answers:  # as its client does it: from when a request was sent, in the order of its chunks
        latest = one.sent
        for i, moment in enumerate(one.times[: one.tokens]):
            ttfts += [moment - one.sent] if i == 0 else []
            itls += [moment - latest] if i > 0 else []
            latest = moment
        e2els.append(latest - one.sent)
        tpots += [(e2els[-1] - ttfts[-1]) / (one.tokens - 1)] if one.tokens > 1 else []
    run = whole(answers)
    duration = max(one.times[one.tokens - 1] for one in answers)
    tokens = sum(one.tokens for one in answers)
    expected = {
        "duration": duration, "completed": 300, "failed": 0, "total_input_tokens": 1500, "total_output_tokens": tokens,
        "request_throughput": 300 / duration, "output_throughput": tokens / duration,
        "total_token_throughput": (tokens + 1500) / duration,
    }  # fmt: skip
    for name, values in {"ttft": ttfts, "tpot": tpots, "itl": itls, "e2el": e2els}.items():
        expected[f"mean_{name}_ms"] = np.mean(values) * 1000
        expected[f"median_{name}_ms"] = np.median(values) * 1000
        expected[f"p90_{name}_ms"] = np.percentile(values, 90) * 1000
        expected[f"p99_{name}_ms"] = np.percentile(values, 99) * 1000
    assert run["as_vllm"] == pytest.approx(expected)
    assert run["inter_token_from"] == "one token a chunk"
    assert run["inter_token_s"] == run["itl_s"]
    assert run["ttft_s"]["mean"] == pytest.approx(np.mean(ttfts) + LATE)  # ours start when a request was due
    assert run["e2e_s"]["p99"] == pytest.approx(np.percentile(e2els, 99) + LATE)
    assert run["chunks"] == tokens


def test_chunks_of_several_tokens() -> None:
    one = Timed(answer(0, 0.0, [1.0, 1.5, 3.5], 8))
    assert one.brought.tolist() == [3, 4]  # 7 tokens after the first
    assert one.between.tolist() == pytest.approx([0.5 / 3] * 3 + [0.5] * 4)
    assert one.each == pytest.approx(one.between.mean()) == pytest.approx(2.5 / 7)
    known = Timed(answer(0, 0.0, [1.0, 1.5, 3.5], 8, [2, 3, 8]))
    assert known.between.tolist() == pytest.approx([0.5] + [0.4] * 5)
    assert whole([known.sent])["inter_token_from"] == "usage of every chunk"
    assert whole([one.sent])["inter_token_from"] == "mean tokens a chunk"
    assert Timed(answer(0, 0.0, [1.0], 8)).between.tolist() == []
    assert Timed(answer(0, 0.0, [1.0], 1)).each is None


def test_nothing_is_lost_silently() -> None:
    gone = whole([answer(0, 0.0, [], 0)._replace(error="gone")])
    assert (gone["requests"], gone["seconds"], gone["ttft_s"], gone["output_tokens_per_s"]) == (0, 0.0, None, 0.0)
    answers = made_up(random.Random(6), 10)
    answers[2] = answers[2]._replace(status=429, error="429: slow down", times=[])
    answers[3] = answers[3]._replace(status=503, error="503: full", times=[])
    answers[4] = answers[4]._replace(error="the connection was closed in an answer")
    answers[5] = answers[5]._replace(status=0, error="no connection: Connection refused", times=[])
    asked = jobs(answers)
    asked[6] = Job([1] * 5, answers[6].tokens + 1)
    run = summary(asked, answers, [IDLE])
    assert (run["attempted"], run["requests"], run["other_lengths"]) == (10, 6, 1)
    assert run["refused"] == {"429": 1, "503": 1}
    reasons = ["the connection was closed in an answer", "no connection: Connection refused"]
    assert run["failed"] == dict.fromkeys(reasons, 1)
    assert run["as_vllm"]["failed"] == 4
    assert run["output_tokens"] == sum(one.tokens for one in answers if one.error is None)
    shown = show([{"workload": "w", "model": "m", "url": "u", "median": {**run, "server": None}}])
    assert "6 of 10 requests" in shown
    assert "(2 refused, 2 failed)" in shown
    assert all(f"1 requests without an answer: {what}" in shown for what in ("429", "503", *reasons))


@pytest.mark.parametrize(
    ("client", "late", "why"),
    [
        ({}, 0.0, []),
        ({"busiest": 0.95}, 0.0, ["a client used 0.95 of a core"]),
        ({"lag_p99_s": 0.05}, 0.0, ["a client's event loop was 50 ms late in 1 % of the time"]),
        ({}, 0.2, ["1 % of the requests were sent 200 ms late or more"]),
    ],
)
def test_a_saturated_client_says_so(client: dict[str, Any], late: float, why: list[str]) -> None:
    answers = [one._replace(sent=one.due + late) for one in made_up(random.Random(7), 20)]
    run = whole(answers, [IDLE, {**IDLE, **client}])
    assert run["saturated"] == why
    assert run["sent_late_s"]["max"] == pytest.approx(late)
    shown = show([{"workload": "w", "model": "m", "url": "u", "median": {**run, "server": None}}])
    assert ("may be its own" in shown) == bool(why)


def test_the_engines_view_is_beside_the_clients() -> None:
    seen = {"count": 9, "mean": 0.25, "p50": 0.125, "p90": 0.5, "p99": 0.75}
    server = {"inter_token_s": seen, "cpu_cores": {"front": 0.5}, "cpu_us_per_token": {"front": 123.0}}
    run = {**whole(made_up(random.Random(8), 20)), "server": server}
    lines = show([{"workload": "w", "model": "m", "url": "u", "median": run}]).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("between tokens"))
    assert lines[at + 1].split() == ["as", "the", "engine", "saw", "it", "250", "125", "500", "750"]
    assert "server's processor time: front 123 us a token (0.50 cores)" in lines


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
    assert latencies([Trace(0.0, 1, [(1.0, 1)])])["inter_token_s"] is None, "one token has no gaps"
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


def test_table_aligns_numbers_to_the_right() -> None:
    assert table(("name", "n"), [("a", 1), ("long name", 10)]) == "name        n\na           1\nlong name  10"
    assert [short(value) for value in (None, 0.0123456, 12.3456, 12345.6)] == ["-", "0.01235", "12.35", "12,346"]


BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)


class Server:
    """Metrics under quire's names; `prefix` is another one."""

    def __init__(self, prefix: str = "quire_") -> None:
        self.registry = CollectorRegistry()
        text, labels = "text", ("model_name", "engine")
        self.gaps = Histogram(f"{prefix}inter_token_latency_seconds", text, labels, registry=self.registry,
                              buckets=BOUNDS).labels("m", "0")  # fmt: skip
        self.cpu = Counter(f"{prefix}process_cpu_seconds", text, (*labels, "process"), registry=self.registry)
        self.tokens, self.steps, self.idle, *self.drafts = (
            Counter(prefix + name, text, labels, registry=self.registry).labels("m", "0")
            for name in ("generation_tokens", "engine_steps", "engine_idle_seconds", "spec_decode_num_drafts",
                         "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        )  # fmt: skip

    def scrape(self) -> Scrape:
        found = Scrape.of(generate_latest(self.registry).decode())
        assert found is not None
        return found


@pytest.mark.parametrize("prefix", ["quire_", "vllm:"])
def test_what_happened_between(prefix: str) -> None:
    server, rng = Server(prefix), random.Random(2)
    for _ in range(100):  # before the run
        server.gaps.observe(rng.uniform(0.05, 0.2))
    server.cpu.labels("m", "0", "front").inc(7)
    server.cpu.labels("m", "0", "engine").inc(5)
    server.tokens.inc(1000)
    before = server.scrape()
    gaps = [rng.uniform(0.001, 0.02) for _ in range(5000)]
    for gap in gaps:
        server.gaps.observe(gap)
    server.cpu.labels("m", "0", "front").inc(2)
    server.cpu.labels("m", "0", "engine").inc(1)
    server.cpu.labels("m", "0", "late").inc(2)  # a process that counts from nothing
    server.tokens.inc(5010)
    server.steps.inc(100)
    server.idle.inc(0.02)
    for counter, count in zip(server.drafts, (10, 30, 24)):
        counter.inc(count)
    facts = between(before, server.scrape(), tokens=5000, seconds=4.0)
    assert facts is not None
    assert facts["output_tokens"] == 5010
    assert (facts["steps"], facts["idle_ms_per_step"]) == (100, pytest.approx(0.2))
    assert (facts["draft_tokens"], facts["acceptance_rate"], facts["mean_accepted_length"]) == (30, 0.8, 3.4)
    assert facts["cpu_cores"] == {"front": 0.5, "engine": 0.25, "late": 0.5}
    assert facts["cpu_us_per_token"] == {"front": 400, "engine": 200, "late": 400}
    seen = facts["inter_token_s"]
    assert seen["count"] == 5000
    assert seen["mean"] == pytest.approx(sum(gaps) / 5000)
    gaps.sort()
    for share in (50, 90, 99):  # they are uniform, so between the bounds of a bucket too
        assert seen[f"p{share}"] == pytest.approx(gaps[50 * share], rel=0.05)


def test_what_a_server_does_not_show_is_absent() -> None:
    empty = Scrape.of("# nothing\n")
    assert empty is not None
    assert between(empty, empty, 10, 1.0) is None
    assert between(None, empty, 10, 1.0) is None
    assert between(empty, None, 10, 1.0) is None
    server = Server()
    before = server.scrape()
    server.gaps.observe(0.01)
    facts = between(before, server.scrape(), 10, 1.0)
    assert facts is not None
    assert set(facts) == {"inter_token_s", "output_tokens"}
    assert facts["output_tokens"] == 0
    assert Scrape.of("<html>not metrics</html>") is None


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([(1.0, 10.0), (2.0, 20.0), (float("inf"), 20.0)], 0.5, 1.0),
        ([(1.0, 10.0), (2.0, 20.0), (float("inf"), 20.0)], 0.75, 1.5),
        ([(1.0, 0.0), (2.0, 4.0), (float("inf"), 4.0)], 0.25, 1.25),
        ([(1.0, 1.0), (2.0, 1.0), (4.0, 2.0), (float("inf"), 2.0)], 1.0, 4.0),
        ([(1.0, 1.0), (2.0, 1.0), (float("inf"), 9.0)], 0.99, 2.0),  # beyond the last bound
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_quantiles(buckets: list[tuple[float, float]], share: float, expected: float | None) -> None:
    assert quantile(buckets, share) == expected


def test_memory_while_it_runs() -> None:
    """The mean of what each look saw; what a server doesn't show is left out, and so is all of it without a look."""
    registry = CollectorRegistry()
    running = Gauge("quire_num_requests_running", "text", ("engine",), registry=registry).labels("0")
    size = Gauge("quire_kv_bytes", "text", ("engine", "category"), registry=registry)
    layer = Gauge("quire_kv_layer_bytes", "text", ("engine", "layer_type", "category"), registry=registry)
    looks, enough = iter(range(4)), threading.Event()

    def scrape() -> Scrape | None:
        look = next(looks, None)
        if look is None:
            return None
        running.set(look)
        size.labels("0", "used").set(10 * look)
        if look == 3:  # a layer type that comes late
            layer.labels("0", "state", "internal").set(8)
        if look == 2:  # a server that doesn't answer once
            return None
        if look == 3:
            enough.set()
        return Scrape.of(generate_latest(registry).decode())

    with Watch(scrape, 0.001) as watch:
        assert enough.wait(60)
    assert watch.held() == {
        "samples": 3, "running": pytest.approx(4 / 3), "bytes": {"used": pytest.approx(40 / 3)},
        "layers": {"state": {"internal": pytest.approx(8 / 3)}},
    }  # fmt: skip
    with Watch(scrape, None) as unwatched:
        pass
    assert unwatched.held() is None
