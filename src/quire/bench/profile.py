"""Where a step's time goes on a GPU: its duration, the kernels in it by kind, and how long the GPU lies idle. Of decode
steps, and of the steps that compute prompts.

The step is timed without the profiler; the kernels' times come from profiled steps of the same batch. Kernels that are
launched early and wait for their predecessors overlap them, so what is summed up is the time in which any kernel runs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from quire.bench.document import short, table
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.control.engine import Engine
from quire.errors import StartupError
from quire.vocabulary.params import SamplingParams

ROWS = (1, 32, 256)
CONTEXT = 1000
TIMED, PROFILED, WARM = 60, 20, 12


def flags(parser: argparse.ArgumentParser) -> None:
    """The entry's own arguments."""
    group = parser.add_argument_group("measurement")
    group.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="N", help="sequences in the batch")
    group.add_argument("--prompts", type=int, default=8, metavar="N", help="prompts computed at once (0: none)")
    group.add_argument("--context", type=int, default=CONTEXT, metavar="N", help="tokens of each prompt")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each batch."""
    import torch

    if not torch.cuda.is_available():
        raise StartupError("quire bench profile measures a GPU, and torch finds none", "Run it beside a GPU")
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
    """Decode steps of `rows` sequences: milliseconds a step, busy milliseconds, and kernels by kind."""
    import torch

    params = SamplingParams(temperature=0, max_tokens=TIMED + PROFILED + WARM + 200, ignore_eos=True, detokenize=False)
    for i in range(rows):
        engine.add(str(i), [(7 * i + j) % 1000 + 10 for j in range(context)], params)
    while len(engine.scheduler.running) < rows or any(r.live[0].planned < context for r in engine.scheduler.running):
        engine.step()
    for _ in range(WARM):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED):
        engine.step()
    torch.cuda.synchronize()
    step = (time.perf_counter() - began) / TIMED
    found = _kernels(lambda: [engine.step() for _ in range(PROFILED)], PROFILED, step)
    for i in range(rows):
        engine.abort(str(i))
    while engine.unfinished:
        engine.step()
    return found


def measure_prompts(engine: Engine, count: int, context: int) -> dict[str, Any]:
    """The steps that compute `count` new prompts of `context` tokens each and draw one token after each, together."""
    import torch

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def compute(salt: str) -> None:
        for i in range(count):
            engine.add(str(i), [(7 * i + j) % 1000 + 10 for j in range(context)], params, salt=salt)
        while engine.unfinished:
            engine.step()

    compute("warm")
    torch.cuda.synchronize()
    began = time.perf_counter()
    compute("timed")
    torch.cuda.synchronize()
    step = time.perf_counter() - began
    return {"prompt_tokens_per_s": count * context / step, **_kernels(lambda: compute("profiled"), 1, step)}


def _kernels(work: Callable[[], object], steps: int, step: float) -> dict[str, Any]:
    """The kernels of `steps` steps that `work` runs and that take `step` seconds each when nobody looks."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy = union([(start, end) for start, end, _ in spans]) / 1e3
    span = (max(end for _, end, _ in spans) - min(start for start, _, _ in spans)) / 1e3
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for start, end, name in spans:
        kinds[kind(name)][0] += 1
        kinds[kind(name)][1] += (end - start) / 1e3
    return {
        "step_ms": 1e3 * step,
        "busy_ms": busy / steps,
        "idle_share": max(0.0, 1 - busy / steps / (1e3 * step)),
        "idle_share_while_profiled": 1 - busy / span,
        "kernels": {
            name: {"a_step": count / steps, "ms_a_step": ms / steps}
            for name, (count, ms) in sorted(kinds.items(), key=lambda item: -item[1][1])
        },
    }


def union(spans: list[tuple[float, float]]) -> float:
    """The time that intervals (start, end) cover together."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def kind(name: str) -> str:
    """A kernel's name without what its template was made with."""
    return re.split(r"[<(]", re.sub(r"^void ", "", name))[0][:60]


def show(results: Sequence[dict[str, Any]]) -> str:
    """A line a batch, then the kernels of each."""
    head = ("step of", "context", "step ms", "busy ms", "idle", "prompt tokens/s")
    lines = [
        table(head, [(_name(r), r["context"], short(r["step_ms"]), short(r["busy_ms"]), f"{r['idle_share']:.1%}",
                      short(r.get("prompt_tokens_per_s"))) for r in results])
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
