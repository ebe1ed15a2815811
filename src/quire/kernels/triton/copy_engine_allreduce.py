"""All-reduce of many rows over three or more ranks by copy engines, as copy_engine_pair for two. Rows are cut into
pieces. Each rank owns a share of the rows of each piece: the others send it their numbers ("parts") of these rows, and
it adds them in fp32 and in rank order, rounds once, and sends the sums to all. So each rank sends less than twice the
rows' bytes, for any number of ranks. Each rank then computes the residual sum and the norm; a row waits for its owner's
flag.

The memory after peer_memory_layout.KERNEL_BYTES holds flags, one for each phase, piece and rank, then two regions. The
region of PARTS holds the received parts of each piece, by sending rank; the region of SUMS holds all rows in order. A
flag is set to the number of the call, which the host counts, so that graphs cannot capture this.

One buffer of each kind is enough. A rank sends parts after it has read all sums of the previous call, and each owner
had added its parts of that call before it sent those sums. An owner sends sums after it has received parts from all
ranks, which had all read the previous call's sums before. So everything that is overwritten has been read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.peer_memory_layout import KERNEL_BYTES, MAX_PEERS
from quire.kernels.triton.all_reduce import PeerBuffers, load_norm_weights, peer_address, round_sum, store_row
from quire.kernels.triton.copy_engine_pair import MAX_PIECES, region_offset, wait_for_flag
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.norm import num_warps_for

PARTS, SUMS = 0, 1  # phases: sent to a row's owner, and by it


def flag_offset(phase: int, piece: int, rank: int) -> int:
    """Return the offset in bytes, in a rank's memory, of the flag of a piece that `rank` sends."""
    return KERNEL_BYTES + ((phase * MAX_PIECES + piece) * MAX_PEERS + rank) * 8


def owned_rows(rows: slice, owner: int, ranks: int) -> slice:
    """Return the rows of a piece that a rank owns; the last ranks may own fewer, or none."""
    share = cdiv(rows.stop - rows.start, ranks)
    begin = min(rows.start + owner * share, rows.stop)
    return slice(begin, min(begin + share, rows.stop))


def parts_layout(ranks: int, piece: int, rows: slice) -> tuple[int, int]:
    """Return where the parts of `rows`, one of the pieces of `piece` rows, are in their owner's region: the first row,
    and the rows of each of the other ranks there, in rank order."""
    return rows.start // piece * cdiv(piece, ranks) * (ranks - 1), cdiv(rows.stop - rows.start, ranks)


def region_rows(ranks: int, piece: int, rows: int) -> int:
    """Return the rows of the larger region, for `rows` rows in pieces of `piece`."""
    whole, rest = divmod(rows, piece)
    return max(rows, (whole * cdiv(piece, ranks) + cdiv(rest, ranks)) * (ranks - 1))


@fast_launch
@triton.jit(do_not_specialize=["me", "parts", "sums", "begin", "first", "share"])
def _add_up(
    delta, table, me, parts, sums, begin, first, share, SIZE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """Sum row begin + program. Its parts are in row first + program, and for each further rank `share` rows later."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    place = (begin + program) * SIZE + columns
    mine, theirs = tl.load(delta + place, mask=inside, other=0.0), peer_address(table, me, parts, delta)
    for r in tl.static_range(RANKS):
        row = first + program + tl.where(me < r, r - 1, r).to(tl.int64) * share
        other = tl.load(theirs + row * SIZE + columns, mask=inside & (me != r), other=0.0, cache_modifier=".cg")
        part = tl.where(me == r, mine, other).to(tl.float32)
        if r == 0:
            total = part
        else:
            total += part
    tl.store(peer_address(table, me, sums, delta) + place, round_sum(total, delta), mask=inside)


@triton.jit
def _give_up(flags, call, error, me, owner, RANKS: tl.constexpr):
    """Store as error the rank that did not answer: the owner, or the first rank whose part is missing here too. Then
    set the flags of missing parts, so that the stream that waits for them continues: the sums are wrong, but the step
    has failed, and the stream's queue must end."""
    missed = owner
    for i in tl.static_range(RANKS):
        r = RANKS - 1 - i
        came = tl.atomic_add((flags + r * 8).to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")
        missed = tl.where((came < call) & (me != r), r, missed)  # other ranks may have given up, and have continued
    if tl.load(error) == 0:  # the first cause is kept
        tl.store(error, missed + 1)
    for r in tl.static_range(RANKS):
        if r != me:
            tl.atomic_max((flags + r * 8).to(tl.pointer_type(tl.int64)), call, sem="release", scope="sys")


@triton.jit
def _piece_rows(number, piece, rows):
    """Return the rows of piece `number`; the last piece may be shorter."""
    return tl.minimum(rows - number * piece, piece)


@fast_launch
@triton.jit(do_not_specialize=["me", "polls", "parts_said", "sums_said", "call", "piece", "rows"])
def _await_own(
    table, error, me, polls, parts_said, sums_said, call, piece, rows, RANKS: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Wait for the sums that this rank computes and sends, in one program. The programs of _finish occupy the GPU while
    they wait for other ranks' sums; if they started earlier, on every GPU, _add_up would have room on none."""
    for number in range((rows + piece - 1) // piece):
        length = _piece_rows(number, piece, rows)
        if me * tl.cdiv(length, RANKS) < length:
            mine = tl.load(table + me) + number * (MOST * 8)
            seen = wait_for_flag((mine + sums_said + me * 8).to(tl.pointer_type(tl.int64)), call, error, polls)
            if seen != call:
                _give_up(mine + parts_said, call, error, me, me, RANKS)


@fast_launch
@triton.jit(do_not_specialize=["me", "polls", "parts_said", "sums_said", "sums", "call", "piece", "rows"])
def _finish(
    x, delta, post_norm_weight, weight, bias, out, table, error, me, polls, parts_said, sums_said, sums, call, piece,
    rows, x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
    RANKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Finish one row a program: wait for its sum, then store it, or add it to the residual and normalise. The rows of a
    piece share one flag for each owner. `parts_said` and `sums_said` are the offsets of the flags."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale, shift, added_scale = load_norm_weights(
        weight, bias, post_norm_weight, columns, inside, NORM, POST_NORM, LAYER
    )
    number = row // piece
    owner = row % piece // tl.cdiv(_piece_rows(number, piece, rows), RANKS)
    mine = tl.load(table + me) + number * (MOST * 8)
    seen = wait_for_flag((mine + sums_said + owner * 8).to(tl.pointer_type(tl.int64)), call, error, polls)
    if seen != call:
        _give_up(mine + parts_said, call, error, me, owner, RANKS)
    tl.debug_barrier()
    total = tl.load(
        peer_address(table, me, sums, delta) + row * SIZE + columns, mask=inside, other=0.0, cache_modifier=".cg"
    )
    store_row(total, row, x, out, delta, scale, shift, added_scale, x_stride, delta_stride, out_stride, eps,
           SIZE, BLOCK, NORM, POST_NORM, LAYER)  # fmt: skip


def reduce_owned(peers: PeerBuffers, delta: Tensor, own: slice, first: int, share: int) -> None:
    """Sum rows `own` of delta [T, size], contiguous, this rank's share of a piece, into its region of sums. All parts
    must have arrived, in their `parts_layout`. One program a row: none of them waits, and the sooner all end, the
    sooner the next product has the whole GPU."""
    size = delta.shape[1]
    assert delta.is_contiguous(), "delta is contiguous, as it was sent"
    block = power_of_2(size)
    _add_up[(own.stop - own.start,)](
        delta, peers.table, peers.rank, region_offset(peers, PARTS), region_offset(peers, SUMS), own.start, first,
        share, size, block, peers.ranks, num_warps=num_warps_for(block),
    )  # fmt: skip


def all_reduce_norm_owned(
    peers: PeerBuffers, call: int, piece: int, x: Tensor | None, delta: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, post_norm_weight: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Do the same as copy_engine_pair.all_reduce_norm_pair, with the sums that the owners send; delta, whose parts were
    sent, is written only without x. In two launches, the first of which leaves nearly all of the GPU to
    `reduce_owned`."""
    rows, size = delta.shape
    assert delta.is_contiguous(), "delta is contiguous, as it was sent"
    assert rows <= MAX_PIECES * piece, f"{rows} rows are more than {MAX_PIECES} pieces of {piece}"
    block, flags = power_of_2(size), (flag_offset(PARTS, 0, 0), flag_offset(SUMS, 0, 0))
    peer_args = (peers.table, peers.error, peers.rank, peers.polls)
    _await_own[(1,)](*peer_args, *flags, call, piece, rows, peers.ranks, MAX_PEERS, num_warps=1)
    _finish[(rows,)](
        x, delta, post_norm_weight, weight, bias, out, *peer_args, *flags, region_offset(peers, SUMS), call, piece,
        rows, 0 if x is None else x.stride(0), delta.stride(0), 0 if out is None else out.stride(0), eps,
        size, block, x is not None, post_norm_weight is not None, bias is not None, peers.ranks, MAX_PEERS,
        num_warps=num_warps_for(block),
    )  # fmt: skip
