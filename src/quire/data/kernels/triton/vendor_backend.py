"""The attention backend on a GPU whose long prompts go through a kernel that knows nothing of pages, unmodified: one
call a sequence. All else is TritonBackend's, over contiguous keys and values: rows of one token, rotation and writes,
short prompts, and layers that the kernel isn't for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels import vendor
from quire.data.kernels.batch import Batch, LayerCache
from quire.data.kernels.triton.backend import Launches, TritonBackend
from quire.errors import StartupError
from quire.vocabulary.specs import Layout


class VendorBackend(TritonBackend):
    """See TritonBackend. `name` is the kernel's in `vendor.KERNELS`."""

    needs = Layout.CONTIGUOUS

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.kernel = name, vendor.KERNELS[name]

    def check(self, cache: LayerCache) -> None:
        """StartupError for a layer that the kernel can't know, or where it doesn't run."""
        if not vendor.fits(self.name, cache):
            raise StartupError(
                f"--attention is {self.name}, and the model has heads of {cache.head_dim} numbers of "
                f"{8 * cache.dtype.itemsize} bits",
                f"It takes multiples of 8 up to {vendor.MOST_DIM[self.name]}, of 16 bits; use --attention triton, or "
                "--dtype bfloat16",
            )
        try:
            self._try(cache)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise StartupError(
                f"--attention is {self.name}, which this torch, {torch.__version__}, can't run here: {reason}",
                "Use --attention triton",
            ) from error

    def _try(self, cache: LayerCache) -> None:
        """Two chunks of nothing, the second as one that follows another."""
        q = torch.zeros((vendor.LEAST, cache.heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        k = torch.zeros((2 * len(q), cache.kv_heads, cache.head_dim), dtype=cache.dtype, device=cache.device)
        keys = k.transpose(0, 1)
        for start in (0, len(q)):
            end = start + len(q)
            self.kernel(q, keys[:, :end], keys[:, :end], start, cache.scale)

    def plan(
        self, batch: Batch, cache: LayerCache, asked: Batch | None = None, without: np.ndarray | None = None
    ) -> Launches:
        of = asked or batch
        lent = self._lent(cache, of)
        plan = super().plan(batch, cache, asked, lent)
        rows = zip(*(x[lent].tolist() for x in (of.slots, of.offsets, of.lengths, of.starts)))
        plan.lent = [(slot, offset, length, start) for slot, offset, length, start in rows]
        return plan

    def _lent(self, cache: LayerCache, of: Batch) -> np.ndarray:
        """[R]: which rows are for the kernel."""
        contexts, many = of.contexts(cache.group), of.lengths > 1
        if not self.is_long(cache, of.lengths[many], contexts[many]):
            return np.zeros_like(many)
        return _long_rows(of.lengths, contexts)

    def is_long(self, cache: LayerCache, lengths: np.ndarray, contexts: np.ndarray) -> bool:
        return super().is_long(cache, lengths, contexts) and bool(_long_rows(lengths, contexts).any())

    def _long(self, cache: LayerCache) -> int | None:
        return vendor.LONG if vendor.takes(self.name, cache) else None

    def rehearse_long(self, cache: LayerCache, tables: Tensor) -> None:
        if vendor.takes(self.name, cache):
            self._try(cache)

    def read(self, q: Tensor, cache: LayerCache, plan: Launches) -> Tensor:
        if len(plan.lent) == 1 and plan.tiles is None and plan.slots is None:
            return self._row(q, cache, *plan.lent[0])  # there is nothing else
        out = super().read(q, cache, plan)
        for row in plan.lent:
            offset, length = row[1:3]
            out[offset : offset + length] = self._row(q, cache, *row)
        return out

    def _row(self, q: Tensor, cache: LayerCache, slot: int, offset: int, length: int, start: int) -> Tensor:
        keys, values = (x[slot, :, : start + length] for x in (cache.keys, cache.values))
        return self.kernel(q[offset : offset + length], keys, values, start, cache.scale)


def _long_rows(lengths: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """[R]: the rows of a step with long prompts that are for the kernel; what is short beside them isn't."""
    return (lengths >= vendor.LEAST) & (contexts >= vendor.LONG)
