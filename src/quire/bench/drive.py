"""Run a workload on an engine in this process, and record batches, memory and preemptions.

The clock is the engine's. Requests arrive at given times, or when others end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.bench.latency import Trace, draft_facts
from quire.bench.workloads import Job
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.errors import QuireError
from quire.memory.answers import Usage
from quire.protocol.sampling_params import SamplingParams

WATCHING = 0.01  # share of the time that sampling the memory may take


class Load(NamedTuple):
    """The arrivals of requests. Open: request i arrives at `times[i]` seconds. Closed (`times` is None): the next one
    arrives when fewer than `concurrency` are running."""

    times: Sequence[float] | None = None
    concurrency: int = 1

    def arrival(self, index: int, under_way: int, now: float) -> float | None:
        """Return the arrival time of request `index` if it has arrived by `now`, else None. Times are seconds from the
        start."""
        if self.times is None:
            return now if under_way < self.concurrency else None
        return self.times[index] if self.times[index] <= now else None


class Decoding(NamedTuple):
    """Decoding parameters of each job, by SamplingParams' names."""

    temperature: float = 0.0
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    speculate: bool = True

    @property
    def plain(self) -> bool:
        """Return True if a request has one sequence."""
        return self.n == 1 and self.best_of is None and self.beam_width is None

    def params(self, job: Job) -> SamplingParams:
        """Return parameters that generate exactly the job's output length."""
        return SamplingParams(
            temperature=self.temperature, n=self.n, best_of=self.best_of, beam_width=self.beam_width,
            max_tokens=job.output, ignore_eos=True, detokenize=False, seed=len(job.prompt), speculate=self.speculate,
        )  # fmt: skip


class Watch:
    """The counters of an engine since this object was made, and the mean of its memory samples by category."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._began = time.perf_counter()
        self._spent = 0.0
        self._samples: list[Usage] = []
        self._running = self._steps = 0
        self._tables = self._saved = 0  # pages that sequences need without sharing, and those saved by it, over steps
        self._before = self._counters()

    def _counters(self) -> dict[str, int]:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        sharing = scheduler.memory.account().sharing
        return {
            "steps": stats.steps, "rows": stats.rows, "preemptions": scheduler.num_preemptions,
            **{f"preemptions_{way}": count for way, count in scheduler.preemption_counts.items()},
            "swapped_out_bytes": sharing.swapped_out, "swapped_in_bytes": sharing.swapped_in,
            "copied_pages": sharing.copies, "prefix_hit_tokens": sharing.hits, "prefix_query_tokens": sharing.queries,
            "encoder_runs": sharing.encoder_runs, "encoder_parts": sharing.encoder_parts,
            "picture_hits": sharing.picture_hits, "num_drafts": stats.num_drafts, "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
        }  # fmt: skip

    def step(self, outputs: Sequence[BranchOutput]) -> None:
        """Update the counters; call this after each step. Requests that the step ended count as running in it."""
        self._steps += 1
        self._running += len(self.engine.scheduler.running) + sum(output.done for output in outputs)
        sharing = self.engine.scheduler.memory.account().sharing
        self._tables, self._saved = self._tables + sharing.tables, self._saved + sharing.saved
        now = time.perf_counter()
        if not self._samples or self._spent < WATCHING * (now - self._began):
            self._samples.append(self.engine.scheduler.memory.account().usage)
            self._spent += time.perf_counter() - now

    def facts(self) -> dict[str, Any]:
        """Return the counters since the start. `mean_batch` is rows a step: the sequences that a step computed."""
        counts = {name: count - self._before[name] for name, count in self._counters().items()}
        rows = counts.pop("rows")
        drafts = draft_facts(*(counts.pop(name) for name in ("num_drafts", "draft_tokens", "accepted_tokens")))
        usage = {
            name: sum(sample[i] for sample in self._samples) / len(self._samples)
            for i, name in enumerate(Usage._fields)
        }
        return {
            **counts, **drafts, "mean_batch": rows / counts["steps"], "mean_running": self._running / self._steps,
            "memory_bytes": usage, "memory_samples": len(self._samples),
            "sharing_saved": self._saved / self._tables if self._tables else 0.0,
        }  # fmt: skip


def drive(
    engine: Engine, jobs: Sequence[Job], load: Load, decoding: Decoding, best: dict[str, list[int]] | None = None
) -> tuple[list[Trace], dict[str, Any]]:
    """Run all jobs to their full output lengths. Return their traces, on a clock that starts at 0, and the counters.
    `best` receives the tokens of each job's first sequence, by job number."""
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
            engine.add(str(len(traces)), job.prompt, decoding.params(job), images=job.media, pixels=job.pixels)
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
                raise QuireError(f"request {output.request_id} failed: {output.stop_reason}")
            traces[int(output.request_id)].events.append((now, len(output.tokens)))
            if best is not None and output.branch == 0:
                best[output.request_id] += output.tokens
            under_way -= output.done
        watch.step(outputs)
    return traces, watch.facts()
