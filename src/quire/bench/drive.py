"""Driving an engine in this process through a workload, and watching it: batches, memory, preemptions.

The clock is the engine's own. Requests come at given times, or as soon as others are done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.bench.latency import Trace
from quire.bench.workloads import Job
from quire.engine import Engine, Output
from quire.errors import QuireError
from quire.memory import Usage
from quire.request import SamplingParams

WATCHING = 0.01  # of the time may go into sampling the memory


class Load(NamedTuple):
    """When requests come. Open: request i at `times[i]` seconds. Closed (`times` is None): the next one as soon as
    fewer than `concurrency` are under way."""

    times: Sequence[float] | None = None
    concurrency: int = 1

    def arrival(self, index: int, under_way: int, now: float) -> float | None:
        """When request `index` came, if it has by `now`. All times are seconds from the start."""
        if self.times is None:
            return now if under_way < self.concurrency else None
        return self.times[index] if self.times[index] <= now else None


class Watch:
    """Counters of an engine from now on, and its memory by category, averaged over samples."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._began = time.perf_counter()
        self._spent = 0.0
        self._samples: list[Usage] = []
        self._running = self._steps = 0
        self._before = self._counters()

    def _counters(self) -> dict[str, int]:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        memory: Any = scheduler.memory
        return {
            "steps": stats.steps,
            "rows": stats.rows,
            "preemptions": scheduler.preemptions,
            "preempted": dict(scheduler.preempted),
            "prefix_hit_tokens": memory.hits,
            "prefix_query_tokens": memory.queries,
        }

    def step(self, outputs: Sequence[Output]) -> None:
        """To be called after each step. Requests that it ended were running in it."""
        self._steps += 1
        self._running += len(self.engine.scheduler.running) + sum(output.done for output in outputs)
        now = time.perf_counter()
        if not self._samples or self._spent < WATCHING * (now - self._began):
            self._samples.append(self.engine.scheduler.memory.usage())
            self._spent += time.perf_counter() - now

    def facts(self) -> dict[str, Any]:
        """What happened since the start. `mean_batch` is rows a step: sequences that a step computed."""
        counts = {name: count - self._before[name] for name, count in self._counters().items()}
        rows = counts.pop("rows")
        usage = {
            name: sum(sample[i] for sample in self._samples) / len(self._samples)
            for i, name in enumerate(Usage._fields)
        }
        return {
            **counts,
            "mean_batch": rows / counts["steps"],
            "mean_running": self._running / self._steps,
            "memory_bytes": usage,
            "memory_samples": len(self._samples),
        }


def drive(engine: Engine, jobs: Sequence[Job], load: Load, temperature: float) -> tuple[list[Trace], dict[str, Any]]:
    """Run all jobs to their full output lengths. Returns their traces, on a clock that starts at 0, and the facts."""
    start = engine.clock()
    watch = Watch(engine)
    traces: list[Trace] = []
    under_way = 0
    while len(traces) < len(jobs) or under_way:
        while len(traces) < len(jobs):
            arrival = load.arrival(len(traces), under_way, engine.clock() - start)
            if arrival is None:
                break
            job = jobs[len(traces)]
            engine.add(str(len(traces)), job.prompt, _params(job, temperature))
            traces.append(Trace(arrival, len(job.prompt), []))
            under_way += 1
        if not under_way:
            assert load.times is not None, "a closed loop without requests under way"
            time.sleep(max(0.0, load.times[len(traces)] - (engine.clock() - start)))
            continue
        outputs = engine.step()
        now = engine.clock() - start
        for output in outputs:
            if output.finish_reason == "error":
                raise QuireError(f"request {output.request} failed: {output.stop_reason}")
            traces[int(output.request)].events.append((now, len(output.tokens)))
            under_way -= output.done
        watch.step(outputs)
    return traces, watch.facts()


def _params(job: Job, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=job.output, ignore_eos=True, detokenize=False, seed=len(job.prompt)
    )
