"""Communication of pipeline stages on GPUs of one host: each rank has an inbox on its GPU, into which the previous
stage copies the tensors of a step, followed by a flag. The header of each message goes through the sockets that stages
on CPUs use, so that timeouts and lost stages are detected as there.

A stage on another host gets the tensors over NCCL (quire.distributed.nccl_stage_links): they are copied into a buffer,
and sent while this stage goes on. If NCCL can't be used, they go through the socket, by way of the CPU's memory.

An inbox has STAGE_BUFFER_STEPS slots, used in turn. A stage that receives a step has finished the step before, and
acknowledges that, so a slot is only overwritten after it was read. Over NCCL a stage acknowledges a step as soon as it
receives it: until then the previous stage has the rows, in its one buffer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.distributed import peer_memory
from quire.distributed.nccl_stage_links import StageLinks
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

    def __init__(
        self,
        shard: Shard,
        fds: RankFds,
        seconds: float,
        device: torch.device,
        slot_bytes: int,
        links: StageLinks,
    ) -> None:
        """Open the inbox and exchange handles. `slot_bytes` is the size of the rows of the longest step, `links` are
        those to stages on other hosts. Raise StartupError if a GPU has no access to another one's memory. Return once
        the next stage is connected too."""
        super().__init__(shard, fds, seconds)
        self.device, self.slot_bytes, self.acknowledged = device, -(-slot_bytes // 256) * 256, 0
        self._remote_previous, self._remote_next, self._links = fds.remote_previous, fds.remote_next, links
        make_buffer = partial(torch.empty, 2 * self.slot_bytes, dtype=torch.uint8, device=device)
        self._received, self._sent = (None if link is None else make_buffer() for link in (links.previous, links.next))
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
        """See StagePipes. The copies are queued on the current stream; without NCCL, for a stage on another host, this
        waits for it."""
        if self._links.next is not None:
            self._send_over_nccl(x, delta)
            return
        if self._remote_next:
            super().send(x.cpu(), None if delta is None else delta.cpu())
            return
        assert self._next is not None, "the last stage has no next one"
        self._await_acknowledgement(STAGE_BUFFER_STEPS)
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

    def _send_over_nccl(self, x: Tensor, delta: Tensor | None) -> None:
        both = [x] if delta is None else [x, delta]
        assert self._links.next is not None, "the next stage is on another host"
        assert self._sent is not None, "there is a buffer"
        self._await_acknowledgement(1)
        self._links.next.wait()
        rows = self._rows(self._sent, x.shape[0], x.shape[1], x.dtype)
        for place, tensor in zip(rows, both):
            place.copy_(tensor)
        self._links.next.send(rows[: len(both)])
        self._send_head(x, len(both))

    def _await_acknowledgement(self, steps: int) -> None:
        """Wait until the next stage has acknowledged all but the last `steps` - 1 steps."""
        assert self._next is not None, "the last stage has no next one"
        while self.num_sent - self.acknowledged >= steps:
            self._receive_into(self._next, memoryview(bytearray(len(ACK))))
            self.acknowledged += 1

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """See StagePipes. The tensors are valid for operations on the current stream, until the step after next is
        sent."""
        if self._links.previous is not None:
            return self._receive_over_nccl(rows, columns, dtype)
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

    def _receive_over_nccl(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        assert self._links.previous is not None, "the previous stage is on another host"
        assert self._previous is not None, "the first stage has no previous one"
        assert self._received is not None, "there is a buffer"
        more = self._receive_head(rows, columns, dtype)
        x, delta = both = self._rows(self._received, rows, columns, dtype)
        self._links.previous.receive(both[: 1 + more])
        self._blocking_call(self._previous.sendall, ACK)
        return x, delta if more else None

    def _rows(self, buffer: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return [2, rows, columns] at the start of a buffer: x and delta."""
        nbytes = rows * columns * dtype.itemsize
        assert nbytes <= self.slot_bytes, f"{nbytes} bytes are more than the {self.slot_bytes} of a step"
        return buffer[: 2 * nbytes].view(dtype).view(2, rows, columns)

    def _slot_offset(self, slot: int, place: int) -> int:
        return FLAG_BYTES + (2 * slot + place) * self.slot_bytes

    def _current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)
