"""Measure the control plane alone, without a model: microseconds to plan a step, update the memory and process the
result. PagedAttention mentions this overhead without a number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.echo_runner import EchoRunner
from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.latency import spread
from quire.bench.machine import Others
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import StartupError
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.protocol.method import Advance, Branch, Choice, Context
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence as Seq
from quire.protocol.step_plan import SliceResult, StepPlan, StepResult, TopLogprobs

SEQUENCES = (1, 256, 1000)
CONTEXTS = (128, 32768)
REQUESTS, CONTEXT = 64, 512  # with beams
STEPS = 500
MOST = 2**20
MAX_TOKENS = 2**26
PROMPT_TOKEN = 100
WINDOWS = (None, 1024, 512, 256)  # of layer groups
CANDIDATES = SliceResult((PROMPT_TOKEN,), (TopLogprobs(PROMPT_TOKEN, -1.0, 1, (PROMPT_TOKEN,), (-1.0,)),))


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(
        parser, "measurement", groups=(1, "groups of layers, all but the first with windows"), steps=(STEPS, "steps"),
        beams=(0, "instead of sequences: requests of N beams, half of them re-parented at each step (by default then "
               "64 requests of 512 tokens)"),
    )  # fmt: skip
    group.add_argument("--sequences", type=int, nargs="+", metavar="N",
                       help="running sequences (default: 1 256 1000)")  # fmt: skip
    group.add_argument("--contexts", type=int, nargs="+", metavar="N",
                       help="tokens of each sequence (default: 128 32768)")  # fmt: skip
    group.add_argument("--unlike", action="store_true",
                       help="group i has i times as many layers as the first, so that page sizes differ")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each of args.sequences (with --beams: requests) and args.contexts (tokens)."""
    args.sequences = args.sequences or ([REQUESTS] if args.beams else list(SEQUENCES))
    args.contexts = args.contexts or ([CONTEXT] if args.beams else list(CONTEXTS))
    if args.beams % 2 or not 0 <= args.beams <= 64:
        raise StartupError(f"--beams is {args.beams}", "Give an even number up to 64, half of which are re-parented")
    if not 1 <= args.groups <= len(WINDOWS):
        raise StartupError(f"--groups is {args.groups}", f"Give a number from 1 to {len(WINDOWS)}")
    for name, values in (("sequences", args.sequences), ("contexts", args.contexts), ("steps", [args.steps])):
        if min(values) < 1 or max(values) > MOST:
            raise StartupError(f"--{name} is {' '.join(map(str, values))}", f"Give numbers from 1 to {MOST:,}")
    if max(args.sequences) * max(args.contexts) * max(args.beams, 1) > MAX_TOKENS:
        raise StartupError(
            f"{max(args.sequences)} sequences of {max(args.contexts)} tokens are too many to hold",
            f"At most {MAX_TOKENS:,} tokens in all",
        )
    if args.beams:
        return [
            beams_cost(count, args.beams, context, args.steps) for context in args.contexts for count in args.sequences
        ]
    return [
        step_cost(count, context, args.steps, args.groups, args.unlike)
        for context in args.contexts
        for count in args.sequences
    ]


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the microseconds as a table."""
    beams = tuple(name for name in ("beams", "groups") if any(name in result for result in results))
    head = ("sequences", *beams, "context", "schedule us", "update us", "step us (median)", "mean", "p99",
            "others' cores")  # fmt: skip
    rows = [
        (r["sequences"], *(r[name] for name in beams), r["context"], short(r["schedule_us"]["p50"]),
         short(r["update_us"]["p50"]), *(short(r["step_us"][which]) for which in ("p50", "mean", "p99")),
         f"{r['cores_used_by_others']:.2f}")
        for r in results
    ]  # fmt: skip
    return table(head, rows)


def step_cost(count: int, context: int, steps: int = STEPS, groups: int = 1, unlike: bool = False) -> dict[str, Any]:
    """Return the microseconds of schedule, of update, and of both, in decode steps of `count` sequences of about
    `context` tokens. Of several `groups` of layers all but the first have a window; with `unlike` group i has i times
    as many layers as the first, so that pages lie in large ones (Jenga §4).

    Lengths differ by up to a page, so that in every step some sequences need a new page, as in service.
    """
    scheduler, runner = decoding(count, context, steps, groups, unlike)
    costs = _timed(scheduler, lambda plan: runner.collect(runner.submit(plan)), count, steps)
    return {"sequences": count, "groups": groups, "unlike": unlike, "context": context, **costs}


def _timed(scheduler: Scheduler, answer: Callable[[StepPlan], StepResult], rows: int, steps: int) -> dict[str, Any]:
    freeze_loaded_objects()  # as in service
    others = Others()
    planning, updating = [], []
    for _ in range(steps):
        began = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None, "there is nothing to plan"
        assert len(plan.slices) == rows, "a step doesn't run every sequence"
        result = answer(plan)
        collected = time.perf_counter()
        scheduler.update(plan, result)
        ended = time.perf_counter()
        planning.append((planned - began) * 1e6)
        updating.append((ended - collected) * 1e6)
    both = [a + b for a, b in zip(planning, updating)]
    return {
        "steps": steps, "schedule_us": spread(planning), "update_us": spread(updating), "step_us": spread(both),
        "cores_used_by_others": others.load(),
    }  # fmt: skip


class Halves:
    """Stands in for beam search: the first half of `width` branches are forked, the other half are freed."""

    def __init__(self, width: int) -> None:
        self.width = width

    def top(self, context: Context) -> int:
        """Return one candidate: the step needs no more."""
        return 1

    def keep(self) -> int:
        """Return that no branch ends before its length."""
        return 1

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance:
        """Continue branches 0, 0, 1, 1, ..."""
        twice = len(branches) == self.width
        return Advance(tuple(Choice(i // 2 if twice else 0, i, -1.0) for i in range(self.width)))


def beams_cost(requests: int, width: int, context: int, steps: int = STEPS) -> dict[str, Any]:
    """Return the microseconds of decode steps of `requests` requests of `width` branches, half of which are re-parented
    in each step by forks, frees and copies on write."""
    scheduler = branching(requests, width, context, steps)
    costs = _timed(scheduler, _candidates, requests * width, steps)
    return {"sequences": requests, "beams": width, "context": context, **costs}


def branching(requests: int, width: int, context: int, steps: int) -> Scheduler:
    """Return a scheduler in default settings whose requests have all their branches."""
    config = EngineConfig(max_num_seqs=requests * width)
    longest = context + config.page_size + steps + 2
    memory = build_memory(config, _spec(longest), MemorySize(requests * width * longest, longest, 2))
    scheduler = Scheduler(memory, token_budget=requests * longest, max_seqs=requests * width, max_len=longest)
    params = SamplingParams(method=partial(Halves, width), max_tokens=steps + 2, ignore_eos=True, temperature=0.0)
    for i in range(requests):
        seq = Seq(scheduler.new_seq_id(), [PROMPT_TOKEN] * (context + i % config.page_size), cache_salt=str(i))
        seq.num_forks = width - 1
        request = Request(str(i), seq, params, arrival_time=0.0, max_tokens=steps + 2)
        request.method = Halves(width)
        scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None, "there is nothing to plan"
    assert len(plan.slices) == requests, "the prompts don't fit into one step"
    scheduler.update(plan, _candidates(plan))
    return scheduler


def _candidates(plan: StepPlan) -> StepResult:
    return StepResult((CANDIDATES,) * len(plan.slices), 0.0)


def decoding(
    count: int, context: int, steps: int, groups: int = 1, unlike: bool = False
) -> tuple[Scheduler, EchoRunner]:
    """Return a scheduler in default settings, whose `count` sequences have finished their prompts, and a runner that
    computes nothing."""
    config = EngineConfig(max_num_seqs=count)
    longest = context + config.page_size + steps + 1
    size = MemorySize(count * (longest + config.page_size) * 102 // 100, longest, 2)
    memory = build_memory(config, _spec(longest, groups, unlike), size)
    scheduler = Scheduler(memory, token_budget=count * longest, max_seqs=count, max_len=longest)
    runner = EchoRunner(is_constant=True)
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, temperature=0.0)
    for i in range(count):
        seq = Seq(scheduler.new_seq_id(), [PROMPT_TOKEN] * (context + i % config.page_size), cache_salt=str(i))
        scheduler.add(Request(str(i), seq, params, arrival_time=0.0, max_tokens=steps + 1))
    plan = scheduler.schedule()
    assert plan is not None, "there is nothing to plan"
    assert len(plan.slices) == count, "the prompts don't fit into one step"
    scheduler.update(plan, runner.collect(runner.submit(plan)))
    return scheduler, runner


def _spec(longest: int, groups: int = 1, unlike: bool = False) -> ModelSpec:
    kinds = [window for i, window in enumerate(WINDOWS[:groups]) for _ in range(i + 1 if unlike else 1)]
    layers = tuple(LayerSpec(8, 128, window=window) for window in kinds) * (32 // len(kinds))
    return ModelSpec("none", layers, 32000, longest, 4096, 32, 14336, 8 * 10**9)
