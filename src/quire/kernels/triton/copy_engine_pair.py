"""All-reduce of many rows over two ranks by the GPUs' copy engines, so that multiprocessors are free for what comes
next. A rank's rows are written into the other's memory in pieces, each as soon as it is computed, followed by a flag.
The kernel here adds them to this rank's rows, in fp32 and in rank order, as `all_reduce` does, and then computes the
residual sum and the norm; each row waits only for its piece's flag.

The memory after peer_memory_layout.KERNEL_BYTES holds flags, MAX_PIECES for each of two turns, then two regions, used
in turn. The host counts calls; a call's turn is the parity of its number, and its flags are set to that number. So
graphs cannot capture this.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.peer_memory_layout import COPY_FLAG_BYTES, KERNEL_BYTES
from quire.kernels.triton.all_reduce import (
    ABORT_POLLS,
    PeerBuffers,
    load_norm_weights,
    peer_address,
    round_sum,
    store_row,
)
from quire.kernels.triton.fast_launch import fast_launch
from quire.kernels.triton.launch import power_of_2
from quire.kernels.triton.norm import num_warps_for

MAX_PIECES = 8  # of a call


def flag_offset(turn: int, piece: int) -> int:
    """Return the offset in bytes of a piece's flag in a rank's memory."""
    return KERNEL_BYTES + (turn * MAX_PIECES + piece) * 8


def region_offset(peers: PeerBuffers, turn: int) -> int:
    """Return the offset in bytes of the region of a turn; of copy_engine_allreduce, of a phase."""
    return KERNEL_BYTES + COPY_FLAG_BYTES + turn * region_capacity(peers)


def region_capacity(peers: PeerBuffers) -> int:
    """Return the bytes of rows that a region holds."""
    return max(peers.copy_bytes - COPY_FLAG_BYTES, 0) // 2 // 16 * 16


@triton.jit
def wait_for_flag(flag, call, error, polls):
    """Poll a flag until it is `call`, at most `polls` times, or until another program has stored an error. Return the
    flag."""
    left = polls
    seen = tl.load(flag, volatile=True)
    while (seen != call) & (left > 0):
        seen = tl.load(flag, volatile=True)
        left -= 1
        if left % ABORT_POLLS == 0:  # noqa: SIM102
            if tl.load(error) != 0:
                left = left * 0
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # makes what was written before the flag visible


@fast_launch
@triton.jit(do_not_specialize=["me", "polls", "flags", "theirs", "call", "piece"])
def _carried(
    x, delta, post_norm_weight, weight, bias, out, table, error, me, polls, flags, theirs, call, piece,
    x_stride, delta_stride, out_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, POST_NORM: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """Finish one row a program: wait for the other rank's row, add, then store the sum, or add it to the residual and
    normalise. `piece` rows share a flag."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale, shift, added_scale = load_norm_weights(
        weight, bias, post_norm_weight, columns, inside, NORM, POST_NORM, LAYER
    )
    mine = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
    flag = (tl.load(table + me) + flags + row // piece * 8).to(tl.pointer_type(tl.int64))
    seen = wait_for_flag(flag, call, error, polls)
    if seen != call:  # noqa: SIM102
        if tl.load(error) == 0:
            tl.store(error, 2 - me)
    tl.debug_barrier()
    other = tl.load(
        peer_address(table, me, theirs, delta) + row * SIZE + columns, mask=inside, other=0.0, cache_modifier=".cg"
    )
    first = tl.where(me == 0, mine, other).to(tl.float32)
    second = tl.where(me == 0, other, mine).to(tl.float32)
    store_row(round_sum(first + second, delta), row, x, out, delta, scale, shift, added_scale,
           x_stride, delta_stride, out_stride, eps, SIZE, BLOCK, NORM, POST_NORM, LAYER)  # fmt: skip


def all_reduce_norm_pair(
    peers: PeerBuffers, call: int, piece: int, x: Tensor | None, delta: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, post_norm_weight: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Sum delta [T, size], contiguous, this rank's rows of exchange number `call`, with the other rank's, which arrive
    in pieces of `piece` rows. x [T, size] += the sum, in place, and its norm is written to `out`, as by
    all_reduce.all_reduce_norm; without x the sum is written to delta."""
    rows, size = delta.shape
    assert delta.is_contiguous(), "delta is contiguous, as it was sent"
    assert rows <= MAX_PIECES * piece, f"{rows} rows are more than {MAX_PIECES} pieces of {piece}"
    block = power_of_2(size)
    _carried[(rows,)](
        x, delta, post_norm_weight, weight, bias, out, peers.table, peers.error, peers.rank, peers.polls,
        flag_offset(call % 2, 0), region_offset(peers, call % 2), call, piece,
        0 if x is None else x.stride(0), delta.stride(0), 0 if out is None else out.stride(0), eps,
        size, block, x is not None, post_norm_weight is not None, bias is not None, num_warps=num_warps_for(block),
    )  # fmt: skip
