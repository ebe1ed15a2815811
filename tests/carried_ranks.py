"""Ranks without a model that have rows carried, as on GPUs (tests/gpu/carrier_ranks.py), but of pieces of shared memory
and by interpreted kernels: everything but the calls of CUDA. A program, see distributed/test_carried_ranks.py."""

from __future__ import annotations

from typing import Any

import carrier_ranks
import peer_ranks
import reduce_ranks
import torch

from bench import exchange_rank
from quire.distributed import device_exchange
from quire.distributed.rank_messages import InitMessage
from quire.distributed.rank_queries import RANK_QUERIES
from quire.kernels import peer_memory_layout
from quire.kernels.triton import norm
from quire.startup import rank_program

REPLAYS = 2  # beside carrier_ranks' ways


class Carried(carrier_ranks.Carried):
    """`warm_up(rows, REPLAYS)`: what the bench's replays have carried."""

    def __init__(self, hello: InitMessage, rank_device: Any) -> None:
        super().__init__(hello, rank_device)
        for one in self.norms:
            one.kernel = norm.rms_norm

    def warm_up(self, rows: int, way: int) -> None:
        if way != REPLAYS:
            super().warm_up(rows, way)
            return
        exchange_rank.CARRIED = rows, 1
        wrong = torch.zeros(1, dtype=torch.int64)
        carried = self._carrying(wrong)
        assert carried is not None, "rows are carried"
        for _ in range(3):
            carried()
        self.exchange.check_peers()
        self.found = {"wrong": int(wrong)}


def main() -> None:
    peer_ranks.reach()
    reduce_ranks.immediate()
    peer_memory_layout.COPY_BYTES, device_exchange.NCCL_MIN_BYTES = 1 << 20, 16
    exchange_rank.SIZE, exchange_rank.DTYPE = 64, torch.float32
    RANK_QUERIES["found"] = lambda runner: runner.found
    rank_program.main(Carried, peer_ranks.Seat)
