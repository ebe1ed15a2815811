"""Linear layers: for few rows, where reading the weight is all that counts, and one whose rows do not know the batch.

Few rows: a program owns some rows of the weight and streams them through shared memory, `W x^T` on the tensor cores
with the rows of x as the narrow side. No program waits for another and none adds to another's result, so a result is
the same every time, and a row's does not depend on the values of the rows beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.data.kernels.triton.activation import ACTIVATIONS, activate
from quire.data.kernels.triton.launch import cdiv, early, power_of_2, shared_memory
from quire.data.kernels.triton.quick import quick
from quire.errors import StartupError

MAX_ROWS = 32  # at 64 the library's products are faster on an H200, but for the head


class Tile(NamedTuple):
    """What one program computes at a time, and how."""

    rows: int  # of x
    columns: int  # of the result: rows of the weight
    depth: int  # of the dot products
    stages: int
    warps: int
    early: int = 0  # as many tiles of the weight are loaded before the wait for the kernels before


# By the rows of x at most, and the weight's shape: measured on one H200 within a whole step of Llama-3-8B in bf16, with
# small kernels between the products: down is "deep", o "square", qkv "middle", gate_up "tall", the head "vocabulary".
# One row needs no tensor cores. Narrow tiles occupy every multiprocessor, wide ones read x less often.
TILES = {
    1: {
        "deep": Tile(0, 8, 512, 3, 4, 3),
        "square": Tile(0, 8, 512, 3, 4, 2),
        "middle": Tile(0, 8, 512, 3, 2, 1),
        "tall": Tile(0, 4, 2048, 3, 4),
        "vocabulary": Tile(0, 4, 2048, 3, 4),
    },
    8: {
        "deep": Tile(8, 32, 512, 4, 4, 1),
        "square": Tile(8, 32, 512, 3, 2, 2),
        "middle": Tile(8, 16, 256, 6, 1, 1),
        "tall": Tile(8, 32, 128, 4, 2, 2),
        "vocabulary": Tile(8, 32, 256, 3, 2),
    },
    16: {
        "deep": Tile(16, 32, 256, 6, 4),
        "square": Tile(16, 64, 256, 4, 4, 1),
        "middle": Tile(16, 64, 128, 6, 4, 1),
        "tall": Tile(16, 64, 128, 4, 4, 1),
        "vocabulary": Tile(16, 128, 128, 3, 8),
    },
    32: {
        "deep": Tile(32, 64, 128, 6, 4),
        "square": Tile(32, 64, 128, 6, 4),
        "middle": Tile(32, 64, 128, 5, 4),
        "tall": Tile(32, 64, 128, 4, 4, 1),
        "vocabulary": Tile(32, 128, 128, 4, 8),
    },
}
SHARED = 200_000  # bytes of shared memory that the largest of these need


def supports(weight: Tensor, rows: int) -> bool:
    """Whether `linear` and `gated` take this weight, and `rows` rows are few enough for them to be worth it."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    dense = weight.is_contiguous() and weight.shape[1] % 16 == 0
    return half and dense and rows <= MAX_ROWS and shared_memory(weight.device) >= SHARED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> x weight^T + bias [M, N], rounded once.

    1 <= M <= MAX_ROWS; K % 16 == 0; the last dimensions dense, the stride of x's rows free.
    """
    return _launch(x, weight, bias, few_rows(len(x), *weight.shape), None, pdl)


def gated(x: Tensor, weight: Tensor, activation: str, *, pdl: bool = False) -> Tensor:
    """x [M, K], weight [2 I, K] (the gate's rows, then up's) -> act(gate) * up [M, I], rounded once; else as `linear`.

    `activation`: one of ACTIVATIONS.
    """
    return _launch(x, weight, None, few_rows(len(x), *weight.shape), ACTIVATIONS[activation], pdl)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, activation: str | None, pdl: bool) -> Tensor:
    """A tile of no rows is for one row of x, without tensor cores."""
    rows, depth = x.shape
    size = len(weight) if activation is None else len(weight) // 2
    assert 1 <= rows <= max(tile.rows, 1), f"{rows} rows are not few"
    assert depth % 16 == 0, f"{depth} is not a multiple of 16"
    _check(x, weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    early = min(tile.early, depth // tile.depth)
    even = (depth - early * tile.depth) % tile.depth == 0
    options = {"BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "EARLY": early, "EVEN": even, "num_warps": tile.warps}
    options |= {"BIAS": bias is not None, "KIND": activation, "PDL": pdl}
    options |= {"launch_pdl": True} if pdl else {}
    grid = (cdiv(size, tile.columns if activation is None else tile.columns // 2),)
    tensors = (x, weight, out if bias is None else bias, out)
    if tile.rows == 0:
        _one[grid](*tensors, size, depth, STAGES=tile.stages, **options)
    else:
        _few[grid](*tensors, rows, size, depth, x.stride(0), BLOCK_M=tile.rows, num_stages=tile.stages, **options)
    return out


def few_rows(rows: int, size: int, depth: int) -> Tile:
    """The tile for a weight [size, depth]."""
    block = 1 if rows == 1 else 8 if rows <= 8 else 16 if rows <= 16 else 32
    if size > 8192:
        shape = "tall" if size < 65536 else "vocabulary"
    else:
        shape = "deep" if depth > 8192 else "square" if size <= 5120 else "middle"
    tile = TILES[block][shape]
    return tile._replace(depth=min(tile.depth, max(16, power_of_2(depth))))


def _check(x: Tensor, weight: Tensor) -> None:
    assert weight.shape[1] == x.shape[1], f"x {tuple(x.shape)} does not fit the weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), "the weight must be dense"
    assert x.stride(1) == 1, "rows must be dense"


@triton.jit
def _few_rows(index, size, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """The rows of the weight of program `index`: BLOCK_N; with a KIND of activation gate's and up's take turns."""
    n = index * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is None:
        return tl.minimum(n, size - 1).to(tl.int64)  # rows past the end compute the last one again, and are not stored
    return (tl.minimum(n // 2, size - 1) + n % 2 * size).to(tl.int64)


@quick
@triton.jit(do_not_specialize=["rows"])
def _few(
    x, weight, bias, out, rows, size, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight a program, all of K in order; the last EARLY tiles are loaded before the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    tiles = weight + _few_rows(tl.program_id(0), size, BLOCK_N, KIND)[:, None] * depth + k[None, :]
    body = depth - EARLY * BLOCK_K
    early = ()
    for i in tl.static_range(EARLY):
        early += (tl.load(tiles + body + i * BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    real = m < rows
    inputs = x + m[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, body, BLOCK_K):
        inside = (start + k < body)[None, :]
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside, other=0.0)
        v = tl.load(inputs + start, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
    for i in tl.static_range(EARLY):
        v = tl.load(inputs + body + i * BLOCK_K, mask=real[:, None], other=0.0)
        acc = tl.dot(early[i], tl.trans(v), acc, input_precision="ieee")
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        acc = activate(gate, KIND) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    mask = (n < size)[:, None] & real[None, :]
    tl.store(out + m[None, :] * size + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@quick
@triton.jit
def _one(
    x, weight, bias, out, size, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_few` for one row: multiplied and added without the tensor cores, whose tiles would be nearly empty."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    tiles = weight + _few_rows(tl.program_id(0), size, BLOCK_N, KIND)[:, None] * depth + k[None, :]
    body = depth - EARLY * BLOCK_K
    early = ()
    for i in tl.static_range(EARLY):
        early += (tl.load(tiles + body + i * BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, body, BLOCK_K, num_stages=STAGES):
        inside = start + k < body
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside[None, :], other=0.0)
        v = tl.load(x + start + k) if EVEN else tl.load(x + start + k, mask=inside, other=0.0)
        sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
    for i in tl.static_range(EARLY):
        sums += early[i].to(tl.float32) * tl.load(x + body + i * BLOCK_K + k).to(tl.float32)[None, :]
    acc = tl.sum(sums, axis=1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is not None:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_N // 2, 2)))
        acc = activate(gate, KIND) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < size)


def invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> x weight^T + bias [M, N]; a row's bits depend on nothing but that row.

    Any M >= 1; layout as for `linear`. Every element is a sum over K in one order, whatever the tile: tensor cores give
    the same bits in tiles of every size used here, and on either side of the product, which the tests compare.
    """
    rows, depth = x.shape
    size = len(weight)
    _check(x, weight)
    if supports(weight, rows):
        return _launch(x, weight, bias, few_rows(max(rows, 2), size, depth), None, pdl)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    bulk = _bulk_copies(x, weight, out) and rows > 64
    tile = any_rows(rows, size, x.dtype, bulk)
    tiles = cdiv(rows, tile.rows) * cdiv(size, tile.columns)
    added = out if bias is None else bias
    options = {"num_stages": tile.stages, "num_warps": tile.warps, "BIAS": bias is not None}
    options |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    if not bulk:
        even = depth % tile.depth == 0
        _tile[(tiles,)](x, weight, added, out, rows, size, depth, x.stride(0), EVEN=even, **options)
        return out
    programs = _multiprocessors(x.device)  # whatever the rows: each number would be a kernel of its own
    inputs = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    weights = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
    results = TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2])
    _tiles[(programs,)](inputs, weights, added, results, rows, size, depth, PROGRAMS=programs, **options)
    return out


def check_invariant(weight: Tensor) -> None:
    """StartupError where `invariant`'s tiles don't fit the GPU."""
    shared = shared_memory(weight.device)
    if weight.dtype != torch.float32 and shared < SHARED:
        raise StartupError(
            f"--deterministic needs {SHARED:,} bytes of shared memory a program, and this GPU has {shared:,}",
            "Serve without it, or in --dtype float32",
        )


def any_rows(rows: int, size: int, dtype: torch.dtype, bulk: bool) -> Tile:
    """The tile of `invariant`, with or without Hopper's bulk copies; measured as `few_rows`."""
    if dtype == torch.float32:
        return Tile(32, 32, 32, 2, 4)
    if bulk:
        return Tile(128, 128, 64, 5, 8) if rows <= 1024 else Tile(128, 256, 64, 4, 8)
    if rows > 64:
        return Tile(128, 128, 64, 4, 8)
    return Tile(64, 64, 128, 4, 4) if size > 4096 else Tile(64, 32, 256, 4, 4)


def _bulk_copies(*tensors: Tensor) -> bool:
    """Whether Hopper's tensor copies can move tiles of these: rows at multiples of 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)
    half = tensors[0].dtype in (torch.bfloat16, torch.float16)
    return aligned and (half and early(tensors[0].device) if tensors[0].is_cuda else True)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _place(index, rows, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles in groups of eight rows of tiles, so that tiles computed together share what they read."""
    down = tl.cdiv(rows, BLOCK_M)
    group = 8 * tl.cdiv(size, BLOCK_N)
    first = index // group * 8
    height = tl.minimum(down - first, 8)
    return (first + index % group % height) * BLOCK_M, index % group // height * BLOCK_N


@quick
@triton.jit(do_not_specialize=["rows"])
def _tile(
    x, weight, bias, out, rows, size, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One tile a program."""
    top, left = _place(tl.program_id(0), rows, size, BLOCK_M, BLOCK_N)
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = m < rows
    inputs = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weights = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * depth + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = (start + k < depth)[None, :]
        v = tl.load(inputs + start, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        w = tl.load(weights + start) if EVEN else tl.load(weights + start, mask=inside, other=0.0)
        acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & (n < size)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    inputs, weights, bias, results, rows, size, depth, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile a program. Past their ends, descriptors read zeros and write nothing."""
    count = tl.cdiv(rows, BLOCK_M) * tl.cdiv(size, BLOCK_N)
    for index in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        top, left = _place(index, rows, size, BLOCK_M, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, depth, BLOCK_K):
            acc = tl.dot(inputs.load([top, start]), weights.load([left, start]).T, acc, input_precision="ieee")
        if BIAS:
            n = left + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
        # Half a tile at a time: the whole would not fit beside the stages.
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        results.store([top, left], low.to(results.dtype))
        results.store([top, left + BLOCK_N // 2], high.to(results.dtype))
