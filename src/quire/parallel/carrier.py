"""Rows that ranks add up, sent by a GPU's copy engines while it computes the next ones: a product of many rows is
computed in pieces, and each is on its way to the other ranks while the next is computed. See kernels.triton.carried for
two ranks, and kernels.triton.owned for more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.triton import carried, owned
from quire.data.kernels.triton.reduce import Peers
from quire.parallel import peer_memory

LEAST, LEAST_BYTES = 1024, 16 << 20  # rows and bytes of a piece: smaller products and copies take longer in all


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def carrier_of(peers: Peers, device: torch.device) -> Carrier:
    """One rank's end, of so many ranks."""
    return Carrier(peers, device) if peers.ranks == 2 else Owners(peers, device)


class Carrier:
    """One of two ranks' end. At most one exchange is under way: `delta`, which was or is being sent, until `finish`."""

    add_norm = staticmethod(carried.add_norm)

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.call, self.piece = peers, 0, 0
        self.delta: Tensor | None = None
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        *self._computed, self._sent = (_event() for _ in range(carried.PIECES + 1))

    def pieces(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """The rows that are to be computed at a time, for `send`, of so many with `nbytes` in all; none where they are
        too few for it to be worth it, or too many."""
        size = max(-(-rows // carried.PIECES), LEAST, LEAST_BYTES * rows // nbytes)
        fits = self._reach(rows, size) * nbytes <= carried.room(self.peers) * rows
        if rows < 2 * LEAST or not fits or torch.cuda.is_current_stream_capturing():
            return ()
        return tuple(slice(at, min(at + size, rows)) for at in range(0, rows, size))

    def send(self, delta: Tensor, rows: slice) -> None:
        """Send these rows of delta [T, size], dense, which the current stream has computed; from the first on, in
        order, in the pieces that were said."""
        begin, end = rows.start, rows.stop
        if begin == 0:
            self.drop()
            self.call, self.piece, self.delta = self.call + 1, end, delta
        number = begin // self.piece
        self._computed[number].record()
        self._stream.wait_event(self._computed[number])
        self._bring(delta, rows, number)

    def finish(
        self, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, behind: Tensor | None
    ) -> Tensor:
        """As carried.add_norm, of what was sent: the norm, or without x the sum, in delta's place."""
        delta, self.delta = self.delta, None
        assert delta is not None, "it was sent"
        self._sent.record(self._stream)
        torch.cuda.current_stream().wait_event(self._sent)  # then delta's memory may be used for something else
        out = None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        self.add_norm(self.peers, self.call, self.piece, x, delta, weight, bias, eps, behind, out)
        return delta if out is None else out

    def drop(self) -> None:
        """What was sent isn't what is to be added up: it is waited for, and forgotten."""
        if self.delta is not None:
            self.delta = self.delta.clone()
            self.finish(None, None, None, 0.0, None)

    def rehearse(
        self, peers: Peers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        behind: Tensor | None,
    ) -> None:  # fmt: skip
        """Compile what will be launched for rows like these: one of them, which nobody sends."""
        x, delta = x[:1].clone(), delta[:1].clone()
        self.add_norm(peers, 1, 1, x, delta, weight, bias, eps, behind, torch.empty_like(x))
        self.add_norm(peers, 1, 1, None, delta, None, None, 0.0, None, None)

    def _reach(self, rows: int, piece: int) -> int:
        """The rows of the region that is filled the furthest."""
        return rows

    def _bring(self, delta: Tensor, rows: slice, number: int) -> None:
        """Send a piece, once it is computed."""
        begin, row, turn = rows.start, delta.stride(0) * delta.itemsize, self.call % 2
        other, stream = self.peers.addresses[1 - self.peers.rank], self._stream.cuda_stream
        target = other + carried.rows_at(self.peers, turn) + begin * row
        peer_memory.copy(target, delta.data_ptr() + begin * row, (rows.stop - begin) * row, stream)
        peer_memory.write(other + carried.flag_at(turn, number), self.call, stream)


class Owners(Carrier):
    """The same of more ranks, each of which adds up its share of every piece. That is done on a second stream, which
    waits for the others' parts by the driver's means: no program does, so the product has the GPU until all are there.

    Such a wait has no bounds. So nothing waits for that stream but the kernels of `finish`, which have: one for this
    rank's own sums, behind which it has sent all and read delta, and one for the others', which may fill the GPU then.
    When they give up they let the stream go on. All ranks queue the same, in an order in which it could be done one by
    one: it doesn't matter which streams share a queue of the device."""

    add_norm = staticmethod(owned.add_norm)

    def __init__(self, peers: Peers, device: torch.device) -> None:
        super().__init__(peers, device)
        self._adding: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        me, ranks = peers.rank, peers.ranks
        self._others = tuple((me + i) % ranks for i in range(1, ranks))  # no two ranks begin with the same

    def rehearse(
        self, peers: Peers, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
        behind: Tensor | None,
    ) -> None:  # fmt: skip
        """See Carrier."""
        super().rehearse(peers, x, delta, weight, bias, eps, behind)
        owned.add_up(peers, delta[:1].clone(), slice(0, 1), 0, 0)

    def _reach(self, rows: int, piece: int) -> int:
        return owned.reach(self.peers.ranks, piece, rows)

    def _bring(self, delta: Tensor, rows: slice, number: int) -> None:
        """The others' shares go to them; this rank's own is added up when their parts are there, and goes to all."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._stream.cuda_stream
        me, parts = peers.rank, owned.region_at(peers, owned.PARTS)
        first, share = owned.places(peers.ranks, self.piece, rows)
        for owner in self._others:
            some = owned.owned(rows, owner, peers.ranks)
            at = parts + (first + (me - (me > owner)) * share) * row
            self._copy(peers.addresses[owner] + at, delta.data_ptr() + some.start * row, some, row, stream)
        for owner in self._others:
            peer_memory.write(peers.addresses[owner] + owned.flag_at(owned.PARTS, number, me), self.call, stream)
        own = owned.owned(rows, me, peers.ranks)
        if own.start < own.stop:
            self._adding.wait_event(self._computed[number])
            self._add_up(delta, own, number, first, share)

    def _add_up(self, delta: Tensor, own: slice, number: int, first: int, share: int) -> None:
        """Of this rank's own rows; see owned.places."""
        peers, row, stream = self.peers, delta.stride(0) * delta.itemsize, self._adding.cuda_stream
        me, mine = peers.rank, peers.addresses[peers.rank]
        for source in self._others:
            peer_memory.wait(mine + owned.flag_at(owned.PARTS, number, source), self.call, stream)
        with torch.cuda.stream(self._adding):
            owned.add_up(peers, delta, own, first, share)
        at = owned.region_at(peers, owned.SUMS) + own.start * row
        for other in self._others:
            self._copy(peers.addresses[other] + at, mine + at, own, row, stream)
        for rank in (*self._others, me):  # behind the copies: its own word says that this rank has sent all
            peer_memory.write(peers.addresses[rank] + owned.flag_at(owned.SUMS, number, me), self.call, stream)

    def _copy(self, target: int, source: int, rows: slice, row: int, stream: int) -> None:
        if rows.start < rows.stop:
            peer_memory.copy(target, source, (rows.stop - rows.start) * row, stream)
