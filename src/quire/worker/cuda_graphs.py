"""Decode steps as CUDA graphs: a step in which every sequence computes one token is two launches, the model up to its
logits and an epilogue.

Graphs are captured for each batch size, at start or when it is first needed; smaller batches are padded with rows of
slot 0, which read and write scratch memory. What changes between replays is on the device already (page tables, last
samples) or is uploaded in one small copy: each row's token, slot and position.
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
from quire.kernels.triton.compile_locks import KernelNotLoaded, loading_refused
from quire.kernels.triton.decode import SplitScratch, decode_scratch
from quire.models.decoder import one_layer_of_each_kind
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.worker.cross_attention import CrossAttentionImages
from quire.worker.image_inputs import ImageInputs
from quire.worker.inputs import resolve_positions, resolve_tokens
from quire.worker.staging_buffer import StagingBuffer
from quire.worker.step_context import make_decode_context
from quire.worker.store import Store

AnyEpilogue = Callable[[Tensor, Tensor], Any]


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that have graphs. From 64 on they are those whose matrix products take clearly less time
    than the next size's: with the library's tiles others are as slow, or slower (all products of Llama-3-8B on an H200:
    448 rows take 1.4 times as long as 512)."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 161, 16), 200, 256, 320, 352, 384, 432, 512, 576, 640, 704, 768, 864]
    return [*(size for size in steps if size < max_rows), max_rows]


def allocate_split_scratch(
    caches: Iterable[LayerCache], launches: Callable[[LayerCache], Iterable[tuple[int, int]]]
) -> SplitScratch | None:
    """Return scratch memory that all layers share, which run one after another, or None if there are no caches.
    `launches` yields the (rows, splits) of a layer's launches."""
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
    """Graphs for up to `max_rows` rows. `logits` is applied to what `model` returns. `sampled_tokens`: see
    resolve_tokens. `base_positions`: see resolve_positions. `epilogues` are functions of the logits [B, V] and the
    slots [B], by name, captured for each size; their results are valid until the next replay. `hidden_states` keeps
    those of all rows."""

    def __init__(
        self,
        model: Any,
        logits: Callable[[Any], Any],
        store: Store,
        backend: TritonBackend,
        sampled_tokens: Tensor,
        staging: StagingBuffer,
        max_rows: int,
        epilogues: dict[str, AnyEpilogue],
        capturer: GraphCapturer,
        image_inputs: ImageInputs | None = None,
        base_positions: Tensor | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self.base_positions = base_positions
        self.model, self.logits, self.epilogues, self.backend = model, logits, epilogues, backend
        self.store, self.sampled_tokens, self.staging, self.capturer = store, sampled_tokens, staging, capturer
        self.max_rows, self.capture_sizes = max_rows, capture_sizes(max_rows)
        self.image_inputs, self.hidden_states = image_inputs, hidden_states
        # With cross-attention layers, a size has two graphs: for text only, and for rows that may attend to images.
        self.image_variants = (False, True) if store.cross_caches else (False,)
        self.model_graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by size and has_images
        self.epilogue_graphs: dict[tuple[int, bool, str], CapturedGraph] = {}
        # Zeros: slot 0 and position 0 are padding.
        self.inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=sampled_tokens.device)
        self.split_scratch = allocate_split_scratch(
            chain(store.caches.values(), store.cross_caches.values()),
            lambda cache: ((size, backend.num_splits(size, cache)) for size in self.capture_sizes),
        )

    def can_run(self, slices: SeqSlices) -> bool:
        """Return True if a graph is large enough and every slice computes one token and samples the next."""
        return self.has_room(len(slices)) and slices.is_decode_only

    def has_room(self, rows: int) -> bool:
        """Return True if a graph is large enough."""
        return rows <= self.max_rows

    def run(self, columns: np.ndarray, epilogue: str, has_images: bool = False) -> Any:
        """Enqueue a step of rows, `columns` [3, R] of which are their slots, positions and tokens. Return the result of
        its epilogue on the device, padding included. With `has_images`, some row attends to images."""
        size = self.ensure_captured(columns.shape[1], has_images)
        self.store.record_graph_replay(size, has_images)
        self.replay(columns, size, has_images)
        captured = self.epilogue_graphs[size, has_images, epilogue]
        captured.graph.replay()
        return captured.result

    def ensure_captured(self, rows: int, has_images: bool) -> int:
        """Return the size of the graphs that run `rows` rows. Capture them first if needed."""
        size = self.capture_sizes[bisect_left(self.capture_sizes, rows)]
        if (size, has_images) not in self.model_graphs:
            self.capture(size, has_images)
        return size

    def replay(self, columns: np.ndarray, size: int, has_images: bool) -> None:
        """Enqueue the step up to its logits."""
        padded = np.zeros((3, size), dtype=np.int64)
        padded[:, : columns.shape[1]] = columns
        self.staging.upload(padded, self._inputs_for(size))
        self.model_graphs[size, has_images].replay()

    def warmup(self, size: int, has_images: bool = False) -> None:
        """Run a step of padding without a graph, so that its kernels are compiled and loaded. From any thread, but not
        while another one captures."""
        logits, slots = self._compute_logits(size, has_images), self._inputs_for(size)[0]
        for epilogue in self.epilogues.values():
            epilogue(logits, slots)

    def capture(self, size: int, has_images: bool = False) -> None:
        """Capture the graphs of a size. The largest size comes first: all others reuse the memory that it leaves free
        in the pool. Logits are used only by the size's own epilogues, so their memory is reused too."""
        if (size, has_images) != (self.max_rows, False) and (self.max_rows, False) not in self.model_graphs:
            self.capture(self.max_rows)
        self.inputs.zero_()
        with one_layer_of_each_kind(self.model):
            self.warmup(size, has_images)  # in this thread: libraries have handles per thread
        slots = self._inputs_for(size)[0]
        model, logits = self.capturer.capture(lambda: self._compute_logits(size, has_images))
        self.epilogue_graphs |= {
            (size, has_images, name): self.capturer.capture(partial(epilogue, logits, slots))
            for name, epilogue in self.epilogues.items()
        }
        self.model_graphs[size, has_images] = model

    def _inputs_for(self, size: int) -> Tensor:
        """Return slots, positions and tokens [3, size]."""
        return self.inputs[: 3 * size].view(3, size)

    def _compute_logits(self, size: int, has_images: bool) -> Any:
        slots, positions, tokens = self._inputs_for(size)
        tokens = resolve_tokens(tokens, slots, self.sampled_tokens)
        positions = resolve_positions(positions, slots, self.base_positions)
        cross_attention = None
        if has_images:
            assert isinstance(self.image_inputs, CrossAttentionImages), "no layer attends to images"
            cross_attention = self.image_inputs.decode_cross_context(slots, self.backend, self.split_scratch)
        step = make_decode_context(
            self.store, self.backend, slots, positions, self.split_scratch, cross_attention=cross_attention,
            hidden_states=self.hidden_states,
        )  # fmt: skip
        return self.logits(self.model(tokens, step))


class CapturedGraph(NamedTuple):
    """A graph, and what it returns on the device."""

    graph: torch.cuda.CUDAGraph
    result: Any


class GraphCapturer:
    """Captures graphs on a separate stream. They share one memory pool, so no two may run at once, and the result of
    one is valid until the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory_pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], Any]) -> CapturedGraph:
        """Return a graph of what `step` enqueues, and its result. No kernel may be loaded during a capture. If `step`
        launches one that is not loaded, run it without a capture, which loads the kernel, and capture it again."""
        with suppress(KernelNotLoaded), loading_refused():
            return self._capture(step)
        step()
        return self._capture(step)

    def _capture(self, step: Callable[[], Any]) -> CapturedGraph:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a tensor that is freed during a capture would invalidate it
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
                try:
                    result = step()
                except BaseException:
                    with suppress(RuntimeError):  # of a failed capture; the first error is raised instead
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self.stream)
        return CapturedGraph(graph, result)
