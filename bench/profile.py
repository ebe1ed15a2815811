"""Profile steps on a GPU: their duration, the kernels in them by kind, and the GPU's idle time. For decode steps and
for steps that compute prompts.

The step is timed without the profiler; kernel times come from profiled steps of the same batch. The busy time is the
time in which any kernel runs. While several run, it is the time of the one that ends first, as the others were launched
early and wait for it. With several ranks each is profiled; a kernel that waits for other ranks counts as running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.bench.arguments import add_numbers
from quire.bench.contexts import stop
from quire.bench.document import short, table
from quire.bench.replay import need_gpu
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.core.engine import Engine
from quire.distributed.rank_queries import KernelProfiler
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams

ROWS = (1, 32, 256)
CONTEXT = 1000
TIMED, PROFILED, WARM = 60, 20, 12


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    add_numbers(
        parser, "measurement", rows=(list(ROWS), "sequences in the batch"),
        prompts=(8, "prompts computed at once (0: none)"), context=(CONTEXT, "tokens of each prompt"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each batch."""
    need_gpu("quire bench profile")
    if min(args.rows) < 1 or args.context < 1:
        raise StartupError(f"--rows {args.rows} --context {args.context}", "Give positive numbers")
    results = []
    with built(config_from(args)) as made:
        for rows in args.rows:
            print(f"{rows} rows", file=sys.stderr)
            results.append({"model": made.name, "rows": rows, "context": args.context,
                            **measure(made.engine, rows, args.context)})  # fmt: skip
        if args.prompts:
            results.append({"model": made.name, "rows": args.prompts, "context": args.context,
                            **measure_prompts(made.engine, args.prompts, args.context)})  # fmt: skip
    return results


def measure(engine: Engine, rows: int, context: int) -> dict[str, Any]:
    """Measure decode steps of `rows` sequences: milliseconds a step, busy milliseconds, and kernels by kind."""
    params = SamplingParams(temperature=0, max_tokens=TIMED + PROFILED + WARM + 200, ignore_eos=True, detokenize=False)
    for i in range(rows):
        engine.add(str(i), [(7 * i + j) % 1000 + 10 for j in range(context)], params)
    while len(engine.scheduler.running) < rows or any(
        r.live_seqs[0].planned < context for r in engine.scheduler.running
    ):
        engine.step()
    for _ in range(WARM):
        engine.step()
    began = time.perf_counter()
    for _ in range(TIMED):
        engine.step()
    step = (time.perf_counter() - began) / TIMED
    found = _kernels(engine, lambda: [engine.step() for _ in range(PROFILED)], PROFILED, step)
    stop(engine)
    return found


def measure_prompts(engine: Engine, count: int, context: int) -> dict[str, Any]:
    """Measure the steps that together compute `count` new prompts of `context` tokens and sample one token for each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def compute(salt: str) -> None:
        for i in range(count):
            engine.add(str(i), [(7 * i + j) % 1000 + 10 for j in range(context)], params, salt=salt)
        while engine.has_unfinished_requests:
            engine.step()

    compute("warm")
    began = time.perf_counter()
    compute("timed")
    step = time.perf_counter() - began
    return {"prompt_tokens_per_s": count * context / step, **_kernels(engine, lambda: compute("profiled"), 1, step)}


def _kernels(engine: Engine, work: Callable[[], object], steps: int, step: float) -> dict[str, Any]:
    """Profile `steps` steps that `work` runs and that take `step` seconds each without the profiler. Return the kernels
    of the rank that is busy for the longest and, with several ranks, of each."""
    ask = getattr(engine.runner, "query", None)
    if ask is None:
        profiler = KernelProfiler()
        profiler.begin()
        work()
        told = [profiler.end()]
    else:
        ask("profile")
        work()
        told = ask("profiled")
    ranks = [_of_step(one, steps, step) for one in told]
    longest = max(ranks, key=lambda one: float(one["busy_ms"]))
    return {"step_ms": 1e3 * step, **longest, **({"ranks": ranks} if len(ranks) > 1 else {})}


def _of_step(told: dict[str, Any], steps: int, step: float) -> dict[str, Any]:
    """Return the totals of a rank's profiler over `steps` steps, divided by their number."""
    busy = told["busy_ms"] / steps
    return {
        "busy_ms": busy,
        "idle_share": max(0.0, 1 - busy / (1e3 * step)),
        "idle_share_while_profiled": 1 - told["busy_ms"] / told["span_ms"] if told["span_ms"] else 1.0,
        "kernels": {
            name: {"a_step": one["count"] / steps, "ms_a_step": one["ms"] / steps}
            for name, one in told["kernels"].items()
        },
    }


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format a line a batch, or with several ranks a line a rank, then the kernels of each batch."""
    head = ("step of", "context", "rank", "step ms", "busy ms", "idle", "idle while profiled", "prompt tokens/s")
    lines = [
        table(head, [
            (_name(r), r["context"], rank, short(r["step_ms"]), short(one["busy_ms"]), f"{one['idle_share']:.1%}",
             f"{one['idle_share_while_profiled']:.1%}", short(r.get("prompt_tokens_per_s")))
            for r in results for rank, one in enumerate(r.get("ranks", [r]))
        ])
    ]  # fmt: skip
    for result in results:
        kernels = list(result["kernels"].items())[:14]
        lines.append(f"\n{_name(result)}, by kernel:")
        lines.append(
            table(("kernel", "a step", "ms a step"),
                  [(name, short(k["a_step"]), short(k["ms_a_step"])) for name, k in kernels])
        )  # fmt: skip
    return "\n".join(lines)


def _name(result: dict[str, Any]) -> str:
    return f"{result['rows']} {'prompts' if 'prompt_tokens_per_s' in result else 'rows'}"
