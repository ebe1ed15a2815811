"""Simulated replicas behind a router, compared with one engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.bench.arrivals import poisson
from quire.bench.simulate import SimulatedDeployment, main, read_deployment
from quire.config import EngineConfig
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.sim.fleet import Fleet, work_costs
from quire.sim.simulation import SimulationResult, TraceRequest

PREFIX, PREFIXES = 512, 32


def deployment(
    replicas: int, policy: str = "prefix", kv_tokens: int = 5_000, **settings: object
) -> SimulatedDeployment:
    config = EngineConfig.of(kv_tokens=kv_tokens, **settings)
    return read_deployment(config, "h200-llama3-8b")._replace(replicas=replicas, router=policy)


def trace(count: int, rate: float, prefixes: int = PREFIXES, hot: float = 0.0) -> list[TraceRequest]:
    """Return requests of which a share of `hot` has the first prefix, and the others any."""
    rng, found = random.Random(1), []
    for time in poisson(count, rate, 1):
        prefix = 0 if rng.random() < hot else rng.randrange(max(prefixes, 1))
        own = [rng.randrange(5000, 20000) for _ in range(rng.randrange(16, 64))]
        prompt = [100 + prefix] * (PREFIX if prefixes else 0) + own
        params = SamplingParams(max_tokens=rng.randrange(8, 64), ignore_eos=True, detokenize=False)
        found.append(TraceRequest(time, prompt, params))
    return found


def hit_rate(outcome: SimulationResult) -> float:
    return outcome.totals.hits / outcome.totals.queries


def first_token(outcome: SimulationResult) -> float:
    """Return the 99th percentile of the seconds to the first token."""
    return float(np.percentile([one.lower_bound("ttft", 0.0) for one in outcome.requests], 99))


def test_one_replica_is_served_as_without_a_router() -> None:
    requests = trace(150, 60.0)
    alone = deployment(1).simulate(requests)
    plant = deployment(1)
    behind = Fleet([plant.simulation()], "prefix", work_costs(plant.cost)).run(requests)
    assert [one.token_times for one in behind.requests] == [one.token_times for one in alone.requests]
    for field in ("steps", "mean_batch", "mean_running", "preemptions", "queries", "hits"):
        assert getattr(behind.totals, field) == pytest.approx(getattr(alone.totals, field)), field
    assert behind.totals.seconds == pytest.approx(alone.totals.seconds)
    assert behind.replicas == [150]


@pytest.mark.parametrize("settings", [{}, {"model_config": "gemma-2-2b"}, {"memory": "orca-max"}])
def test_the_router_knows_what_is_cached(settings: dict[str, str]) -> None:
    plant = deployment(3, kv_tokens=12_000, max_model_len=2048, **settings)
    fleet = Fleet([plant.simulation() for _ in range(3)], "prefix", work_costs(plant.cost))
    outcome = fleet.run(trace(90, 60.0))
    assert all(one.done for one in outcome.requests)
    assert sum(outcome.replicas) == 90
    for replica, known in zip(fleet.replicas, fleet.router.replicas):
        memory = replica.memory
        group = memory.prefix_cache.routed_group() if isinstance(memory, PagedMemory) else None
        assert known.stored == (set() if group is None else set(memory.page_pool.index[group]))  # type: ignore[attr-defined]
        assert (group is None) == ("memory" in settings)
        assert not known.computing
        assert known.prompt_tokens == 0


def test_prefixes_stay_apart() -> None:
    """Prefixes that need nearly all of the memory of four replicas: hits as in one cache as large as all."""
    requests = trace(600, 150.0)
    one = hit_rate(deployment(1, kv_tokens=20_000).simulate(requests))
    hits = {policy: hit_rate(deployment(4, policy).simulate(requests)) for policy in ("prefix", "round-robin")}
    assert hits["prefix"] >= 0.95 * one
    assert hits["round-robin"] < 0.7 * hits["prefix"]


def test_a_hot_prefix_does_not_overload_a_replica() -> None:
    requests = trace(400, 200.0, hot=0.9)
    assert first_token(deployment(4).simulate(requests)) <= 1.1 * first_token(
        deployment(4, "least-loaded").simulate(requests)
    )


def test_without_common_prefixes_only_the_load_counts() -> None:
    requests = trace(300, 2000.0, prefixes=0)
    prefix, least = (deployment(4, policy).simulate(requests).totals.seconds for policy in ("prefix", "least-loaded"))
    assert prefix == pytest.approx(least, rel=0.02)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--calibration", "h200-llama3-8b", "--workload", "mmlu-pro@20", "--rate", "20", "--kv-tokens", "20000"]
    assert main([*args, "--replicas", "2", "--router", "round-robin"]) == 0
    printed = capsys.readouterr().out
    assert "2 replicas (router: round-robin), each of NVIDIA H200" in printed
    assert "10 to 10 requests a replica" in printed
