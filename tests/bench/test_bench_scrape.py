"""What a server's metrics say of a run, from the texts that prometheus_client writes, beside counting by hand."""

from __future__ import annotations

import random
import threading

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.bench.scrape import Scrape, Watch, between, quantile

BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)


class Server:
    """Metrics under quire's names; `prefix` is another one."""

    def __init__(self, prefix: str = "quire_") -> None:
        self.registry = CollectorRegistry()
        text, labels = "text", ("model_name", "engine")
        self.gaps = Histogram(f"{prefix}inter_token_latency_seconds", text, labels, registry=self.registry,
                              buckets=BOUNDS).labels("m", "0")  # fmt: skip
        self.cpu = Counter(f"{prefix}process_cpu_seconds", text, (*labels, "process"), registry=self.registry)
        self.tokens, self.steps, self.idle = (
            Counter(prefix + name, text, labels, registry=self.registry).labels("m", "0")
            for name in ("generation_tokens", "engine_steps", "engine_idle_seconds")
        )

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
    server.tokens.inc(5010)
    server.steps.inc(100)
    server.idle.inc(0.02)
    facts = between(before, server.scrape(), tokens=5000, seconds=4.0)
    assert facts is not None
    assert facts["output_tokens"] == 5010
    assert (facts["steps"], facts["idle_ms_per_step"]) == (100, pytest.approx(0.2))
    assert facts["cpu_cores"] == {"front": 0.5, "engine": 0.25}
    assert facts["cpu_us_per_token"] == {"front": 400, "engine": 200}
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


def test_a_process_that_came_later_counts_from_nothing() -> None:
    server = Server()
    server.cpu.labels("m", "0", "front").inc(3)
    before = server.scrape()
    server.cpu.labels("m", "0", "engine").inc(2)
    facts = between(before, server.scrape(), 100, 1.0)
    assert facts is not None
    assert facts["cpu_us_per_token"] == {"front": 0, "engine": 20_000}


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
