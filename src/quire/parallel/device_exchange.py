"""How ranks on GPUs meet in a step: through each other's memory where they reach it (kernels.triton.reduce), else, and
for the largest sums, through NCCL. Both may be captured in graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.data.kernels.peer_sizes import BYTES
from quire.errors import PeerLost
from quire.parallel.group import Group
from quire.parallel.shared import AT_START, SharedExchange
from quire.vocabulary.layout import Part

if TYPE_CHECKING:
    from quire.parallel.carrier import Carrier

LARGE = 16 << 20
"""Bytes from which on sums are NCCL's, or carried, where a product is computed in pieces."""
REHEARSED = 1 << 20  # bytes of `Peers.more`, for a row


class DeviceExchange:
    """One rank's end (see quire.data.layers.exchange). `peers` are a kernels.triton.reduce.Peers, None where GPUs don't
    reach each other; `group` is None where NCCL must not be used; `host` is where processes meet outside of steps."""

    def __init__(self, part: Part, device: torch.device, host: SharedExchange, peers: Any, group: Group | None) -> None:
        assert peers is not None or group is not None, "ranks have something to meet through"
        self.part, self.device, self.host, self.group = part, device, host, group
        self.peers, self._error = peers, None if peers is None else peers.error
        self.alone, self.pdl = False, False
        self.carrier: Carrier | None = None
        if peers is not None:
            from quire.data.kernels.triton import reduce
            from quire.data.kernels.triton.launch import early

            self.kernels, self.pdl = reduce, device.type == "cuda" and early(device)
            if peers.more:
                from quire.parallel.carrier import carrier_of

                self.carrier = carrier_of(peers, device)

    def add(self, x: Tensor) -> Tensor:
        """See quire.data.layers.exchange."""
        if self.carrier is not None and self.carrier.delta is not None:
            if self.carrier.delta is x:
                return self.carrier.finish(None, None, None, 0.0, None)
            self.carrier.drop()
        if self._through_group(x):
            return x if self.alone or self.group is None else self.group.add(x)
        dense = x.contiguous()
        rows = dense.view(-1, x.shape[-1])
        if not self.kernels.shape_of(self.part.ranks, rows.shape[1], x.itemsize).parts:  # too long for rows
            rows = dense.view(-1, 64)
        self.kernels.add(self.peers, rows, pdl=self.pdl)
        return x if dense is x else x.copy_(dense)

    def normed(
        self, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float, behind: Tensor | None = None
    ) -> Tensor | None:
        """x [T, size] += the sum of all ranks' delta, in place, and the norm of that, in one launch: see
        kernels.triton.reduce.add_norm. None where that isn't done: `add` comes first then."""
        if self.carrier is not None:
            if self.carrier.delta is delta:
                return self.carrier.finish(x, weight, bias, eps, behind)
            self.carrier.drop()
            if self.alone:
                self.carrier.rehearse(self.peers, x, delta, weight, bias, eps, behind)
        if self._through_group(x) or not self.kernels.shape_of(self.part.ranks, x.shape[1], x.itemsize).parts:
            return None
        return self.kernels.add_norm(self.peers, x, delta, weight, bias, eps, behind=behind, pdl=self.pdl)

    def pieces(self, rows: int, nbytes: int) -> tuple[slice, ...]:
        """In what pieces a product is to be computed that is to be added up over ranks, of so many rows and bytes in
        all, each of which `send` is then given; none: as a whole, and nothing is sent before `add` or `normed`."""
        if self.carrier is None or self.alone or nbytes <= LARGE:
            return ()
        return self.carrier.pieces(rows, nbytes)

    def send(self, delta: Tensor, rows: slice) -> None:
        """Begin to exchange these rows of delta, the next of its `pieces`."""
        assert self.carrier is not None, "there are no pieces without"
        self.carrier.send(delta, rows)

    def gather(self, x: Tensor) -> Tensor:
        """See quire.data.layers.exchange."""
        if self.peers is not None:
            return self.kernels.gather(self.peers, x, pdl=self.pdl)
        if self.alone or self.group is None:
            return x.expand(self.part.ranks, *x.shape).contiguous()
        return self.group.gather(x)

    def largest(self, x: Tensor) -> Tensor:
        """See SharedExchange, through which it goes: nothing is captured, and no time counts."""
        return self.host.largest(x)

    def _through_group(self, x: Tensor) -> bool:
        """Whether sums like x are not taken through peers' memory."""
        if self.peers is None:
            return True
        return x.nbytes > LARGE and self.group is not None and not self.group.ordered

    def check(self) -> None:
        """PeerLost if a kernel has waited in vain."""
        if self._error is not None and (missed := int(self._error[0])):
            raise PeerLost(f"rank {missed - 1} has said nothing in a step")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within, steps may run in any threads and in any order: nobody is met, and sums are of no use. It ends for all
        ranks together."""
        peers = self.peers
        if peers is not None:
            scratch = torch.zeros(BYTES + REHEARSED, dtype=torch.uint8, device=self.device)
            table = torch.full_like(peers.table, scratch.data_ptr())
            counters, error = torch.zeros_like(peers.counters), torch.zeros_like(peers.counters)
            self.peers = peers._replace(table=table, counters=counters, error=error, polls=0, more=REHEARSED)
        self.alone = True
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.alone, self.peers = False, peers
            self.host.meet(AT_START)
