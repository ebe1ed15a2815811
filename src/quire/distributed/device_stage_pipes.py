"""Communication of pipeline stages on GPUs of one host: each rank has an inbox on its GPU, into which the previous
stage copies the tensors of a step, followed by a flag. The header of each message goes through the sockets that stages
on CPUs use, so that timeouts and lost stages are detected as there.

A stage on another host gets the tensors through the socket, by way of the CPU's memory.

An inbox has STAGE_BUFFER_STEPS slots, used in turn. A stage that receives a step has finished the step before, and
acknowledges that, so a slot is only overwritten after it was read."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed import peer_memory
from quire.distributed.peer_memory import HANDLE_BYTES, PeerError
from quire.distributed.rendezvous import RankFds
from quire.distributed.stage_pipes import StagePipes
from quire.errors import StartupError
from quire.protocol.parallel_layout import Shard
from quire.protocol.pipeline_stages import STAGE_BUFFER_STEPS

FLAG_BYTES = 4096  # bytes before the slots, for flags
ACK = b"\1"


class DeviceStagePipes(StagePipes):
    """The connections of one rank on a GPU to the previous and the next stage (see StagePipes)."""

    def __init__(self, shard: Shard, fds: RankFds, seconds: float, device: torch.device, slot_bytes: int) -> None:
        """Open the inbox and exchange handles. `slot_bytes` is the size of the rows of the longest step. Raise
        StartupError if a GPU has no access to another one's memory. Return once the next stage is connected too."""
        super().__init__(shard, fds, seconds)
        self.device, self.slot_bytes, self.acknowledged = device, -(-slot_bytes // 256) * 256, 0
        self._remote_previous, self._remote_next = fds.remote_previous, fds.remote_next
        try:
            if self._previous is not None and not self._remote_previous:
                nbytes = FLAG_BYTES + 2 * STAGE_BUFFER_STEPS * self.slot_bytes
                self._inbox_address, handle = peer_memory.export(nbytes)
                self._inbox = peer_memory.as_tensor(self._inbox_address, nbytes, device)
                self._blocking_call(self._previous.sendall, handle)
            if self._next is not None and not self._remote_next:
                handle_bytes = bytearray(HANDLE_BYTES)
                self._receive_into(self._next, memoryview(handle_bytes))
                self._next_inbox_address = peer_memory.open_handle(bytes(handle_bytes))
        except PeerError as error:
            raise StartupError(
                f"a stage's GPU doesn't reach another one's memory: {error}", "Use GPUs with peer access, or --tp"
            ) from error

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """See StagePipes. The copies are queued on the current stream; for a stage on another host, this waits for
        it."""
        if self._remote_next:
            super().send(x.cpu(), None if delta is None else delta.cpu())
            return
        assert self._next is not None, "the last stage has no next one"
        while self.num_sent - self.acknowledged >= STAGE_BUFFER_STEPS:
            self._receive_into(self._next, memoryview(bytearray(len(ACK))))
            self.acknowledged += 1
        slot, stream = (self.num_sent + 1) % STAGE_BUFFER_STEPS, self._current_stream()
        both = [x] if delta is None else [x, delta]
        for i, tensor in enumerate(both):
            dense = tensor.contiguous()
            assert dense.nbytes <= self.slot_bytes, (
                f"{dense.nbytes} bytes are more than the {self.slot_bytes} of a step"
            )
            peer_memory.copy(
                self._next_inbox_address + self._slot_offset(slot, i), dense.data_ptr(), dense.nbytes, stream
            )
        peer_memory.stream_write_value(self._next_inbox_address + 8 * slot, self.num_sent + 1, stream)
        self._send_head(x, len(both))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """See StagePipes. The tensors are valid for operations on the current stream, until the step after next is
        sent."""
        if self._remote_previous:
            x, delta = super().receive(rows, columns, dtype)
            return x.to(self.device), None if delta is None else delta.to(self.device)
        assert self._previous is not None, "the first stage has no previous one"
        if self.num_received:
            self._blocking_call(self._previous.sendall, ACK)
        more = self._receive_head(rows, columns, dtype)
        slot, nbytes = self.num_received % STAGE_BUFFER_STEPS, rows * columns * dtype.itemsize
        peer_memory.stream_wait_value(self._inbox_address + 8 * slot, self.num_received, self._current_stream())
        places = (self._slot_offset(slot, i) for i in range(2))
        x, delta = (self._inbox[at : at + nbytes].view(dtype).view(rows, columns) for at in places)
        return x, delta if more else None

    def _slot_offset(self, slot: int, place: int) -> int:
        return FLAG_BYTES + (2 * slot + place) * self.slot_bytes

    def _current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)
