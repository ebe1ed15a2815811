"""`quire bench kernels --family kv` on a CPU: decode steps at long contexts with 8-bit keys and values against bf16,
for the 125M shape: attention alone, and whole steps. Both formats take turns in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from quire.bench import contexts
from quire.bench.shapes import built, local_runner
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.kernels.cpu.backend import NativeBackend
from quire.kernels.cpu.library import Library, RecordedOps
from quire.worker.store import Store

NAMES = {"auto": "bf16", "int8": "int8"}
CONTEXTS = (1024, 4096, 16384)
ROWS = (1, 8)
TURNS, RUNS = 5, 2  # rounds of each format, and measured steps in a round
BLOCK = 1 << 14  # heads
SHAPE = {"max_position_embeddings": 2 * CONTEXTS[-1]}


class Taken(NamedTuple):
    """One run: seconds of wall-clock time, and CPU seconds of all threads, which other processes affect less."""

    seconds: float
    processor: float


Runs = Mapping[str, Callable[[], object]]


def contexts_in_turn(own: Library, memory: float) -> Iterator[dict[str, Any]]:
    """Yield a line for each format, number of rows and context. `memory`: bytes/s of a plain read. `ratio` and
    `processor_ratio`, in lines of 8 bits, are bf16's time over that of 8 bits."""
    with ExitStack() as stack:
        engines = {kind: stack.enter_context(built(_config(kind), SHAPE)).engine for kind in NAMES}
        for engine in engines.values():
            fill(local_runner(engine).store)
            contexts.Skipping(engine)
        stores = {kind: local_runner(engine).store for kind, engine in engines.items()}
        sizes = {kind: store.kv_config.groups[0].token_bytes for kind, store in stores.items()}
        for rows in ROWS:
            for context in CONTEXTS:
                tapes = {kind: _tape(own, store, rows, context) for kind, store in stores.items()}
                runs: Runs = {kind: partial(own.run, tape) for kind, tape in tapes.items()}
                for what, taken in (("attention", in_turn(runs)), ("step", _steps(engines, rows, context))):
                    yield from _lines(f"{what}, {rows} x {context:,}", taken, sizes, rows * context, memory)


def _config(kind: str) -> EngineConfig:
    tokens = (ROWS[-1] + 1) * (CONTEXTS[-1] + 4 * TURNS * RUNS)  # admission leaves some pages free
    return EngineConfig(
        device="cpu", dtype="bfloat16", kv_cache_dtype=kind, kv_tokens=tokens, max_num_seqs=ROWS[-1],
        enable_prefix_caching=False,
    )  # fmt: skip


def fill(store: Store) -> None:
    """Write random keys and values, repeated over heads, to all of the memory."""
    cache = store.caches[0]
    some = torch.randn(BLOCK, cache.head_dim).to(torch.bfloat16)
    if cache.is_int8:
        scales = torch.full((BLOCK, 1), 0.01).view(torch.int8)
        some = torch.cat(((30 * some).clamp(-127, 127).to(torch.int8), scales), 1)
    heads = store.buffer.view(some.dtype).view(-1, some.shape[1])
    for part in heads.split(BLOCK):
        part.copy_(some[: len(part)])


def _tape(own: Library, store: Store, rows: int, context: int) -> RecordedOps:
    """Record the attention of a step, in all layers, to pages in random order."""
    [group], backend = store.kv_config.groups, NativeBackend(kernels=own)
    pages = torch.randperm(len(group.ids))[: rows * group.num_pages(context)].view(rows, -1) + group.ids.start
    table = torch.cat((torch.zeros_like(pages[:1]), pages))
    with own.record() as tape:
        step = backend.decode_batch(torch.arange(1, rows + 1), torch.full((rows,), context - 1))
        for cache in store.caches.values():
            q = torch.randn(rows, cache.heads, cache.head_dim).to(torch.bfloat16)
            backend.attend_cached(q, cache, backend.plan_captured(step, table, cache))
    return tape


def _steps(engines: Mapping[str, Engine], rows: int, context: int) -> dict[str, list[Taken]]:
    """Measure whole steps of `rows` sequences of `context` tokens."""
    for engine in engines.values():
        contexts.start(engine, [context] * rows)
    try:
        return in_turn({kind: engine.step for kind, engine in engines.items()})
    finally:
        for engine in engines.values():
            contexts.stop(engine)


def in_turn(runs: Runs) -> dict[str, list[Taken]]:
    """Return what each run took, without the first of each round, whose data are not in the caches."""
    taken: dict[str, list[Taken]] = {kind: [] for kind in runs}
    for _ in range(TURNS):
        for kind, run in runs.items():
            run()
            for _ in range(RUNS):
                began, processor = time.perf_counter(), time.process_time()
                run()
                taken[kind].append(Taken(time.perf_counter() - began, time.process_time() - processor))
    return taken


def _lines(
    case: str, taken: Mapping[str, list[Taken]], sizes: Mapping[str, int], tokens: int, memory: float
) -> Iterator[dict[str, Any]]:
    medians = {kind: Taken(*map(median, zip(*some))) for kind, some in taken.items()}
    for kind, (seconds, processor) in medians.items():
        rate = sizes[kind] * tokens / seconds
        yield {
            "kernel": f"KV in {NAMES[kind]}", "case": case, "us": seconds * 1e6, "rate": rate / 1e9, "bound": "memory",
            "unit": "GB/s", "share": rate / memory, "processor_us": processor * 1e6,
            "ratio": medians["auto"].seconds / seconds, "processor_ratio": medians["auto"].processor / processor,
        }  # fmt: skip
