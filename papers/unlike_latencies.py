"""Serve a case of unlike layers at given rates, by several allocation rules: by simulation, and on a GPU.

Other devices than the paper's serve other rates, so rates are given as shares of simulated capacities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from papers.serving import in_parallel, middle_rate
from papers.side_by_side import Span, Wait, report, serve, sleep_until
from papers.unlike_gpu import ON, WARM, on_device
from papers.unlike_serving import H200, SEED, Case, burst
from quire.bench.arrivals import poisson
from quire.core.engine import Engine
from quire.sim.simulation import TraceRequest

MEASURES = ("e2e", "ttft", "tpot")


class Rate(NamedTuple):
    """A rate, as the sum of shares of the first rule's capacity and of the second's, and the requests of its run."""

    first: float
    second: float
    requests: int


class Load(NamedTuple):
    """The first `requests` of a case at `rate` requests a second, as Poisson arrivals; every rate uses the same
    sequence, scaled. The run is aborted after `seconds`."""

    case: Case
    rate: float
    requests: int
    seconds: float

    def trace(self, pixels: bool = False) -> list[TraceRequest]:
        asked = burst(self.case.specs()[: self.requests], self.case.eyes, pixels)
        return [one._replace(arrival=at / self.rate) for one, at in zip(asked, poisson(len(asked), 1.0, SEED))]

    def serve(self, engine: Engine, wait: Wait, rule: str, by: str) -> dict[str, Any]:
        """Return the mean latencies in seconds; an unfinished request counts with its lower bound at the end."""
        served, steps, _ = serve(engine, wait, self.trace(by == "real"), Span(0.0, self.seconds, self.seconds))
        means = {name: mean(one.lower_bound(name, steps[-1].at) for one in served) for name in MEASURES}
        unfinished = sum(not one.done for one in served)
        return {"rule": rule, "by": by, "rate": self.rate, **means, "unfinished": unfinished}

    def simulate(self, rule: str) -> dict[str, Any]:
        made = self.case.plant(rule).simulation()
        return self.serve(made.engine, made.clock.advance_to, rule, "simulated")


def capacity(case: Case, rule: str) -> float:
    """Return the requests a second of a rule when all come at once."""
    return middle_rate(case.plant(rule).simulation().run(burst(case.specs(), case.eyes)))


def serve_for_real(loads: Sequence[Load], rule: str, engine: Engine) -> list[dict[str, Any]]:
    """Return the points of all loads; the first one also runs before, which compiles what its steps need."""
    return [report(load.serve(engine, sleep_until, rule, "real")) for load in (loads[0], *loads)][1:]


def latencies(
    case: Case, rules: tuple[str, str], rates: Sequence[Rate], seconds: float = math.inf, real: bool = False,
    device: str = ON, warm: Sequence[int] = WARM,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a point for each rate and rule, simulated, and if `real` on the device, with the KV memory of the case's
    own: the mean latencies end to end, to the first token and for each token after it, in seconds; the `share` of
    the first rule's capacity that the rate is; and the rule's own capacity in requests a second."""
    case = case.on(H200) if real else case
    capacities = dict(zip(rules, in_parallel(capacity, [(case, rule) for rule in rules])))
    first, second = capacities.values()
    loads = [Load(case, one.first * first + one.second * second, one.requests, seconds) for one in rates]
    jobs = [(load, rule) for load in reversed(loads) for rule in rules]
    points: list[dict[str, Any]] = in_parallel(Load.simulate, jobs)
    for rule in rules if real else ():
        points += on_device(case, rule, partial(serve_for_real, loads, rule), device, warm)
    for point in points:
        point |= {"share": point["rate"] / first, "capacity": capacities[point["rule"]]}
    return sorted(points, key=lambda point: (point["rate"], rules.index(point["rule"]), point["by"]))
