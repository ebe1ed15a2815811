"""Check vAttention §5.2 on a CPU: torch's own attention over tensors in mapped pages, scattered on purpose, and the
same call over ordinary memory. The two alternate in one process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.document import table
from quire.vattention import init

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

LAYERS, ROWS, HEADS, DIM = 4, 4, 8, 64
CONTEXTS, QUERIES = (1024, 4096), (1, 256)  # a decode, and a chunk of a prompt
PAGES = (64, 256)  # KiB
LEAST = 0.97  # of an ordinary tensor's speed
TURNS = 40


def views() -> Reproduction:
    """Measure on the CPU, even if there is a GPU."""
    points = list(_points())
    rows = [(p["dtype"], p["kib"], p["context"], p["queries"], *(f"{p[name]:.1f}" for name in ("plain", "mapped")),
             f"{p['plain'] / p['mapped']:.3f}") for p in points]  # fmt: skip
    head = ("numbers", "KiB a page", "context", "queries", "ordinary us", "mapped us", "speed")
    text = table(head, rows) + f"\n{ROWS} sequences, {HEADS} heads of {DIM}, a buffer a layer, one thread a core.\n"
    return Reproduction(judged(points), text, partial(draw, points), points)


def _points() -> Iterator[dict[str, Any]]:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        for kib in PAGES:
            yield from _over(dtype, kib)


def _over(dtype: torch.dtype, kib: int) -> list[dict[str, Any]]:
    """Measure all shapes over one memory. Its requests grow in turn, a page each, so that no page is adjacent to its
    successor."""
    import torch

    longest, page = max(CONTEXTS), kib * 1024
    pages = ROWS * -(-longest * HEADS * DIM * dtype.itemsize // page)
    memory = init(LAYERS, ROWS, longest, HEADS, DIM, dtype.itemsize, page, pages=pages, dtype=dtype)
    ids, order = [memory.alloc_reqid() for _ in range(ROWS)], Random(0)
    lens, step = [0] * ROWS, page // (HEADS * DIM * dtype.itemsize)
    while min(lens) < longest:
        grows = order.choice([i for i in ids if lens[i] < longest])
        lens[grows] = min(lens[grows] + step, longest)
        assert memory.step(lens) == 0, "pages for all of them"
    mapped = list(memory.tensors)
    ordinary = [torch.randn(ROWS, longest, HEADS, DIM).to(dtype) for _ in mapped]
    for view, plain in zip(mapped, ordinary):
        view.copy_(plain)
    found = [
        {"dtype": str(dtype).removeprefix("torch."), "kib": kib, "context": context, "queries": queries,
         **_timed(ordinary, mapped, context, queries)}
        for context in CONTEXTS
        for queries in QUERIES
    ]  # fmt: skip
    del view, plain
    mapped.clear()
    memory.tensors = ()
    gc.collect()
    memory.close()
    return found


def _timed(ordinary: list[Tensor], mapped: list[Tensor], context: int, queries: int) -> dict[str, float]:
    """Return the medians of both in microseconds, measured alternately. Their results must be equal bit by bit."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    query = torch.randn(1, HEADS, queries, DIM).to(ordinary[0].dtype)

    def call(tensors: list[Tensor], turn: int) -> Tensor:
        layer, row = 2 * (turn % LAYERS), turn // LAYERS % ROWS
        keys, values = (x[row, :context].transpose(0, 1)[None] for x in tensors[layer : layer + 2])
        return attention(query, keys, values)

    spent: dict[str, list[float]] = {"plain": [], "mapped": []}
    for turn in range(-LAYERS * ROWS, TURNS):
        results = []
        for name, tensors in (("plain", ordinary), ("mapped", mapped))[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            results.append(call(tensors, turn % (LAYERS * ROWS)))
            if turn >= 0:
                spent[name].append(1e6 * (time.perf_counter() - began))
        assert torch.equal(*results), "other bits over mapped pages"
    return {name: median(times) for name, times in spent.items()}


def judged(points: Sequence[dict[str, Any]]) -> list[Result]:
    """Judge the median of all shapes, for each dtype and page size."""
    results = []
    for dtype, kib in dict.fromkeys((p["dtype"], p["kib"]) for p in points):
        speed = median(p["plain"] / p["mapped"] for p in points if (p["dtype"], p["kib"]) == (dtype, kib))
        what = f"{dtype}, pages of {kib} KiB: torch's attention over mapped pages / ordinary memory (at least {LEAST})"
        verdict = HOLDS if speed >= LEAST else DIFFERS
        results.append(Result("V-M15", what, "about 1", round(speed, 3), "times the speed", verdict))
    return results


def draw(data: Sequence[dict[str, Any]]) -> Figure:
    """Draw the speed of each shape."""
    from quire.bench.plots import lines

    points = [
        {**p, "speed": p["plain"] / p["mapped"], "line": f"{p['dtype']}, {p['kib']} KiB",
         "panel": "decodes" if p["queries"] == 1 else f"chunks of {p['queries']}"}
        for p in data
    ]  # fmt: skip
    title = "vAttention §5.2: torch's attention over mapped pages on a CPU"
    return lines(points, "context", "speed", "line", "panel", title, ("tokens", "times ordinary memory's"), False)
