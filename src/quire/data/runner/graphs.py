"""Decode steps as CUDA graphs: a step in which every sequence computes one token is two launches, whatever the model:
the model up to its logits, and the tail that follows them.

Graphs are captured for each size of batch, at start or when it is first needed; smaller batches are padded with rows
of slot 0, which read and write scratch memory. All that changes between replays is on the device already (page tables,
last samples) or is one small copy: each row's token, slot and position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import LayerCache
from quire.data.kernels.triton.attention import SplitScratch, choose_splits, decode_scratch, multiprocessors
from quire.data.kernels.triton.backend import TritonBackend
from quire.data.runner.recorder import Graph, Recorder
from quire.data.runner.staging import Staging
from quire.data.runner.step import token_step
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST
from quire.vocabulary.rows import Rows

AnyTail = Callable[[Tensor, Tensor], Any]


def sizes(largest: int) -> list[int]:
    """Batches that get a graph of their own, from 64 on those whose products take clearly less time than those of the
    next: the library's tiles make others as slow, or slower (448 rows take 1.4 times as long as 512; all of
    Llama-3-8B's products on an H200)."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 161, 16), 200, 256, 320, 352, 384, 432, 512, 576, 640, 704, 768, 864]
    return [*(size for size in steps if size < largest), largest]


def split_scratch(
    caches: Iterable[LayerCache], launches: Callable[[LayerCache], Iterable[tuple[int, int]]]
) -> SplitScratch | None:
    """One that suffices for all layers, which follow one another: `launches` are a layer's rows and parts. None for
    none."""
    kinds = {(c.heads, c.kv_heads, c.head_dim): c for c in caches}
    if not kinds:
        return None
    meta = torch.device("meta")
    needs = [
        decode_scratch(rows, cache.heads, cache.kv_heads, cache.head_dim, splits, meta)
        for cache in kinds.values() for rows, splits in launches(cache)
    ]  # fmt: skip
    most = [max(tensor.numel() for tensor in tensors) for tensors in zip(*needs)]
    device = next(iter(kinds.values())).device
    return SplitScratch(*(torch.empty(count, dtype=torch.float32, device=device) for count in most))


class DecodeGraphs:
    """Graphs for up to `largest` rows. `tails` say what follows `logits`, by name: a function of the logits [B, V]
    and the slots [B], captured for each size; what it returns is valid until the next replay."""

    def __init__(
        self,
        model: Any,
        logits: Callable[[Tensor], Tensor],
        store: Store,
        backend: TritonBackend,
        last: Tensor,
        staging: Staging,
        largest: int,
        tails: dict[str, AnyTail],
        recorder: Recorder,
        pictures: Any = None,
    ) -> None:
        self.model, self.logits, self.store, self.last, self.staging = model, logits, store, last, staging
        self.tails = tails
        self.backend, self.sizes, self.recorder = backend, sizes(largest), recorder
        self.largest = largest
        # Where layers attend to pictures, a size has two graphs: for text alone, and for rows of which some see any.
        self.pictures, self.sights = pictures, (False, True) if store.cross else (False,)
        self.models: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by size, and whether some row sees
        self.ends: dict[tuple[int, bool, str], Graph] = {}
        # Slot 0 and position 0: what padding is, until a step fills them in.
        self.inputs = torch.zeros(3 * largest, dtype=torch.int64, device=last.device)
        count = multiprocessors(last.device)
        self.scratch = split_scratch(
            chain(store.caches.values(), store.cross.values()),
            lambda cache: ((size, choose_splits(size, cache.kv_heads, count)) for size in self.sizes),
        )

    def fits(self, rows: Rows) -> bool:
        """Every row computes one token and samples what follows it."""
        return len(rows) <= self.largest and rows.decode

    def run(self, rows: Rows, tail: str, sees: bool = False) -> Any:
        """Enqueue the step; what its tail leaves on the device, padding included. `sees`: some row sees a picture."""
        size = self.captured(rows, sees)
        self.store.replayed(size, sees)
        self.replay(rows, size, sees)
        end = self.ends[size, sees, tail]
        end.graph.replay()
        return end.result

    def captured(self, rows: Rows, sees: bool) -> int:
        """The size of the graphs for so many rows, which are captured then."""
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        if (size, sees) not in self.models:
            self.capture(size, sees)
        return size

    def replay(self, rows: Rows, size: int, sees: bool) -> None:
        """Enqueue the step up to its logits."""
        filled = np.zeros((3, size), dtype=np.int64)
        filled[:, : len(rows)] = rows.singles
        self.staging.upload(filled, self._rows(size))
        self.models[size, sees].replay()

    def rehearse(self, size: int, sees: bool = False) -> None:
        """Run a step of padding as it is, so that its kernels are compiled and loaded. From any thread, but not while
        another one captures."""
        logits, slots = self._logits(size, sees), self._rows(size)[0]
        for tail in self.tails.values():
            tail(logits, slots)

    def capture(self, size: int, sees: bool = False) -> None:
        """Capture the graphs of a size. The largest one's come first: what they leave free in the pool is room for all
        others. Logits are of no use to any graph but the size's own tails, so they are left free too."""
        if (size, sees) != (self.largest, False) and (self.largest, False) not in self.models:
            self.capture(self.largest)
        self.inputs.zero_()
        self.rehearse(size, sees)  # in this thread: libraries keep handles for each
        slots = self._rows(size)[0]
        model, logits = self.recorder.record(lambda: self._logits(size, sees))
        self.ends |= {
            (size, sees, name): self.recorder.record(partial(tail, logits, slots)) for name, tail in self.tails.items()
        }
        self.models[size, sees] = model

    def _rows(self, size: int) -> Tensor:
        """Slots, positions and tokens [3, size]."""
        return self.inputs[: 3 * size].view(3, size)

    def _logits(self, size: int, sees: bool) -> Tensor:
        slots, positions, tokens = self._rows(size)
        tokens = torch.where(tokens == LAST, self.last.index_select(0, slots), tokens)
        step = token_step(self.store, self.backend, slots, positions, self.scratch)
        if sees:
            assert self.pictures is not None, "nobody sees what no layer attends to"
            step.crossing = self.pictures.single(slots, self.backend, self.scratch)
        return self.logits(self.model(tokens, step))
