"""Decode steps as CUDA graphs: a step in which every sequence computes one token is two launches, whatever the model:
the model up to its logits, and the tail that follows them.

Graphs are captured for each size of batch, at start or when it is first needed; smaller batches are padded with rows
of slot 0, which read and write scratch memory. All that changes between replays is on the device already (page tables,
last samples) or is one small copy: each row's token, slot and position.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.decode import SplitScratch, choose_splits, decode_scratch, multiprocessors
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED
from quire.worker.staging_buffer import StagingBuffer
from quire.worker.step_context import make_decode_context
from quire.worker.store import Store

AnyEpilogue = Callable[[Tensor, Tensor], Any]


def capture_sizes(max_rows: int) -> list[int]:
    """Batches that get a graph of their own, from 64 on those whose products take clearly less time than those of the
    next: the library's tiles make others as slow, or slower (448 rows take 1.4 times as long as 512; all of
    Llama-3-8B's products on an H200)."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 161, 16), 200, 256, 320, 352, 384, 432, 512, 576, 640, 704, 768, 864]
    return [*(size for size in steps if size < max_rows), max_rows]


def allocate_split_scratch(
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
    """Graphs for up to `max_rows` rows. `epilogues` say what follows `logits`, by name: a function of the logits [B, V]
    and the slots [B], captured for each size; what it returns is valid until the next replay."""

    def __init__(
        self,
        model: Any,
        logits: Callable[[Tensor], Tensor],
        store: Store,
        backend: TritonBackend,
        last_sampled: Tensor,
        staging: StagingBuffer,
        max_rows: int,
        epilogues: dict[str, AnyEpilogue],
        capturer: GraphCapturer,
        image_inputs: Any = None,
    ) -> None:
        self.model, self.logits, self.store, self.last_sampled, self.staging = (
            model,
            logits,
            store,
            last_sampled,
            staging,
        )
        self.epilogues = epilogues
        self.backend, self.capture_sizes, self.capturer = backend, capture_sizes(max_rows), capturer
        self.max_rows = max_rows
        # Where layers attend to pictures, a size has two graphs: for text alone, and for rows of which some see any.
        self.image_inputs, self.image_variants = image_inputs, (False, True) if store.cross_caches else (False,)
        self.model_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by size, and whether some row sees
        self.epilogue_graphs: dict[tuple[int, bool, str], CapturedGraph] = {}
        # Slot 0 and position 0: what padding is, until a step fills them in.
        self.inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=last_sampled.device)
        count = multiprocessors(last_sampled.device)
        self.split_scratch = allocate_split_scratch(
            chain(store.caches.values(), store.cross_caches.values()),
            lambda cache: ((size, choose_splits(size, cache.kv_heads, count)) for size in self.capture_sizes),
        )

    def can_run(self, slices: SeqSlices) -> bool:
        """Every row computes one token and samples what follows it."""
        return len(slices) <= self.max_rows and slices.is_decode_only

    def run(self, slices: SeqSlices, epilogue: str, has_images: bool = False) -> Any:
        """Enqueue the step; what its tail leaves on the device, padding included. `has_images`: some row sees a "
        "picture."""
        size = self.ensure_captured(slices, has_images)
        self.store.record_graph_replay(size, has_images)
        self.replay(slices, size, has_images)
        end = self.epilogue_graphs[size, has_images, epilogue]
        end.graph.replay()
        return end.result

    def ensure_captured(self, slices: SeqSlices, has_images: bool) -> int:
        """The size of the graphs for so many rows, which are captured then."""
        size = self.capture_sizes[bisect_left(self.capture_sizes, len(slices))]
        if (size, has_images) not in self.model_graphs:
            self.capture(size, has_images)
        return size

    def replay(self, slices: SeqSlices, size: int, has_images: bool) -> None:
        """Enqueue the step up to its logits."""
        filled = np.zeros((3, size), dtype=np.int64)
        filled[:, : len(slices)] = slices.decode_columns
        self.staging.upload(filled, self._inputs_for(size))
        self.model_graphs[size, has_images].replay()

    def warmup(self, size: int, has_images: bool = False) -> None:
        """Run a step of padding as it is, so that its kernels are compiled and loaded. From any thread, but not while
        another one captures."""
        logits, slots = self._compute_logits(size, has_images), self._inputs_for(size)[0]
        for tail in self.epilogues.values():
            tail(logits, slots)

    def capture(self, size: int, has_images: bool = False) -> None:
        """Capture the graphs of a size. The largest one's come first: what they leave free in the pool is room for all
        others. Logits are of no use to any graph but the size's own tails, so they are left free too."""
        if (size, has_images) != (self.max_rows, False) and (self.max_rows, False) not in self.model_graphs:
            self.capture(self.max_rows)
        self.inputs.zero_()
        self.warmup(size, has_images)  # in this thread: libraries keep handles for each
        slots = self._inputs_for(size)[0]
        model, logits = self.capturer.capture(lambda: self._compute_logits(size, has_images))
        self.epilogue_graphs |= {
            (size, has_images, name): self.capturer.capture(partial(tail, logits, slots))
            for name, tail in self.epilogues.items()
        }
        self.model_graphs[size, has_images] = model

    def _inputs_for(self, size: int) -> Tensor:
        """Slots, positions and tokens [3, size]."""
        return self.inputs[: 3 * size].view(3, size)

    def _compute_logits(self, size: int, has_images: bool) -> Tensor:
        slots, positions, tokens = self._inputs_for(size)
        tokens = torch.where(tokens == LAST_SAMPLED, self.last_sampled.index_select(0, slots), tokens)
        step = make_decode_context(self.store, self.backend, slots, positions, self.split_scratch)
        if has_images:
            assert self.image_inputs is not None, "nobody sees what no layer attends to"
            step.cross_attention = self.image_inputs.decode_cross_context(slots, self.backend, self.split_scratch)
        return self.logits(self.model(tokens, step))


class CapturedGraph(NamedTuple):
    """What was captured, and what it leaves on the device."""

    graph: torch.cuda.CUDAGraph
    result: Any


class GraphCapturer:
    """Captures graphs on a stream of its own. They share one pool of memory, so no two may be under way at once, and
    what one leaves is valid until the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory_pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], Any]) -> CapturedGraph:
        """What `step` enqueues."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a tensor that is freed while a stream is captured would spoil the capture
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
                try:
                    result = step()
                except BaseException:
                    with suppress(RuntimeError):  # of a capture that failed: what failed is said instead
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self.stream)
        return CapturedGraph(graph, result)
