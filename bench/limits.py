"""Compare the time of steps with a CPU's limits: for each workload the bytes and operations of its steps, the rates at
which the cores read and multiply in the same run, and the time of each operation of a step.

Steps are timed twice: without clocks in them, and with a clock around each operation (bench.spent). Disturbances
only make a step slower, so the fastest of all runs counts, for each step. Steps with prompts and steps of decodes alone
are reported separately. With one thread the clock is the process's CPU time.

The first results are the rates of each number of threads, in bytes and operations a second: `read` of a `buffer` beyond
all caches, `read_weights` of as many bytes as the weights, products in `bf16`, `fp32` and `int8`. Then one for each
workload and kind of step, with each operation's `ms`, `calls`, `bytes` (of weights, keys and values), `operations` and
`limit_ms`: the longer of reading the bytes and computing the operations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.spent import ATTENTION, PRODUCT, Spent, Work, watched
from quire.bench.arguments import add_numbers
from quire.bench.calibrate import shape_of
from quire.bench.document import short, table
from quire.bench.drive import Decoding
from quire.bench.machine import Others
from quire.bench.shapes import clock_of
from quire.bench.workloads import EXPECTED, Job, parse
from quire.cli.flags import config_from
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.protocol.step_plan import StepPlan
from quire.sim.cost_model import ModelShape, step_work
from quire.startup.build import build
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import ITEMSIZE

WORKLOADS = ("fixed:128:128@32", "fixed:128:128@1", "fixed:2048:1@1", "shared:512:32:32@32")
PROMPTS, DECODE = "with prompts", "decode"


class Step(NamedTuple):
    """One step: its kind, its time and that of its operations in seconds, its rows and tokens, and the bytes and
    operations of its attention."""

    kind: str
    seconds: float
    spent: dict[str, Work]
    rows: int
    tokens: int
    kv_bytes: float
    attention: float


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "measurement", repeat=(3, "runs of each kind"))
    group.add_argument("--workload", action="append", metavar="NAME",
                       help=f"{EXPECTED}; may be given repeatedly (default: W1 to W4 of performance.md)")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cores' limits by number of threads, then a result for each workload and kind of step."""
    import torch

    from bench.core_limits import core_limits, thread_counts

    config = replace(config_from(args), cuda_graphs=False)  # a recorded step hides its operations
    if args.repeat < 1:
        raise StartupError(f"--repeat is {args.repeat}", "It must be at least 1")
    workloads = [parse(name) for name in args.workload or WORKLOADS]
    built = build(config)
    freeze_loaded_objects()
    engine = built.engine
    try:
        if built.memory_plan.device != "cpu":
            raise StartupError("quire bench limits measures a CPU", "Give --device cpu, or run quire bench profile")
        shape = shape_of(read_checkpoint(config), itemsize := ITEMSIZE[built.memory_plan.dtype])
        engine.lift_queue_limit()
        counts = thread_counts(threads := torch.get_num_threads())
        print("what the cores read and multiply", file=sys.stderr)
        cores = core_limits(counts, shape.weight_bytes)
        results: list[dict[str, Any]] = []
        facts = {"model": built.name, "dtype": built.memory_plan.dtype, "threads": threads}
        for workload in workloads:
            print(workload.name, file=sys.stderr)
            jobs = workload.jobs(built.spec.vocab_size, config.seed)
            found = measured(engine, jobs, shape, args.repeat)
            results += [{**facts, "workload": workload.name, **result} for result in found]
        print("what the cores read and multiply, again", file=sys.stderr)
        cores = [one.better(other) for one, other in zip(cores, core_limits(counts, shape.weight_bytes))]
        most = next((found for found in cores if found.threads == threads), cores[-1])
        for result in results:
            limit(result, most.read, most.multiply(itemsize))
        return [{"cores": found._asdict()} for found in cores] + results
    finally:
        engine.close()


def measured(engine: Engine, jobs: Sequence[Job], shape: ModelShape, repeat: int) -> list[dict[str, Any]]:
    """Return a result for each kind of step that the jobs need."""
    others = Others()
    drive_once(engine, jobs)
    plain = fastest([steps(engine, jobs, shape) for _ in range(repeat)])
    with watched(engine) as spent:
        timed = fastest([steps(engine, jobs, shape, spent) for _ in range(repeat)])
    return [
        {"steps": kind, **told([s for s in plain if s.kind == kind], [s for s in timed if s.kind == kind]),
         "cores_used_by_others": others.load()}
        for kind in dict.fromkeys(step.kind for step in timed)
    ]  # fmt: skip


def drive_once(engine: Engine, jobs: Sequence[Job], step: Callable[[], None] | None = None) -> None:
    """Run all jobs, which arrive at once, to completion with an empty prefix cache, calling `step` (default: the
    engine's) for each step."""
    if (prefixes := engine.scheduler.memory.prefix_cache) is not None:
        prefixes.reset()
    for i, job in enumerate(jobs):
        engine.add(str(i), job.prompt, Decoding().params(job))
    while engine.has_unfinished_requests:
        (step or engine.step)()


def steps(engine: Engine, jobs: Sequence[Job], shape: ModelShape, spent: Spent | None = None) -> list[Step]:
    """Return the steps of one run. Without `spent` the times of operations are unknown."""
    found: list[Step] = []
    plans: list[StepPlan] = []
    clock, runner = clock_of(engine.runner), engine.runner
    submit = runner.submit

    def submitted(plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    def step() -> None:
        began = clock()
        engine.step()
        seconds = clock() - began
        parts = spent.take() if spent is not None else {}
        if not plans or not (plan := plans.pop()).slices:
            return
        rows, work = plan.slices, step_work(plan._replace(page_ops=(), overlapped_page_ops=()), shape, ())
        kind = PROMPTS if any(len(row.tokens) > 1 for row in rows) else DECODE
        # what a row of several tokens reads of the cache, and the attention operations of one token
        kv = sum(
            part.token_bytes * part.visible_tokens(row.start + len(row.tokens))
            for row in rows
            for part in shape.attention
        )
        pairs = sum(part.pair_operations * part.visible_tokens(row.start + 1) for row in rows if len(row.tokens) == 1
                    for part in shape.attention)  # fmt: skip
        found.append(Step(kind, seconds, parts, len(rows), work.tokens, kv, work.attention + pairs))

    with patch.object(runner, "submit", submitted):
        drive_once(engine, jobs, step)
    return found


def fastest(runs: Sequence[Sequence[Step]]) -> list[Step]:
    """Return for each step the fastest of all runs, which plan the same steps."""
    assert len({tuple(step[3:] for step in run) for run in runs}) == 1, "runs of the same jobs have the same steps"
    return [min(same, key=lambda step: step.seconds) for same in zip(*runs)]


def told(plain: Sequence[Step], timed: Sequence[Step]) -> dict[str, Any]:
    """Return the means of steps of one kind: the times without and with clocks, and the operations."""

    def mean(numbers: Iterable[float]) -> float:
        return sum(numbers) / len(timed)

    names = sorted({name for step in timed for name in step.spent})
    operations = {name: _mean([step.spent.get(name, Work()) for step in timed]) for name in names}
    if ATTENTION in operations:
        kv, computed = mean(step.kv_bytes for step in timed), mean(step.attention for step in timed)
        operations[ATTENTION] |= {"bytes": kv, "operations": computed}
    return {
        "count": len(timed), "rows": mean(step.rows for step in timed), "tokens": mean(step.tokens for step in timed),
        "step_ms": 1e3 * mean(step.seconds for step in plain),
        "step_ms_with_clocks": 1e3 * mean(step.seconds for step in timed), "operations": operations,
    }  # fmt: skip


def _mean(works: Sequence[Work]) -> dict[str, float]:
    seconds, calls, read, operations = (sum(numbers) / len(works) for numbers in zip(*works))
    return {"ms": 1e3 * seconds, "calls": calls, "bytes": read, "operations": operations}


def limit(found: dict[str, Any], read: float, multiply: float) -> None:
    """Add the least time of each operation, the longer of reading and multiplying alone, and their sum for the step."""
    for operation in found["operations"].values():
        operation["limit_ms"] = 1e3 * max(operation["bytes"] / read, operation["operations"] / multiply)
    found["limit_ms"] = sum(operation["limit_ms"] for operation in found["operations"].values())
    for name in ("bytes", "operations"):
        found[f"step_{name}"] = sum(operation[name] for operation in found["operations"].values())


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the cores' limits, a line for each workload and kind of step, and the operations of each."""
    cores = [result["cores"] for result in results if "cores" in result]
    kinds = [result for result in results if "operations" in result]
    again = "GB/s of the weights alone, again and again"
    head: tuple[str, ...] = "threads", "GB/s read", again, "bf16 GFLOP/s", "fp32 GFLOP/s", "int8 GOP/s"
    rows: list[tuple[Any, ...]] = [
        (c["threads"], *(short(None if c[name] is None else c[name] / 1e9)
                         for name in ("read", "read_weights", "bf16", "fp32", "int8")))
        for c in cores
    ]  # fmt: skip
    lines = [table(head, rows), ""]
    head = ("workload", "steps", "rows", "tokens", "MB", "GFLOP", "step ms", "with clocks", "limit ms", "of the limit")
    rows = [
        (r["workload"], r["steps"], short(r["rows"]), short(r["tokens"]), short(r["step_bytes"] / 1e6),
         short(r["step_operations"] / 1e9), short(r["step_ms"]), short(r["step_ms_with_clocks"]), short(r["limit_ms"]),
         f"{r['limit_ms'] / r['step_ms']:.0%}")
        for r in kinds
    ]  # fmt: skip
    lines.append(table(head, rows))
    for result in kinds:
        lines.append(f"\n{result['workload']}, a step {result['steps']}:")
        lines.append(_operations(result))
    return "\n".join(lines)


def _operations(result: dict[str, Any]) -> str:
    whole = sum(part["ms"] for part in result["operations"].values())
    products = [part for name, part in result["operations"].items() if name.startswith(PRODUCT)]
    parts = sorted(result["operations"].items(), key=lambda item: -item[1]["ms"])
    rows = [
        (name, short(part["calls"]), short(part["ms"]), f"{part['ms'] / whole:.1%}", short(part["limit_ms"]))
        for name, part in parts
    ]
    total = {name: sum(part[name] for part in products) for name in ("calls", "ms", "limit_ms")}
    rows.append(("all products", short(total["calls"]), short(total["ms"]), f"{total['ms'] / whole:.1%}",
                 short(total["limit_ms"])))  # fmt: skip
    return table(("operation", "calls", "ms", "share", "limit ms"), rows)
