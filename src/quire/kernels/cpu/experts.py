"""A mixture of experts with packed weights (native/experts.cpp): rows are sorted by their experts, and each of the two
products of all experts is one operation. An expert's rows have the bits that they would have in a product of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu.library_loader import required_library
from quire.kernels.cpu.linear import CHUNKS_PER_THREAD, MIN_CHUNK_BYTES, PackedLinear
from quire.kernels.cpu.low_bit_linear import MAX_UNSTAGED_ROWS, PackedLowBitLinear
from quire.kernels.cpu.rows import DTYPE_SUFFIXES, split_columns

Packed = PackedLinear | PackedLowBitLinear
ROUTED_ROWS = 16  # of a chunk
GATHERED_BYTES = 1 << 17  # of a chunk


class PackedExperts:
    """The packed weights of all experts, or of one rank's: `gate_up` with its activation, gated, and `down`, an entry
    an expert. `first`: the number of the first of them among all experts."""

    def __init__(self, gate_up: Sequence[Packed], down: Sequence[Packed], first: int = 0) -> None:
        self.gate_up, self.down, self.first = StackedProducts(gate_up), StackedProducts(down), first
        inner, outer = self.gate_up.weights[0], self.down.weights[0]
        assert len(gate_up) == len(down), f"{len(gate_up)} gate and up weights, but {len(down)} down weights"
        assert inner.gated, "gate and up are not gated"
        assert not outer.gated, "down is gated"
        assert (inner.width, inner.columns) == (outer.columns, outer.rows), (
            f"gate and up [{inner.rows}, {inner.columns}] and down [{outer.rows}, {outer.columns}] do not fit"
        )
        assert inner.dtype == outer.dtype, f"gate and up compute in {inner.dtype}, down in {outer.dtype}"

    def __call__(
        self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool, shared: Tensor | None = None,
        shared_gate: Tensor | None = None, scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return [T, hidden] of x [T, hidden] and the router's logits [T, all experts], as SparseMLP. `shared` [T,
        hidden] is the shared expert's output, to be multiplied by the sigmoid of `shared_gate` [T, 1]. `scale`: see
        `route`."""
        kernels, (tokens, size), experts = required_library(), x.shape, len(self.down.weights)
        columns, dtype = self.gate_up.weights[0].columns, self.gate_up.weights[0].dtype
        assert x.dtype == dtype, f"{x.dtype} is not {dtype}"
        assert size == columns, f"{tuple(x.shape)} is not [T, {columns}]"
        end = self.first + experts
        fits = len(logits) == tokens and logits.shape[1] >= end
        assert fits, f"logits {tuple(logits.shape)} are not of {tokens} rows, or not of {end} experts"
        pairs, out, suffix = tokens * top_k, x.new_empty(x.shape), DTYPE_SUFFIXES[x.dtype]
        if shared is not None:
            assert shared_gate is not None, "the shared expert has a gate"
            assert shared.shape == x.shape, f"shared {tuple(shared.shape)} is not {tuple(x.shape)}"
            assert shared_gate.shape == (tokens, 1), f"shared_gate {tuple(shared_gate.shape)} is not {(tokens, 1)}"
            assert shared.dtype == shared_gate.dtype == x.dtype, f"the shared expert is not in {x.dtype}"
            shared, shared_gate = shared.contiguous(), shared_gate.contiguous()
        if not tokens:
            return out
        weights, chosen = route(logits, top_k, renormalize, scale)
        bounds, hit, places = (
            torch.empty(count, dtype=torch.int64) for count in (experts + 1, min(experts, pairs), pairs)
        )
        kernels.call("experts_sort", 1, chosen, bounds, hit, places, pairs, experts, len(hit), self.first)
        own = pairs if logits.shape[1] == experts else int(bounds[-1])
        x, rows = x if x.stride(1) == 1 else x.contiguous(), x.new_empty(own, size)
        width, per = size * x.itemsize, max(1, GATHERED_BYTES // (size * x.itemsize))
        args = x, rows, places, pairs, top_k, width, x.stride(0) * x.itemsize, per
        kernels.call("experts_gather", -(-pairs // per), *args)
        rows = self.down(self.gate_up(rows, tokens, bounds, hit), tokens, bounds, hit)
        part, parts = split_columns(size)
        kernels.call(
            f"experts_combine_{suffix}", tokens * parts, rows, weights, places, out, shared, shared_gate, size, top_k,
            part,
        )  # fmt: skip
        return out


def route(logits: Tensor, top_k: int, renormalize: bool, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights (fp32) and experts (int64), as quire.kernels.triton.fused_moe.topk_softmax."""
    tokens, experts = logits.shape
    assert 1 <= top_k <= experts, f"{top_k} of {experts} experts"
    assert scale is None or (scale.shape, scale.dtype) == ((experts,), torch.float32), "a scale an expert, in fp32"
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights, chosen = (torch.empty(tokens, top_k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    required_library().call(
        f"experts_route_{DTYPE_SUFFIXES[logits.dtype]}", -(-tokens // ROUTED_ROWS), logits, weights, chosen, tokens,
        experts, top_k, logits.stride(0), int(renormalize), ROUTED_ROWS, scale,
    )  # fmt: skip
    return weights, chosen


def weight_kind(weight: Packed) -> tuple[object, ...]:
    """Return what packed weights have in common that one operation multiplies."""
    form = weight.form if isinstance(weight, PackedLowBitLinear) else None
    return (
        form, weight.rows, weight.columns, weight.dtype, weight.gated, weight.activation, weight.deterministic,
        weight.data.shape, weight.bias is None,
    )  # fmt: skip


class StackedProducts:
    """Packed weights of one shape and format, which are multiplied by rows sorted by their index."""

    def __init__(self, weights: Sequence[Packed]) -> None:
        self.weights = tuple(weights)
        assert weights, "there are no weights"
        assert len({weight_kind(weight) for weight in weights}) == 1, "weights have different shapes or formats"
        self.addresses = torch.tensor([weight.data.data_ptr() for weight in weights])
        biases = [weight.bias.data_ptr() for weight in weights if weight.bias is not None]
        self.biases = torch.tensor(biases) if biases else None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(weight.data.nbytes for weight in self.weights)

    def __call__(self, x: Tensor, most: int, bounds: Tensor, hit: Tensor) -> Tensor:
        """Return the products of x [P, columns], of which at most `most` rows belong to a weight; `bounds` and `hit`:
        see native/experts.cpp."""
        kernels, first = required_library(), self.weights[0]
        assert x.shape[1] == first.columns, f"{tuple(x.shape)} is not [P, {first.columns}]"
        out = x.new_empty(len(x), first.width)
        per, chunks = first.max_chunk_rows(), kernels.threads * CHUNKS_PER_THREAD if kernels.threads > 1 else 1
        groups = max(1, min(first.panels, -(-chunks // len(hit)), first.data.nbytes // MIN_CHUNK_BYTES))
        most = min(most, len(x))
        staged = first.stage(x) if isinstance(first, PackedLowBitLinear) and most > MAX_UNSTAGED_ROWS else None
        args = first.product_args(x, out, per, groups, staged)
        kernels.call(
            "experts_product", len(hit) * groups, kernels.address(first.kernel), bounds, hit, self.addresses,
            x.stride(0) * x.itemsize, out.stride(0) * out.itemsize, 0 if staged is None else staged.stride(0),
            self.biases, len(args), *args,
        )  # fmt: skip
        return out
