"""The cost of the control plane alone: plan a step, update the memory, take in the result, with no model behind it.

PagedAttention names this overhead without a number; here it is, in microseconds a step.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

from quire.bench.document import short, table
from quire.bench.latency import spread
from quire.bench.machine import Others
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory import Size, build_memory
from quire.request import Request, SamplingParams
from quire.request import Sequence as Seq
from quire.scheduler import Scheduler
from quire.sim.echo import EchoRunner
from quire.specs import LayerSpec, ModelSpec

SEQUENCES = (1, 256, 1000)
CONTEXTS = (128, 32768)
STEPS = 500
MOST = 2**20
MAX_TOKENS = 2**26
PROMPT_TOKEN = 100


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each of args.sequences running sequences and args.contexts tokens of context."""
    for name, values in (("sequences", args.sequences), ("contexts", args.contexts), ("steps", [args.steps])):
        if min(values) < 1 or max(values) > MOST:
            raise StartupError(f"--{name} is {' '.join(map(str, values))}", f"Give numbers from 1 to {MOST:,}")
    if max(args.sequences) * max(args.contexts) > MAX_TOKENS:
        raise StartupError(
            f"{max(args.sequences)} sequences of {max(args.contexts)} tokens are too many to hold",
            f"At most {MAX_TOKENS:,} tokens in all",
        )
    return [step_cost(count, context, args.steps) for context in args.contexts for count in args.sequences]


def show(results: Sequence[dict[str, Any]]) -> str:
    """Microseconds as a table."""
    head = ("sequences", "context", "schedule us", "update us", "step us (median)", "mean", "p99", "others' cores")
    return table(
        head,
        [
            (
                result["sequences"],
                result["context"],
                short(result["schedule_us"]["p50"]),
                short(result["update_us"]["p50"]),
                *(short(result["step_us"][which]) for which in ("p50", "mean", "p99")),
                f"{result['cores_used_by_others']:.2f}",
            )
            for result in results
        ],
    )


def step_cost(count: int, context: int, steps: int = STEPS) -> dict[str, Any]:
    """Decode steps of `count` sequences of about `context` tokens: microseconds of schedule, of update, and both.

    Lengths differ by up to a page, so that every step sees some sequences cross into a new page, as in service.
    """
    scheduler, runner = decoding(count, context, steps)
    gc.collect()  # what was allocated to get here is not part of a step; collections that steps cause are
    others = Others()
    planning, updating = [], []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None, "there is nothing to plan"
        assert len(plan.rows) == count, "a step doesn't run every sequence"
        result = runner.collect(runner.submit(plan))
        collected = time.perf_counter()
        scheduler.update(plan, result)
        ended = time.perf_counter()
        planning.append((planned - began) * 1e6)
        updating.append((ended - collected) * 1e6)
    both = [a + b for a, b in zip(planning, updating)]
    return {
        "sequences": count,
        "context": context,
        "steps": steps,
        "schedule_us": spread(planning),
        "update_us": spread(updating),
        "step_us": spread(both),
        "cores_used_by_others": others.load(),
    }


def decoding(count: int, context: int, steps: int) -> tuple[Scheduler, EchoRunner]:
    """A scheduler in default settings, its `count` sequences past their prompts, and a runner that computes nothing."""
    config = EngineConfig(max_num_seqs=count)
    longest = context + config.page_size + steps + 1
    spec = ModelSpec("none", (LayerSpec(8, 128),) * 32, 32000, longest, 4096, 32, 14336, 8 * 10**9)
    memory = build_memory(config, spec, Size(count * (longest + config.page_size) * 102 // 100, longest, 2))
    scheduler = Scheduler(memory, budget=count * longest, max_seqs=count, max_len=longest)
    runner = EchoRunner(blind=True)
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, temperature=0.0)
    for i in range(count):
        seq = Seq(scheduler.new_id(), [PROMPT_TOKEN] * (context + i % config.page_size), salt=str(i))
        scheduler.add(Request(str(i), seq, params, arrival=0.0, max_tokens=steps + 1))
    plan = scheduler.schedule()
    assert plan is not None, "there is nothing to plan"
    assert len(plan.rows) == count, "the prompts don't fit into one step"
    scheduler.update(plan, runner.collect(runner.submit(plan)))
    return scheduler, runner
