"""Time the ways of building a step's page tables: whole tables, padded to the longest, from lists or from arrays, and
only the changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from papers.closed_forms import spec_of
from papers.entry import Point
from quire.config import EngineConfig
from quire.protocol.model_spec import LayerSpec
from quire.protocol.step_plan import TableWrite

if TYPE_CHECKING:
    from quire.worker.store import Store

PAGE = 16


def tables(
    loads: Mapping[str, Sequence[int]], step_ms: float, token_ms: float, repeats: int = 40
) -> list[Point]:  # fmt: skip
    """Return the median `us` of host time of each way to build the tables of sequences of these lengths, and its
    `share` of a decode step in percent. A step takes `step_ms` and `token_ms` for each token of KV without it."""
    points: list[Point] = []
    for load, lengths in loads.items():
        rows = rows_of(lengths)
        step = 1000 * (step_ms + token_ms * sum(lengths))
        ways = {"padded lists": rows.padded_lists, "padded arrays": rows.padded_arrays, "deltas": rows.deltas}
        for way, us in [*((way, _us(build, repeats)) for way, build in ways.items()), ("none", 0.0)]:
            points.append({"load": load, "way": way, "us": us, "step_us": step, "share": 100 * us / (us + step)})
    return points


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


def _us(build: Callable[[], object], repeats: int) -> float:
    """Return the median host time in microseconds."""
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(repeats + 1):
        wait()
        began = time.perf_counter()
        build()
        seconds.append(time.perf_counter() - began)
    return 1e6 * median(seconds[1:])
