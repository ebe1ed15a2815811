"""All-reduce and all-gather over GPUs that reach each other's memory: each rank writes its numbers into the others'
exchange memory, and continues once theirs have arrived. The residual sum and the norm of `kernels.triton.norm` may
follow the sum in the same launch.

Each rank has one exchange memory, which all ranks can write. It holds the flags of each program, then for each program
two regions used in turn, and two more for one-shot sums. A program that writes into a region for the second time has
received the others' data of the call in between, which they begin after they have read the region. So ranks must launch
the same kernels in the same order, on one stream for one exchange memory. The number of calls of a program, whose
parity is the turn, is counted on the device, so that graphs can capture the launches.

One-shot sums need no flag, which would take as long to arrive as the numbers: their regions hold zeros until numbers
arrive, and a zero among the numbers is sent as -0. The reader restores the zeros.

A kernel lets the next one begin as soon as all its programs have begun: then none of them waits for room.

Sums are computed in fp32 and in rank order, by every rank (one-shot) or for all ranks by the rank that has these
columns (two-shot), and rounded once. All ranks get the same bits either way, those of
quire.distributed.shared_memory_exchange.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.peer_memory_layout import FLAG_BYTES, MAX_PEERS, ONE_SHOT_OFFSET, PROGRAMS, REGION_BYTES
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.norm import add_residual, normalize, num_warps_for

REGISTERS = 128  # the most of a thread, so that two programs of up to 8 warps fit in a multiprocessor
POLLS = 1 << 20  # polls of a flag in a second, about
ABORT_POLLS = tl.constexpr(4096)  # polls between two checks whether another program has stored an error
GATHER_WORDS = 1024  # words that a program gathers at once


class PeerBuffers(NamedTuple):
    """One rank's access to all exchange memories. `table` [ranks] int64 holds their addresses as this rank reaches
    them, and `addresses` the same for the host. `counters` [PROGRAMS] int64 are this rank's calls, initially zeros.
    `error` [1] int64 is 1 + the rank that did not answer in time, or 0. `polls` is how often a flag is polled. After
    peer_memory_layout.KERNEL_BYTES there are `copy_bytes` bytes for copy_engine_pair and copy_engine_allreduce. Sums of
    up to `one_shot_bytes` bytes are one-shot, if a row is short enough, and larger ones two-shot."""

    table: Tensor
    counters: Tensor
    error: Tensor
    rank: int
    ranks: int
    polls: int
    addresses: tuple[int, ...] = ()
    copy_bytes: int = 0
    one_shot_bytes: int = 1 << 17


@triton.jit
def _flag(base, program, phase, rank, MOST: tl.constexpr):
    return (base + ((program * 2 + phase) * MOST + rank) * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _barrier(table, error, me, program, phase: tl.constexpr, epoch, polls, RANKS: tl.constexpr, MOST: tl.constexpr):
    """Signal all other ranks that the numbers written before can be read, and wait for their signals."""
    tl.debug_barrier()
    for r in tl.static_range(RANKS):
        if r != me:
            tl.atomic_xchg(_flag(tl.load(table + r), program, phase, me, MOST), epoch, sem="release", scope="sys")
    mine = tl.load(table + me)
    for r in tl.static_range(RANKS):
        if r != me:
            flag, left = _flag(mine, program, phase, r, MOST), polls
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while (seen < epoch) & (left > 0):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                left -= 1
            if seen < epoch:  # noqa: SIM102
                if tl.load(error) == 0:  # the first cause is kept
                    tl.store(error, r + 1)
    tl.debug_barrier()


@triton.jit
def peer_address(table, rank, offset, like):
    """Return the address at `offset` bytes in a rank's exchange memory, as a pointer of the type of `like`."""
    return tl.multiple_of((tl.load(table + rank) + offset).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def load_norm_weights(
    weight, bias, post_norm_weight, columns, inside, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr
):
    """Return the norm's weight, its bias, and the weight of the norm before it; zeros for those that are not used."""
    scale = tl.zeros(columns.shape, tl.float32)
    shift, added_scale = scale, scale
    if NORM:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if POST_NORM:
            added_scale = tl.load(post_norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    return scale, shift, added_scale


@triton.jit
def store_row(
    total, row, x, out, delta, scale, shift, added_scale, x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Store a row's sum, in delta's dtype, to delta; or if NORM add it to x and store the norm of x to `out`."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if NORM:
        values = add_residual(x + row * x_stride + columns, total, added_scale, eps, inside, SIZE, POST_NORM)
        result = normalize(values, scale, shift, eps, inside, SIZE, LAYER)
        tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(delta + row * delta_stride + columns, total, mask=inside)


@triton.jit
def round_sum(total, like):
    """Round a sum to the type of `like`; a sum of zeros of any signs is +0."""
    return tl.where(total == 0, 0.0, total).to(like.dtype.element_ty)


@triton.jit
def _sum(own, theirs, table, me, region, stride, inside, RANKS: tl.constexpr):
    """Return the rounded sum, in fp32 and in rank order, of this rank's numbers at `own` and the others' numbers, which
    are `stride` bytes apart in a region, at index `theirs`."""
    for r in tl.static_range(RANKS):
        mine = tl.load(own, mask=inside & (me == r), other=0.0)
        other = tl.load(peer_address(table, me, region + r * stride, own) + theirs, mask=inside & (me != r), other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        part = tl.where(me == r, mine, other).to(tl.float32)
        if r == 0:
            total = part
        else:
            total += part
    return round_sum(total, own)


@triton.jit
def _receive(place, inside, error, rank, polls):
    """Wait until `rank` has sent all words to `place`, so that none is 0; reset them to 0 and return the words."""
    words = tl.load(place, mask=inside, other=1, volatile=True)
    missing, left = tl.max((words == 0).to(tl.int32), axis=0), polls
    while (missing > 0) & (left > 0):
        words = tl.load(place, mask=inside, other=1, volatile=True)
        missing = tl.max((words == 0).to(tl.int32), axis=0)
        left -= 1
        if left % ABORT_POLLS == 0:  # noqa: SIM102
            if tl.load(error) != 0:  # after an error no program waits for long
                left = left * 0
    if missing > 0:  # noqa: SIM102
        if tl.load(error) == 0:  # the first cause is kept
            tl.store(error, rank + 1)
    tl.store(place, tl.zeros_like(words), mask=inside)
    return words


@fast_launch
@triton.jit(do_not_specialize=["me", "polls"])
def _one_shot(
    x, delta, post_norm_weight, weight, bias, out, table, counters, error, me, polls, rows,
    x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
    RANKS: tl.constexpr, PLACE: tl.constexpr, HOLD: tl.constexpr, WORD: tl.constexpr,
    WHOLE: tl.constexpr, REGION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum rows program, program + programs, ... in one phase. A row takes PLACE bytes, and a rank's rows HOLD. WORD:
    the integer type of a number's size."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale, shift, added_scale = load_norm_weights(
        weight, bias, post_norm_weight, columns, inside, NORM, POST_NORM, LAYER
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    own = delta.to(tl.pointer_type(WORD))
    zero = tl.full(columns.shape, -(1 << (WORD.primitive_bitwidth - 1)), WORD)  # -0
    epoch = tl.load(counters + program) + 1
    region = WHOLE + (program * 2 + epoch % 2) * REGION
    place = region + me * HOLD
    for row in range(program, rows, programs):
        words = tl.load(own + row * delta_stride + columns, mask=inside, other=0)
        words = tl.where(words == 0, zero, words)
        for r in tl.static_range(RANKS):
            if r != me:
                tl.store(peer_address(table, r, place, own) + columns, words, mask=inside)
        place += PLACE
    place = region
    for row in range(program, rows, programs):
        mine = tl.load(own + row * delta_stride + columns, mask=inside, other=0)
        total = tl.zeros(columns.shape, tl.float32)
        for r in tl.static_range(RANKS):
            words = mine
            if r != me:
                words = _receive(peer_address(table, me, place + r * HOLD, own) + columns, inside, error, r, polls)
            total += words.to(delta.dtype.element_ty, bitcast=True).to(tl.float32)
        store_row(round_sum(total, delta), row, x, out, delta, scale, shift, added_scale,
                x_stride, delta_stride, out_stride, eps, SIZE, BLOCK, NORM, POST_NORM, LAYER)  # fmt: skip
        place += PLACE
    tl.store(counters + program, epoch)


@fast_launch
@triton.jit(do_not_specialize=["me", "polls"])
def _two_shot(
    x, delta, post_norm_weight, weight, bias, out, table, counters, error, me, polls, rows,
    x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
    RANKS: tl.constexpr, PLACE: tl.constexpr, HOLD: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
    MOST: tl.constexpr, FLAGS: tl.constexpr, REGION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do the same in two phases: rank r sums WIDTH columns from r * WIDTH on (PART: WIDTH rounded up to a power of
    two), and sends the sums. Numbers to sum take PLACE / RANKS bytes a row and HOLD a rank; rows of sums follow."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    columns, few = tl.arange(0, BLOCK), tl.arange(0, PART)
    inside = columns < SIZE
    scale, shift, added_scale = load_norm_weights(
        weight, bias, post_norm_weight, columns, inside, NORM, POST_NORM, LAYER
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    epoch = tl.load(counters + program) + 1
    region = FLAGS + (program * 2 + epoch % 2) * REGION
    place = region + me * HOLD
    for row in range(program, rows, programs):
        for r in tl.static_range(RANKS):
            if r != me:
                real = (few < WIDTH) & (r * WIDTH + few < SIZE)
                values = tl.load(delta + row * delta_stride + r * WIDTH + few, mask=real, other=0.0)
                tl.store(peer_address(table, r, place, delta) + few, values, mask=real)
        place += PLACE // RANKS
    _barrier(table, error, me, program, 0, epoch, polls, RANKS, MOST)
    place, sums = region, region + RANKS * HOLD
    real = (few < WIDTH) & (me * WIDTH + few < SIZE)
    for row in range(program, rows, programs):
        own = delta + row * delta_stride + me * WIDTH + few
        total = _sum(own, few, table, me, place, HOLD, real, RANKS)
        for r in tl.static_range(RANKS):
            tl.store(peer_address(table, r, sums, delta) + me * WIDTH + few, total, mask=real)
        place += PLACE // RANKS
        sums += PLACE
    _barrier(table, error, me, program, 1, epoch, polls, RANKS, MOST)
    sums = region + RANKS * HOLD
    for row in range(program, rows, programs):
        total = tl.load(peer_address(table, me, sums, delta) + columns, mask=inside, other=0.0, cache_modifier=".cg")
        store_row(total, row, x, out, delta, scale, shift, added_scale, x_stride, delta_stride, out_stride, eps,
                SIZE, BLOCK, NORM, POST_NORM, LAYER)  # fmt: skip
        sums += PLACE
    tl.store(counters + program, epoch)


@fast_launch
@triton.jit(do_not_specialize=["me", "polls"])
def _gather(
    x, out, table, counters, error, me, polls, count, RANKS: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
    MOST: tl.constexpr, FLAGS: tl.constexpr, REGION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather `count` numbers, BLOCK at a time; a rank's numbers take HOLD bytes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    epoch = tl.load(counters + program) + 1
    region = FLAGS + (program * 2 + epoch % 2) * REGION
    place = region + me * HOLD
    for start in range(program * BLOCK, count, programs * BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < count
        values = tl.load(x + columns, mask=inside, other=0)
        tl.store(out + me * count + columns, values, mask=inside)
        for r in tl.static_range(RANKS):
            if r != me:
                tl.store(peer_address(table, r, place, x) + tl.arange(0, BLOCK), values, mask=inside)
        place += BLOCK * 4
    _barrier(table, error, me, program, 0, epoch, polls, RANKS, MOST)
    place = region
    for start in range(program * BLOCK, count, programs * BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < count
        for r in tl.static_range(RANKS):
            if r != me:
                theirs = peer_address(table, me, place + r * HOLD, x) + tl.arange(0, BLOCK)
                found = tl.load(theirs, mask=inside, other=0, cache_modifier=".cg")
                tl.store(out + r * count + columns, found, mask=inside)
        place += BLOCK * 4
    tl.store(counters + program, epoch)


class ExchangeShape(NamedTuple):
    """Layout of an exchange of rows: bytes of a row, columns of a rank in two-shot sums, and the most rows of a program
    in one-shot and in two-shot sums."""

    row_bytes: int
    columns_per_rank: int
    one_shot_rows: int
    two_shot_rows: int


def exchange_shape(ranks: int, size: int, itemsize: int) -> ExchangeShape:
    """Return the layout for rows of `size` numbers of `itemsize` bytes. If two_shot_rows is 0 rows are too long."""
    width = cdiv(cdiv(size, ranks) * itemsize, 16) * 16 // itemsize
    place = ranks * width * itemsize
    return ExchangeShape(place, width, REGION_BYTES // (ranks * place), REGION_BYTES // (2 * place))


def all_reduce(peers: PeerBuffers, delta: Tensor, *, shots: int = 0, pdl: bool = False) -> Tensor:
    """Replace delta [T, size] by the sum over all ranks, in place, and return it. Rows are contiguous, of any
    stride."""
    _reduce(peers, None, delta, None, None, None, 0.0, None, shots, pdl)
    return delta


def all_reduce_norm(
    peers: PeerBuffers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *,
    post_norm_weight: Tensor | None = None, shots: int = 0, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Add the sum of all ranks' delta [T, size] to x [T, size] in place, and return the norm of x: equal to
    norm.layer_norm or, without a bias, norm.rms_norm, bit for bit. `shots`: 1 or 2 phases, or 0 to choose by the number
    of bytes. delta is not changed."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _reduce(peers, x, delta, post_norm_weight, weight, bias, eps, out, shots, pdl)
    return out


def _reduce(
    peers: PeerBuffers, x: Tensor | None, delta: Tensor, post_norm_weight: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float, out: Tensor | None, shots: int, pdl: bool,
) -> None:  # fmt: skip
    rows, size = delta.shape
    assert delta.stride(1) == 1, "rows are contiguous"
    assert x is None or (x.shape, x.stride(1), x.dtype) == (delta.shape, 1, delta.dtype), "rows of one shape and dtype"
    ranks, itemsize = peers.ranks, delta.itemsize
    shape = exchange_shape(ranks, size, itemsize)
    assert shape.two_shot_rows, f"a row of {size} numbers is too long"
    if not shots:
        shots = 1 if shape.one_shot_rows and rows * size * itemsize <= peers.one_shot_bytes else 2
    fit = shape.one_shot_rows if shots == 1 else shape.two_shot_rows
    block = power_of_2(size)
    options: dict[str, int] = {"num_warps": num_warps_for(block), "launch_pdl": pdl}
    programs = PROGRAMS
    if options["num_warps"] <= 8:
        options["maxnreg"] = REGISTERS
    else:
        programs = max(programs // 2, 1)
    for at in range(0, rows, programs * fit):
        chunk = slice(at, at + programs * fit)
        d, a, o = delta[chunk], None if x is None else x[chunk], None if out is None else out[chunk]
        grid = (min(len(d), programs),)
        args = (
            a, d, post_norm_weight, weight, bias, o, peers.table, peers.counters, peers.error, peers.rank,
            peers.polls, len(d), 0 if a is None else a.stride(0), d.stride(0), 0 if o is None else o.stride(0), eps,
            size, block, x is not None, post_norm_weight is not None, bias is not None, ranks, shape.row_bytes,
        )  # fmt: skip
        if shots == 1:
            word = tl.int16 if itemsize == 2 else tl.int32
            _one_shot[grid](*args, fit * shape.row_bytes, word, ONE_SHOT_OFFSET, REGION_BYTES, pdl, **options)
        else:
            hold, columns = fit * shape.row_bytes // ranks, shape.columns_per_rank
            _two_shot[grid](
                *args, hold, columns, power_of_2(columns), MAX_PEERS, FLAG_BYTES, REGION_BYTES, pdl, **options
            )


def all_gather(peers: PeerBuffers, x: Tensor, *, pdl: bool = False) -> Tensor:
    """Return the x of all ranks in rank order, [ranks, *x.shape]. x has a multiple of 4 bytes."""
    result = x.new_empty((peers.ranks, *x.shape))
    words = x.contiguous().view(-1).view(torch.int32)
    result_words = result.view(peers.ranks, -1).view(torch.int32)
    hold = REGION_BYTES // peers.ranks // (4 * GATHER_WORDS) * GATHER_WORDS
    most = PROGRAMS * hold
    for at in range(0, len(words), most):
        piece = words[at : at + most]
        out = result_words if len(piece) == len(words) else result_words.new_empty((peers.ranks, len(piece)))
        _gather[(min(cdiv(len(piece), GATHER_WORDS), PROGRAMS),)](
            piece, out, peers.table, peers.counters, peers.error, peers.rank, peers.polls, len(piece),
            peers.ranks, GATHER_WORDS, 4 * hold, MAX_PEERS, FLAG_BYTES, REGION_BYTES, pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        if out is not result_words:
            result_words[:, at : at + most] = out
    return result
