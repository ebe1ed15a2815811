"""Compare routing policies in simulations of replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from papers.serving import in_parallel
from quire.bench.arrivals import poisson
from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams
from quire.sim.fleet import Fleet, work_costs
from quire.sim.simulation import TraceRequest

DEVICE = "h200-llama3-8b"
KV_TOKENS = 40_000  # of each replica
PREFIX, PREFIXES = 2048, 64  # tokens, and their number: 3.3 times a replica's memory
HOT = 0.9  # share of the requests that have the first prefix
OWN = (16, 64)  # tokens of a prompt after its prefix, at least and at most; without prefixes APART
APART = (256, 1024)
OUTPUT = (8, 64)


class Load(NamedTuple):
    """What all requests have in common: `prefixes` that they begin with, of which the first has a share of `hot` (0:
    all are alike), and the requests a second of a replica."""

    name: str
    rate: float
    prefixes: int = PREFIXES
    hot: float = 0.0

    def trace(self, replicas: int, requests: int) -> list[TraceRequest]:
        """Return a trace of `requests` requests for each replica. It does not depend on the policy."""
        rng, found = random.Random(1), list[TraceRequest]()
        for i, time in enumerate(poisson(replicas * requests, replicas * self.rate, 1)):
            first = 0 if rng.random() < self.hot else rng.randrange(max(self.prefixes, 1))
            own = rng.randrange(*(OWN if self.prefixes else APART))
            # The first own token tells requests apart; the others have no effect.
            prompt = [first] * (PREFIX if self.prefixes else 0) + [PREFIXES + i] * own
            params = SamplingParams(max_tokens=rng.randrange(*OUTPUT), ignore_eos=True, detokenize=False)
            found.append(TraceRequest(time, prompt, params))
        return found


class Served(NamedTuple):
    """A run: a load, served by `replicas` with a policy, `requests` of each."""

    load: Load
    replicas: int
    policy: str
    requests: int

    def simulate(self) -> dict[str, Any]:
        """Return the point of the run."""
        plant = read_deployment(EngineConfig(kv_tokens=KV_TOKENS), DEVICE)
        trace = self.load.trace(self.replicas, self.requests)
        simulations = [plant.simulation() for _ in range(self.replicas)]
        done = Fleet(simulations, self.policy, work_costs(plant.cost)).run(trace)
        first = [one.lower_bound("ttft", 0.0) for one in done.requests]
        return {
            "load": self.load.name, "replicas": self.replicas, "policy": self.policy,
            "hits": done.totals.hits / done.totals.queries, "one_cache": hits_of_one_cache(trace, self.load),
            "requests_per_s": len(trace) / done.totals.seconds, "first_token": float(np.percentile(first, 99)),
        }  # fmt: skip


def runs() -> list[Served]:
    """Return every run: each load with the policy "prefix" and the one that it is compared with."""
    found = list[Served]()
    for replicas, requests in ((4, 100), (16, 50), (64, 25)):
        for load, other, more in (
            (Load("64 prefixes", 15.0), "round-robin", 1), (Load("64 prefixes, overload", 80.0), "round-robin", 1),
            (Load("a hot prefix", 15.0, hot=HOT), "least-loaded", 4),
            (Load("nothing shared", 15.0, prefixes=0), "least-loaded", 1),
        ):  # fmt: skip
            found += [Served(load, replicas, policy, more * requests) for policy in ("prefix", other)]
    return found


def hits_of_one_cache(trace: Sequence[TraceRequest], load: Load) -> float:
    """Return the share of prompt tokens that one cache finds that forgets nothing: every prefix is computed once."""
    seen, found, asked = set[int](), 0, 0
    for request in trace:
        asked += len(request.prompt)
        if load.prefixes and request.prompt[0] in seen:
            found += PREFIX
        seen.add(request.prompt[0])
    return found / asked


def served(runs: Sequence[Served]) -> list[dict[str, Any]]:
    """Return the points of all runs, the largest of which come first."""
    order = sorted(range(len(runs)), key=lambda i: -runs[i].replicas)
    done = dict(zip(order, in_parallel(Served.simulate, [(runs[i],) for i in order])))
    return [done[i] for i in range(len(runs))]
