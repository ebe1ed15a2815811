"""Communication of ranks on GPUs in a step: through each other's memory where GPUs have peer access
(kernels.triton.all_reduce), else, and for the largest sums, through NCCL. Both can be captured in graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.distributed.nccl import NcclCommunicator
from quire.distributed.rendezvous import START_FACTOR
from quire.distributed.shared_memory_exchange import SharedMemoryExchange
from quire.errors import PeerLost
from quire.kernels.peer_memory_layout import KERNEL_BYTES
from quire.protocol.parallel_layout import Shard

if TYPE_CHECKING:
    from quire.distributed.copy_engine_allreduce import CopyEngineAllReduce

NCCL_MIN_BYTES = 16 << 20
"""Larger sums go through NCCL, or through copy engines where a product is computed in pieces."""
WARMUP_BYTES = 1 << 20  # `PeerBuffers.copy_bytes` while warming up: room for a row
MEASURED_ROWS = tuple(4**i for i in range(6))
"""Rows of the sums that `measure_sums` times."""
CALLS = 8  # of a sum in a graph
ROW_LIMITS = (0, *(2 * rows for rows in MEASURED_ROWS[:-1]), 1 << 20)
"""If one phase is faster for the first n of MEASURED_ROWS, sums of up to ROW_LIMITS[n] rows take it."""


class DeviceExchange:
    """The Exchange (quire.layers.exchange) of one rank. `peers` is a kernels.triton.all_reduce.PeerBuffers, or None
    without peer access; `nccl` is None if NCCL must not be used; `host_exchange` is used outside of steps."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        host_exchange: SharedMemoryExchange,
        peers: Any,
        nccl: NcclCommunicator | None,
    ) -> None:
        assert peers is not None or nccl is not None, "ranks need peer access or NCCL"
        self.shard, self.device, self.host_exchange, self.nccl = shard, device, host_exchange, nccl
        self.peers, self._error = peers, None if peers is None else peers.error
        self.is_warming_up, self.has_measured, self.pdl = False, False, False
        self.copy_engine: CopyEngineAllReduce | None = None
        if peers is not None:
            from quire.kernels.triton import all_reduce as reduce
            from quire.kernels.triton.launch import supports_pdl

            self.kernels, self.pdl = reduce, device.type == "cuda" and supports_pdl(device)
            if peers.copy_bytes:
                from quire.distributed.copy_engine_allreduce import make_copy_engine_all_reduce

                self.copy_engine = make_copy_engine_all_reduce(peers, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See quire.layers.exchange."""
        if self.copy_engine is not None and self.copy_engine.pending_delta is not None:
            if self.copy_engine.pending_delta is x:
                return self.copy_engine.finish(None, None, None, 0.0, None)
            self.copy_engine.finish_and_discard()
        if self._uses_nccl(x):
            return x if self.is_warming_up or self.nccl is None else self.nccl.all_reduce(x)
        dense = x.contiguous()
        rows = dense.view(-1, x.shape[-1])
        if not self.kernels.exchange_shape(
            self.shard.tp_size, rows.shape[1], x.itemsize
        ).two_shot_rows:  # the rows are too long
            rows = dense.view(-1, 64)
        self.kernels.all_reduce(self.peers, rows, pdl=self.pdl)
        return x if dense is x else x.copy_(dense)

    def all_reduce_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        post_norm_weight: Tensor | None = None,
    ) -> Tensor | None:
        """Add the sum of all ranks' delta to x [T, size] in place, and return the norm of that, in one launch: see
        kernels.triton.all_reduce.all_reduce_norm. Return None if that is not possible; then `all_reduce` must be called
        first."""
        if self.copy_engine is not None:
            if self.copy_engine.pending_delta is delta:
                return self.copy_engine.finish(x, weight, bias, eps, post_norm_weight)
            self.copy_engine.finish_and_discard()
            if self.is_warming_up:
                self.copy_engine.warm_up(self.peers, x, delta, weight, bias, eps, post_norm_weight)
        if (
            self._uses_nccl(x)
            or not self.kernels.exchange_shape(self.shard.tp_size, x.shape[1], x.itemsize).two_shot_rows
        ):
            return None
        return self.kernels.all_reduce_norm(
            self.peers, x, delta, weight, bias, eps, post_norm_weight=post_norm_weight, pdl=self.pdl
        )

    def split_rows(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """Return the pieces in which to compute a product of `rows` rows and `nbytes` bytes that is to be all-reduced,
        each of which is then passed to `send_rows`; none: as a whole, and nothing is sent before `all_reduce` or
        `all_reduce_norm`."""
        if self.copy_engine is None or self.is_warming_up or nbytes <= NCCL_MIN_BYTES:
            return ()
        return self.copy_engine.split_rows(rows, nbytes)

    def send_rows(self, delta: Tensor, rows: slice) -> None:
        """Start the all-reduce of these rows of delta, the next piece of `split_rows`."""
        assert self.copy_engine is not None, "`split_rows` returns no pieces without"
        self.copy_engine.send_rows(delta, rows)

    def all_gather(self, x: Tensor) -> Tensor:
        """See quire.layers.exchange."""
        if self.peers is not None:
            return self.kernels.all_gather(self.peers, x, pdl=self.pdl)
        if self.is_warming_up or self.nccl is None:
            return x.expand(self.shard.tp_size, *x.shape).contiguous()
        return self.nccl.all_gather(x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """See quire.layers.exchange. It goes through the host: it is never captured, and time does not matter."""
        return self.host_exchange.all_reduce_max(x)

    def _uses_nccl(self, x: Tensor) -> bool:
        """Return True if sums of x's size are not computed through peers' memory."""
        if self.peers is None:
            return True
        return x.nbytes > NCCL_MIN_BYTES and self.nccl is not None and not self.nccl.is_ordered

    def measure_sums(self, size: int, dtype: torch.dtype, capture: Callable[[Callable[[], Any]], Any]) -> None:
        """Time sums of rows of `size` numbers in one phase and in two. From now on use one phase up to the number of
        bytes that is the best limit for these sums. It depends on the number of ranks and on their links. All ranks
        call this together, and get the same limit. `capture`: of a GraphCapturer. A second call has no effect."""
        if self.peers is None or self.has_measured:
            return
        self.has_measured = True
        if not self.kernels.exchange_shape(self.shard.tp_size, size, dtype.itemsize).one_shot_rows:
            return  # rows are too long for one phase
        x, delta = torch.zeros((2, MEASURED_ROWS[-1], size), dtype=dtype, device=self.device)
        weight = torch.ones(size, dtype=dtype, device=self.device)

        def add(shots: int, rows: int) -> None:
            self.kernels.all_reduce_norm(
                self.peers, x[:rows], delta[:rows], weight, None, 1e-5, shots=shots, pdl=self.pdl
            )

        sums = [[partial(add, shots, rows) for rows in MEASURED_ROWS] for shots in (1, 2)]
        with self.warming_up():  # compile and load the kernels
            for call in chain(*sums):
                call()
        seconds = torch.tensor([[seconds_of(call, capture) for call in calls] for calls in sums], dtype=torch.float32)
        rows = ROW_LIMITS[fastest_prefix(*self.host_exchange.all_reduce_max(seconds).tolist())]
        self.peers = self.peers._replace(one_shot_bytes=rows * size * dtype.itemsize)

    def check_peers(self) -> None:
        """Raise PeerLost if a kernel waited in vain."""
        if self._error is not None and (missed := int(self._error[0])):
            raise PeerLost(f"rank {missed - 1} was silent in a step")

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """A context in which steps may run on any thread and in any order: no rank is waited for, and the sums are
        meaningless. All ranks leave it together."""
        peers = self.peers
        if peers is not None:
            scratch = torch.zeros(KERNEL_BYTES + WARMUP_BYTES, dtype=torch.uint8, device=self.device)
            table = torch.full_like(peers.table, scratch.data_ptr())
            counters, error = torch.zeros_like(peers.counters), torch.zeros_like(peers.counters)
            self.peers = peers._replace(table=table, counters=counters, error=error, polls=0, copy_bytes=WARMUP_BYTES)
        self.is_warming_up = True
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.is_warming_up, self.peers = False, peers
            self.host_exchange.barrier(START_FACTOR)


def fastest_prefix(first: Sequence[float], second: Sequence[float]) -> int:
    """Return how many of the times `first` to take, with those of `second` for the rest, so that the product of all
    times is the least."""
    products = [0.0]
    for one, other in zip(first, second):
        products.append(products[-1] + log(one / other))
    return products.index(min(products))


def seconds_of(call: Callable[[], None], capture: Callable[[Callable[[], Any]], Any]) -> float:
    """Return the seconds of a call on the GPU, in a graph of CALLS: the least of three replays."""

    def repeat() -> None:
        for _ in range(CALLS):
            call()

    with torch.inference_mode():
        graph = capture(repeat).graph
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    least = float("inf")
    for _ in range(3):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3 / CALLS)
    return least
