"""Linear layers: for few rows, whose time is that of reading the weight, and a batch-invariant one for any rows.

Few rows: a program takes some rows of the weight and streams them through shared memory, `W x^T` on the tensor cores
with the rows of x as the narrow side. No program waits for another or adds to another's result, so results are
reproducible, and a row's result does not depend on the values of the rows beside it.

A weight may be in FP8 (e4m3). It is converted in registers, exactly, so that only the weight is rounded. Its `scale`
[G, N] multiplies sums: of row n over all of K by scale[0, n], or over its g-th SCALE_GROUP numbers by scale[g, n].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.errors import StartupError
from quire.kernels.triton.activation import ACTIVATIONS, activate
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, shared_memory, supports_pdl
from quire.kernels.triton.linear_tiles import SCALE_GROUP, any_rows_tile, bulk_is_faster, few_rows_tile, grouped_tile
from quire.kernels.triton.tiles import Tile

MAX_ROWS = 32  # at 64 cuBLAS is faster on an H200, except for the head
MAX_PDL_ROWS = 256  # if the kernel after a product of more rows starts early, prompts take 4 to 5 % longer
MIN_SHARED_MEMORY = 200_000  # bytes that the largest tiles need
E4M3 = torch.float8_e4m3fn


def supports(weight: Tensor, rows: int) -> bool:
    """Return True if `linear` and `gated_linear` take this weight, and are the fastest for `rows` rows."""
    half = weight.dtype in (torch.bfloat16, torch.float16, E4M3)
    dense = weight.is_contiguous() and weight.shape[1] % 16 == 0
    return half and dense and rows <= MAX_ROWS and shared_memory(weight.device) >= MIN_SHARED_MEMORY


def max_fast_rows(weight: Tensor) -> int:
    """Return the most rows for which `linear` is faster than cuBLAS, for a weight [size, depth] in 16 bits.

    cuBLAS divides the depth among programs. From 17 rows on this is faster for a deep weight whose tiles occupy at most
    half of the multiprocessors: 33 us instead of 41 for 32 rows and [4096, 14336] on an H200."""
    size, depth = weight.shape
    programs = cdiv(size, _few_rows_tile(MAX_ROWS, weight).columns)
    return 16 if depth > 8192 and 2 * programs <= _multiprocessors(weight.device) else MAX_ROWS


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, pdl: bool = False,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return x weight^T + bias [M, N] for x [M, K], weight [N, K], bias [N], rounded once.

    1 <= M <= MAX_ROWS; K % 16 == 0; the last dimensions contiguous, any stride of x's rows. `scale`: of an FP8 weight.
    `tile`: another one than the card's.
    """
    return _launch(x, weight, bias, scale, tile or _few_rows_tile(len(x), weight), None, pdl)


def gated_linear(
    x: Tensor, weight: Tensor, activation: str, scale: Tensor | None = None, *, pdl: bool = False,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return act(gate) * up [M, I] for x [M, K], weight [2 I, K] (the gate's rows, then up's), rounded once; else as
    `linear`. `activation` is a key of ACTIVATIONS."""
    return _launch(x, weight, None, scale, tile or _few_rows_tile(len(x), weight), ACTIVATIONS[activation], pdl)


def _few_rows_tile(rows: int, weight: Tensor) -> Tile:
    size, depth = weight.shape
    return few_rows_tile(weight.device, rows, size, depth, weight.dtype == E4M3)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, tile: Tile, activation: str | None,
    pdl: bool, round_sums: bool = False,
) -> Tensor:  # fmt: skip
    """Launch `_few`, or `_one` for a tile of 0 rows, which computes one row of x without tensor cores. `round_sums`:
    round sums to x's dtype before the activation, as if it was another launch; only by `_few`."""
    rows, depth = x.shape
    size = len(weight) if activation is None else len(weight) // 2
    assert 1 <= rows <= max(tile.rows, 1), f"{rows} rows do not fit a tile of {max(tile.rows, 1)}"
    assert depth % 16 == 0, f"{depth} is not a multiple of 16"
    group = _check_operands(x, weight, scale)
    if group > 0:
        tile = grouped_tile(tile, depth)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    early = min(tile.prefetch, depth // tile.depth)
    even = (depth - early * tile.depth) % tile.depth == 0
    options: dict[str, Any] = {"BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "EARLY": early, "EVEN": even}
    options |= {"num_warps": tile.warps, "GROUP": group, "BIAS": bias is not None, "KIND": activation}
    options |= {"PDL": pdl, "launch_pdl": pdl}
    grid = (cdiv(size, tile.columns if activation is None else tile.columns // 2),)
    tensors = (x, weight, out if scale is None else scale, out if bias is None else bias, out)
    if tile.rows == 0:
        _one[grid](*tensors, size, depth, STAGES=tile.stages, **options)
    else:
        options |= {"BLOCK_M": tile.rows, "num_stages": tile.stages, "ROUND_SUMS": round_sums}
        _few[grid](*tensors, rows, size, depth, x.stride(0), **options)
    return out


def _check_operands(x: Tensor, weight: Tensor, scale: Tensor | None) -> int:
    """Check shapes and strides. Return the numbers that share a scale: -1 if the weight is not in FP8, 0 for a row."""
    assert weight.shape[1] == x.shape[1], f"x {tuple(x.shape)} does not fit the weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), "the weight must be dense"
    assert x.stride(1) == 1, "rows must be dense"
    assert (weight.dtype == E4M3) == (scale is not None), f"a weight in {weight.dtype}, and its scale {scale}"
    if scale is None:
        return -1
    fits = len(scale) in (1, cdiv(x.shape[1], SCALE_GROUP)) and scale.shape[1] == len(weight)
    assert fits, f"the scale {tuple(scale.shape)} does not fit the weight {tuple(weight.shape)}"
    assert scale.is_contiguous(), "the scale must be dense"
    return 0 if len(scale) == 1 else SCALE_GROUP


@triton.jit
def _weight_rows(index, size, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Return the BLOCK_N weight rows of program `index`; with an activation KIND gate's and up's rows alternate."""
    n = index * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is None:
        return tl.minimum(n, size - 1).to(tl.int64)  # rows past the end repeat the last one, and are not stored
    return (tl.minimum(n // 2, size - 1) + n % 2 * size).to(tl.int64)


@triton.jit
def _scales(scale, start, size, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Return the address of the scales of the numbers from `start` on; `scale`: address of the first numbers' ones."""
    return scale + start // GROUP * (size if KIND is None else 2 * size)


@triton.jit
def _add(acc, w, v, scale, start, size, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Return acc [N, M] + w [N, K] v^T, v [M, K], for the numbers from `start` on."""
    if GROUP > 0:
        part = tl.dot(w.to(v.dtype), tl.trans(v), input_precision="ieee")
        by = tl.load(_scales(scale, start, size, GROUP, KIND))
        acc = tl.fma(part, tl.broadcast_to(by[:, None], part.shape), acc)
    else:
        acc = tl.dot(w.to(v.dtype), tl.trans(v), acc, input_precision="ieee")
    return acc


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _few(
    x, weight, scale, bias, out, rows, size, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ROUND_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of the weight a program, all of K in order. Before the wait for the preceding kernel, load
    the last EARLY tiles of these rows."""
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    lines = _weight_rows(tl.program_id(0), size, BLOCK_N, KIND)
    tiles = weight + lines[:, None] * depth + k[None, :]
    scale += lines
    body = depth - EARLY * BLOCK_K
    early = ()
    for i in tl.static_range(EARLY):
        early += (tl.load(tiles + body + i * BLOCK_K),)
    if PDL:
        gdc_wait()
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    real = m < rows
    inputs = x + m[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, body, BLOCK_K):
        inside = (start + k < body)[None, :]
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside, other=0.0)
        v = tl.load(inputs + start, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        acc = _add(acc, w, v, scale, start, size, GROUP, KIND)
    for i in tl.static_range(EARLY):
        v = tl.load(inputs + body + i * BLOCK_K, mask=real[:, None], other=0.0)
        acc = _add(acc, early[i], v, scale, body + i * BLOCK_K, size, GROUP, KIND)
    if GROUP == 0:
        acc *= tl.load(scale)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is not None:
        if ROUND_SUMS:
            acc = acc.to(out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        acc = activate(gate, KIND) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    mask = (n < size)[:, None] & real[None, :]
    tl.store(out + m[None, :] * size + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@fast_launch
@triton.jit
def _one(
    x, weight, scale, bias, out, size, depth,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the same for one row, without tensor cores, whose tiles would be nearly empty."""
    if PDL:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    lines = _weight_rows(tl.program_id(0), size, BLOCK_N, KIND)
    tiles = weight + lines[:, None] * depth + k[None, :]
    scale += lines
    body = depth - EARLY * BLOCK_K
    early = ()
    for i in tl.static_range(EARLY):
        early += (tl.load(tiles + body + i * BLOCK_K),)
    if PDL:
        gdc_wait()
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, body, BLOCK_K, num_stages=STAGES):
        inside = start + k < body
        w = tl.load(tiles + start) if EVEN else tl.load(tiles + start, mask=inside[None, :], other=0.0)
        v = tl.load(x + start + k) if EVEN else tl.load(x + start + k, mask=inside, other=0.0)
        if GROUP > 0:
            by = tl.load(_scales(scale, start, size, GROUP, KIND))
            sums += w.to(tl.float32) * v.to(tl.float32)[None, :] * by[:, None]
        else:
            sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
    for i in tl.static_range(EARLY):
        part = early[i].to(tl.float32) * tl.load(x + body + i * BLOCK_K + k).to(tl.float32)[None, :]
        if GROUP > 0:
            part *= tl.load(_scales(scale, body + i * BLOCK_K, size, GROUP, KIND))[:, None]
        sums += part
    acc = tl.sum(sums, axis=1)
    if GROUP == 0:
        acc *= tl.load(scale)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND is not None:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_N // 2, 2)))
        acc = activate(gate, KIND) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=n < size)


def batch_invariant_gated_linear(
    x: Tensor, weight: Tensor, activation: str, scale: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """Return `act_and_mul` of `batch_invariant_linear(x, weight, None, scale)` in one launch, with the same bits: sums
    are rounded before the activation too. Rows and layout as for `gated_linear`."""
    tile = _few_rows_tile(max(len(x), 2), weight)  # 1 row has a kernel that sums in another order
    return _launch(x, weight, None, scale, tile, ACTIVATIONS[activation], pdl, round_sums=True)


def batch_invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """Return x weight^T + bias [M, N] for x [M, K], weight [N, K], bias [N]; a row's bits depend only on that row.

    Any M >= 1; layout as for `linear`. Every element is a sum over K in one order, whatever the tile: tensor cores give
    the same bits in tiles of every size used here, and on either side of the product. Tests check this.
    """
    rows, depth = x.shape
    size, group = len(weight), _check_operands(x, weight, scale)
    if supports(weight, rows):
        return _launch(x, weight, bias, scale, _few_rows_tile(max(rows, 2), weight), None, pdl)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    bulk = group < 0 and bulk_is_faster(rows, size) and _bulk_copies(x, weight, out)
    tile = any_rows_tile(rows, size, x.dtype, bulk, _multiprocessors(x.device))
    if group > 0:
        tile = grouped_tile(tile, depth)._replace(stages=tile.stages)
    if group >= 0 and shared_memory(x.device) < MIN_SHARED_MEMORY:
        tile = tile._replace(stages=2)
    tiles = cdiv(rows, tile.rows) * cdiv(size, tile.columns)
    added = out if bias is None else bias
    pdl = pdl and rows <= MAX_PDL_ROWS
    options = {"num_stages": tile.stages, "num_warps": tile.warps, "PDL": pdl, "launch_pdl": pdl}
    options |= {"BIAS": bias is not None}
    options |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    if not bulk:
        options |= {"EVEN": depth % tile.depth == 0, "GROUP": group}
        tensors = (x, weight, out if scale is None else scale, added, out)
        _tile[(tiles,)](*tensors, rows, size, depth, x.stride(0), **options)
        return out
    programs = _multiprocessors(x.device)  # for any rows, because each number of programs is compiled separately
    inputs = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    weights = TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth])
    results = TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2])
    _tiles[(programs,)](inputs, weights, added, results, rows, size, depth, PROGRAMS=programs, **options)
    return out


def check_batch_invariant(weight: Tensor) -> None:
    """Raise StartupError if the tiles of `batch_invariant_linear` do not fit in the GPU's shared memory."""
    shared = shared_memory(weight.device)
    if weight.dtype != torch.float32 and shared < MIN_SHARED_MEMORY:
        raise StartupError(
            f"--deterministic needs {MIN_SHARED_MEMORY:,} bytes of shared memory a program, and this GPU has "
            f"{shared:,}",
            "Serve without it, or in --dtype float32",
        )


def _bulk_copies(*tensors: Tensor) -> bool:
    """Return True if Hopper's bulk tensor copies can move tiles of these tensors: 16-bit numbers, and rows at multiples
    of 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)
    half = tensors[0].dtype in (torch.bfloat16, torch.float16)
    return aligned and (half and supports_pdl(tensors[0].device) if tensors[0].is_cuda else True)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _tile_origin(index, rows, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first row and column of tile `index`. Tiles are ordered in groups of eight rows of tiles, so that
    tiles computed at the same time share their operands."""
    down = tl.cdiv(rows, BLOCK_M)
    group = 8 * tl.cdiv(size, BLOCK_N)
    first = index // group * 8
    height = tl.minimum(down - first, 8)
    return (first + index % group % height) * BLOCK_M, index % group // height * BLOCK_N


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _tile(
    x, weight, scale, bias, out, rows, size, depth, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    top, left = _tile_origin(tl.program_id(0), rows, size, BLOCK_M, BLOCK_N)
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = m < rows
    inputs = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    lines = tl.minimum(n, size - 1).to(tl.int64)
    weights, scale = weight + lines[:, None] * depth + k[None, :], scale + lines
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = (start + k < depth)[None, :]
        v = tl.load(inputs + start, mask=real[:, None] if EVEN else real[:, None] & inside, other=0.0)
        w = tl.load(weights + start) if EVEN else tl.load(weights + start, mask=inside, other=0.0)
        if GROUP > 0:
            part = tl.dot(v, tl.trans(w.to(v.dtype)), input_precision="ieee")
            by = tl.load(_scales(scale, start, size, GROUP, None))
            acc = tl.fma(part, tl.broadcast_to(by[None, :], part.shape), acc)
        else:
            acc = tl.dot(v, tl.trans(w.to(v.dtype)), acc, input_precision="ieee")
    if GROUP == 0:
        acc *= tl.load(scale)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * size + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & (n < size)[None, :])


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _tiles(
    inputs, weights, bias, results, rows, size, depth, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute every PROGRAMS-th tile a program. Past their ends, descriptors read zeros and write nothing."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.cdiv(rows, BLOCK_M) * tl.cdiv(size, BLOCK_N)
    for index in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        top, left = _tile_origin(index, rows, size, BLOCK_M, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, depth, BLOCK_K):
            acc = tl.dot(inputs.load([top, start]), weights.load([left, start]).T, acc, input_precision="ieee")
        if BIAS:
            n = left + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
        # Half a tile at a time: a whole one would not fit in shared memory beside the stages.
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        results.store([top, left], low.to(results.dtype))
        results.store([top, left + BLOCK_N // 2], high.to(results.dtype))
