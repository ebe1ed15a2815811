"""Two ranks as processes that measure their exchange as GPUs would, by interpreted kernels: `exchange_ranks.py`. Each
tells what it finds. See tests/data/kernels/triton/reduce_ranks.py."""

from __future__ import annotations

import json
import mmap
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from quire.bench import exchange, exchange_rank
from quire.bench.exchange_rank import Timed
from quire.data.kernels import peer_sizes
from quire.data.kernels.triton import norm, reduce
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import join
from quire.parallel import device_exchange
from quire.parallel.device_exchange import DeviceExchange
from quire.parallel.meeting import Meeting
from quire.parallel.shared import SharedExchange
from quire.vocabulary.layout import Layout

CPU = torch.device("cpu")
SIZE = 64


class Seen:
    """A kernel whose launches are counted by name."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self.name, self.kernel, self.launches = name, getattr(reduce, name), launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(self.name)
        return self.kernel[grid]


def timed(peers: reduce.Peers, host: SharedExchange) -> Timed:
    runner = object.__new__(Timed)
    runner.exchange = DeviceExchange(host.part, CPU, host, peers, None)
    runner.part, runner.host, runner.device, runner.group = host.part, host, CPU, None
    runner.seat = SimpleNamespace(exchange=runner.exchange)
    runner.norms = [RMSNorm(SIZE, 1e-5, torch.float32, CPU) for _ in range(2)]
    for one in runner.norms:
        one.weight.fill_(1.0)
        one.kernel = norm.rms_norm
    join(runner.norms[0], runner.exchange)
    return runner


def main() -> None:
    exchange_rank.SIZE, exchange_rank.DTYPE = SIZE, torch.float32
    exchange_rank.CALLS, exchange_rank.LOOKS, exchange_rank.MANY_ON_CPU = 2, 1, 2
    exchange_rank.ON_CPU, exchange_rank.ROUNDS = 1, 1
    reduce.PROGRAMS = 4
    meeting = Meeting(Layout(2))
    shared = [mmap.mmap(-1, peer_sizes.BYTES) for _ in range(2)]
    addresses = [torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in shared]
    rank = 0 if os.fork() else 1
    host = SharedExchange(Layout(2).parts()[rank], meeting.descriptors, 60.0)
    counters, error = torch.zeros(reduce.PROGRAMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    table = torch.tensor(addresses, dtype=torch.int64)
    runner = timed(reduce.Peers(table, counters, error, rank, 2, 1 << 24, tuple(addresses)), host)
    launches: list[str] = []
    for name in ("_one_shot", "_two_shot"):
        setattr(reduce, name, Seen(name, launches))
    for way in exchange.OURS:
        if way != "beside a product":
            launches.clear()
            runner.warm_up(3, exchange.WAYS.index(way))
            found = {name: runner.found[name] for name in ("bits", "exact")}
            line = json.dumps({"way": way, **found, "kernels": sorted(set(launches))}) + "\n"
            os.write(1, line.encode())  # at once, beside the other's
    assert (reduce.ONE_SHOT[2], device_exchange.LARGE) == (1 << 40, 16 << 20)
    if rank:
        os._exit(0)
    sys.exit(os.wait()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
