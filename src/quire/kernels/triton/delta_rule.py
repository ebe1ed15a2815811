"""The gated delta rule over the rows of a step, from a state and to states, and the gated norm of its outputs: equal to
`kernels.delta_rule`.

A program computes the tokens of a row in order, for some columns of a head's state, which stay in registers; rows,
heads and columns are parallel. Sums are over the rows of a state, so columns are independent of one another.
`_delta_rule` takes one token at a time. Rows of more than RECURRENT_TOKENS tokens are computed by chunks, in matrix
products: `_solve_chunks` computes in parallel what does not depend on states, above all the inverse of each chunk's
triangular system (see kernels.delta_rule._run_chunk), and `_scan_chunks` goes from chunk to chunk.

Chunks begin at positions that are multiples of CHUNK. So a row that is cut into steps at such positions is computed
from the same chunks, and most runs end where a chunk does.

With inputs in 16 bits, one factor of a product is a matrix of queries or keys as they are, without error. Their
lengths, decays and rates are multiplied into the other factor, which is in fp32. It is split as in
kernels.triton.products if an error would stay in the state. It is rounded to 16 bits in sums that only an output has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.delta_rule import L2_EPS
from quire.kernels.mamba_states import CONV_TILE, StatePlan
from quire.kernels.triton.decode import multiprocessors
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2, shared_memory
from quire.kernels.triton.mamba_scan import LOG2E, silu_gate, softplus
from quire.kernels.triton.products import MIN_DOT, computed_once, dot, dot_split, split

STATE_NUMBERS = 1024
"""Numbers of a state that one warp, a program, holds: 32 a thread."""
EPS = tl.constexpr(L2_EPS)
CHUNK = CONV_TILE
"""Tokens of a chunk: those of a tile of a plan."""
RECURRENT_TOKENS = 32
"""The most tokens of a row that are computed one at a time, in a step that is known to have a longer row. One at a time
16 tokens take 12 us, 32 take 20 us and 64 take 38 us; by chunks they take 16 to 17 us (H200). In other steps, such as
those that verify a few tokens of each row, the kernels of chunks aren't launched: all of their programs would end at
once."""
MIN_RUN = 16
"""The fewest tokens of a run for which rows are computed by chunks: the kernel's code is repeated for each run that may
end in a chunk."""
FACTORS = 6
"""Numbers of each token and head that `_solve_chunks` stores for `_scan_chunks`, beside the rows of matrices."""
SOLVE_WARPS, SOLVE_STAGES = 4, 1
SCAN_WARPS = 4
FP32_SCAN, FEW_PROGRAMS, MANY_PROGRAMS = (32, 2), (64, 2), (64, 1)
"""Of `_scan_chunks`: a program's columns of a state, and the most chunks that are in shared memory at once.

One program with its next chunk in shared memory is faster, many without: one row of 8192 tokens 487 instead of 667 us,
64 rows of 128 tokens 325 instead of 281 us (H200, bf16). Not 32 columns in 16 bits, though one row takes 390 us then:
ptxas 12.8, which Triton 3.6 and 3.7 use for Hopper, computes wrong addresses of operands in shared memory in some such
kernels. Results are wrong then, or the access is illegal. (12.9 and 13.1 translate the same PTX correctly.)"""
MANY = 2
"""MANY_PROGRAMS applies to more programs than this number times the multiprocessors."""


@triton.jit
def _load_token(token, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, t, KEYS: tl.constexpr,
                SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Return a token's (q, k, v, b, a), in their dtypes."""
    place = token + t * qkv_stride
    q = tl.load(place + head // SHARED * KEY + i, mask=own_keys, other=0.0)
    k = tl.load(place + KEYS + head // SHARED * KEY + i, mask=own_keys, other=0.0)
    v = tl.load(place + 2 * KEYS + head * VALUE + j, mask=own_values, other=0.0)
    b = tl.load(ba + t * ba_stride + head)
    a = tl.load(ba + t * ba_stride + HEADS + head)
    return q, k, v, b, a


@triton.jit
def _unit(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@fast_launch
@triton.jit(
    do_not_specialize=["qkv_stride", "ba_stride", "width", "most"],  # one kernel, and so the same bits, for all steps
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"],
)
def _delta_rule(
    qkv, ba, A, dt_bias, out, states, offsets, lengths, starts, reads, writes, qkv_stride, ba_stride, page_stride,
    width, most, scale,
    RUN: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute all tokens of a row of at most `most` tokens for a head and BLOCK columns of its state."""
    KEYS: tl.constexpr = HEADS // SHARED * KEY
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) // BLOCKS % HEADS
    row = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    i, j = tl.arange(0, PADDED), tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    own_keys, own_values = i < KEY, j < VALUE
    cells = (head * KEY + i[:, None]) * VALUE + j[None, :]
    mask = own_keys[:, None] & own_values[None, :]
    slope, shift = tl.load(A + head) * LOG2E, tl.load(dt_bias + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start, read = tl.load(starts + row), tl.load(reads + row)
    offset, length = tl.load(offsets + row), tl.load(lengths + row)
    if (length == 0) | (length > most):
        return
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    qkv += offset * qkv_stride
    ba += offset * ba_stride
    numbers = _load_token(
        qkv, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, 0, KEYS, SHARED, KEY, VALUE, HEADS
    )
    for t in range(length):
        q, k, v, b, a = numbers
        numbers = _load_token(  # the next token's, while this one is computed; after the last one, it again
            qkv, ba, head, i, j, own_keys, own_values, qkv_stride, ba_stride, tl.minimum(t + 1, length - 1), KEYS,
            SHARED, KEY, VALUE, HEADS,
        )  # fmt: skip
        q, k = _unit(q) * scale, _unit(k)
        rate = 1.0 / (1.0 + tl.exp2(-b.to(tl.float32) * LOG2E))
        h *= tl.exp2(slope * softplus(a.to(tl.float32) + shift))
        u = rate * (v.to(tl.float32) - tl.sum(h * k[:, None], axis=0))
        h = tl.fma(k[:, None], u[None, :], h)
        y = tl.sum(h * q[:, None], axis=0)
        target = out + (offset + t) * (HEADS * VALUE) + head * VALUE + j
        tl.store(target, y.to(out.dtype.element_ty), mask=own_values)
        after = start + t + 1
        if (after % RUN == 0) | (t + 1 == length):
            page = tl.load(writes + row * width + (after - 1) // RUN - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask & (page >= 0))


@triton.jit
def _dot_rounded(a, b):
    """Return a b, with b rounded to the type of a."""
    return dot(a, b.to(a.dtype))


@triton.jit
def _invert(system, SIZE: tl.constexpr, PRODUCT: tl.constexpr):
    """Return the inverse of the matrix 1 + `system` [SIZE, SIZE]; `system` is 0 on the diagonal and above.

    Blocks of 16 x 16 on the diagonal are inverted by elimination, row after row in fp32. Let M be these inverses, and
    N = M (system without these blocks). N^BLOCKS is 0, and the inverse is (1 + N)^-1 M. Squaring the whole system
    instead would add up large terms that cancel if keys are alike."""
    SIDE: tl.constexpr = 16
    BLOCKS: tl.constexpr = SIZE // SIDE
    tl.static_assert(BLOCKS == 4)
    i, j = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    wide = tl.reshape(system, (BLOCKS, SIDE, BLOCKS, SIDE))
    own = (tl.arange(0, BLOCKS)[:, None] == tl.arange(0, BLOCKS)[None, :])[:, None, :, None]
    left = tl.sum(tl.where(own, wide, 0.0), axis=2)
    inverse = tl.zeros_like(left) + tl.where(i == j, 1.0, 0.0)
    for n in range(SIDE - 1):
        column = tl.sum(tl.where(j == n, left, 0.0), axis=2)
        row = tl.sum(tl.where(i == n, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * row[:, None, :]
    blocks = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), (SIZE, SIZE))
    outside = tl.reshape(tl.where(own, 0.0, wide), (SIZE, SIZE))
    n1 = dot_split(blocks, outside, PRODUCT)
    n2 = dot_split(n1, n1, PRODUCT)
    # (1 + N)^-1 = 1 - N + N^2 - N^3
    square = tl.arange(0, SIZE)
    rest = tl.where(square[:, None] == square[None, :], 1.0, 0.0) - n1
    return dot_split(rest + dot_split(rest, n2, PRODUCT), blocks, PRODUCT)


@fast_launch
@triton.jit(
    do_not_specialize=["num_tiles", "num_tokens"],
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "tiles"],
)
def _solve_chunks(
    qkv, ba, A, dt_bias, matrices, factors, offsets, lengths, starts, tiles, num_tiles, num_tokens, qkv_stride,
    ba_stride, most, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a head's matrices and factors of a chunk, if its row has more than `most` tokens. There is a program for
    each tile, whose number in its row is the chunk's, and then one for each row, which may have one more chunk than
    tiles.

    `matrices` [2 or 3, heads, tokens, CHUNK] are: the products of queries and keys, which `_scan_chunks` multiplies by
    the u of a chunk; the inverse of the system, its columns times the tokens' rates; in 16 bits, the rounding error of
    the latter. `factors` [FACTORS, heads, tokens] in fp32 are: of what each token's key reads from the state before the
    chunk; of what its query reads; of what its key adds to the state after the chunk; the decay from the chunk's start
    to the token; 1 / the key's length; the binary logarithm of the token's decay."""
    KEYS: tl.constexpr = HEADS // SHARED * KEY
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, program = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    is_tile = program < num_tiles
    row = tl.load(tiles + program * 2, mask=is_tile, other=0).to(tl.int64)
    row = tl.where(is_tile, row, program - num_tiles)
    offset, length, start = tl.load(offsets + row), tl.load(lengths + row), tl.load(starts + row)
    first = tl.load(tiles + program * 2 + 1, mask=is_tile, other=0).to(tl.int64)
    first = tl.where(is_tile, first, (length + CHUNK - 1) // CHUNK * CHUNK)
    begin = first - start % CHUNK  # in the row; the first chunk's may be below 0
    if (length <= most) | (begin >= length):
        return
    i, n = tl.arange(0, CHUNK), tl.arange(0, PADDED)
    there = (begin + i >= 0) & (begin + i < length)
    t = offset + begin + i
    place = qkv + t[:, None] * qkv_stride + head // SHARED * KEY + n[None, :]
    mask = there[:, None] & (n < KEY)[None, :]
    q, k = tl.load(place, mask=mask, other=0.0), tl.load(place + KEYS, mask=mask, other=0.0)
    b = tl.load(ba + t * ba_stride + head, mask=there, other=0.0).to(tl.float32)
    a = tl.load(ba + t * ba_stride + HEADS + head, mask=there, other=0.0).to(tl.float32)
    rate = tl.where(there, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)
    some = tl.where(there, tl.load(A + head) * LOG2E * softplus(a + tl.load(dt_bias + head)), 0.0)
    rate, some = computed_once(rate), computed_once(some)
    of_q = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + EPS) * scale
    of_k = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + EPS)
    # Sums from each token (the columns) to each later one. Differences of sums from the chunk's start would lose small
    # ones beside large ones.
    later = i[:, None] > i[None, :]
    steps = tl.where(later, some[:, None], 0.0)
    decay = tl.exp2(tl.where(i[:, None] >= i[None, :], tl.cumsum(steps, axis=0), float("-inf"))) * of_k[None, :]
    since, until_end = tl.exp2(tl.cumsum(some, axis=0)), tl.exp2(tl.sum(steps, axis=0))
    pairs = dot(q, tl.trans(k)) * decay * of_q[:, None]
    system = dot(k, tl.trans(k)) * decay * (of_k * rate)[:, None]
    inverse = _invert(tl.where(later, system, 0.0), CHUNK, tl.float32 if WIDE else tl.bfloat16) * rate[None, :]
    size = num_tokens.to(tl.int64) * HEADS
    of_head = head.to(tl.int64) * num_tokens + t
    place = matrices + of_head[:, None] * CHUNK + i[None, :]
    tl.store(place, pairs.to(q.dtype), mask=there[:, None])
    if WIDE:
        tl.store(place + size * CHUNK, inverse, mask=there[:, None])
    else:
        high, low = split(inverse, q.dtype)
        tl.store(place + size * CHUNK, high, mask=there[:, None])
        tl.store(place + 2 * size * CHUNK, low, mask=there[:, None])
    place = factors + of_head
    tl.store(place, since * of_k, mask=there)
    tl.store(place + size, since * of_q, mask=there)
    tl.store(place + 2 * size, until_end * of_k, mask=there)
    tl.store(place + 3 * size, since, mask=there)
    tl.store(place + 4 * size, of_k, mask=there)
    tl.store(place + 5 * size, some, mask=there)


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens", "width"],
    do_not_specialize_on_alignment=["offsets", "lengths", "starts", "reads", "writes"],
)
def _scan_chunks(
    qkv, matrices, factors, out, states, offsets, lengths, starts, reads, writes, num_tokens, qkv_stride, page_stride,
    width, most,
    RUN: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Do the same as `_delta_rule`, chunk by chunk, in rows of more than `most` tokens."""
    KEYS: tl.constexpr = HEADS // SHARED * KEY
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) // BLOCKS % HEADS
    row = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    offset, length, start = tl.load(offsets + row), tl.load(lengths + row), tl.load(starts + row)
    if length <= most:
        return
    i, n, j = tl.arange(0, CHUNK), tl.arange(0, PADDED), tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    own_keys, own_values = n < KEY, j < VALUE
    cells = (head * KEY + n[:, None]) * VALUE + j[None, :]
    mask, read = own_keys[:, None] & own_values[None, :], tl.load(reads + row)
    h = tl.load(states + read * page_stride + cells, mask=mask & (read >= 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # the page that is written may be the one that other threads read
    size, of_head = num_tokens.to(tl.int64) * HEADS, head.to(tl.int64) * num_tokens + offset
    qkv += offset * qkv_stride
    out += offset * (HEADS * VALUE) + head * VALUE
    for begin in range(-(start % CHUNK), length, CHUNK):
        t = begin + i
        there = (t >= 0) & (t < length)
        keys, values = there[:, None] & own_keys[None, :], there[:, None] & own_values[None, :]
        place = qkv + t[:, None] * qkv_stride + head // SHARED * KEY + n[None, :]
        q, k = tl.load(place, mask=keys, other=0.0), tl.load(place + KEYS, mask=keys, other=0.0)
        v = tl.load(qkv + t[:, None] * qkv_stride + 2 * KEYS + head * VALUE + j[None, :], mask=values, other=0.0)
        place = matrices + (of_head + t[:, None]) * CHUNK + i[None, :]
        pairs = tl.load(place, mask=there[:, None], other=0.0)
        inverse = tl.load(place + size * CHUNK, mask=there[:, None], other=0.0)
        place = factors + of_head + t
        key_reads = tl.load(place, mask=there, other=0.0)
        query_reads = tl.load(place + size, mask=there, other=0.0)
        key_adds = tl.load(place + 2 * size, mask=there, other=0.0)
        last = tl.load(factors + 3 * size + of_head + tl.minimum(begin + CHUNK, length) - 1)
        left = v.to(tl.float32) - key_reads[:, None] * dot(k, h)
        u = dot(inverse, left)
        if not WIDE:
            low = tl.load(matrices + 2 * size * CHUNK + (of_head + t[:, None]) * CHUNK + i[None, :],
                          mask=there[:, None], other=0.0)  # fmt: skip
            u += _dot_rounded(low, left)
        y = query_reads[:, None] * _dot_rounded(q, h) + _dot_rounded(pairs, u)
        tl.store(out + t[:, None] * (HEADS * VALUE) + j[None, :], y.to(out.dtype.element_ty), mask=values)
        end = tl.minimum(begin + CHUNK, length)
        if RUN % CHUNK:  # states at the ends of runs in the chunk
            for number in tl.static_range((CHUNK - 1) // RUN + 1):
                border = ((start + begin) // RUN + number + 1) * RUN - start
                if (border > 0) & (border < end):
                    own = factors + of_head + t
                    of_k = tl.load(own + 4 * size, mask=there, other=0.0)
                    some = tl.load(own + 5 * size, mask=there & (t < border), other=0.0)
                    until = tl.sum(tl.where(i[:, None] > i[None, :], some[:, None], 0.0), axis=0)
                    adds = tl.where(t < border, tl.exp2(until) * of_k, 0.0)
                    decay = tl.load(factors + 3 * size + of_head + border - 1)
                    earlier = decay * h + dot(tl.trans(k), adds[:, None] * u)
                    page = tl.load(writes + row * width + (start + border - 1) // RUN - start // RUN)
                    target = states + page * page_stride + cells
                    tl.store(target, earlier.to(states.dtype.element_ty), mask=mask & (page >= 0))
        h = last * h + dot(tl.trans(k), key_adds[:, None] * u)
        if ((start + end) % RUN == 0) | (end == length):
            page = tl.load(writes + row * width + (start + end - 1) // RUN - start // RUN)
            tl.store(states + page * page_stride + cells, h.to(states.dtype.element_ty), mask=mask & (page >= 0))


def gated_delta_rule(
    qkv: Tensor, ba: Tensor, A: Tensor, dt_bias: Tensor, states: Tensor, plan: StatePlan, *, pdl: bool = False,
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Return the outputs of the gated delta rule, as quire.kernels.delta_rule.gated_delta_rule. Rows of qkv and ba may
    have any stride. Rows of more than RECURRENT_TOKENS tokens are computed by chunks if runs have MIN_RUN tokens or
    more. `deterministic`: all tokens are computed one at a time; with states in fp32 a token's bits depend neither on
    other rows of the step nor on how its row is cut into steps. pdl: programmatic dependent launch, on GPUs of
    capability 9 and more."""
    (tokens, numbers), (_, heads, key_dim, value_dim) = qkv.shape, states.shape
    key_heads, rest = divmod(numbers - heads * value_dim, 2 * key_dim)
    assert not rest, f"{numbers} queries, keys and values do not fit states of {tuple(states.shape[1:])}"
    assert heads % key_heads == 0, f"{heads} heads of values and {key_heads} of keys"
    assert ba.shape == (tokens, 2 * heads), "b and a for each head"
    assert qkv.stride(1) == ba.stride(1) == 1, "rows are contiguous"
    assert states.stride()[1:] == (key_dim * value_dim, value_dim, 1), "a page's numbers are contiguous"
    for vector in (A, dt_bias):
        assert (vector.shape, vector.dtype, vector.is_contiguous()) == ((heads,), torch.float32, True), "in fp32"
    out = torch.empty((tokens, heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    rows, scale = len(plan.offsets), key_dim**-0.5
    if not rows:
        return out
    sizes = {"HEADS": heads, "SHARED": heads // key_heads, "KEY": key_dim}
    # The host knows the mean length of rows only, and that a row has several tiles if it is longer than a tile.
    by_chunks = (
        not deterministic and plan.page_tokens >= MIN_RUN and plan.tiles is not None
        and (len(plan.tiles) > rows or tokens > rows * RECURRENT_TOKENS)
    )  # fmt: skip
    padded = power_of_2(key_dim)
    block = min(power_of_2(value_dim), max(1, STATE_NUMBERS // padded))
    blocks = cdiv(value_dim, block)
    _delta_rule[(rows * heads * blocks,)](
        qkv, ba, A, dt_bias, out, states, plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages,
        qkv.stride(0), ba.stride(0), states.stride(0), plan.write_pages.stride(0),
        RECURRENT_TOKENS if by_chunks else tokens, scale, RUN=plan.page_tokens, VALUE=value_dim, PADDED=padded,
        BLOCK=block, BLOCKS=blocks, PDL=pdl, **sizes, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    if by_chunks:
        _run_chunks(qkv, ba, A, dt_bias, out, states, plan, scale, sizes, pdl)
    return out


def _run_chunks(
    qkv: Tensor, ba: Tensor, A: Tensor, dt_bias: Tensor, out: Tensor, states: Tensor, plan: StatePlan, scale: float,
    sizes: dict[str, int], pdl: bool,
) -> None:  # fmt: skip
    """Compute the rows of more than RECURRENT_TOKENS tokens by chunks: store to `out` and `states`. `sizes`: HEADS,
    SHARED and KEY of the kernels."""
    assert plan.tiles is not None, "rows of one token have no chunks"
    tokens, heads, value_dim, in_fp32 = len(qkv), sizes["HEADS"], states.shape[3], qkv.dtype == torch.float32
    matrices = torch.empty((2 if in_fp32 else 3, heads, tokens, CHUNK), dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty((FACTORS, heads, tokens), dtype=torch.float32, device=qkv.device)
    tiles, rows = len(plan.tiles), len(plan.offsets)
    options = {"PADDED": max(power_of_2(sizes["KEY"]), MIN_DOT), "CHUNK": CHUNK, "WIDE": in_fp32, "PDL": pdl}
    _solve_chunks[((tiles + rows) * heads,)](
        qkv, ba, A, dt_bias, matrices, factors, plan.offsets, plan.lengths, plan.starts, plan.tiles, tiles, tokens,
        qkv.stride(0), ba.stride(0), RECURRENT_TOKENS, scale, **sizes, **options, num_warps=SOLVE_WARPS,
        num_stages=SOLVE_STAGES, launch_pdl=pdl,
    )  # fmt: skip
    block, stages = FP32_SCAN if in_fp32 else FEW_PROGRAMS
    if not in_fp32 and rows * heads * cdiv(value_dim, block) > MANY * multiprocessors(qkv.device):
        block, stages = MANY_PROGRAMS
    blocks, padded = cdiv(value_dim, block), options["PADDED"]
    of_chunk = CHUNK * (2 * padded + block + len(matrices) * CHUNK) * qkv.element_size()
    stages = min(stages, (shared_memory(qkv.device) - 4 * padded * block) // of_chunk)
    _scan_chunks[(rows * heads * blocks,)](
        qkv, matrices, factors, out, states, plan.offsets, plan.lengths, plan.starts, plan.read_pages,
        plan.write_pages, tokens, qkv.stride(0), states.stride(0), plan.write_pages.stride(0), RECURRENT_TOKENS,
        RUN=plan.page_tokens, VALUE=value_dim, BLOCK=block, BLOCKS=blocks, **sizes, **options, num_warps=SCAN_WARPS,
        num_stages=max(stages, 1), launch_pdl=pdl,
    )  # fmt: skip


@fast_launch
@triton.jit
def _norm_gate(
    x, gate, weight, out, gate_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One head of a token a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    head, token = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    place = token * (HEADS * DIM) + head * DIM + columns
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + token * gate_stride + head * DIM + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps) * scale
    tl.store(out + place, silu_gate(normed, g).to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """Return the gated norm, as quire.kernels.delta_rule.gated_norm. Rows of `gate` may have any stride."""
    (tokens, numbers), dim = x.shape, len(weight)
    assert x.shape == gate.shape, "a gate for each number"
    assert x.is_contiguous(), "x is contiguous"
    assert gate.stride(1) == 1, "rows of the gate are contiguous"
    out, heads = torch.empty_like(x), numbers // dim
    if tokens:
        _norm_gate[(tokens * heads,)](
            x, gate, weight, out, gate.stride(0), eps, HEADS=heads, DIM=dim, BLOCK=power_of_2(dim), PDL=pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
