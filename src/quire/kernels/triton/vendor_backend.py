"""The attention backend on a GPU that computes long prompts by a kernel without support for pages, in one call a
sequence. TritonBackend computes all else, over contiguous keys and values: rows of one token, rotation and writes,
short prompts, and layers that the kernel does not support.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels import vendor
from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.triton.backend import TritonAttentionPlan, TritonBackend
from quire.protocol.kv_cache_config import KVCacheLayout


class VendorBackend(TritonBackend):
    """A TritonBackend with the kernel `name` of `vendor.KERNELS` for long prompts."""

    layout = KVCacheLayout.CONTIGUOUS

    def __init__(self, name: str, max_drafts: int = 0) -> None:
        super().__init__(max_drafts=max_drafts)
        self.name, self.kernel = name, vendor.KERNELS[name]

    def check_cache(self, cache: LayerCache) -> None:
        """Raise StartupError if the kernel does not support the layer's heads, or does not run on this machine."""
        if not vendor.supports_heads(self.name, cache):
            raise StartupError(
                f"--attention is {self.name}, and the model has heads of {cache.head_dim} numbers of "
                f"{8 * cache.dtype.itemsize} bits",
                f"It takes multiples of 8 up to {vendor.MAX_HEAD_DIMS[self.name]}, of 16 bits; use --attention "
                "triton, or --dtype bfloat16",
            )
        try:
            self._probe(cache)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise StartupError(
                f"--attention is {self.name}, which this torch, {torch.__version__}, can't run here: {reason}",
                "Use --attention triton",
            ) from error

    def _probe(self, cache: LayerCache) -> None:
        """Run the kernel on zeros: a first chunk, and a second one that follows it."""
        q = torch.zeros((vendor.MIN_QUERIES, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        k = torch.zeros((2 * len(q), cache.kv_heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        keys = k.transpose(0, 1)
        for start in (0, len(q)):
            end = start + len(q)
            self.kernel(q, keys[:, :end], keys[:, :end], start, cache.scale)

    def plan(
        self, batch: ForwardBatch, cache: LayerCache, query_batch: ForwardBatch | None = None,
        without: np.ndarray | None = None,
    ) -> TritonAttentionPlan:  # fmt: skip
        of = query_batch or batch
        external = self._external_rows(cache, of)
        plan = super().plan(batch, cache, query_batch, external)
        rows = zip(*(x[external].tolist() for x in (of.slots, of.offsets, of.lengths, of.starts)))
        plan.external_rows = [(slot, offset, length, start) for slot, offset, length, start in rows]
        return plan

    def _external_rows(self, cache: LayerCache, of: ForwardBatch) -> np.ndarray:
        """Return [R]: True for the rows that the kernel computes."""
        contexts, many = of.context_lens(cache.group), of.lengths > 1
        if not self.use_long_kernel(cache, of.lengths[many], contexts[many]):
            return np.zeros_like(many)
        return _long_rows(of.lengths, contexts)

    def use_long_kernel(self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray) -> bool:
        return super().use_long_kernel(cache, lengths, contexts) and bool(_long_rows(lengths, contexts).any())

    def _long_threshold(self, cache: LayerCache) -> int | None:
        return vendor.MIN_CONTEXT if vendor.supports_layer(self.name, cache) else None

    def warmup_long(self, cache: LayerCache, tables: Tensor) -> None:
        if vendor.supports_layer(self.name, cache):
            self._probe(cache)

    def attend_cached(self, q: Tensor, cache: LayerCache, plan: TritonAttentionPlan) -> Tensor:
        if len(plan.external_rows) == 1 and plan.tiles is None and plan.slots is None:
            return self._attend_row(q, cache, *plan.external_rows[0])  # the step has no other rows
        out = super().attend_cached(q, cache, plan)
        for row in plan.external_rows:
            offset, length = row[1:3]
            out[offset : offset + length] = self._attend_row(q, cache, *row)
        return out

    def _attend_row(self, q: Tensor, cache: LayerCache, slot: int, offset: int, length: int, start: int) -> Tensor:
        keys, values = (x[slot, :, : start + length] for x in (cache.keys, cache.values))
        return self.kernel(q[offset : offset + length], keys, values, start, cache.scale)


def _long_rows(lengths: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Return [R]: True for the long rows of a step with long prompts, which the kernel computes; not its short rows."""
    return (lengths >= vendor.MIN_QUERIES) & (contexts >= vendor.MIN_CONTEXT)
