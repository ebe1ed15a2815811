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

from quire.errors import StartupError
from quire.kernels.limits import MAX_SCORED_POSITIONS
from quire.protocol.step_plan import DeviceSamplingParams, SeqSlice, SlotInit, StepPlan

if TYPE_CHECKING:
    from quire.worker.model_runner import ModelRunner

COMPILE_THREADS = 16
MAX_PARALLEL_ROWS = 256  # rows of a step that is run beside others: their logits are all in memory
SAMPLING_KINDS = (  # of sampling, and how many log-probabilities are wanted
    (DeviceSamplingParams(temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5), 1),
    (DeviceSamplingParams(temperature=0.8), -1),
    (DeviceSamplingParams(temperature=0.0, prompt_logprobs=1), -1),  # last: slot 0 keeps no penalties
)
TOKEN_COUNTS = (1, 2, 9, 17, 33, 64, 65)  # tokens of a step: products of each have kernels of their own


def warm_up(runner: ModelRunner, max_tokens: int, max_len: int) -> None:
    """Steps of all kinds, the largest of `max_tokens` tokens in sequences of up to `max_len`."""
    with nullcontext() if runner.exchange is None else runner.exchange.warming_up():
        _compile_kernels(runner)
    torch.cuda.empty_cache()  # what the threads held
    if runner.decode_graphs is not None:
        with torch.inference_mode():
            for size in reversed(runner.decode_graphs.capture_sizes):
                for sees in runner.decode_graphs.image_variants:
                    runner.decode_graphs.capture(size, sees)
            firsts, seconds = (
                runner.mixed_graphs.half_sizes(max_tokens) if runner.mixed_graphs is not None else ([], [])
            )
            for sizes in firsts:
                runner.mixed_graphs.capture_first_half(*sizes)
            for size in seconds:
                runner.mixed_graphs.capture_second_half(size)
        torch.cuda.empty_cache()  # what they ran first; the memory of the steps that follow stays with the process
    if runner.image_inputs is not None:
        with torch.inference_mode():
            runner.image_inputs.warmup()
    mixed, runner.mixed_graphs = (
        runner.mixed_graphs,
        None,
    )  # some steps with prompts have no graph: their kernels are wanted
    for plan in (
        *_warmup_plans(max_tokens, max_len, runner.store.kv_config.slots - 1),
        *_long_prompt_plans(runner, min(max_tokens, max_len)),
    ):
        runner.collect(runner.submit(plan))
    runner.mixed_graphs = mixed
    runner.store.clear_scratch()  # finite, whatever the model made of padding
    torch.cuda.synchronize(runner.device)


def _compile_kernels(runner: ModelRunner) -> None:
    """Run tasks side by side. Loading one kernel in two threads at once can fail, as can the memory for all tasks at
    once, so what failed is run again alone. Each rank begins with others, so that none waits for what another one
    compiles as long as there is something else to compile."""
    from triton.runtime.errors import OutOfResources

    from quire.kernels.triton.compile_locks import lock_compilation, serialize_module_loading

    serialize_module_loading()
    tasks, exchange = list(_compile_tasks(runner)), runner.exchange
    if exchange is not None:
        lock_compilation()
        begin = len(tasks) * exchange.shard.tp_rank // exchange.shard.tp_size
        tasks = tasks[begin:] + tasks[:begin]
    pool = ThreadPoolExecutor(min(COMPILE_THREADS, os.cpu_count() or 1))
    try:
        running = [pool.submit(_run_task, runner.device, task) for task in tasks]
        failed = [task for task, done in zip(tasks, running) if done.exception() is not None]
    finally:
        pool.shutdown(cancel_futures=True)
    try:
        for task in failed:
            _run_task(runner.device, task)
    except OutOfResources as error:
        raise StartupError(f"a kernel needs more than this GPU has: {error}", "Use --attention sdpa") from error


def _run_task(device: torch.device, task: Callable[[], None]) -> None:
    """In a thread: what torch keeps for each of them is set here."""
    with torch.cuda.device(device), torch.inference_mode():
        task()


def _compile_tasks(runner: ModelRunner) -> Iterator[Callable[[], None]]:
    """Steps that may run side by side. Together they need nearly all kernels; the rest is compiled as it is met. Those
    that need others than their neighbours come first."""
    slots = runner.store.kv_config.slots - 1
    if runner.decode_graphs is not None:
        for sees in runner.decode_graphs.image_variants:
            yield partial(runner.decode_graphs.warmup, 1, sees)
    if runner.backend.fuses_rope and not runner.deterministic:  # of Triton's kernels
        from quire.kernels.triton.decode import representative_batches

        store = runner.store
        kinds = {(c.plan_key, c.kv_heads, c.head_dim): c for c in store.caches.values()}
        for cache in kinds.values():
            for rows in representative_batches(slots, cache, runner.device):
                yield partial(runner.backend.warmup, rows, cache, store.tables[cache.group])
            yield partial(runner.backend.warmup_long, cache, store.tables[cache.group])
        for cache in {c.plan_key: c for c in store.cross_caches.values()}.values():
            entries = store.tables[cache.group].view(-1, 1)  # see quire.worker.cross_attention
            yield partial(runner.backend.warmup_bidirectional, cache, entries)
            for rows in representative_batches(slots, cache, runner.device):
                yield partial(runner.backend.warmup, rows, cache, entries)
    # Logits that rules change are float32; the others are sampled in graphs, if there are any.
    dtypes = {torch.float32, *([runner.dtype] if runner.decode_graphs is None else [])}
    yield from runner.sampler.warmup_tasks(dtypes, slots)
    if runner.decode_graphs is not None:
        for size in runner.decode_graphs.capture_sizes:
            if 1 < size <= MAX_PARALLEL_ROWS and size & (size - 1) == 0:
                for sees in runner.decode_graphs.image_variants:
                    yield partial(runner.decode_graphs.warmup, size, sees)
        for count, singles in (
            runner.mixed_graphs.half_sizes(MAX_PARALLEL_ROWS)[0] if runner.mixed_graphs is not None else ()
        ):
            if count & (count - 1) == 0:
                yield partial(runner.mixed_graphs.warmup, count, singles)


def _warmup_plans(tokens: int, max_len: int, slots: int) -> Iterator[StepPlan]:
    """Prompts: short ones in every way of sampling, and of every number of tokens that has kernels of its own, also
    where each of them has logits; the end of a prompt as long as may be; rows of one token; and as many tokens, in as
    many of `slots` rows, as a step may have."""
    for sampling, top in SAMPLING_KINDS:
        birth = SlotInit(0, 0, -1, sampling, 0, 1, (0,) if sampling.needs_history else (), top)
        yield StepPlan((birth,), (), (_padding_slice(min(5, max_len, tokens)),))
    for count in dict.fromkeys(min(few, max_len, tokens) for few in TOKEN_COUNTS):
        yield StepPlan((), (), (_padding_slice(count),))
    for count in dict.fromkeys(min(few, max_len, tokens) for few in (*TOKEN_COUNTS, MAX_SCORED_POSITIONS)):
        yield StepPlan((), (), (_padding_slice(count)._replace(score_tokens=(0,) * count),))
    last = min(5, max_len, tokens)
    yield StepPlan((), (), (_padding_slice(last)._replace(start=max_len - last, score_tokens=(0,) * last),))
    for count in dict.fromkeys(min(few, slots, tokens) for few in TOKEN_COUNTS):
        yield StepPlan((), (), (_padding_slice(1),) * count)
    rows = min(slots, tokens)
    each, more = divmod(tokens, rows)
    yield StepPlan((), (), tuple(_padding_slice(min(each + (i < more), max_len)) for i in range(rows)))
    # The same number of tokens, in rows as long as they may be.
    whole, rest = divmod(tokens, max_len)
    yield StepPlan((), (), ((_padding_slice(max_len),) * whole + (_padding_slice(rest),) * (rest > 0))[:slots])


def _long_prompt_plans(runner: ModelRunner, longest: int) -> Iterator[StepPlan]:
    """The longest prompt of one step, if layers keep a part of it; then slot 0 has a short one again."""
    if runner.prompt_lengths is not None and longest > runner.prompt_lengths.budget:
        yield StepPlan((SlotInit(0, 0, -1, DeviceSamplingParams(), 0, longest),), (), (_padding_slice(longest),))
        yield StepPlan((SlotInit(0, 0, -1, DeviceSamplingParams(), 0, 1),), (), ())


def _padding_slice(tokens: int) -> SeqSlice:
    return SeqSlice(0, (0,) * tokens, 0, 1)
