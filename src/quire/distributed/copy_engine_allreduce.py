"""Rows that ranks add up, sent by a GPU's copy engines while it computes the next ones: a product of many rows is
computed in pieces, and each is on its way to the other ranks while the next is computed. See kernels.triton.carried for
two ranks, and kernels.triton.owned for more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.distributed import peer_memory
from quire.kernels.triton import copy_engine_allreduce, copy_engine_pair
from quire.kernels.triton.all_reduce import PeerBuffers

MIN_CHUNK_ROWS, MIN_CHUNK_BYTES = (
    1024,
    16 << 20,
)  # rows and bytes of a piece: smaller products and copies take longer in all


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def make_copy_engine_all_reduce(peers: PeerBuffers, device: torch.device) -> CopyEngineAllReduce:
    """One rank's end, of so many ranks."""
    return CopyEngineAllReduce(peers, device) if peers.ranks == 2 else TwoShotCopyEngineAllReduce(peers, device)


class CopyEngineAllReduce:
    """One of two ranks' end. At most one exchange is under way: `pending_delta`, which was or is being sent, until "
    "`finish`."""

    add_norm = staticmethod(copy_engine_pair.all_reduce_norm_pair)

    def __init__(self, peers: PeerBuffers, device: torch.device) -> None:
        self.peers, self.call, self.chunk_rows = peers, 0, 0
        self.pending_delta: Tensor | None = None
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        *self._computed_events, self._sent_event = (_event() for _ in range(copy_engine_pair.MAX_PIECES + 1))

    def split_rows(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """The rows that are to be computed at a time, for `send_rows`, of so many with `nbytes` in all; none where they
        are too few for it to be worth it, or too many."""
        size = max(-(-rows // copy_engine_pair.MAX_PIECES), MIN_CHUNK_ROWS, MIN_CHUNK_BYTES * rows // nbytes)
        fits = self._rows_needed(rows, size) * nbytes <= copy_engine_pair.region_capacity(self.peers) * rows
        if rows < 2 * MIN_CHUNK_ROWS or not fits or torch.cuda.is_current_stream_capturing():
            return ()
        return tuple(slice(at, min(at + size, rows)) for at in range(0, rows, size))

    def send_rows(self, delta: Tensor, rows: slice) -> None:
        """Send these rows of delta [T, size], dense, which the current stream has computed; from the first on, in
        order, in the pieces that were said."""
        begin, end = rows.start, rows.stop
        if begin == 0:
            self.finish_and_discard()
            self.call, self.chunk_rows, self.pending_delta = self.call + 1, end, delta
        number = begin // self.chunk_rows
        self._computed_events[number].record()
        self._stream.wait_event(self._computed_events[number])
        self._send_chunk(delta, rows, number)

    def finish(
        self, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, post_norm_weight: Tensor | None
    ) -> Tensor:
        """As carried.add_norm, of what was sent: the norm, or without x the sum, in delta's place."""
        delta, self.pending_delta = self.pending_delta, None
        assert delta is not None, "it was sent"
        self._sent_event.record(self._stream)
        torch.cuda.current_stream().wait_event(self._sent_event)  # then delta's memory may be used for something else
        out = None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.add_norm(self.peers, self.call, self.chunk_rows, x, delta, weight, bias, eps, post_norm_weight, out)
        return delta if out is None else out

    def finish_and_discard(self) -> None:
        """What was sent isn't what is to be added up: it is waited for, and forgotten."""
        if self.pending_delta is not None:
            self.pending_delta = self.pending_delta.clone()
            self.finish(None, None, None, 0.0, None)

    def warm_up(
        self, peers: PeerBuffers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        post_norm_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Compile what will be launched for rows like these: one of them, which nobody sends."""
        x, delta = x[:1].clone(), delta[:1].clone()
        self.add_norm(peers, 1, 1, x, delta, weight, bias, eps, post_norm_weight, torch.empty_like(x))
        self.add_norm(peers, 1, 1, None, delta, None, None, 0.0, None, None)

    def _rows_needed(self, rows: int, piece: int) -> int:
        """The rows of the region that is filled the furthest."""
        return rows

    def _send_chunk(self, delta: Tensor, rows: slice, number: int) -> None:
        """Send a piece, once it is computed."""
        begin, row, turn = rows.start, delta.stride(0) * delta.itemsize, self.call % 2
        other, stream = self.peers.addresses[1 - self.peers.rank], self._stream.cuda_stream
        target = other + copy_engine_pair.region_offset(self.peers, turn) + begin * row
        peer_memory.copy(target, delta.data_ptr() + begin * row, (rows.stop - begin) * row, stream)
        peer_memory.stream_write_value(other + copy_engine_pair.flag_offset(turn, number), self.call, stream)


class TwoShotCopyEngineAllReduce(CopyEngineAllReduce):
    """The same of more ranks, each of which adds up its share of every piece. That is done on a second stream, which
    waits for the others' parts by the driver's means: no program does, so the product has the GPU until all are there.

    Such a wait has no bounds. So nothing waits for that stream but the kernels of `finish`, which have: one for this
    rank's own sums, behind which it has sent all and read delta, and one for the others', which may fill the GPU then.
    When they give up they let the stream go on. All ranks queue the same, in an order in which it could be done one by
    one: it doesn't matter which streams share a queue of the device."""

    add_norm = staticmethod(copy_engine_allreduce.all_reduce_norm_owned)

    def __init__(self, peers: PeerBuffers, device: torch.device) -> None:
        super().__init__(peers, device)
        self._reduce_stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        me, ranks = peers.rank, peers.ranks
        self._other_ranks = tuple((me + i) % ranks for i in range(1, ranks))  # no two ranks begin with the same

    def warm_up(
        self, peers: PeerBuffers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        post_norm_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """See Carrier."""
        super().warm_up(peers, x, delta, weight, bias, eps, post_norm_weight)
        copy_engine_allreduce.reduce_owned(peers, delta[:1].clone(), slice(0, 1), 0, 0)

    def _rows_needed(self, rows: int, piece: int) -> int:
        return copy_engine_allreduce.region_rows(self.peers.ranks, piece, rows)

    def _send_chunk(self, delta: Tensor, rows: slice, number: int) -> None:
        """The others' shares go to them; this rank's own is added up when their parts are there, and goes to all."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._stream.cuda_stream
        me, parts = peers.rank, copy_engine_allreduce.region_offset(peers, copy_engine_allreduce.PARTS)
        first, share = copy_engine_allreduce.parts_layout(peers.ranks, self.chunk_rows, rows)
        for owner in self._other_ranks:
            some = copy_engine_allreduce.owned_rows(rows, owner, peers.ranks)
            at = parts + (first + (me - (me > owner)) * share) * row
            self._copy(peers.addresses[owner] + at, delta.data_ptr() + some.start * row, some, row, stream)
        for owner in self._other_ranks:
            peer_memory.stream_write_value(
                peers.addresses[owner] + copy_engine_allreduce.flag_offset(copy_engine_allreduce.PARTS, number, me),
                self.call,
                stream,
            )
        own = copy_engine_allreduce.owned_rows(rows, me, peers.ranks)
        if own.start < own.stop:
            self._reduce_stream.wait_event(self._computed_events[number])
            self._reduce_own_rows(delta, own, number, first, share)

    def _reduce_own_rows(self, delta: Tensor, own: slice, number: int, first: int, share: int) -> None:
        """Of this rank's own rows; see owned.places."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._reduce_stream.cuda_stream
        me, mine = peers.rank, peers.addresses[peers.rank]
        for source in self._other_ranks:
            peer_memory.stream_wait_value(
                mine + copy_engine_allreduce.flag_offset(copy_engine_allreduce.PARTS, number, source), self.call, stream
            )
        with torch.cuda.stream(self._reduce_stream):
            copy_engine_allreduce.reduce_owned(peers, delta, own, first, share)
        at = copy_engine_allreduce.region_offset(peers, copy_engine_allreduce.SUMS) + own.start * row
        for other in self._other_ranks:
            self._copy(peers.addresses[other] + at, mine + at, own, row, stream)
        for rank in (*self._other_ranks, me):  # behind the copies: its own word says that this rank has sent all
            peer_memory.stream_write_value(
                peers.addresses[rank] + copy_engine_allreduce.flag_offset(copy_engine_allreduce.SUMS, number, me),
                self.call,
                stream,
            )

    def _copy(self, target: int, source: int, rows: slice, row: int, stream: int) -> None:
        if rows.start < rows.stop:
            peer_memory.copy(target, source, (rows.stop - rows.start) * row, stream)
