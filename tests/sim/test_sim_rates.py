"""Objectives, runs that are given up, and the bisection for a rate that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.sim.cost_model import Coefficients, CostModel, ModelShape
from quire.sim.simulation import (
    MEASURES,
    STATISTICS,
    Objective,
    Simulation,
    SimulationResult,
    TraceRequest,
    highest_rate,
    mean_usage,
    meets_objectives,
    parse_objective,
)

SPEC = ModelSpec("none", (LayerSpec(2, 16),), 512, 64, 64, 4, 128, 10**6)
SECOND = Coefficients(*(0.0,) * 10)._replace(step=1.0)


def asked(output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)


def server(seqs: int = 1) -> Simulation:
    """It computes one step a second, for `seqs` sequences."""
    config = EngineConfig(page_size=4, max_num_seqs=seqs, max_num_batched_tokens=32, enable_prefix_caching=False)
    return Simulation(config, SPEC, CostModel(ModelShape.from_spec(SPEC, 2, True), SECOND), 64 * seqs, kind="cpu")


def serve(
    rate: float, objectives: list[Objective], count: int = 120, output: int = 1, seqs: int = 1
) -> SimulationResult:
    """A request comes every 1 / rate seconds."""
    return server(seqs).run([TraceRequest(i / rate, [1, 2, 3], asked(output)) for i in range(count)], objectives)


@pytest.mark.parametrize(("output", "seqs", "most"), [(1, 1, 1.0), (4, 1, 0.25), (4, 2, 0.5)])
def test_the_rate_of_a_server_that_is_known(output: int, seqs: int, most: float) -> None:
    goals = [parse_objective(f"p99-e2e-ms={1000 * (output + 1.5)}")]
    found = highest_rate(lambda rate: meets_objectives(serve(rate, goals, 120, output, seqs), goals), start=8.0)
    assert 0.97 * most <= found <= 1.03 * most


def searched(most: float, *search: float) -> tuple[float, list[float]]:
    """The rate that a search finds where `most` is the highest, and the rates that it tried."""
    tried: list[float] = []
    found = highest_rate(lambda rate: tried.append(rate) or rate <= most, *search)  # type: ignore[func-returns-value]
    return found, tried


@pytest.mark.parametrize("start", [1e-3, 1.0, 3.7, 500.0])
def test_bisection_ends_within_its_tolerance(start: float) -> None:
    found, tried = searched(3.7, start, 0.01)
    assert found <= 3.7 < found * 1.01
    assert len(tried) < 40
    assert len(set(tried)) == len(tried)


def test_steps_of_the_search_grow() -> None:
    found, tried = searched(1.0, 40.0, 0.02, 1.1, 2.0)
    assert found <= 1.0 < found * 1.02
    assert tried[:4] == pytest.approx([40.0, 40 / 1.1, 40 / 1.1**3, 40 / 1.1**7])
    assert len(tried) < 18


@pytest.mark.parametrize(
    ("search", "words"),
    [
        *(((start,), "can't start at") for start in (math.nan, math.inf, 0.0, -1.0, 5e-324, 1e300)),
        *(((1.0, *steps), "never end") for steps in ((0.0, 2.0, 1.0), (0.02, 1.0, 1.0), (0.02, 2.0, 0.5))),
    ],
)
def test_a_search_that_would_not_end_is_not_begun(search: tuple[float, ...], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        highest_rate(lambda rate: rate < 3, *search)


@pytest.mark.parametrize("at", [math.nan, math.inf])
def test_a_request_that_never_comes_is_not_waited_for(at: float) -> None:
    with pytest.raises(AssertionError, match="never arrives"):
        server().run([TraceRequest(0.0, [1], asked(1)), TraceRequest(at, [1], asked(1))])


def test_an_overloaded_run_is_given_up_early() -> None:
    goals = [parse_objective("mean-e2e-ms=5000")]
    outcome = serve(4.0, goals, 1000)
    assert not outcome.totals.finished
    assert outcome.totals.seconds < 300  # of 1000: three quarters of all requests have yet to be served
    assert not meets_objectives(outcome, goals)


@pytest.mark.share(6)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("measure", MEASURES)
def test_only_lost_runs_are_given_up(statistic: str, measure: str) -> None:
    """Whenever a run is given up, the whole run misses the objective too; and some are given up."""
    rate, gaveup = 1.5, 0
    whole = serve(rate, [], 60, 3, 2)
    for limit in np.geomspace(0.2, 100, 14):
        goal = Objective(statistic, measure, float(limit))
        outcome = serve(rate, [goal], 60, 3, 2)
        assert meets_objectives(outcome, [goal]) == meets_objectives(whole, [goal])
        gaveup += not outcome.totals.finished
    assert gaveup > 0


def test_a_run_can_be_cut() -> None:
    cut, whole = (server().run([TraceRequest(0.0, [1, 2, 3], asked(1))] * 40, until=until) for until in (10.0, 1000.0))
    assert (cut.totals.seconds, cut.totals.finished) == (10.0, False)
    assert sum(one.done for one in cut.requests) == 10
    assert whole.totals.finished


def test_registered_prefixes_are_shared_from_the_first_request_on() -> None:
    """A prefix of 10 pages is registered within a second, and time starts after it: then requests hold it once."""
    config = EngineConfig(
        page_size=4, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False, prefix_tokens=40
    )
    outcomes = []
    for registered in (True, False):
        simulation = Simulation(config, SPEC, CostModel(ModelShape.from_spec(SPEC, 2, True), SECOND), 128, kind="cpu")
        if registered:
            simulation.register_prefix("prefix", [5] * 40)
            assert simulation.clock.now == 1.0
        outcomes.append(simulation.run([TraceRequest(0.0, [5] * 40 + [6], asked(4))] * 6))
    shared, alone = outcomes
    assert shared.requests[0].arrival == 1.0
    assert shared.totals.mean_running > 2 * alone.totals.mean_running
    assert all(one.token_times[-1][0] - one.arrival == 4.0 for one in shared.requests)


def test_measures_of_one_request() -> None:
    [one] = serve(1.0, [], 1, 4).requests
    assert [one.lower_bound(measure, 99.0) for measure in ("e2e", "ttft", "tpot", "normalised")] == [4.0, 1.0, 1.0, 1.0]
    goal = Objective("mean", "normalised", 1.0)
    assert goal.value([one]) == 1.0
    assert goal.name == "mean-normalised-ms"


def test_memory_is_sampled_evenly_and_in_bounds() -> None:
    outcome = serve(1e6, [], 900, 4, 1)  # all come at once, so the trace's length says nothing of the run's
    times = [moment.time for moment in outcome.timeline]
    assert 200 < len(times) <= 801
    assert times == sorted(times)
    assert times[-1] > 0.98 * outcome.totals.seconds
    assert mean_usage(outcome.timeline).total == outcome.timeline[0].usage.total


@pytest.mark.parametrize(
    "text", ["", "p99", "p99-normalised=3", "p98-e2e-ms=3", "p99-e2f-ms=3", "p99-e2e-ms=", "mean-ttft-ms=0",
             "mean-ttft-ms=nan", "mean-ttft-ms=inf", "mean-ttft-ms=-1", "mean-ttft=1"],
)  # fmt: skip
def test_bad_objectives_say_what_was_expected(text: str) -> None:
    with pytest.raises(StartupError, match="such as p99-normalised-ms=200"):
        parse_objective(text)
