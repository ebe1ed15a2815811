"""All-reduce of many rows by a GPU's copy engines, overlapped with computation: a product of many rows is computed in
pieces, and each piece is sent to the other ranks while the next one is computed. See kernels.triton.copy_engine_pair
for two ranks and kernels.triton.copy_engine_allreduce for more."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed import peer_memory
from quire.kernels.triton import copy_engine_allreduce, copy_engine_pair
from quire.kernels.triton.all_reduce import PeerBuffers

# Smaller pieces take longer in all, for products and for copies.
MIN_CHUNK_ROWS, MIN_CHUNK_BYTES = 1024, 16 << 20


def make_copy_engine_all_reduce(peers: PeerBuffers, device: torch.device) -> CopyEngineAllReduce:
    """Return the object for one rank, by the number of ranks."""
    return CopyEngineAllReduce(peers, device) if peers.ranks == 2 else TwoShotCopyEngineAllReduce(peers, device)


class CopyEngineAllReduce:
    """The all-reduce of one of two ranks. At most one is in flight: that of `pending_delta`, until `finish`."""

    add_norm = staticmethod(copy_engine_pair.all_reduce_norm_pair)

    def __init__(self, peers: PeerBuffers, device: torch.device) -> None:
        self.peers, self.call, self.chunk_rows = peers, 0, 0
        self.pending_delta: Tensor | None = None
        self._stream = torch.cuda.Stream(device, priority=-1)
        *self._computed_events, self._sent_event = (torch.cuda.Event() for _ in range(copy_engine_pair.MAX_PIECES + 1))

    def split_rows(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """Return the pieces in which `rows` rows of `nbytes` bytes in all are to be computed and passed to `send_rows`;
        none if there are too few rows for this to pay, or too many for the region."""
        size = max(-(-rows // copy_engine_pair.MAX_PIECES), MIN_CHUNK_ROWS, MIN_CHUNK_BYTES * rows // nbytes)
        fits = self._rows_needed(rows, size) * nbytes <= copy_engine_pair.region_capacity(self.peers) * rows
        if rows < 2 * MIN_CHUNK_ROWS or not fits or torch.cuda.is_current_stream_capturing():
            return ()
        return tuple(slice(at, min(at + size, rows)) for at in range(0, rows, size))

    def send_rows(self, delta: Tensor, rows: slice) -> None:
        """Send these rows of the dense delta [T, size], which the current stream has computed. The pieces of
        `split_rows` must be sent in order, from the first on."""
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
        """Finish the all-reduce of what was sent: return the norm, as copy_engine_pair.all_reduce_norm_pair does, or,
        without x, the sum in delta's memory."""
        delta, self.pending_delta = self.pending_delta, None
        assert delta is not None, "it was sent"
        self._sent_event.record(self._stream)
        torch.cuda.current_stream().wait_event(self._sent_event)  # delta's memory may be reused after this
        out = None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.add_norm(self.peers, self.call, self.chunk_rows, x, delta, weight, bias, eps, post_norm_weight, out)
        return delta if out is None else out

    def finish_and_discard(self) -> None:
        """Wait for what was sent and discard it, since another tensor is to be all-reduced."""
        if self.pending_delta is not None:
            self.pending_delta = self.pending_delta.clone()
            self.finish(None, None, None, 0.0, None)

    def warm_up(
        self, peers: PeerBuffers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        post_norm_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Compile the kernels for rows like these, with one row that is not sent."""
        x, delta = x[:1].clone(), delta[:1].clone()
        self.add_norm(peers, 1, 1, x, delta, weight, bias, eps, post_norm_weight, torch.empty_like(x))
        self.add_norm(peers, 1, 1, None, delta, None, None, 0.0, None, None)

    def _rows_needed(self, rows: int, piece: int) -> int:
        """Return the number of rows of the fullest region."""
        return rows

    def _send_chunk(self, delta: Tensor, rows: slice, number: int) -> None:
        """Send a piece after it is computed."""
        begin, row, turn = rows.start, delta.stride(0) * delta.itemsize, self.call % 2
        other, stream = self.peers.addresses[1 - self.peers.rank], self._stream.cuda_stream
        target = other + copy_engine_pair.region_offset(self.peers, turn) + begin * row
        peer_memory.copy(target, delta.data_ptr() + begin * row, (rows.stop - begin) * row, stream)
        peer_memory.stream_write_value(other + copy_engine_pair.flag_offset(turn, number), self.call, stream)


class TwoShotCopyEngineAllReduce(CopyEngineAllReduce):
    """The all-reduce of one of three or more ranks, each of which sums its share of every piece. It does so on a second
    stream, which waits for the other ranks' parts by stream operations of the driver, not by a kernel, so the product
    has the whole GPU until all parts are there.

    Such a wait has no timeout. Therefore only the kernels of `finish` wait for that stream, and these have timeouts:
    one waits for this rank's own sums, after which it has sent all and read delta, and one for the other ranks' sums,
    which may fill the GPU then. On a timeout they release the stream. All ranks queue the same operations, in an order
    in which they could run one by one, so it does not matter which streams share a hardware queue."""

    add_norm = staticmethod(copy_engine_allreduce.all_reduce_norm_owned)

    def __init__(self, peers: PeerBuffers, device: torch.device) -> None:
        super().__init__(peers, device)
        self._reduce_stream = torch.cuda.Stream(device, priority=-1)
        me, ranks = peers.rank, peers.ranks
        self._other_ranks = tuple((me + i) % ranks for i in range(1, ranks))  # each rank begins with another one

    def warm_up(
        self, peers: PeerBuffers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        post_norm_weight: Tensor | None,
    ) -> None:  # fmt: skip
        """See CopyEngineAllReduce."""
        super().warm_up(peers, x, delta, weight, bias, eps, post_norm_weight)
        copy_engine_allreduce.reduce_owned(peers, delta[:1].clone(), slice(0, 1), 0, 0)

    def _rows_needed(self, rows: int, piece: int) -> int:
        return copy_engine_allreduce.region_rows(self.peers.ranks, piece, rows)

    def _send_chunk(self, delta: Tensor, rows: slice, number: int) -> None:
        """Send the other ranks their shares of a piece, and queue the sum of this rank's own share."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._stream.cuda_stream
        me, parts = peers.rank, copy_engine_pair.region_offset(peers, copy_engine_allreduce.PARTS)
        first, share = copy_engine_allreduce.parts_layout(peers.ranks, self.chunk_rows, rows)
        for owner in self._other_ranks:
            owner_rows = copy_engine_allreduce.owned_rows(rows, owner, peers.ranks)
            at = parts + (first + (me - (me > owner)) * share) * row
            self._copy(peers.addresses[owner] + at, delta.data_ptr() + owner_rows.start * row, owner_rows, row, stream)
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
        """Sum this rank's own rows once the other ranks' parts are there, and send the sums to all ranks. `first` and
        `share` are those of copy_engine_allreduce.parts_layout."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._reduce_stream.cuda_stream
        me, mine = peers.rank, peers.addresses[peers.rank]
        for source in self._other_ranks:
            peer_memory.stream_wait_value(
                mine + copy_engine_allreduce.flag_offset(copy_engine_allreduce.PARTS, number, source), self.call, stream
            )
        with torch.cuda.stream(self._reduce_stream):
            copy_engine_allreduce.reduce_owned(peers, delta, own, first, share)
        at = copy_engine_pair.region_offset(peers, copy_engine_allreduce.SUMS) + own.start * row
        for other in self._other_ranks:
            self._copy(peers.addresses[other] + at, mine + at, own, row, stream)
        for rank in (*self._other_ranks, me):  # after the copies; the own flag says that this rank has sent all
            peer_memory.stream_write_value(
                peers.addresses[rank] + copy_engine_allreduce.flag_offset(copy_engine_allreduce.SUMS, number, me),
                self.call,
                stream,
            )

    def _copy(self, target: int, source: int, rows: slice, row: int, stream: int) -> None:
        if rows.start < rows.stop:
            peer_memory.copy(target, source, (rows.stop - rows.start) * row, stream)
