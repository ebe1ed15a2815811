"""How stages on GPUs of one host give each other what a step's tokens are at a layer's border: each has an inbox on its
GPU, into which the stage before copies, with a flag behind. That something is on its way is said through the pipes
that stages on CPUs use, so that who waits in vain, and for whom, is known as there.

An inbox has INBOX places, used in turn. Whoever takes a step's rows has finished the step before, and says so: what is
written over has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import StartupError
from quire.parallel import peer_memory
from quire.parallel.peer_memory import HANDLE, PeerError
from quire.parallel.pipes import Pipes
from quire.vocabulary.layout import Part
from quire.vocabulary.stages import INBOX

HEAD = 4096  # bytes before the slots, for flags
DONE = b"\1"


class DevicePipes(Pipes):
    """One rank's ends, as Pipes."""

    def __init__(self, part: Part, descriptors: Sequence[int], seconds: float, device: torch.device, room: int) -> None:
        """`room`: bytes of the longest step's rows. StartupError where GPUs don't reach each other's memory. Returns
        once the stage behind is here too."""
        super().__init__(part, descriptors, seconds)
        self.device, self.room, self.done = device, -(-room // 256) * 256, 0
        try:
            if self._before is not None:
                nbytes = HEAD + 2 * INBOX * self.room
                self._own, handle = peer_memory.export(nbytes)
                self._inbox = peer_memory.tensor(self._own, nbytes, device)
                self._wait(self._before.sendall, handle)
            if self._behind is not None:
                found = bytearray(HANDLE)
                self._fill(self._behind, memoryview(found))
                self._other = peer_memory.opened(bytes(found))
        except PeerError as error:
            raise StartupError(
                f"a stage's GPU doesn't reach another one's memory: {error}", "Use GPUs with peer access, or --tp"
            ) from error

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """See Pipes; behind what the current stream computes."""
        assert self._behind is not None, "the last stage has none behind it"
        while self.given - self.done >= INBOX:
            self._fill(self._behind, memoryview(bytearray(len(DONE))))
            self.done += 1
        slot, stream = (self.given + 1) % INBOX, self._stream()
        both = [x] if delta is None else [x, delta]
        for i, tensor in enumerate(both):
            dense = tensor.contiguous()
            assert dense.nbytes <= self.room, f"{dense.nbytes} bytes are more than the {self.room} of a step"
            peer_memory.copy(self._other + self._at(slot, i), dense.data_ptr(), dense.nbytes, stream)
        peer_memory.write(self._other + 8 * slot, self.given + 1, stream)
        self._say(x, len(both))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """See Pipes. What is returned is there when the current stream gets to it, until the step after next is
        sent."""
        assert self._before is not None, "the first stage has none before it"
        if self.taken:
            self._wait(self._before.sendall, DONE)
        more = self._hear(rows, columns, dtype)
        slot, nbytes = self.taken % INBOX, rows * columns * dtype.itemsize
        peer_memory.wait(self._own + 8 * slot, self.taken, self._stream())
        places = (self._at(slot, i) for i in range(2))
        x, delta = (self._inbox[at : at + nbytes].view(dtype).view(rows, columns) for at in places)
        return x, delta if more else None

    def _at(self, slot: int, place: int) -> int:
        return HEAD + (2 * slot + place) * self.room

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)
