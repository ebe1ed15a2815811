"""Rows that two ranks add up, sent by a GPU's copy engines while it computes the next ones: a product of many rows is
computed in pieces, and each is on its way to the other rank while the next is computed. See kernels.triton.carried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.triton import carried
from quire.data.kernels.triton.reduce import Peers
from quire.parallel import peer_memory

LEAST, LEAST_BYTES = 1024, 16 << 20  # rows and bytes of a piece: smaller products and copies take longer in all


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Carrier:
    """One rank's end. At most one exchange is under way: `delta`, which was or is being sent, until `finish`."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.call, self.piece = peers, 0, 0
        self.delta: Tensor | None = None
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        *self._computed, self._sent = (_event() for _ in range(carried.PIECES + 1))

    def pieces(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """The rows that are to be computed at a time, for `send`, of so many with `nbytes` in all; none where they are
        too few for it to be worth it, or too many."""
        size = max(-(-rows // carried.PIECES), LEAST, LEAST_BYTES * rows // nbytes)
        if rows < 2 * LEAST or nbytes > carried.room(self.peers) or torch.cuda.is_current_stream_capturing():
            return ()
        return tuple(slice(at, min(at + size, rows)) for at in range(0, rows, size))

    def send(self, delta: Tensor, rows: slice) -> None:
        """Send these rows of delta [T, size], dense, which the current stream has computed; from the first on, in
        order, in the pieces that were said."""
        begin, end = rows.start, rows.stop
        if begin == 0:
            self.drop()
            self.call, self.piece, self.delta = self.call + 1, end, delta
        number, row, turn = begin // self.piece, delta.stride(0) * delta.itemsize, self.call % 2
        self._computed[number].record()
        self._stream.wait_event(self._computed[number])
        other, stream = self.peers.addresses[1 - self.peers.rank], self._stream.cuda_stream
        target = other + carried.rows_at(self.peers, turn) + begin * row
        peer_memory.copy(target, delta.data_ptr() + begin * row, (end - begin) * row, stream)
        peer_memory.write(other + carried.flag_at(turn, number), self.call, stream)

    def finish(
        self, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, behind: Tensor | None
    ) -> Tensor:
        """As carried.add_norm, of what was sent: the norm, or without x the sum, in delta's place."""
        delta, self.delta = self.delta, None
        assert delta is not None, "it was sent"
        self._sent.record(self._stream)
        torch.cuda.current_stream().wait_event(self._sent)  # then delta's memory may be used for something else
        out = None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        carried.add_norm(self.peers, self.call, self.piece, x, delta, weight, bias, eps, behind, out)
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
        """Compile what `finish` will launch for rows like these: one of them, which nobody sends."""
        x, delta = x[:1].clone(), delta[:1].clone()
        carried.add_norm(peers, 1, 1, x, delta, weight, bias, eps, behind, torch.empty_like(x))
        carried.add_norm(peers, 1, 1, None, delta, None, None, 0.0, None, None)
