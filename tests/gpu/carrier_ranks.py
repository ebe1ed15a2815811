"""A rank without a model, whose warm-up has rows carried, and compares what comes of it: a program, see
test_carrier_gpu.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench import exchange_rank
from bench.exchange_rank import Timed, _unlike
from quire.distributed.rank_queries import RANK_QUERIES
from quire.startup import rank_program

EXACT, LATE = range(2)
LAPS = 3
FEW = 1 << 14  # polls, where nobody comes


class Carried(Timed):
    """`warm_up(rows, EXACT)` or LATE; `found` is what came of it."""

    def warm_up(self, rows: int, way: int) -> None:
        carrier = getattr(self.exchange, "copy_engine", None)
        torch.manual_seed(-1 - self.part.tp_rank)
        delta = torch.randn(rows, exchange_rank.SIZE).to(self.device, exchange_rank.DTYPE)
        self.first = torch.ones_like(delta)
        self.pieces = self.exchange.split_rows(rows, delta.nbytes)
        if carrier is None or not self.pieces:
            self.found = {
                "missing": f"{rows} rows are not carried: {'; '.join(self.rank_device.notices) or 'no carrier'}"
            }
            return
        self._compile(lambda: self.norms[0](self.first.clone(), delta.clone()))
        before = carrier.call
        self.found = self._exact(delta) if way == EXACT else self._late(delta, carrier)
        self.found |= {"pieces": len(self.pieces), "calls": carrier.call - before}
        self.exchange.check_peers()

    def _sent(self, delta: Tensor) -> Tensor:
        for piece in self.pieces:
            self.exchange.send_rows(delta, piece)
        return delta

    def _exact(self, delta: Tensor) -> dict[str, Any]:
        """Sums with the norm and without, of other rows in each call; `wrong`: numbers that differ in some bit."""
        total = self._sum(delta)
        x, out = self._wanted(self.first, total)
        wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        for lap in range(LAPS):
            given, got = delta.roll(2 * lap, 0), self.first.clone()
            _unlike((got, self.norms[0](got, self._sent(given))), (x.roll(2 * lap, 0), out.roll(2 * lap, 0)), wrong)
            given = delta.roll(2 * lap + 1, 0)
            _unlike(
                (self.exchange.all_reduce(self._sent(given)),), (total.roll(2 * lap + 1, 0).to(self.device),), wrong
            )
        return {"wrong": int(wrong)}

    def _late(self, delta: Tensor, carrier: Any) -> dict[str, Any]:
        """The last rank sends nothing until the others have given up, and nothing on their GPUs waits any more:
        `named` is whom they miss, from 1 on."""
        peers, late = carrier.peers, self.part.tp_rank == self.part.tp_size - 1
        if not late:
            carrier.peers = peers._replace(polls=FEW)
            self._sent(delta)
            carrier._stream.synchronize()
        self.host.barrier()
        if not late:
            self.exchange.all_reduce(delta)
            torch.cuda.synchronize()
        named = int(peers.error)
        self.host.barrier()
        if late:
            self.exchange.all_reduce(self._sent(delta))
            torch.cuda.synchronize()
        self.host.barrier()
        carrier.peers = peers
        peers.error.zero_()
        return {"named": named}


def main() -> None:
    """See quire.distributed.rank_worker."""
    RANK_QUERIES["found"] = lambda runner: runner.found
    rank_program.main(Carried)
