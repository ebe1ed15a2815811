"""A rank without a model that measures its exchange: an all-reduce followed by a norm, in each way that this machine
has. It starts and connects as any rank does; a measurement is an order to warm up.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.exchange import OURS, SHOTS, WAYS
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

if TYPE_CHECKING:
    from quire.distributed.rank_devices import RankDevice

SIZE = 8192  # columns of a row, as in Llama-3-70B
DTYPE = torch.bfloat16
CALLS, REPLAYS, ROUNDS = 20, 50, 5  # calls in a graph; its replays in a round; rounds, of which the median is reported
ON_CPU = 20  # calls in a round
MANY, LOOKS = 1_000_000, 10  # maximum calls, and how often the peers are checked meanwhile
MANY_ON_CPU = 500
BUDGET, TRIED = 15.0, 200  # approximate seconds of `replays`; replays that estimate how many fit into them
CARRIED = 2048, 10  # rows sent in pieces, and calls between two checks of the peers
TOLD = 128  # fp32 numbers of a row, gathered after CALLS sums

Call = Callable[[Tensor, Tensor], Tensor]


class Timed:
    """Stands in for a runner. `warm_up(rows, way)` measures WAYS[way] with `rows` rows and leaves the result in
    `found`."""

    depth, attention, notices = 1, "", ()

    def __init__(self, hello: InitMessage, rank_device: RankDevice | None = None) -> None:
        self.part = hello.part
        self.device_exchange = None if rank_device is None else rank_device.exchange
        self.group: NcclCommunicator | None
        if rank_device is None or self.device_exchange is None:
            self.device = torch.device("cpu")
            kernels.use_threads(hello.config.threads)
            self.host = SharedMemoryExchange(hello.part, hello.meeting.fds(hello.part), hello.seconds)
            self.group = NcclCommunicator(hello.part, self.host.store, hello.seconds, self.device, False, "gloo")
        else:
            self.device, self.host = rank_device.device, self.device_exchange.host_exchange
            self.group = self.device_exchange.nccl
        self.exchange = self.device_exchange or self.host
        self.norms = [RMSNorm(SIZE, 1e-5, DTYPE, self.device) for _ in range(2)]
        for norm in self.norms:
            norm.weight.fill_(1.0)
            norm.prepare()
        connect_ranks(self.norms[0], self.exchange)
        self.found: dict[str, Any] = {}

    def warm_up(self, rows: int, way: int) -> None:
        """Measure one way. If it is unavailable, the result is the reason; a way is available on all ranks or on
        none."""
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
        """Return a context in which sums of all sizes use one algorithm, if `name` is in SHOTS."""
        if name not in SHOTS:
            yield
            return
        from quire.distributed import device_exchange

        ours, large = self.device_exchange, device_exchange.NCCL_MIN_BYTES
        assert ours is not None, "`_way` finds it missing"
        peers = ours.peers
        ours.peers = peers._replace(one_shot_bytes=1 << 40 if SHOTS[name] == 1 else 0)
        device_exchange.NCCL_MIN_BYTES = 1 << 40
        try:
            yield
        finally:
            ours.peers, device_exchange.NCCL_MIN_BYTES = peers, large

    def _compile(self, work: Callable[[], object]) -> None:
        """Run `work` so that its kernels are compiled before other ranks wait for this one within a kernel."""
        if self.device_exchange is not None:
            with self.device_exchange.warming_up():
                work()
            self.host.barrier()

    def _way(self, name: str, delta: Tensor) -> tuple[Call, Tensor]:
        """Return the call that adds the sum of all ranks' delta to x [rows, SIZE] and returns its norm in the way
        `name`, and delta where that way reads it."""
        ours, plain = self.norms
        if name in SHOTS and (self.device_exchange is None or self.device_exchange.peers is None):
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
        """Return the call and delta of torch's symmetric-memory operations. Only this uses them: torch calls them
        alpha."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        world, plain = dist.group.WORLD, self.norms[1]
        assert world is not None, "the ranks' group is open"
        group = world.group_name
        buffer = symmetric.empty(delta.shape, dtype=DTYPE, device=self.device)
        symmetric.rendezvous(buffer, group)
        operations = torch.ops.symm_mem
        buffer.copy_(delta)
        self.host.barrier()
        if name == "torch one-shot":
            return (lambda x, delta: plain(x, operations.one_shot_all_reduce(delta, "sum", group))), buffer
        return (lambda x, delta: plain(x, operations.two_shot_all_reduce_(delta, "sum", group))), buffer

    def _sum(self, delta: Tensor) -> Tensor:
        """Return the sum of all ranks' delta in rank order, in fp32 and rounded once, computed on the host."""
        total, *others = self.host.all_gather(delta.cpu()).float().unbind()
        for other in others:
            total += other
        return total.to(DTYPE)

    def _wanted(self, first: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expected x after a call, and its norm by this rank's own kernel."""
        out = self.norms[1](first.clone(), total.to(self.device))
        return (first.cpu() + total).to(self.device), out

    def _beside(self, rows: int) -> dict[str, Any]:
        """Measure a product whose rows are summed over ranks, followed by the norm, as in prompts, with the sum
        overlapping the product (`us`); and the share `hidden` of the time that NCCL's sum takes after the product."""
        if self.device.type != "cuda" or self.group is None:
            return {"missing": "it is hidden by GPUs, beside NCCL"}
        ours, plain, group = *self.norms, self.group
        product = Linear(shard_columns(self.part, SIZE), SIZE, False, DTYPE, self.device)
        torch.manual_seed(self.part.tp_rank)
        weight = product.weight
        assert weight is not None, "it is not packed"
        torch.nn.init.normal_(weight, std=SIZE**-0.5)
        inputs = torch.randn(rows, SIZE // self.part.tp_size, device=self.device, dtype=DTYPE)
        product.prepare()
        connect_ranks(product, self.exchange)
        overlap = product.overlap
        if overlap is None or not overlap.split_rows(rows, rows * SIZE * DTYPE.itemsize):
            return {"missing": "nothing carries them"}
        first = torch.ones(rows, SIZE, device=self.device, dtype=DTYPE)
        x = first.clone()
        out = ours(x, product(inputs))
        found: dict[str, Any] = {"bits": _bits(x, out)}
        found["exact"] = not _unlike((x, out), self._wanted(first, self._sum(product._matmul(inputs))))

        def alone() -> Tensor:
            return product._matmul(inputs)

        pieces = overlap.split_rows(rows, rows * SIZE * DTYPE.itemsize)
        delta = alone()

        def carried() -> Tensor:
            for piece in pieces:
                overlap.send_rows(delta, piece)
            return ours(x, delta)

        def cut() -> Tensor:
            for piece in pieces:
                torch.mm(inputs[piece], weight.t(), out=delta[piece])
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
        """Return the microseconds of a call, of each round. On GPUs `captured` calls are replayed as a graph."""
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
        """Make as many calls as BUDGET permits, with gathers and, between graphs, rows sent in pieces. On GPUs they are
        launched from two streams in turn, one after another, as everything that uses the exchange memory must be,
        concurrently with other work, which differs by rank. All bits of each call are compared, on the device. x is 0
        before a call, so that no bit of the sum is rounded away."""
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
        """Return the least of all ranks' numbers, at least 1, so that all replay equally often."""
        return max(int(self.host.all_gather(torch.tensor([number], dtype=torch.float64)).min()), 1)

    def _carrying(self, wrong: Tensor) -> Callable[[], None] | None:
        """Return a call that sends the rows of a sum in pieces, computes the norm and compares its bits; None if
        unsupported."""
        rows, exchange = CARRIED[0], self.device_exchange
        if exchange is None or not (pieces := exchange.split_rows(rows, rows * SIZE * DTYPE.itemsize)):
            return None
        torch.manual_seed(-1 - self.part.tp_rank)
        delta = torch.randn(rows, SIZE).to(self.device, DTYPE)
        first = torch.ones(rows, SIZE, device=self.device, dtype=DTYPE)
        x, wanted = first.clone(), self._wanted(first, self._sum(delta))

        def call() -> None:
            x.copy_(first)
            for piece in pieces:
                exchange.send_rows(delta, piece)
            _unlike((x, self.norms[0](x, delta)), wanted, wrong)

        self._compile(lambda: self.norms[0](first.clone(), delta.clone()))
        return call

    def close(self) -> None:
        """Do nothing: no resources are open."""


class Busy:
    """Launches work from two streams in turn, one after another, and other work on a third stream, whose size differs
    by rank. Sometimes such work precedes a call too, which makes this rank late."""

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
    """Raised if a way is unavailable."""


def _captured(call: Callable[[], object], calls: int = CALLS) -> Callable[[], object]:
    """Capture this number of calls as one graph."""
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
    """Add to `count` the number of elements whose bits differ, on the device and without waiting for it, and return
    it."""
    count = torch.zeros(1, dtype=torch.int64, device=found[0].device) if count is None else count
    for one, other in zip(found, wanted, strict=True):
        bits = {2: torch.int16, 4: torch.int32}[one.itemsize]
        count += (one.view(bits) != other.view(bits)).sum()
    return count


def _bits(*tensors: Tensor) -> int:
    """Return a checksum of the tensors' bits."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def main() -> None:
    """See quire.distributed.rank_worker."""
    RANK_QUERIES["found"] = lambda runner: runner.found
    rank_program.main(Timed)
