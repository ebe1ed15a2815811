"""Measure host and device time of GPU steps that have a prompt, launched kernel by kernel and replayed as CUDA graphs.

Some sequences decode, and every few steps a prompt arrives. The device is idle before a step, and then waits until the
whole step is enqueued. So the host's time is that of enqueuing alone, and the device's time has no gaps caused by the
host. Steps of decodes alone are replayed either way.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

from quire.bench.arguments import add_numbers
from quire.bench.contexts import stop
from quire.bench.document import short, table
from quire.bench.replay import need_gpu
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan

WAIT = 40_000_000  # cycles: longer than the host needs to launch the slowest step
BETWEEN = 3  # steps of decodes alone before each prompt


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    add_numbers(
        parser, "measurement", rows=(190, "sequences that decode"), context=(400, "tokens of each sequence"),
        prompt=([200], "tokens of the prompt"), steps=(20, "steps of each kind"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each length of prompts, and one for decodes alone."""
    need_gpu("quire bench mixed")
    if min(args.rows, args.context, args.steps, *args.prompt) < 1:
        raise StartupError("--rows, --context, --prompt and --steps", "Give positive numbers")
    with built(config_from(args)) as made:
        runner: Any = made.engine.runner
        if runner.mixed_graphs is None:
            raise StartupError("there are no graphs to compare with", "Leave out --no-cuda-graphs")
        spent = _spent(made.engine, args)
        shape = {"model": made.name, "rows": args.rows, "context": args.context}
        return [{**shape, "prompt": prompt, **numbers} for prompt, numbers in spent.items()]


def _spent(engine: Engine, args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Return medians in ms by the number of prompt tokens; 0 for decodes alone."""
    steps = (args.steps + 1) * 2 * len(args.prompt) * (BETWEEN + 1)
    params = SamplingParams(temperature=0, max_tokens=steps + 100, ignore_eos=True, detokenize=False)
    for i in range(args.rows):
        engine.add(f"row-{i}", [(7 * i + j) % 1000 + 10 for j in range(args.context)], params)
    running = engine.scheduler.running
    while len(running) < args.rows or any(r.live_seqs[0].planned < args.context for r in running):
        engine.step()
    one, timed = replace(params, max_tokens=1), Timed(engine)
    for i in range(args.steps + 1):
        for prompt in args.prompt:
            for replayed in (False, True):
                timed.replayed = replayed
                name = f"{prompt}-{i}-{replayed}"
                engine.add(name, [(11 * i + j) % 1000 + 10 for j in range(prompt)], one, salt=name)
                for _ in range(BETWEEN + 1):
                    engine.step()
        if i == 0:  # not measured
            timed.host.clear()
            timed.device.clear()
    timed.leave()
    stop(engine)
    return timed.medians()


class Timed:
    """Replaces a runner's `submit` to measure steps by the tokens of their prompt and by whether they may be
    replayed."""

    def __init__(self, engine: Engine) -> None:
        self.runner = cast(Any, engine.runner)  # a ModelRunner; its `submit` is replaced
        self.submitted, self.mixed = self.runner.submit, self.runner.mixed_graphs
        self.runner.submit = self.submit
        self.replayed = True
        self.host: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self.device: dict[tuple[int, bool], list[float]] = defaultdict(list)

    def submit(self, plan: StepPlan) -> Any:
        import torch

        self.runner.mixed_graphs = self.mixed if self.replayed else None
        kind = max((len(row.tokens) for row in plan.slices), default=0), self.replayed
        torch.cuda.synchronize()
        torch.cuda._sleep(WAIT)
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        began = time.perf_counter()
        ticket = self.submitted(plan)
        self.host[kind].append(1e3 * (time.perf_counter() - began))
        behind.record()
        behind.synchronize()
        self.device[kind].append(before.elapsed_time(behind))
        return ticket

    def leave(self) -> None:
        self.runner.submit, self.runner.mixed_graphs = self.submitted, self.mixed

    def medians(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = defaultdict(dict)
        for (most, replayed), host in sorted(self.host.items()):
            way = "replayed" if replayed else "eager"
            found[0 if most == 1 else most] |= {
                f"{way}_host_ms": median(host), f"{way}_device_ms": median(self.device[most, replayed]),
                f"{way}_steps": len(host),
            }  # fmt: skip
        return dict(found)


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the results, a line a kind of step."""
    head = ("rows", "context", "prompt", "host ms, eager", "replayed", "device ms, eager", "replayed")
    names = ("rows", "context", "prompt", "eager_host_ms", "replayed_host_ms", "eager_device_ms", "replayed_device_ms")
    return table(head, [[r[name] if i < 3 else short(r.get(name)) for i, name in enumerate(names)] for r in results])
