"""Mixture of experts: the choice of a token's experts, and the products of all experts in one launch.

The choice also lists each expert's (token, expert) pairs. A program computes some pairs of one expert by some rows of
the expert's weight, `W x^T` as in the few-row kernel of `linear`. The grid has a program for every tile that any choice
of experts could need, and programs without pairs end at once, so that a graph serves any choice. No two programs add to
the same number, and a pair's result does not depend on its place in the list, so results are reproducible. A single
token has its own kernel (`_one_token`).

Weights may be in FP8 (e4m3), as in `linear`: they are converted in registers, and sums are multiplied by scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import ACTIVATIONS, activate_gated
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.kernels.triton.linear import E4M3, _weight_rows
from quire.kernels.triton.linear_tiles import SCALE_GROUP, few_rows_tile, grouped_tile
from quire.kernels.triton.tiles import Tile, card_tile

NARROW_DEPTH = 4096
"""Below it one token has a tile of its own, not that of a linear layer."""
ONE_TILE = Tile(32, 64, 128, 4, 4)
"""The tile for any number of pairs, the same on every card."""
MAX_EXACT_PAIRS = 4096
"""The most pairs whose outputs stay in fp32 until they are summed. Those of more, in prompts, are rounded to x's dtype,
as they take much of a layer's time to write and read."""
GROUP_TILES = 8
"""Tiles of pairs that are multiplied by a weight at the same time, so that it is read from memory once for them."""


class Routing(NamedTuple):
    """The experts of each token. A token's choice of an expert is a pair; they are numbered token by token.

    `weights` [T, top] fp32, `expert_ids` [T, top] int64. `counts` [experts] int32: how many pairs each expert has;
    `pairs` [experts, T] int32: their numbers, in any order. A single token needs no lists (None).

    If ranks divide the experts, this is one rank's routing: its experts, a `share` of all, are numbered from 0. Pairs
    of other ranks' experts have the expert -1 and are in no list.
    """

    weights: Tensor
    expert_ids: Tensor
    counts: Tensor | None
    pairs: Tensor | None
    share: float = 1.0

    @property
    def own_ids(self) -> Tensor | None:
        """`expert_ids` [T, top] if some of them may be -1, else None."""
        return self.expert_ids if self.share < 1 else None


@fast_launch
@triton.jit(do_not_specialize=["first"])
def _route(
    logits, weights, chosen, counts, pairs, scale, tokens, stride, first,
    EXPERTS: tl.constexpr, OWN: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, PADDED_TOP: tl.constexpr,
    NORMALISED: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token a program, and list its pairs of the OWN experts from `first` on. If a likelihood
    is NaN, all weights are NaN and the first experts are chosen, because comparisons with NaN depend on the device."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    x = tl.load(logits + row * stride + expert, mask=expert < EXPERTS, other=-float("inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, axis=0))
    whole = tl.sum(x, axis=0)
    wrong = whole != whole
    x = tl.where(wrong, 1.0 / (1 + expert), x / whole)
    x = tl.where(expert < EXPERTS, x, -1.0)
    rank, total = tl.arange(0, PADDED_TOP), 0.0
    best, ids = tl.zeros((PADDED_TOP,), tl.float32), tl.zeros((PADDED_TOP,), tl.int32)
    for j in tl.static_range(TOP):
        at = tl.minimum(tl.argmax(x, axis=0), EXPERTS - 1)
        likelihood = tl.sum(tl.where(expert == at, x, 0.0), axis=0)
        total += likelihood
        best, ids = tl.where(rank == j, likelihood, best), tl.where(rank == j, at, ids)
        x = tl.where(expert == at, -1.0, x)
    best = best / total if NORMALISED else best
    if scale is not None:
        best *= tl.load(scale + ids)
    real, pair = rank < TOP, row * TOP + rank
    own = ids - first
    mine = real & (own >= 0) & (own < OWN)
    tl.store(chosen + pair, tl.where(mine, own, -1).to(tl.int64), mask=real)
    tl.store(weights + pair, tl.where(wrong, float("nan"), best), mask=real)
    if LISTED:
        place = tl.atomic_add(counts + own, 1, mask=mine, sem="relaxed")
        tl.store(pairs + own.to(tl.int64) * tokens + place, pair.to(tl.int32), mask=mine)


def route(
    logits: Tensor, top_k: int, renormalize: bool, listed: bool = True, scale: Tensor | None = None,
    own: range | None = None, *, pdl: bool = False,
) -> Routing:  # fmt: skip
    """Choose the `top_k` most probable experts of each row of logits [T, experts]. Their weights are probabilities,
    divided by their sum if `renormalize`, the largest first, times the `scale` [experts] of their expert, if given. If
    not `listed`, there are no lists of pairs. `own`: the experts of this rank (None: all)."""
    tokens, experts = logits.shape
    own = range(experts) if own is None else own
    assert logits.stride(1) == 1, "rows are contiguous"
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    counts = torch.zeros(len(own), dtype=torch.int32, device=logits.device) if listed else None
    pairs = torch.empty((len(own), tokens), dtype=torch.int32, device=logits.device) if listed else None
    if tokens:
        _route[(tokens,)](
            logits, weights, chosen, chosen if counts is None else counts, chosen if pairs is None else pairs, scale,
            tokens, logits.stride(0), own.start,
            EXPERTS=experts, OWN=len(own), PADDED=power_of_2(experts), TOP=top_k, PADDED_TOP=power_of_2(top_k),
            NORMALISED=renormalize, LISTED=listed, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return Routing(weights, chosen, counts, pairs, len(own) / experts)


@triton.jit
def find_pairs(
    counts, pairs, tokens, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return (expert, pairs, which of these are valid) of a tile; the expert is EXPERTS or more if there is no such
    tile."""
    experts = tl.arange(0, PADDED)
    listed = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
    tiles = tl.cdiv(listed, BLOCK_M)
    passed = tl.cumsum(tiles, axis=0)
    expert = tl.sum((passed <= tile).to(tl.int32), axis=0)
    mine = experts == expert
    at = (tile - tl.sum(tl.where(mine, passed - tiles, 0), axis=0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = at < tl.sum(tl.where(mine, listed, 0), axis=0)
    pair = tl.load(pairs + expert.to(tl.int64) * tokens + at, mask=real, other=0).to(tl.int64)
    return expert, pair, real


@triton.jit
def _add(acc, rows, v, inside, scale, GROUP: tl.constexpr):
    """Return acc [N, M] + w [N, K] v [K, M], with the scales of a group of numbers if there are groups."""
    w = tl.load(rows, mask=inside[None, :], other=0.0).to(v.dtype)
    if GROUP > 0:
        part = tl.dot(w, v, input_precision="ieee")
        acc = tl.fma(part, tl.broadcast_to(tl.load(scale)[:, None], part.shape), acc)
    else:
        acc = tl.dot(w, v, acc, input_precision="ieee")
    return acc


@fast_launch
@triton.jit(do_not_specialize=["tokens", "tiles"])
def _experts(
    x, weight, bias, scale, shares, out, counts, pairs, tokens, tiles, x_stride, size, depth,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute for each pair: with a KIND, act(gate) * up of its token's x; without, the product of the pair's row of x,
    and `bias` if there is one, times its share. GROUP numbers of a row share a scale: 0 for a whole row, -1 if the
    weight is not in FP8."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the kernel before may choose the experts, so no weights can be loaded earlier
    across, index = tl.cdiv(size, BLOCK_N), tl.program_id(0)
    first = index // (SIDE * across) * SIDE
    beside = tl.minimum(tiles - first, SIDE)
    tile, left = first + index % (SIDE * across) % beside, index % (SIDE * across) // beside * BLOCK_N
    expert, pair, real = find_pairs(counts, pairs, tokens, tile, EXPERTS, PADDED, BLOCK_M)
    if expert < EXPERTS:
        n, k = left + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        source = pair
        if KIND is not None:
            source = pair // TOP
        inputs = x + source[None, :] * x_stride + k[:, None]
        each = size if KIND is None else 2 * size
        lines = expert.to(tl.int64) * each + tl.minimum(n, size - 1)
        rows, factors = weight + lines[:, None] * depth + k[None, :], scale + lines
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, depth, BLOCK_K):
            inside = start + k < depth
            v = tl.load(inputs + start, mask=inside[:, None] & real[None, :], other=0.0)
            by = factors + start // GROUP * (EXPERTS * each) if GROUP > 0 else factors
            acc = _add(acc, rows + start, v, inside, by, GROUP)
            if KIND is not None:
                other = _add(other, rows + start + size * depth, v, inside, by + size, GROUP)
        if GROUP == 0:
            acc *= tl.load(factors)[:, None]
            if KIND is not None:
                other *= tl.load(factors + size)[:, None]
        if bias is not None:
            acc += tl.load(bias + lines).to(tl.float32)[:, None]
            if KIND is not None:
                other += tl.load(bias + lines + size).to(tl.float32)[:, None]
        if KIND is not None:
            acc = activate_gated(acc, other, KIND)
        else:
            acc *= tl.load(shares + pair, mask=real, other=0.0)[None, :]
        place = out + pair[None, :] * size + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < size)[:, None] & real[None, :])


@fast_launch
@triton.jit
def _sum(
    parts, out, own_ids,
    SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store to out[row] the sum of the row's TOP parts, in their order, without those whose expert is -1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, columns = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        inside = columns < SIZE
        if own_ids is not None:
            inside = inside & (tl.load(own_ids + row * TOP + j) >= 0)
        total += tl.load(parts + (row * TOP + j) * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, total.to(out.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def _add_up_pairs(
    x, weight, bias, scale, shares, chosen, first_pair, rows, lines, size, depth,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    """Return [N], the sum over PAIRS pairs from `first_pair` on: the products of x and `rows` [N] of the `size` weight
    rows of the pair's expert, plus their `bias` if there is one. With a KIND there is one pair, and x [depth]. Without,
    each pair has a row of x [TOP, depth], and its term is multiplied by its share. If DIVIDED, pairs whose expert is -1
    add nothing. `lines`: the weight rows of all experts.

    One loop runs over the columns of all pairs, so that loads of the next pair begin before a pair is done."""
    k, blocks = tl.arange(0, BLOCK_K), tl.cdiv(depth, BLOCK_K)
    # Not loaded in the loop, where the weight's loads would wait for them.
    experts, factors = (tl.load(chosen + first_pair),), (tl.load(shares + first_pair) if KIND is None else 1.0,)
    for i in tl.static_range(1, PAIRS):
        experts += (tl.load(chosen + first_pair + i),)
        factors += (tl.load(shares + first_pair + i),)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in tl.range(0, PAIRS * blocks, num_stages=STAGES):
        index, block = step // blocks, step % blocks
        columns = block * BLOCK_K + k
        inside, expert, factor = columns < depth, experts[0], factors[0]
        for i in tl.static_range(1, PAIRS):
            expert, factor = tl.where(index == i, experts[i], expert), tl.where(index == i, factors[i], factor)
        if DIVIDED:
            inside, expert = inside & (expert >= 0), tl.maximum(expert, 0)
        line = expert * size + rows
        inputs, weights = x + columns, weight + line[:, None] * depth + columns[None, :]
        if KIND is None:
            inputs += (first_pair + index) * depth
        if EVEN and not DIVIDED:
            w, v = tl.load(weights), tl.load(inputs)
        else:
            w, v = tl.load(weights, mask=inside[None, :], other=0.0), tl.load(inputs, mask=inside, other=0.0)
        part = w.to(tl.float32) * (v.to(tl.float32) * factor)[None, :]
        if GROUP > 0:
            part *= tl.load(scale + line + block * BLOCK_K // GROUP * lines)[:, None]
        elif GROUP == 0:
            part *= tl.load(scale + line)[:, None]
        sums += part
    total = tl.sum(sums, axis=1)
    if bias is not None:
        for i in tl.static_range(PAIRS):
            if not DIVIDED or experts[i] >= 0:
                total += tl.load(bias + experts[i] * size + rows).to(tl.float32) * factors[i]
    return total


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["chosen"])
def _one_token(
    x, weight, bias, scale, shares, out, chosen, size, depth,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, DIVIDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one token's products. With a KIND: act(gate) * up for some weight rows of one of its experts, out [TOP,
    size]. Without: for some weight rows the sum over all its experts, times their shares, out [1, size]. If experts are
    DIVIDED among ranks, pairs whose expert is -1 are left out."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0)
    if KIND is not None:
        across = tl.cdiv(size, BLOCK_N // 2)
        pair, index = index // across, index % across
        if not DIVIDED or tl.load(chosen + pair) >= 0:
            acc = _add_up_pairs(
                x, weight, bias, scale, shares, chosen, pair, _weight_rows(index, size, BLOCK_N, KIND),
                EXPERTS * 2 * size, 2 * size, depth, 1, BLOCK_N, BLOCK_K, EVEN, STAGES, GROUP, KIND, False,
            )  # fmt: skip
            gate, up = tl.split(tl.reshape(acc, (BLOCK_N // 2, 2)))
            n = index * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            tl.store(out + pair * size + n, activate_gated(gate, up, KIND).to(out.dtype.element_ty), mask=n < size)
    else:
        total = _add_up_pairs(
            x, weight, bias, scale, shares, chosen, 0, _weight_rows(index, size, BLOCK_N, KIND),
            EXPERTS * size, size, depth, TOP, BLOCK_N, BLOCK_K, EVEN, STAGES, GROUP, KIND, DIVIDED,
        )  # fmt: skip
        n = index * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(out + n, total.to(out.dtype.element_ty), mask=n < size)


def fused_moe(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    biases: tuple[Tensor | None, Tensor | None] = (None, None), *, deterministic: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return [T, hidden]: for each row of x [T, hidden] the sum of its experts' outputs times their weights, in fp32,
    rounded once (see MAX_EXACT_PAIRS). gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner]. `routing`
    has lists unless T is 1 and not `deterministic`.

    `scales`: of `gate_up` and `down` if they are in FP8, [G, experts * rows], as in `linear`. `biases`: theirs,
    [experts * rows]. If ranks divide the experts, weights and `routing` are one rank's, and the result is its term of
    the sum. A graph may capture this. `deterministic`: a row's bits do not depend on the number of rows. pdl:
    programmatic dependent launch, on GPUs of capability 9 and more.
    """
    (tokens, hidden), top, (experts, inner) = x.shape, routing.expert_ids.shape[1], (len(gate_up), down.shape[2])
    assert gate_up.shape == (experts, 2 * inner, hidden), f"gate_up {tuple(gate_up.shape)} does not fit x and down"
    assert down.shape == (experts, hidden, inner), f"down {tuple(down.shape)} does not fit x and gate_up"
    assert x.stride(1) == 1, "rows are contiguous"
    dense = (gate_up, down, routing.weights, routing.expert_ids)
    assert all(tensor.is_contiguous() for tensor in dense), "weights are dense"
    pairs = tokens * top
    if not pairs:
        return torch.empty_like(x)
    groups = _scale_group(gate_up, scales[0]), _scale_group(down, scales[1])
    if tokens == 1 and not deterministic:
        return fused_moe_one_token(x, routing, gate_up, down, activation, scales, biases, groups, pdl)
    assert routing.counts is not None, "several tokens need lists"
    assert routing.pairs is not None, "several tokens need lists"
    exact = deterministic or pairs <= MAX_EXACT_PAIRS
    between = x.new_empty(pairs, inner)
    parts = x.new_empty(pairs, hidden, dtype=torch.float32 if exact else x.dtype)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, parts, None))
    for (source, weight, target, kind), bias, scale, group in zip(products, biases, scales, groups):
        tile = choose_tile(int(pairs * routing.share), source, weight, kind is not None, group, deterministic)
        multiply_experts(source, weight, bias, scale, target, routing, tile, kind, group, pdl)
    return sum_experts(parts, top, x.dtype, pdl, routing.own_ids)


def multiply_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, out: Tensor, routing: Routing, tile: Tile,
    kind: str | None, group: int, pdl: bool,
) -> None:  # fmt: skip
    """Launch `_experts`: store the products of all pairs to `out` [pairs, size]. x is [T, depth] with an activation
    `kind`, else [pairs, depth]. `group`: see `_scale_group`."""
    (pairs, size), experts, top = out.shape, len(weight), routing.expert_ids.shape[1]
    tiles = min(pairs, pairs // tile.rows + experts)
    _experts[(tiles * cdiv(size, tile.columns),)](
        x, weight, bias, out if scale is None else scale, routing.weights, out, routing.counts, routing.pairs,
        pairs // top, tiles, x.stride(0), size, weight.shape[2],
        EXPERTS=experts, PADDED=power_of_2(experts), TOP=top, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        BLOCK_K=tile.depth, SIDE=GROUP_TILES, GROUP=group, KIND=kind, PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def sum_experts(parts: Tensor, top: int, dtype: torch.dtype, pdl: bool, own_ids: Tensor | None = None) -> Tensor:
    """Return [T, hidden]: the sums of the parts [T * top, hidden] of each token, in fp32, rounded once. Parts are left
    out where `own_ids` [T, top], if given, is -1."""
    pairs, hidden = parts.shape
    out = torch.empty(pairs // top, hidden, dtype=dtype, device=parts.device)
    block = min(power_of_2(hidden), 1024)
    blocks = cdiv(hidden, block)
    if pairs:
        _sum[(pairs // top * blocks,)](
            parts, out, own_ids, SIZE=hidden, TOP=top, BLOCK=block, BLOCKS=blocks, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def fused_moe_one_token(
    x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, activation: str,
    scales: tuple[Tensor | None, Tensor | None], biases: tuple[Tensor | None, Tensor | None],
    groups: tuple[int, int], pdl: bool, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return the same as `fused_moe` for a single token. `groups`: see `_scale_group`. `tile`: another one than the
    card's."""
    (experts, hidden, inner), top = down.shape, routing.expert_ids.shape[1]
    between, out = x.new_empty(top, inner), x.new_empty(1, hidden)
    products = ((x, gate_up, between, ACTIVATIONS[activation]), (between, down, out, None))
    for (source, weight, target, kind), bias, scale, group in zip(products, biases, scales, groups):
        size, depth = target.shape[1], weight.shape[2]
        rows = size if kind is None else top * 2 * size
        chosen = tile or one_token_tile(x.device, rows, depth, group)
        options = {"num_warps": chosen.warps, "launch_pdl": pdl}
        programs = cdiv(size, chosen.columns) if kind is None else top * cdiv(size, chosen.columns // 2)
        _one_token[(programs,)](
            source, weight, bias, target if scale is None else scale, routing.weights, target, routing.expert_ids,
            size, depth,
            EXPERTS=experts, TOP=top, BLOCK_N=chosen.columns, BLOCK_K=chosen.depth, EVEN=depth % chosen.depth == 0,
            STAGES=chosen.stages, GROUP=group, KIND=kind, DIVIDED=routing.share < 1, PDL=pdl, **options,
        )  # fmt: skip
    return out


def one_token_tile(device: torch.device, weight_rows: int, depth: int, group: int) -> Tile:
    """Return the tile of one token for this many weight rows of its experts; `group` as for `multiply_experts`."""
    if depth < NARROW_DEPTH:
        tile = card_tile(device, "experts/one_token/narrow", depth)
    else:
        tile = few_rows_tile(device, 1, weight_rows, depth, fp8=group >= 0)
    return grouped_tile(tile, depth) if group > 0 else tile


def choose_tile(
    pairs: int, x: Tensor, weight: Tensor, gated: bool, group: int = -1, deterministic: bool = False
) -> Tile:
    """Return the tile for `pairs` pairs and a weight [experts, rows, depth], gate's and up's if `gated`; if
    `deterministic`, or in fp32, the same for any number. It has as many stages as fit in shared memory, and is at most
    as deep as a `group` of numbers that share a scale, if any."""
    one = deterministic or x.dtype == torch.float32
    entry = f"experts/half/{'gated' if gated else 'plain'}"
    tile = ONE_TILE if one else card_tile(x.device, entry, cdiv(pairs, len(weight)))
    tile = tile._replace(depth=min(tile.depth, group if group > 0 else tile.depth))
    weights = (2 if gated else 1) * tile.columns * weight.element_size()
    stage = (weights + tile.rows * x.element_size()) * tile.depth
    return tile._replace(stages=max(1, min(tile.stages, shared_memory(x.device) // stage)))


def _scale_group(weight: Tensor, scale: Tensor | None) -> int:
    """Return the numbers of a row that share a scale: -1 if the weight is not in FP8, 0 for a whole row."""
    assert (weight.dtype == E4M3) == (scale is not None), f"a weight in {weight.dtype}, and its scale {scale}"
    if scale is None:
        return -1
    experts, rows, depth = weight.shape
    fits = len(scale) in (1, cdiv(depth, SCALE_GROUP)) and scale.shape[1] == experts * rows
    assert fits, f"the scale {tuple(scale.shape)} does not fit the weight {tuple(weight.shape)}"
    assert scale.is_contiguous(), "the scale must be dense"
    return 0 if len(scale) == 1 else SCALE_GROUP
