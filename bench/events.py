"""Measure rare events in the control plane: one call each, which delays everything that waits for the next step.

Each is repeated on a new memory; the least time counts, since disturbances only make it longer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from bench.echo_runner import EchoRunner
from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.machine import Others
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import StartupError
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.memory.build import build_memory
from quire.memory.interface import KVMemory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence as Seq

BRANCHES, LONG = 128, 32768
LOOKUP = 131072
SWAPPED, PROMPT = 1000, 64
PAIRS = 64
MOST = 1000
ONE = (LayerSpec(8, 128),) * 32
TWO = (LayerSpec(8, 128), *(LayerSpec(8, 128, window=4096),) * 3)


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    add_numbers(parser, "measurement", repeat=(5, "runs of each event"))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each event."""
    if not 1 <= args.repeat <= MOST:
        raise StartupError(f"--repeat is {args.repeat}", f"Give a number from 1 to {MOST}")
    freeze_loaded_objects()  # as in service
    results = []
    for name, (about, event) in EVENTS.items():
        others = Others()
        counted = [event() for _ in range(args.repeat)]
        seconds = sorted(took for took, _ in counted)
        results.append({
            "event": name, "about": about, "ms": seconds[0] * 1e3, "median_ms": seconds[len(seconds) // 2] * 1e3,
            "count": counted[0][1], "cores_used_by_others": others.load(),
        })  # fmt: skip
    return results


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the milliseconds as a table."""
    rows = [(r["about"], short(r["ms"]), short(r["median_ms"]), r["count"]) for r in results]
    return table(("event", "ms (least)", "median", "count"), rows)


def _memory(layers: tuple[LayerSpec, ...], tokens: int, longest: int, seqs: int, **settings: Any) -> KVMemory:
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=2**20, **settings)
    return build_memory(
        config, ModelSpec("none", layers, 32000, longest, 4096, 32, 14336, 1), MemorySize(tokens, longest, 2)
    )


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def come_back() -> tuple[float, int]:
    """Admit BRANCHES branches of one prompt of LONG tokens again after a preemption. Count the tokens that they
    reuse."""
    memory = _memory(ONE, 2 * LONG + BRANCHES * 64, LONG + 64, BRANCHES)
    first = Seq(1, list(range(LONG)))
    memory.admit([first], LONG)
    first.computed = first.planned = LONG
    memory.commit(first)
    branches = [first, *(first.fork(i, i, 0) for i in range(2, BRANCHES + 1))]
    for branch in branches[1:]:
        memory.fork(first, branch)
    for i, branch in enumerate(branches):
        branch.tokens += [LONG + i] * 20
        memory.grow(branch, LONG + 20)
        branch.computed = branch.planned = LONG + 20
        memory.commit(branch)
    for branch in branches:
        memory.free(branch)
        branch.computed = branch.planned = 0
    memory.take_page_ops()
    admitted: Any = None

    def admit() -> None:
        nonlocal admitted
        admitted = memory.admit(branches, 2**20)

    seconds = _timed(admit)
    assert isinstance(admitted, list), "the branches find no room"
    return seconds, sum(one.reused_tokens for one in admitted)


def look_up() -> tuple[float, int]:
    """Look up a prompt of LOOKUP tokens in the cache. Full layers have all of its pages; layers with windows have none,
    since their pages are evicted first. Count the cached tokens."""
    memory = _memory(TWO, 4 * LOOKUP, LOOKUP + 64, 4)
    old = Seq(1, list(range(LOOKUP)))
    memory.admit([old], LOOKUP)
    while old.planned < LOOKUP:
        end = min(old.planned + 8192, LOOKUP)
        assert memory.grow(old, end), "the prompt finds no room"
        old.computed = old.planned = end
        memory.commit(old)
    again = Seq(2, [*old.tokens[: LOOKUP - 1], 0])
    again.page_keys = list(old.page_keys)
    memory.free(old)
    prefixes, page_pool = cast(PagedMemory, memory).prefix_cache, cast(PagedMemory, memory).page_pool
    for page in list(page_pool.index[1].values()):
        page_pool.evict(1, page)
    found: list[int] = []
    return _timed(lambda: found.append(prefixes.find_cached(again).tokens)), found[0]


def abort_swapped() -> tuple[float, int]:
    """Abort SWAPPED swapped requests in one call, and count them."""
    memory = _memory(ONE, SWAPPED * 2 * PROMPT, 4 * PROMPT, SWAPPED, swap_gib=2.0**19)
    scheduler = Scheduler(memory, token_budget=2**20, max_seqs=SWAPPED, max_len=4 * PROMPT, preemption="swap")
    runner = EchoRunner(is_constant=True)
    requests = list(_requests(scheduler, (list(range(i, i + PROMPT)) for i in range(0, SWAPPED * PROMPT, PROMPT))))
    plan = scheduler.schedule()
    assert plan is not None, "there is nothing to plan"
    scheduler.update(plan, runner.collect(runner.submit(plan)))
    for request in reversed(requests):
        scheduler._preempt(request)
    assert len(scheduler.swapped) == SWAPPED, "requests weren't swapped"

    def abort() -> None:
        for request in requests:
            scheduler.finish(request, request.live_seqs[0], "abort")

    seconds = _timed(abort)
    assert not scheduler.swapped, "a request is left"
    return seconds, SWAPPED


def repeat_prompts() -> tuple[float, int]:
    """Compute PAIRS prompts, each sent twice in a row, and count the steps."""
    memory = _memory(ONE, 4 * PAIRS * 2 * PROMPT, 4 * PROMPT, 2 * PAIRS)
    scheduler = Scheduler(memory, token_budget=2**20, max_seqs=2 * PAIRS, max_len=4 * PROMPT)
    runner = EchoRunner(is_constant=True)
    prompts = (list(range(i // 2 * 100, i // 2 * 100 + 100)) for i in range(2 * PAIRS))
    requests = list(_requests(scheduler, prompts))
    steps = 0

    def serve() -> None:
        nonlocal steps
        while any(request.live_seqs and request.live_seqs[0].computed < 100 for request in requests):
            plan = scheduler.schedule()
            assert plan is not None, "there is nothing to plan"
            scheduler.update(plan, runner.collect(runner.submit(plan)))
            steps += 1

    return _timed(serve), steps


def _requests(scheduler: Scheduler, prompts: Iterator[list[int]]) -> Iterator[Request]:
    params = SamplingParams(max_tokens=PROMPT, ignore_eos=True, temperature=0.0)
    for i, prompt in enumerate(prompts):
        request = Request(str(i), Seq(scheduler.new_seq_id(), prompt), params, arrival_time=0.0, max_tokens=PROMPT)
        scheduler.add(request)
        yield request


EVENTS: dict[str, tuple[str, Callable[[], tuple[float, int]]]] = {
    "come-back": (f"{BRANCHES} branches of {LONG:,} tokens come back", come_back),
    "look-up": (f"a prefix of {LOOKUP:,} tokens is looked up, full and window", look_up),
    "abort-swapped": (f"{SWAPPED:,} swapped requests are aborted", abort_swapped),
    "repeat-prompts": (f"{PAIRS} prompts, each twice in a row: steps", repeat_prompts),
}
