"""Measure the share of a decode step that building page tables takes (vAttention §3.3.2).

The ways: whole tables in each step, padded to the longest, as in vLLM, first from lists and later from arrays; only the
changes, as in quire; and none. Host time is measured here. Step time is what `quire bench profile` measured on an H200
for Llama-3-8B.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from papers.closed_forms import spec_of
from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.document import table
from quire.config import EngineConfig
from quire.protocol.model_spec import LayerSpec
from quire.protocol.step_plan import TableWrite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.worker.store import Store

PAGE = 16
STEP_MS, TOKEN_MS = 3.93, 4.7e-5  # a step of one row, and for each token of KV: 5.48 and 15.7 ms at 32 and 256 x 1,000
LOADS = {
    "32 x 1,000": [1000] * 32, "256 x 1,000": [1000] * 256, "16 x 16K": [16384] * 16,
    "4 x 32K beside 124 x 512": [32768] * 4 + [512] * 124,
}  # fmt: skip
WAYS = ("padded lists", "padded arrays", "deltas", "none")
REPEATS = 40
ONCE, FIXED = 30, 10  # % of a decode step in vLLM, before and after a change
LEAST = 10  # % of a step at the worst load: the least that confirms the paper's cost of padded tables
MOST = 1.0  # % for deltas, at most

Points = Sequence[dict[str, Any]]


class Rows(NamedTuple):
    """Sequences in memory: their page tables as lists, and a store with the same tables."""

    tables: list[list[int]]
    store: Store

    def padded_lists(self) -> object:
        import torch

        width = max(map(len, self.tables))
        return torch.tensor([one + [0] * (width - len(one)) for one in self.tables]).to(self.store.device)

    def padded_arrays(self) -> object:
        import torch

        whole = np.zeros((len(self.tables), max(map(len, self.tables))), dtype=np.int64)
        for row, one in zip(whole, self.tables):
            row[: len(one)] = one
        return torch.from_numpy(whole).to(self.store.device)

    def deltas(self) -> None:
        """Write one more page for each sequence that fills one in this step."""
        some = range(0, len(self.tables), PAGE)
        self.store.apply_page_ops(
            tuple(TableWrite(i + 1, 0, len(self.tables[i]) - 1, (self.tables[i][-1],)) for i in some)
        )


def rows_of(lengths: Sequence[int]) -> Rows:
    """Return rows with pages of almost no bytes: only page numbers matter."""
    import torch

    from quire.memory.page_layout import MemorySize, build_kv_config
    from quire.worker.store import Store

    spec = replace(spec_of("llama3-8b"), layers=(LayerSpec(1, 8),))
    config = EngineConfig(page_size=PAGE, max_num_seqs=len(lengths), swap_gib=0.0)
    counts = [-(-length // PAGE) for length in lengths]
    geometry = build_kv_config(config, spec, MemorySize(PAGE * sum(counts), max(lengths), 2))
    ids = np.random.default_rng(0).permutation(geometry.groups[0].ids).tolist()
    ends = np.cumsum(counts).tolist()
    tables = [ids[end - count : end] for count, end in zip(counts, ends)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = Store(geometry, spec, torch.float16, device)
    store.apply_page_ops(tuple(TableWrite(i + 1, 0, 0, tuple(pages)) for i, pages in enumerate(tables)))
    return Rows(tables, store)


def _us(build: Callable[[], object]) -> float:
    """Return the median host time in microseconds."""
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(REPEATS + 1):
        wait()
        began = time.perf_counter()
        build()
        seconds.append(time.perf_counter() - began)
    return 1e6 * median(seconds[1:])


def table_building() -> Reproduction:
    """Measure the share of a step for each way of building tables."""
    points: list[dict[str, Any]] = []
    for load, lengths in LOADS.items():
        rows = rows_of(lengths)
        step = 1000 * (STEP_MS + TOKEN_MS * sum(lengths))
        builders = (rows.padded_lists, rows.padded_arrays, rows.deltas, None)
        for way, build in zip(WAYS, builders):
            us = 0.0 if build is None else _us(build)
            points.append({"load": load, "way": way, "us": us, "step_us": step, "share": 100 * us / (us + step)})
    by = {(p["load"], p["way"]): p for p in points}
    cells = [
        (load, f"{by[load, 'none']['step_us'] / 1000:.1f}",
         *(f"{by[load, way]['us']:.0f} ({by[load, way]['share']:.2f} %)" for way in WAYS))
        for load in LOADS
    ]  # fmt: skip
    text = table(("rows x tokens", "step ms", *(f"{way}, us" for way in WAYS)), cells)
    return Reproduction(judged(points), text, partial(draw, points), points)


def judged(points: Points) -> list[Result]:
    """Judge the worst load of each way."""
    most = {way: max((p["share"], p["load"]) for p in points if p["way"] == way) for way in WAYS}
    paper = {"padded lists": f"up to {ONCE}", "padded arrays": f"up to {FIXED}", "deltas": None, "none": None}
    results = []
    for way, (share, load) in most.items():
        good = share >= LEAST if way == "padded lists" else share <= (FIXED if way == "padded arrays" else MOST)
        rule = (
            f"at least {LEAST}" if way == "padded lists" else f"at most {FIXED if way == 'padded arrays' else MOST:g}"
        )
        what = f"tables as {way}: the most of a decode step ({load}; {rule})"
        results.append(Result("V-X2", what, paper[way], round(share, 2), "%", HOLDS if good else DIFFERS))
    return results


def draw(data: Points) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 4)
    axes = fig.add_subplot()
    loads = list(dict.fromkeys(p["load"] for p in data))
    for i, (way, colour) in enumerate(zip(WAYS, COLOURS)):
        shares = [p["share"] for p in data if p["way"] == way]
        bars = axes.bar([x + 0.2 * (i - 1.5) for x in range(len(loads))], shares, 0.19, color=colour, label=way)
        axes.bar_label(bars, fmt="%.2g", fontsize=7)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_ylabel("% of a decode step")
    axes.legend()
    fig.suptitle("vAttention 3.3.2: building page tables, of a decode step")
    return fig
