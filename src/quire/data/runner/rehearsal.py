"""The rehearsal at start: every kind of step once, on scratch memory alone. Kernels are compiled and loaded, graphs are
captured and the largest step's memory is claimed before the first request comes, not while somebody waits for it.

All rows are padding (slot 0), whose pages and samples belong to nobody. Compiling is most of the work where no kernels
are on disk yet, and happens outside of the interpreter's lock, so it goes on in several threads first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from quire.data.kernels.limits import SCORED_AT_ONCE
from quire.errors import StartupError
from quire.vocabulary.plan import Birth, Row, Sampling, StepPlan

if TYPE_CHECKING:
    from quire.data.runner.model_runner import ModelRunner

THREADS = 16
MOST_AT_ONCE = 256  # rows of a step that is run beside others: their logits are all in memory
KINDS = (  # of sampling, and how many log-probabilities are wanted
    (Sampling(temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5), 1),
    (Sampling(temperature=0.8), -1),
    (Sampling(temperature=0.0, prompt_logprobs=1), -1),  # last: slot 0 keeps no penalties
)
FEW = (1, 2, 9, 17, 33, 64, 65)  # tokens of a step: products of each have kernels of their own


def rehearse(runner: ModelRunner, tokens: int, max_len: int) -> None:
    """Steps of all kinds, the largest of `tokens` tokens in sequences of up to `max_len`."""
    with nullcontext() if runner.exchange is None else runner.exchange.rehearsing():
        _compile(runner)
    torch.cuda.empty_cache()  # what the threads held
    if runner.graphs is not None:
        with torch.inference_mode():
            for size in reversed(runner.graphs.sizes):
                for sees in runner.graphs.sights:
                    runner.graphs.capture(size, sees)
            firsts, seconds = runner.mixed.halves(tokens) if runner.mixed is not None else ([], [])
            for sizes in firsts:
                runner.mixed.capture_first(*sizes)
            for size in seconds:
                runner.mixed.capture_second(size)
        torch.cuda.empty_cache()  # what they ran first; the memory of the steps that follow stays with the process
    if runner.pictures is not None:
        with torch.inference_mode():
            runner.pictures.rehearse()
    mixed, runner.mixed = runner.mixed, None  # some steps with prompts have no graph: their kernels are wanted
    for plan in (*_plans(tokens, max_len, runner.store.geometry.slots - 1), *_ends(runner, min(tokens, max_len))):
        runner.collect(runner.submit(plan))
    runner.mixed = mixed
    runner.store.clear_scratch()  # finite, whatever the model made of padding
    torch.cuda.synchronize(runner.device)


def _compile(runner: ModelRunner) -> None:
    """Run tasks side by side. Loading one kernel in two threads at once can fail, as can the memory for all tasks at
    once, so what failed is run again alone. Each rank begins with others, so that none waits for what another one
    compiles as long as there is something else to compile."""
    from triton.runtime.errors import OutOfResources

    from quire.data.kernels.triton.loading import in_any_thread, once_for_all

    in_any_thread()
    tasks, exchange = list(_tasks(runner)), runner.exchange
    if exchange is not None:
        once_for_all()
        begin = len(tasks) * exchange.part.rank // exchange.part.ranks
        tasks = tasks[begin:] + tasks[:begin]
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        running = [pool.submit(_alone, runner.device, task) for task in tasks]
        failed = [task for task, done in zip(tasks, running) if done.exception() is not None]
    finally:
        pool.shutdown(cancel_futures=True)
    try:
        for task in failed:
            _alone(runner.device, task)
    except OutOfResources as error:
        raise StartupError(f"a kernel needs more than this GPU has: {error}", "Use --attention sdpa") from error


def _alone(device: torch.device, task: Callable[[], None]) -> None:
    """In a thread: what torch keeps for each of them is set here."""
    with torch.cuda.device(device), torch.inference_mode():
        task()


def _tasks(runner: ModelRunner) -> Iterator[Callable[[], None]]:
    """Steps that may run side by side. Together they need nearly all kernels; the rest is compiled as it is met. Those
    that need others than their neighbours come first."""
    slots = runner.store.geometry.slots - 1
    if runner.graphs is not None:
        for sees in runner.graphs.sights:
            yield partial(runner.graphs.rehearse, 1, sees)
    if runner.backend.rotates and not runner.deterministic:  # of Triton's kernels
        from quire.data.kernels.triton.attention import representatives

        store = runner.store
        kinds = {(c.kind, c.kv_heads, c.head_dim): c for c in store.caches.values()}
        for cache in kinds.values():
            for rows in representatives(slots, cache, runner.device):
                yield partial(runner.backend.rehearse, rows, cache, store.tables[cache.group])
            yield partial(runner.backend.rehearse_long, cache, store.tables[cache.group])
        for cache in {c.kind: c for c in store.cross.values()}.values():
            entries = store.tables[cache.group].view(-1, 1)  # see quire.data.runner.crossing
            yield partial(runner.backend.rehearse_whole, cache, entries)
            for rows in representatives(slots, cache, runner.device):
                yield partial(runner.backend.rehearse, rows, cache, entries)
    # Logits that rules change are float32; the others are sampled in graphs, if there are any.
    dtypes = {torch.float32, *([runner.dtype] if runner.graphs is None else [])}
    yield from runner.sampler.rehearsals(dtypes, slots)
    if runner.graphs is not None:
        for size in runner.graphs.sizes:
            if 1 < size <= MOST_AT_ONCE and size & (size - 1) == 0:
                for sees in runner.graphs.sights:
                    yield partial(runner.graphs.rehearse, size, sees)
        for count, singles in runner.mixed.halves(MOST_AT_ONCE)[0] if runner.mixed is not None else ():
            if count & (count - 1) == 0:
                yield partial(runner.mixed.rehearse, count, singles)


def _plans(tokens: int, max_len: int, slots: int) -> Iterator[StepPlan]:
    """Prompts: short ones in every way of sampling, and of every number of tokens that has kernels of its own, also
    where each of them has logits; the end of a prompt as long as may be; rows of one token; and as many tokens, in as
    many of `slots` rows, as a step may have."""
    for sampling, top in KINDS:
        birth = Birth(0, 0, -1, sampling, 0, 1, (0,) if sampling.needs_history else (), top)
        yield StepPlan((birth,), (), (_row(min(5, max_len, tokens)),))
    for count in dict.fromkeys(min(few, max_len, tokens) for few in FEW):
        yield StepPlan((), (), (_row(count),))
    for count in dict.fromkeys(min(few, max_len, tokens) for few in (*FEW, SCORED_AT_ONCE)):
        yield StepPlan((), (), (_row(count)._replace(score=(0,) * count),))
    last = min(5, max_len, tokens)
    yield StepPlan((), (), (_row(last)._replace(start=max_len - last, score=(0,) * last),))
    for count in dict.fromkeys(min(few, slots, tokens) for few in FEW):
        yield StepPlan((), (), (_row(1),) * count)
    rows = min(slots, tokens)
    each, more = divmod(tokens, rows)
    yield StepPlan((), (), tuple(_row(min(each + (i < more), max_len)) for i in range(rows)))
    # The same number of tokens, in rows as long as they may be.
    whole, rest = divmod(tokens, max_len)
    yield StepPlan((), (), ((_row(max_len),) * whole + (_row(rest),) * (rest > 0))[:slots])


def _ends(runner: ModelRunner, longest: int) -> Iterator[StepPlan]:
    """The longest prompt of one step, if layers keep a part of it; then slot 0 has a short one again."""
    if runner.prompts is not None and longest > runner.prompts.budget:
        yield StepPlan((Birth(0, 0, -1, Sampling(), 0, longest),), (), (_row(longest),))
        yield StepPlan((Birth(0, 0, -1, Sampling(), 0, 1),), (), ())


def _row(tokens: int) -> Row:
    return Row(0, (0,) * tokens, 0, 1)
