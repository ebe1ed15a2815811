"""A long run of the engine over an EchoRunner: nothing may be left behind. As a script it writes what it counted:
`python tests/conformance/soak.py 100000 docs/measurements/soak.json`, or over another of MEMORIES, if it is named."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from memories import MAX_LEN, MEMORIES, VOCAB, Build, host_free, host_total
from pictured import PICTURED
from traces import Trace

from bench.echo_runner import EchoRunner
from quire.core.engine import Engine
from quire.core.validation import EngineLimits
from quire.protocol.step_plan import ImageEncoding, PageCopy, StepPlan, SwapIn, SwapOut

KINDS = {PageCopy: "copies", SwapOut: "pages_out", SwapIn: "pages_in"}


class Counting(EchoRunner):
    """Counts what the plans ask for."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, vocab_size=VOCAB)
        self.counts: Counter[str] = Counter()

    def submit(self, plan: StepPlan) -> int:
        self.counts["steps"] += 1
        self.counts["tokens_computed"] += sum(len(row.tokens) for row in plan.slices)
        self.counts["forks"] += sum(birth.parent_slot >= 0 for birth in plan.new_slots)
        for entry in plan.page_ops:
            if (kind := KINDS.get(type(entry))) is not None:
                self.counts[kind] += 1
            elif isinstance(entry, ImageEncoding):
                self.counts["parts_encoded"] += entry.num_parts
        return super().submit(plan)


def soak(requests: int, *, seed: int = 0, depth: int = 2, name: str = "paged-4") -> dict[str, float]:
    """Serve a random stream of all kinds of requests over a memory, a few of them aborted; every 100th is compared with
    the oracle. Returns counts."""
    rng, runner = random.Random(seed), Counting(depth)
    memory = {**MEMORIES, **PICTURED}[name](Build(tokens=160, chunk=64, max_seqs=12, host=24, prefix_tokens=16))
    trace = Trace(memory, seed=seed, depth=depth, budget=64, max_seqs=12, runner=runner, preemption="auto")
    scheduler, begin = trace.scheduler, time.perf_counter()
    scheduler.memory = memory  # unwatched
    engine = Engine(scheduler, runner, EngineLimits(VOCAB, MAX_LEN, 1000), clock=lambda: 0.0)
    trace.engine = engine
    added = steps = 0
    while added < requests or engine.has_unfinished_requests:
        while added < requests and len(engine.requests) < 8:
            trace.add(trace.draw(rng, str(added)))
            added += 1
            if added % 100:
                trace.asked.pop(str(added - 1), None)
                trace.outputs.pop(str(added - 1), None)
        if rng.random() < 0.01 and engine.requests:
            trace.abort(rng.choice(list(engine.requests)))
        if rng.random() < 0.01:
            trace.prefixes()
        for output in engine.step():
            if output.request_id in trace.outputs:
                trace.outputs[output.request_id].append(output)
        steps += 1
        assert steps < 200 * requests, "the engine makes no progress"
        if steps % 1000 == 0:
            memory.check()
    trace.drained()
    seconds = time.perf_counter() - begin
    return {
        "submitted": added,
        "served": added - trace.refused,
        "refused": trace.refused,
        "aborted": len(trace.aborted),
        "compared": len(trace.asked),
        "seconds": round(seconds, 1),
        "preemptions_by_swap": scheduler.preemption_counts["swap"],
        "preemptions_by_recomputation": scheduler.preemption_counts["recompute"],
        **runner.counts,
        "evictions": memory.page_pool.evictions,
        "pages_left": sum(memory.page_pool.used),
        "slots_left": memory.kv_config.slots - 1 - len(memory.free_slots),
        "host_pages_left": host_total(memory) - host_free(memory),
    }


if __name__ == "__main__":
    told = soak(int(sys.argv[1]), name=sys.argv[3] if len(sys.argv) > 3 else "paged-4")
    Path(sys.argv[2]).write_text(json.dumps(told, indent=2) + "\n")
