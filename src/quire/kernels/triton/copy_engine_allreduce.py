"""Sums of many rows over three ranks or more, whose numbers copy engines carry as kernels.triton.carried's over two. Of
each piece every rank owns a share of the rows: the others send it their parts of these, it adds them up, in fp32 and in
rank order, rounds once, and sends the sums to all. So each rank sends less than twice the rows' bytes, however many
ranks there are. What follows, the residual sum and the norm, each has for itself; a row waits for its owner's flag.

The memory lies behind peer_sizes.BYTES: flags, of each phase, piece and rank, then two regions. In that of PARTS what
came for a piece lies by the rank that sent it; that of SUMS has all rows in their order. A flag is the number of the
call, which the host counts, so none of this is captured.

There is no second turn. A rank sends parts when it has read all sums of the call before, and each owner had added up
its parts of that call before it sent these. An owner sends sums when parts have come from everybody, each of whom had
read the sums of the call before then. So what is written over was read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.peer_memory_layout import KERNEL_BYTES, MAX_PEERS
from quire.kernels.triton.all_reduce import PeerBuffers, load_norm_weights, peer_address, round_sum, store_row
from quire.kernels.triton.copy_engine_pair import MAX_PIECES, wait_for_flag
from quire.kernels.triton.copy_engine_pair import region_offset as carried_region_offset
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import cdiv, power_of_2
from quire.kernels.triton.norm import num_warps_for

PARTS, SUMS = 0, 1  # what is sent: to a row's owner, and by it


def flag_offset(phase: int, piece: int, rank: int) -> int:
    """Bytes from the begin of a rank's memory to the flag of a piece that `rank` sends."""
    return KERNEL_BYTES + ((phase * MAX_PIECES + piece) * MAX_PEERS + rank) * 8


def region_offset(peers: PeerBuffers, phase: int) -> int:
    """The same, to the region of parts or of sums."""
    return carried_region_offset(peers, phase)


def owned_rows(rows: slice, owner: int, ranks: int) -> slice:
    """Of a piece of rows those that a rank owns; the last ranks may have fewer, or none."""
    share = cdiv(rows.stop - rows.start, ranks)
    begin = min(rows.start + owner * share, rows.stop)
    return slice(begin, min(begin + share, rows.stop))


def parts_layout(ranks: int, piece: int, rows: slice) -> tuple[int, int]:
    """Where parts of `rows`, one of the pieces of `piece` rows, lie in their owner's region of parts: the row from
    which on, and how many rows each of the other ranks has there, in rank order."""
    return rows.start // piece * cdiv(piece, ranks) * (ranks - 1), cdiv(rows.stop - rows.start, ranks)


def region_rows(ranks: int, piece: int, rows: int) -> int:
    """The rows that the longer of the regions holds, of so many rows in pieces of `piece`."""
    whole, rest = divmod(rows, piece)
    return max(rows, (whole * cdiv(piece, ranks) + cdiv(rest, ranks)) * (ranks - 1))


@fast_launch
@triton.jit(do_not_specialize=["me", "parts", "sums", "begin", "first", "share"])
def _add_up(
    delta, table, me, parts, sums, begin, first, share, SIZE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """Row begin + program, whose parts lie in row first + program and `share` rows further of each next rank's."""
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
def _give_up(said, call, error, me, owner, RANKS: tl.constexpr):
    """Name who was missed for a sum: the owner, or whose part isn't here either. Then let the stream go on that waits
    for such parts: what it adds up now is of no use, but nor is the step, and its queue must have an end."""
    missed = owner
    for i in tl.static_range(RANKS):
        r = RANKS - 1 - i
        came = tl.atomic_add((said + r * 8).to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")
        missed = tl.where((came < call) & (me != r), r, missed)  # others may have given up, and gone on
    if tl.load(error) == 0:  # the first cause is kept
        tl.store(error, missed + 1)
    for r in tl.static_range(RANKS):
        if r != me:
            tl.atomic_max((said + r * 8).to(tl.pointer_type(tl.int64)), call, sem="release", scope="sys")


@triton.jit
def _piece_rows(number, piece, rows):
    """Rows of a piece."""
    return tl.minimum(rows - number * piece, piece)


@fast_launch
@triton.jit(do_not_specialize=["me", "polls", "parts_said", "sums_said", "call", "piece", "rows"])
def _await_own(
    table, error, me, polls, parts_said, sums_said, call, piece, rows, RANKS: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Wait for the sums that this rank itself takes and sends, in one program. Those of _finish fill the GPU while they
    wait for others' sums, and if they did so on every GPU, _add_up would find room on none."""
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
    rows,
    x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
    RANKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A row a program; `piece` rows have a flag of each owner in common. `parts_said` and `sums_said`: where the flags
    are."""
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
    """The sums of rows `own` of delta [T, size], dense, this rank's share of a piece, into its region of sums, once all
    parts are there, in their `parts_layout`. As many programs as rows: none of them waits, and the sooner all have
    ended, the sooner the next product has all of the GPU."""
    size = delta.shape[1]
    assert delta.is_contiguous(), "rows are dense, as they were sent"
    block = power_of_2(size)
    _add_up[(own.stop - own.start,)](
        delta, peers.table, peers.rank, region_offset(peers, PARTS), region_offset(peers, SUMS), own.start, first,
        share,
        size, block, peers.ranks, num_warps=num_warps_for(block),
    )  # fmt: skip


def all_reduce_norm_owned(
    peers: PeerBuffers, call: int, piece: int, x: Tensor | None, delta: Tensor, weight: Tensor | None,
    bias: Tensor | None,
    eps: float, post_norm_weight: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """As carried.add_norm, of the sums that come: delta, whose parts were sent, is written without x alone. In two
    launches, the first of which leaves nearly all of the GPU to `reduce_owned`."""
    rows, size = delta.shape
    assert delta.is_contiguous(), "rows are dense, as they were sent"
    assert rows <= MAX_PIECES * piece, f"{rows} rows are more than {MAX_PIECES} pieces of {piece}"
    block, said = power_of_2(size), (flag_offset(PARTS, 0, 0), flag_offset(SUMS, 0, 0))
    whose = (peers.table, peers.error, peers.rank, peers.polls)
    _await_own[(1,)](*whose, *said, call, piece, rows, peers.ranks, MAX_PEERS, num_warps=1)
    _finish[(rows,)](
        x, delta, post_norm_weight, weight, bias, out, *whose, *said, region_offset(peers, SUMS), call, piece, rows,
        0 if x is None else x.stride(0), delta.stride(0), 0 if out is None else out.stride(0), eps,
        size, block, x is not None, post_norm_weight is not None, bias is not None, peers.ranks, MAX_PEERS,
        num_warps=num_warps_for(block),
    )  # fmt: skip
