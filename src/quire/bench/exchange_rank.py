"""A rank without a model, whose warm-up measures its exchange: what comes before a norm is added up over all ranks, and
the norm computed, in each way that this machine has. Started, seated and joined as any rank is.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire.bench.exchange import OURS, SHOTS, WAYS
from quire.distributed.nccl import NcclCommunicator
from quire.distributed.rank_messages import InitMessage
from quire.distributed.rank_queries import RANK_QUERIES
from quire.distributed.shared_memory_exchange import SharedMemoryExchange
from quire.kernels.cpu import library_loader as kernels
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.prepare import connect_ranks
from quire.layers.sharding import shard_columns
from quire.startup import rank_program

SIZE = 8192  # numbers of a row, as Llama-3-70B's have
DTYPE = torch.bfloat16
CALLS, REPLAYS, ROUNDS = 20, 50, 5  # in a graph; of a graph; of which the median is told
ON_CPU = 20  # calls of a round
MANY, LOOKS = 1_000_000, 10  # calls of `replays` at most, and how often it is asked whether somebody was missed
MANY_ON_CPU = 500
BUDGET, TRIED = 15.0, 200  # seconds that `replays` take, about; replays by which it is known how many these are
CARRIED = 2048, 10  # rows that are carried, and how often between two looks
TOLD = 128  # numbers of 4 bytes a row that are gathered behind CALLS sums

Call = Callable[[Tensor, Tensor], Tensor]


class Timed:
    """Stands for a runner. `warm_up(rows, way)` measures WAYS[way] with so many rows; `found` is what came of it."""

    depth, attention, notices = 1, "", ()

    def __init__(self, hello: InitMessage, seat: Any = None) -> None:
        self.part, self.seat = hello.part, seat
        self.device = torch.device("cpu") if seat is None else seat.device
        if seat is None:
            kernels.use_threads(hello.config.threads)
        self.exchange = (
            SharedMemoryExchange(hello.part, hello.meeting, hello.seconds) if seat is None else seat.exchange
        )
        self.host = self.exchange if seat is None else self.exchange.host_exchange
        self.group = NcclCommunicator(hello.part, self.host.store, hello.seconds, self.device, False, "gloo") \
            if seat is None else self.exchange.nccl  # fmt: skip
        self.norms = [RMSNorm(SIZE, 1e-5, DTYPE, self.device) for _ in range(2)]
        for norm in self.norms:
            norm.weight.fill_(1.0)
            norm.prepare()
        connect_ranks(self.norms[0], self.exchange)
        self.found: dict[str, Any] = {}

    def warm_up(self, rows: int, way: int) -> None:
        """Measure. What can't be measured here says why, on all ranks alike."""
        name = WAYS[way]
        if name == "beside a product":
            self.found = self._beside(rows)
            return
        torch.manual_seed(rows)
        first = torch.randn(rows, SIZE).to(self.device, DTYPE)
        torch.manual_seed(rows + 1 + self.part.tp_rank)
        delta = torch.randn(rows, SIZE).to(self.device, DTYPE)
        if name == "replays":
            self.found = self._replayed(delta)
            return
        try:
            call, given = self._way(name, delta)
        except Missing as missing:
            self.found = {"missing": str(missing)}
            return
        with self._taking(name):
            if name in OURS:
                self._compile(lambda: call(first.clone(), delta.clone()))
            x = first.clone()
            out = call(x, given)
            self.found = {"bits": _bits(x, out), "exact": not _unlike((x, out), self._wanted(first, self._sum(delta)))}
            given.zero_()  # some ways add in place
            self.found["us"] = self._spent(lambda: call(x, given), captured=True)
        self.exchange.check_peers()

    @contextmanager
    def _taking(self, name: str) -> Iterator[None]:
        """Sums of all sizes go `name`'s way, where that is one of SHOTS."""
        if name not in SHOTS:
            yield
            return
        from quire.distributed import device_exchange
        from quire.kernels.triton import all_reduce

        former, large = dict(all_reduce.ONE_SHOT_BYTES), device_exchange.NCCL_MIN_BYTES
        all_reduce.ONE_SHOT_BYTES[self.part.tp_size] = 1 << 40 if SHOTS[name] == 1 else 0
        device_exchange.NCCL_MIN_BYTES = 1 << 40
        try:
            yield
        finally:
            all_reduce.ONE_SHOT_BYTES.clear()
            all_reduce.ONE_SHOT_BYTES.update(former)
            device_exchange.NCCL_MIN_BYTES = large

    def _compile(self, work: Callable[[], object]) -> None:
        """Let kernels be compiled that `work` launches, while nobody waits for this rank inside of one."""
        if self.seat is not None:
            with self.exchange.warming_up():
                work()
            self.host.barrier()

    def _way(self, name: str, delta: Tensor) -> tuple[Call, Tensor]:
        """x [rows, SIZE] += the sum of all ranks' delta, and the norm of that, `name`'s way; and delta where that way
        wants it."""
        ours, plain = self.norms
        if name in SHOTS and getattr(self.exchange, "peers", None) is None:
            raise Missing("sums don't go through the memory of peers")
        if name == "quire" or name in SHOTS:
            return ours, delta.clone()
        if name in ("NCCL", "gloo"):
            if self.group is None or (name == "NCCL") != (self.device.type == "cuda"):
                raise Missing(f"ranks have no group of {name}")
            group = self.group
            return (lambda x, delta: plain(x, group.all_reduce(delta))), delta.clone()
        if self.device.type != "cuda" or self.group is None:
            raise Missing("symmetric memory is that of GPUs")
        return self._symmetric(name, delta)

    def _symmetric(self, name: str, delta: Tensor) -> tuple[Call, Tensor]:
        """torch's own operations over the memory of peers. The one place that has them: they are said to be alpha."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        group, plain = dist.group.WORLD.group_name, self.norms[1]
        buffer = symmetric.empty(delta.shape, dtype=DTYPE, device=self.device)
        symmetric.rendezvous(buffer, group)
        operations = torch.ops.symm_mem
        buffer.copy_(delta)
        self.host.barrier()
        if name == "torch one-shot":
            return (lambda x, delta: plain(x, operations.one_shot_all_reduce(delta, "sum", group))), buffer
        return (lambda x, delta: plain(x, operations.two_shot_all_reduce_(delta, "sum", group))), buffer

    def _sum(self, delta: Tensor) -> Tensor:
        """All ranks' in rank order and in fp32, rounded once, by what ranks on CPUs meet through."""
        total, *others = self.host.all_gather(delta.cpu()).float()
        for other in others:
            total += other
        return total.to(DTYPE)

    def _wanted(self, first: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """x after a call, and its norm as this rank's own kernel has it."""
        out = self.norms[1](first.clone(), total.to(self.device))
        return (first.cpu() + total).to(self.device), out

    def _beside(self, rows: int) -> dict[str, Any]:
        """A product whose rows ranks add up, with the norm behind, as prompts have it: with the sums taken by the way
        (`us`), and what of that time is hidden which NCCL's sum takes behind the product."""
        if self.device.type != "cuda" or self.group is None:
            return {"missing": "it is hidden by GPUs, beside NCCL"}
        ours, plain, group = *self.norms, self.group
        product = Linear(shard_columns(self.part, SIZE), SIZE, False, DTYPE, self.device)
        torch.manual_seed(self.part.tp_rank)
        torch.nn.init.normal_(product.weight, std=SIZE**-0.5)
        inputs = torch.randn(rows, SIZE // self.part.tp_size, device=self.device, dtype=DTYPE)
        product.prepare()
        connect_ranks(product, self.exchange)
        if product.overlap is None or not product.overlap.split_rows(rows, rows * SIZE * DTYPE.itemsize):
            return {"missing": "nothing carries them"}
        first = torch.ones(rows, SIZE, device=self.device, dtype=DTYPE)
        x = first.clone()
        out = ours(x, product(inputs))
        found: dict[str, Any] = {"bits": _bits(x, out)}
        found["exact"] = not _unlike((x, out), self._wanted(first, self._sum(product._matmul(inputs))))

        def alone() -> Tensor:
            return product._matmul(inputs)

        pieces = product.overlap.split_rows(rows, rows * SIZE * DTYPE.itemsize)
        delta = alone()

        def carried() -> Tensor:
            for piece in pieces:
                self.exchange.send_rows(delta, piece)
            return ours(x, delta)

        def cut() -> Tensor:
            for piece in pieces:
                torch.mm(inputs[piece], product.weight.t(), out=delta[piece])
            return plain(x, delta)

        spent = {
            "product, norm": self._spent(lambda: plain(x, alone())),
            "norm": self._spent(lambda: plain(x, delta)),
            "NCCL between": self._spent(lambda: plain(x, group.all_reduce(alone()))),
            "product in pieces, norm": self._spent(cut),
            "carried, norm": self._spent(carried),
            "carried": self._spent(lambda: ours(x, product(inputs))),
        }
        self.exchange.check_peers()
        least, most, now = (median(spent[name]) for name in ("product, norm", "NCCL between", "carried"))
        return {**found, "us": spent["carried"], "hidden": (most - now) / (most - least), "parts_us": spent}

    def _spent(self, call: Callable[[], object], captured: bool = False) -> list[float]:
        """Microseconds of a call, of each round: one after another, or `captured` in a graph, on GPUs."""
        cuda, spans = self.device.type == "cuda", []
        captured = captured and cuda
        once = _captured(call) if captured else call
        number = REPLAYS if captured else ON_CPU
        for _ in range(ROUNDS):
            self.host.barrier()
            began = time.perf_counter()
            if cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            for _ in range(number):
                once()
            if cuda:
                end.record()
                end.synchronize()
                spans.append(1e3 * start.elapsed_time(end) / (number * (CALLS if captured else 1)))
            else:
                spans.append(1e6 * (time.perf_counter() - began) / number)
        return spans

    def _replayed(self, delta: Tensor) -> dict[str, Any]:
        """Many calls, as many as BUDGET has room for, with gathers and, between graphs, rows that are carried. On GPUs
        they are launched from two streams in turn, one after another, as all that uses the exchange memory must be,
        beside other work, of which ranks have more and less. All bits of each call are compared, on the device: x is 0
        before, so that none of a sum's is rounded away."""
        cuda, ours, calls, rows = self.device.type == "cuda", self.norms[0], CALLS, len(delta)
        x, kept = torch.empty((2, calls, rows, SIZE), device=self.device, dtype=DTYPE)
        given, numbers = (
            delta.clone(),
            torch.arange(rows * TOLD, dtype=torch.int32).view(rows, TOLD) + self.part.tp_rank,
        )
        every, numbers = self.host.all_gather(numbers).to(self.device), numbers.to(self.device)
        wanted = (*self._wanted(torch.zeros_like(delta), self._sum(delta)), every)
        wrong = torch.zeros(1, dtype=torch.int64, device=self.device)

        def work() -> None:
            x.zero_()
            for i in range(calls):
                given.copy_(delta)
                kept[i].copy_(ours(x[i], given))
            _unlike((x, kept, self.exchange.all_gather(numbers)), wanted, wrong)

        self._compile(work)
        wrong.zero_()
        once = _captured(work, 1) if cuda else work
        carried = self._carrying(wrong)
        busy = Busy(self.part.tp_rank) if cuda else None

        def replays(count: int) -> None:
            for i in range(count):
                if busy is None:
                    once()
                else:
                    busy.run(i, once)
            if busy is not None and carried is not None:
                for i in range(CARRIED[1]):
                    busy.run(i, carried)
            if cuda:
                torch.cuda.synchronize()
            self.exchange.check_peers()

        tried = TRIED if cuda else 1
        replays(2)
        self.host.barrier()
        began = time.perf_counter()
        replays(tried)
        most = (MANY if cuda else MANY_ON_CPU) // calls // LOOKS
        looks = min(most, self._agreed(BUDGET / LOOKS * tried / (time.perf_counter() - began)))
        began = time.perf_counter()
        for _ in range(LOOKS):
            replays(looks)
        graphs, found = LOOKS * looks, int(wrong)
        return {"calls": graphs * calls, "gathers": graphs, "carried": LOOKS * CARRIED[1] if carried is not None else 0,
                "seconds": time.perf_counter() - began, "bits": _bits(x, kept), "wrong": found,
                "exact": found == 0}  # fmt: skip

    def _agreed(self, number: float) -> int:
        """The least of all ranks' numbers, and 1 at least: all replay as often."""
        return max(int(self.host.all_gather(torch.tensor([number], dtype=torch.float64)).min()), 1)

    def _carrying(self, wrong: Tensor) -> Callable[[], None] | None:
        """A sum of rows that are sent in pieces, with the norm behind, whose bits are compared; where it is done."""
        rows, carrier = CARRIED[0], getattr(self.exchange, "copy_engine", None)
        if carrier is None or not (pieces := self.exchange.split_rows(rows, rows * SIZE * DTYPE.itemsize)):
            return None
        torch.manual_seed(-1 - self.part.tp_rank)
        delta = torch.randn(rows, SIZE).to(self.device, DTYPE)
        first = torch.ones(rows, SIZE, device=self.device, dtype=DTYPE)
        x, wanted = first.clone(), self._wanted(first, self._sum(delta))

        def call() -> None:
            x.copy_(first)
            for piece in pieces:
                self.exchange.send_rows(delta, piece)
            _unlike((x, self.norms[0](x, delta)), wanted, wrong)

        self._compile(lambda: self.norms[0](first.clone(), delta.clone()))
        return call

    def close(self) -> None:
        """Nothing is kept."""


class Busy:
    """Two streams, from which work is launched in turn, one after another, and a third that has other work, which ranks
    have of unlike sizes; so has, now and then, the one in front of a call: then this rank is late."""

    def __init__(self, rank: int) -> None:
        self.rank, self.streams = rank, [torch.cuda.Stream() for _ in range(3)]
        self.other = torch.randn(1024 + 512 * rank, 1024, device="cuda", dtype=DTYPE)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def run(self, i: int, work: Callable[[], object]) -> None:
        now, before = self.streams[i % 2], self.streams[1 - i % 2]
        now.wait_stream(before)
        with torch.cuda.stream(now):
            if (i + 3 * self.rank) % 8 == 0:
                self._busy()
            work()
        with torch.cuda.stream(self.streams[2]):
            self._busy()

    def _busy(self) -> None:
        torch.mm(self.other, self.other[:1024])


class Missing(Exception):
    """A way that isn't there."""


def _captured(call: Callable[[], object], calls: int = CALLS) -> Callable[[], object]:
    """So many calls as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph.replay


def _unlike(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], count: Tensor | None = None) -> Tensor:
    """Adds to `count` how many numbers differ in some bit; on their device, which isn't waited for."""
    count = torch.zeros(1, dtype=torch.int64, device=found[0].device) if count is None else count
    for one, other in zip(found, wanted, strict=True):
        bits = {2: torch.int16, 4: torch.int32}[one.itemsize]
        count += (one.view(bits) != other.view(bits)).sum()
    return count


def _bits(*tensors: Tensor) -> int:
    """A number that differs where bits do."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def main() -> None:
    """See quire.distributed.rank_worker."""
    RANK_QUERIES["found"] = lambda runner: runner.found
    rank_program.main(Timed)
