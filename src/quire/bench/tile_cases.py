"""The cases that `quire bench kernels --tune` measures for each entry of a table of tiles (quire.kernels.triton.tiles):
products, or attention, in the sizes of models, as functions of the tile. On the device "meta" they can only be
compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.bench.kv_batches import random_kv
from quire.bench.low_bit_kernels import AWQ_FORMAT, LINEARS, random_matrix
from quire.bench.rank_kernels import DECODES, LAYERS, LLAMA_8B, PAGE
from quire.bench.replay import inputs
from quire.kernels.forward_batch import LayerCache
from quire.kernels.triton import low_bit
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.decode import SplitScratch, choose_splits, decode, decode_scratch, multiprocessors
from quire.kernels.triton.fp8_linear import quantize_rows, scaled_matmul
from quire.kernels.triton.fused_moe import MAX_EXACT_PAIRS, Routing, fused_moe_one_token, multiply_experts, route
from quire.kernels.triton.launch import cdiv, supports_pdl
from quire.kernels.triton.linear import E4M3, gated_linear, linear
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.tiles import ENTRIES, MORE, Tile
from quire.weights.low_bit import MXFP4_FORMAT

GPU = torch.device("cuda")
SIZES = {
    shape: LLAMA_8B.matrices[name]
    for shape, name in
    {"deep": "down", "square": "o", "middle": "qkv", "tall": "gate_up", "vocabulary": "head"}.items()
}  # fmt: skip
"""Shape -> rows and columns of its weight."""
MODELS = ((128, 8, 2048, 768), (32, 4, 2880, 2880))
"""Experts, experts of a token, hidden and intermediate size: of Qwen3-30B-A3B and GPT-OSS-20B."""
HEADS = {64: (64, 8), 128: (32, 8), 256: (16, 8)}
"""Size of a head -> query heads and key/value heads."""

Case = Sequence[Callable[[Tile], Tensor]]
"""Functions that do the same work, each on inputs of its own, so that the inputs are not in the GPU's cache."""


def cases(entry: str, most: int, device: torch.device) -> list[Case]:
    """Return the cases of an entry, named without its `most`."""
    family, form, shape = entry.split("/")
    if family == "linear":
        return [_linear(form, shape, most, device)]
    if family == "decode":
        return list(_decodes(int(shape), most, device))
    if form == "one_token" and family == "experts":
        return [_one_token(*MODELS[most == MORE], device)]
    if form == "one_token":
        return list(_low_bit_one_token(shape == "gated", device))
    return list((_experts if family == "experts" else _low_bit)(shape == "gated", most, device))


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _linear(form: str, shape: str, most: int, device: torch.device) -> Case:
    """Return products of `most` rows, each after the small kernel that precedes it in a layer."""
    (size, depth), activation, pdl = SIZES[shape], "silu" if shape == "tall" else None, supports_pdl(GPU)
    dtype = torch.bfloat16 if form == "half" else E4M3
    ones = torch.ones(1, size, device=device)
    scale = None if form == "half" else ones
    x, norm = _random(device, most, depth), _random(device, depth)

    def product(weight: Tensor, tile: Tile) -> Tensor:
        if form == "rounded":
            rounded = quantize_rows(x, pdl=pdl)
            return scaled_matmul(*rounded, weight, None, ones, x.dtype, activation, pdl=pdl, tile=tile)
        rows = rms_norm(x, norm, 1e-6, pdl=pdl)
        if activation is not None:
            return gated_linear(rows, weight, activation, scale, pdl=pdl, tile=tile)
        return linear(rows, weight, None, scale, pdl=pdl, tile=tile)

    copies = range(inputs(size * depth * dtype.itemsize))
    return [partial(product, _random(device, size, depth).to(dtype)) for _ in copies]


def _one_token(count: int, top: int, hidden: int, inner: int, device: torch.device) -> Case:
    """Return both products of the experts of one token, for several choices of experts."""
    x, gate_up = _random(device, 1, hidden), _random(device, count, 2 * inner, hidden)
    down, none = _random(device, count, hidden, inner), (None, None)

    def mixture(routing: Routing, tile: Tile) -> Tensor:
        return fused_moe_one_token(x, routing, gate_up, down, "silu", none, none, (-1, -1), supports_pdl(GPU), tile)

    logits = [_random(device, 1, count) for _ in range(inputs(6 * top * hidden * inner))]
    return [partial(mixture, route(row, top, True, listed=False)) for row in logits]


def _experts(gated: bool, most: int, device: torch.device, low_bits: bool = False) -> Iterator[Case]:
    """Yield one of the two products of the experts of each of MODELS, with three quarters of `most` pairs an expert, or
    512 if `most` is MORE."""
    for count, top, hidden, inner in MODELS:
        tokens = cdiv(count * (512 if most == MORE else most * 3 // 4), top)
        routing, pairs = route(_random(device, tokens, count), top, True), tokens * top
        (size, depth), kind = ((inner, hidden), ACTIVATIONS["silu"]) if gated else ((hidden, inner), None)
        x, rows = _random(device, tokens if gated else pairs, depth), (1 + gated) * size
        exact = not gated and (low_bits or pairs <= MAX_EXACT_PAIRS)
        out = x.new_empty(pairs, size, dtype=torch.float32 if exact else x.dtype)
        weight = (
            random_matrix(count * rows, depth, MXFP4_FORMAT, device)
            if low_bits
            else _random(device, count, rows, depth)
        )
        yield [partial(_multiply, x, weight, out, routing, kind)]


def _multiply(
    x: Tensor, weight: Tensor | low_bit.LowBitMatrix, out: Tensor, routing: Routing, kind: str | None, tile: Tile
) -> Tensor:
    if isinstance(weight, Tensor):
        multiply_experts(x, weight, None, None, out, routing, tile, kind, -1, supports_pdl(GPU))
    else:
        tokens, rows = len(routing.expert_ids), out.shape[1] * (1 if kind is None else 2)
        experts = weight.rows // rows
        low_bit.launch(x, weight, None, out, routing, tokens, tile, kind, supports_pdl(GPU), experts=experts)
    return out


def _low_bit(gated: bool, most: int, device: torch.device) -> Iterator[Case]:
    """Yield linear layers of `most` rows, or MAX_FUSED_ROWS if that is less, then experts. The tile for up to 8 rows is
    measured with one row too."""
    for rows in (1, 8) if most == 8 else (min(most, low_bit.MAX_FUSED_ROWS),):
        for size, columns, activation in LINEARS.values():
            if (activation is not None) == gated:
                x, copies = _random(device, rows, columns), range(inputs(size * AWQ_FORMAT.gpu_row_bytes(columns)))
                run = partial(_low_bit_linear, x, activation)
                yield [partial(run, random_matrix(size, columns, AWQ_FORMAT, device)) for _ in copies]
    yield from _experts(gated, most, device, low_bits=True)


def _low_bit_one_token(gated: bool, device: torch.device) -> Iterator[Case]:
    """Yield one of the two products of the experts of one token, for each of MODELS, for several choices of experts."""
    for count, top, hidden, inner in MODELS:
        (size, depth), kind = ((inner, hidden), ACTIVATIONS["silu"]) if gated else ((hidden, inner), None)
        rows = (1 + gated) * size
        weight = random_matrix(count * rows, depth, MXFP4_FORMAT, device)
        x, out = _random(device, 1 if gated else top, depth), _random(device, top if gated else 1, size)
        logits = [_random(device, 1, count) for _ in range(inputs(top * rows * MXFP4_FORMAT.gpu_row_bytes(depth)))]
        product = partial(low_bit.launch_one_token, x, weight, None, out, kind=kind, pdl=supports_pdl(GPU))
        yield [partial(product, route(row, top, True, listed=False)) for row in logits]


def _low_bit_linear(x: Tensor, activation: str | None, weight: low_bit.LowBitMatrix, tile: Tile) -> Tensor:
    return low_bit.low_bit_linear(x, weight, None, activation, pdl=supports_pdl(GPU), tile=tile)


def _decodes(dim: int, most: int, device: torch.device) -> Iterator[Case]:
    """Yield decode attention over pages, in those sizes of DECODES for which this GPU uses the entry's tile."""
    (heads, kv_heads), count = HEADS[dim], multiprocessors(GPU)
    for batch, context in DECODES:
        splits = choose_splits(batch, kv_heads, count)
        programs = cdiv(batch * kv_heads * splits, count)  # of a multiprocessor
        if next(limit for limit in ENTRIES[f"decode/half/{dim}"] if programs <= limit) == most:
            layers = min(inputs(2 * batch * kv_heads * context * dim * 2), LAYERS)
            kv = random_kv(batch, context, kv_heads, dim, PAGE, layers, torch.bfloat16, heads, on=device.type)
            scratch = decode_scratch(batch, heads, kv_heads, dim, splits, device)
            q, rows = _random(device, batch, heads, dim), (kv.tables, kv.slots, kv.lengths)
            yield [partial(_decode, q, cache, rows, splits, scratch) for cache in kv.caches]


def _decode(
    q: Tensor, cache: LayerCache, rows: tuple[Tensor, Tensor, Tensor], splits: int, scratch: SplitScratch, tile: Tile
) -> Tensor:
    return decode(q, cache, *rows, splits=splits, scratch=scratch, tile=tile)
