"""The warm-up runs every kind of step once, on scratch memory: kernels are compiled and loaded, graphs are captured and
the largest step's memory is allocated before the first request.

All rows are padding (slot 0), whose pages and samples are not used. Steps that are not captured run one layer of each
kind (see quire.models.decoder.one_layer_of_each_kind).

If no kernels are cached on disk, compilation is most of the work. So several threads run steps first. They wait for the
processes that compile (see quire.kernels.triton.compile_process), or compile themselves if there are no such processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quire.errors import StartupError
from quire.kernels.limits import MAX_SCORED_POSITIONS
from quire.kernels.triton.compile_process import KernelCompiler, running_compiler
from quire.models.decoder import one_layer_of_each_kind
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import SeqSlice, SlotInit, StepPlan
from quire.worker.image_inputs import ImageInputs
from quire.worker.prompt_lengths import PromptLengths
from quire.worker.sampler import Sampler
from quire.worker.store import Store

if TYPE_CHECKING:
    from quire.worker.cuda_graphs import DecodeGraphs
    from quire.worker.mixed_graphs import MixedGraphs

log = logging.getLogger("quire.startup")
COMPILE_THREADS = 16
MAX_PARALLEL_ROWS = 256  # rows of steps that run side by side: the logits of all of them are in memory
SAMPLING_KINDS = (  # parameters, and the number of log-probabilities
    (DeviceSamplingParams(temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5), 1),
    (DeviceSamplingParams(temperature=0.8), -1),
    (DeviceSamplingParams(temperature=0.0, prompt_logprobs=1), -1),  # last: leaves slot 0 without penalties
)
TOKEN_COUNTS = (1, 2, 9, 17, 33, 64, 65)  # tokens of a step: matrix products have different kernels for each
PROMPT_COUNTS = tuple(1 << i for i in range(8, 16))
"""More such numbers with `--deterministic`: tiles are chosen by the next power of two. For 65 tokens that is 128."""


class WarmupRunner(Protocol):
    """The parts of a ModelRunner on a GPU that the warm-up uses."""

    model: Any
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    backend: Any
    exchange: Any
    store: Store
    sampler: Sampler
    image_inputs: ImageInputs | None
    prompt_lengths: PromptLengths | None

    @property
    def decode_graphs(self) -> Any:
        """A DecodeGraphs or None."""
        ...

    @property
    def mixed_graphs(self) -> MixedGraphs | None: ...

    @property
    def max_rows(self) -> int:
        """The most rows of a step that sample."""
        ...

    def run_without_mixed_graphs(self, plan: StepPlan) -> None: ...


def warm_up(runner: WarmupRunner, max_tokens: int, max_len: int) -> None:
    """Run steps of all kinds, the largest of `max_tokens` tokens in sequences of up to `max_len`."""
    exchange = nullcontext() if runner.exchange is None else runner.exchange.warming_up()
    with exchange, one_layer_of_each_kind(runner.model):
        _compile_kernels(runner)
    log.debug("kernels are compiled and loaded")
    torch.cuda.empty_cache()  # memory of the threads
    decode_graphs: DecodeGraphs | None = runner.decode_graphs
    mixed_graphs = runner.mixed_graphs
    if decode_graphs is not None:
        if runner.exchange is not None:
            runner.exchange.measure_sums(runner.spec.hidden, runner.dtype, decode_graphs.capturer.capture)
        with torch.inference_mode():
            for size in reversed(decode_graphs.capture_sizes):
                for has_images in decode_graphs.image_variants:
                    decode_graphs.capture(size, has_images)
            if mixed_graphs is not None:
                first_sizes, second_sizes = mixed_graphs.half_sizes(max_tokens)
                for sizes in first_sizes:
                    mixed_graphs.capture_first_half(*sizes)
                for size in second_sizes:
                    mixed_graphs.capture_second_half(size)
        torch.cuda.empty_cache()  # memory of the runs before the captures; that of the steps below stays allocated
        log.debug("graphs are captured")
    if runner.image_inputs is not None:
        with torch.inference_mode():
            runner.image_inputs.warmup()
    with one_layer_of_each_kind(runner.model):
        for plan in (
            *_warmup_plans(max_tokens, max_len, runner.max_rows, runner.deterministic),
            *_long_prompt_plans(runner, min(max_tokens, max_len)),
        ):
            runner.run_without_mixed_graphs(plan)  # some steps with prompts have no graph, and need these kernels
    runner.store.clear_scratch()  # results of padding may not be finite
    torch.cuda.synchronize(runner.device)
    log.debug("steps of all kinds have run")


def _compile_kernels(runner: WarmupRunner) -> None:
    """Run the compile tasks in threads. Loading one kernel in two threads at once can fail, and memory may not suffice
    for all tasks at once, so failed tasks are run again alone. Each rank begins with a different task, so that ranks
    wait for each other's compilations as late as possible."""
    from triton.runtime.errors import OutOfResources

    from quire.kernels.triton.compile_locks import serialize_module_loading

    serialize_module_loading()
    tasks, exchange = list(_compile_tasks(runner)), runner.exchange
    if exchange is not None:
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
    """Run a task in a thread, with the torch settings that are per thread."""
    with torch.cuda.device(device), torch.inference_mode():
        task()


def _compile_tasks(runner: WarmupRunner) -> Iterator[Callable[[], None]]:
    """Yield steps that may run side by side, those with the most different kernels first. Together they need nearly all
    kernels; the rest is compiled in the steps of `warm_up`."""
    slots = runner.max_rows
    decode_graphs: DecodeGraphs | None = runner.decode_graphs
    if decode_graphs is not None:
        for has_images in decode_graphs.image_variants:
            yield partial(decode_graphs.warmup, 1, has_images)
    if runner.backend.fuses_rope:
        yield from _triton_attention_tasks(runner)
    # Processed logits are float32; the others are sampled in graphs, if there are any.
    dtypes = {torch.float32, *([runner.dtype] if decode_graphs is None else [])}
    yield from runner.sampler.warmup_tasks(dtypes, slots)
    if decode_graphs is not None:
        steps = [
            (size, partial(decode_graphs.warmup, size, has_images))
            for size in decode_graphs.capture_sizes if 1 < size <= MAX_PARALLEL_ROWS
            for has_images in decode_graphs.image_variants
        ]  # fmt: skip
        if (mixed_graphs := runner.mixed_graphs) is not None:
            steps += [
                (tokens, partial(mixed_graphs.warmup, tokens, decode_rows))
                for tokens, decode_rows in mixed_graphs.half_sizes(MAX_PARALLEL_ROWS)[0]
            ]
        yield from (step for size, step in steps if size & (size - 1) == 0)
        if (compiler := running_compiler()) is not None:  # few other sizes have kernels that no power of two has
            yield from (partial(_run_if_compiling, compiler, step) for size, step in steps if size & (size - 1))


def _triton_attention_tasks(runner: WarmupRunner) -> Iterator[Callable[[], None]]:
    """Yield calls of the Triton backend, which together compile its attention kernels."""
    backend, store = runner.backend, runner.store
    caches = {(c.plan_key, c.kv_heads, c.head_dim): c for c in store.caches.values()}.values()
    if runner.deterministic:
        for cache in caches:
            yield partial(backend.warmup_small, cache, store.tables[cache.group])
        return
    from quire.kernels.triton.decode import representative_batches

    for cache in caches:
        # Of all kernels, that for long prompts takes longest to compile.
        yield partial(backend.warmup_long, cache, store.tables[cache.group])
        for rows in representative_batches(runner.max_rows, cache, runner.device, backend.shared_rows(cache)):
            yield partial(backend.warmup, rows, cache, store.tables[cache.group])
    for cache in {c.plan_key: c for c in store.cross_caches.values()}.values():
        entries = store.tables[cache.group].view(-1, 1)  # see quire.worker.cross_attention
        yield partial(backend.warmup_bidirectional, cache, entries)
        for rows in representative_batches(runner.max_rows, cache, runner.device, backend.shared_rows(cache)):
            yield partial(backend.warmup, rows, cache, entries)


def _run_if_compiling(compiler: KernelCompiler, step: Callable[[], None]) -> None:
    """Run a step if any kernel of the steps before it was missing on disk. Else its own are probably there too."""
    if compiler.num_requests:
        step()


def _warmup_plans(tokens: int, max_len: int, slots: int, deterministic: bool) -> Iterator[StepPlan]:
    """Yield plans of prompts: short ones with every kind of sampling; every number of tokens that has different
    kernels, with and without logits of all tokens; the end of a prompt of `max_len`; rows of one token; and `tokens`
    tokens in as many of `slots` rows as possible, and in as few."""
    for sampling, num_logprobs in SAMPLING_KINDS:
        init = SlotInit(0, 0, -1, sampling, 0, 1, (0,) if sampling.needs_history else (), num_logprobs)
        yield StepPlan((init,), (), (_padding_slice(min(5, max_len, tokens)),))
    counts = (*TOKEN_COUNTS, *PROMPT_COUNTS) if deterministic else TOKEN_COUNTS
    for count in dict.fromkeys(min(count, tokens) for count in counts):
        yield _longest_rows(count, max_len, slots)
    for count in dict.fromkeys(min(count, max_len, tokens) for count in (*TOKEN_COUNTS, MAX_SCORED_POSITIONS)):
        yield StepPlan((), (), (_padding_slice(count)._replace(score_tokens=(0,) * count),))
    last = min(5, max_len, tokens)
    yield StepPlan((), (), (_padding_slice(last)._replace(start=max_len - last, score_tokens=(0,) * last),))
    for count in dict.fromkeys(min(count, slots, tokens) for count in TOKEN_COUNTS):
        yield StepPlan((), (), (_padding_slice(1),) * count)
    rows = min(slots, tokens)
    each, more = divmod(tokens, rows)
    yield StepPlan((), (), tuple(_padding_slice(min(each + (i < more), max_len)) for i in range(rows)))
    yield _longest_rows(tokens, max_len, slots)


def _longest_rows(tokens: int, max_len: int, slots: int) -> StepPlan:
    """Return a plan of `tokens` tokens in as few rows of up to `max_len` as possible, or of as many as `slots` rows
    have room for."""
    whole, rest = divmod(tokens, max_len)
    return StepPlan((), (), ((_padding_slice(max_len),) * whole + (_padding_slice(rest),) * (rest > 0))[:slots])


def _long_prompt_plans(runner: WarmupRunner, longest: int) -> Iterator[StepPlan]:
    """Yield the longest prompt of one step, if layers prune it, and a plan that resets slot 0 to a short prompt."""
    if runner.prompt_lengths is not None and longest > runner.prompt_lengths.budget:
        yield StepPlan((SlotInit(0, 0, -1, DeviceSamplingParams(), 0, longest),), (), (_padding_slice(longest),))
        yield StepPlan((SlotInit(0, 0, -1, DeviceSamplingParams(), 0, 1),), (), ())


def _padding_slice(tokens: int) -> SeqSlice:
    return SeqSlice(0, (0,) * tokens, 0, 1)
