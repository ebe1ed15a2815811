"""The rehearsal at start: every kind of step once, on scratch memory alone. Kernels are compiled and loaded, graphs are
captured and the largest step's memory is claimed before the first request comes, not while somebody waits for it.

All rows are padding (slot 0), whose pages and samples belong to nobody. Compiling is most of the work where no kernels
are on disk yet, and happens outside of the interpreter's lock, so it goes on in several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from quire.plan import Birth, Row, StepPlan
from quire.request import SamplingParams

if TYPE_CHECKING:
    from quire.runner.model_runner import ModelRunner

THREADS = 16
MOST_AT_ONCE = 256  # rows of a step that is run beside others: their logits are all in memory
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5, logprobs=1),
)


def rehearse(runner: ModelRunner, tokens: int, max_len: int) -> None:
    """Steps of all kinds, the largest of `tokens` tokens in sequences of up to `max_len`."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        running = [pool.submit(_alone, runner.device, task) for task in _tasks(runner)]
        for task in running:
            task.result()
    if runner.graphs is not None:
        with torch.inference_mode():
            for size in reversed(runner.graphs.sizes):
                runner.graphs.capture(size)
    torch.cuda.empty_cache()  # what the threads held; the memory of the steps that follow stays with the process
    for plan in _plans(tokens, max_len):
        runner.collect(runner.submit(plan))
    torch.cuda.synchronize(runner.device)


def _alone(device: torch.device, task: Callable[[], None]) -> None:
    """In a thread: what torch keeps for each of them is set here."""
    with torch.cuda.device(device), torch.inference_mode():
        task()


def _tasks(runner: ModelRunner) -> Iterator[Callable[[], None]]:
    """Steps that may run side by side. Together they need nearly all kernels; the rest is compiled as it is met."""
    if runner.graphs is not None:
        for size in runner.graphs.sizes:
            if size & (size - 1) == 0 and size <= MOST_AT_ONCE:
                yield partial(runner.graphs.rehearse, size)
    # Logits that rules change are float32; the others are sampled in graphs, if there are any.
    yield from runner.sampler.rehearsals({torch.float32, *([runner.dtype] if runner.graphs is None else [])})
    if runner.attention == "triton" and not runner.deterministic:
        from quire.kernels.triton.attention import representatives

        store = runner.store
        kinds = {(c.group, c.heads, c.kv_heads, c.head_dim): c for c in store.caches}
        for cache in kinds.values():
            for rows in representatives(store.geometry.slots - 1, cache, runner.device):
                yield partial(runner.backend.rehearse, rows, cache, store.tables[cache.group])


def _plans(tokens: int, max_len: int) -> Iterator[StepPlan]:
    """Prompts, short ones in every way of sampling, and as many as fit into a step."""
    short = Row(0, (0,) * min(5, max_len, tokens), 0, 1)
    for params in PARAMS:
        birth = Birth(0, 0, -1, params, 0, 1, (0,) if params.needs_history else (), 1, params.logprobs or -1)
        yield StepPlan((birth,), (), (short,))
    whole, rest = divmod(tokens, max_len)
    rows = [Row(0, (0,) * max_len, 0, 1)] * whole + [Row(0, (0,) * rest, 0, 1)] * (rest > 0)
    yield StepPlan((), (), tuple(rows))
