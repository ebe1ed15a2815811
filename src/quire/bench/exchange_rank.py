"""A rank without a model, whose warm-up measures its exchange: what comes before a norm is added up over all ranks, and
the norm computed, in each way that this machine has. Started, seated and joined as any rank is.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire.bench.exchange import WAYS
from quire.data.kernels.cpu import loading as kernels
from quire.data.layers.cut import columns
from quire.data.layers.linear import Linear
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import join
from quire.parallel import rank
from quire.parallel.frames import Hello
from quire.parallel.group import Group
from quire.parallel.questions import QUESTIONS
from quire.parallel.shared import SharedExchange

SIZE = 8192  # numbers of a row, as Llama-3-70B's have
DTYPE = torch.bfloat16
CALLS, REPLAYS, ROUNDS = 20, 50, 5  # in a graph; of a graph; of which the median is told
ON_CPU = 20  # calls of a round
MANY, LOOKS = 1_000_000, 10  # calls of `replays`, and how often their bits are looked at
MANY_ON_CPU = 500

Call = Callable[[Tensor, Tensor], Tensor]


class Timed:
    """Stands for a runner. `warm_up(rows, way)` measures WAYS[way] with so many rows; `found` is what came of it."""

    depth, attention, notices = 1, "", ()

    def __init__(self, hello: Hello, seat: Any = None) -> None:
        self.part, self.seat = hello.part, seat
        self.device = torch.device("cpu") if seat is None else seat.device
        if seat is None:
            kernels.use_threads(hello.config.threads)
        self.exchange = SharedExchange(hello.part, hello.meeting, hello.seconds) if seat is None else seat.exchange
        self.host = self.exchange if seat is None else self.exchange.host
        self.group = Group(hello.part, self.host.store, hello.seconds, self.device, False, "gloo") \
            if seat is None else self.exchange.group  # fmt: skip
        self.norms = [RMSNorm(SIZE, 1e-5, DTYPE, self.device) for _ in range(2)]
        for norm in self.norms:
            norm.weight.fill_(1.0)
            norm.prepare()
        join(self.norms[0], self.exchange)
        self.found: dict[str, Any] = {}

    def warm_up(self, rows: int, way: int) -> None:
        """Measure. What can't be measured here says why, on all ranks alike."""
        name = WAYS[way]
        if name == "beside a product":
            self.found = self._beside(rows)
            return
        torch.manual_seed(rows)
        first = torch.randn(rows, SIZE).to(self.device, DTYPE)
        torch.manual_seed(rows + 1 + self.part.rank)
        delta = torch.randn(rows, SIZE).to(self.device, DTYPE)
        if name == "replays":
            self.found = self._replayed(first, delta)
            return
        try:
            call, given = self._way(name, delta)
        except Missing as missing:
            self.found = {"missing": str(missing)}
            return
        x = first.clone()
        out = call(x, given)
        self.found = {"bits": _bits(x, out), "exact": torch.equal(x.cpu(), self._expected(first, delta))}
        given.zero_()  # some ways add in place
        self.found["us"] = self._spent(lambda: call(x, given), captured=True)
        self.exchange.check()

    def _way(self, name: str, delta: Tensor) -> tuple[Call, Tensor]:
        """x [rows, SIZE] += the sum of all ranks' delta, and the norm of that, `name`'s way; and delta where that way
        wants it."""
        ours, plain = self.norms
        if name == "quire":
            return ours, delta.clone()
        if name in ("NCCL", "gloo"):
            if self.group is None or (name == "NCCL") != (self.device.type == "cuda"):
                raise Missing(f"ranks have no group of {name}")
            group = self.group
            return (lambda x, delta: plain(x, group.add(delta))), delta.clone()
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
        self.host.meet()
        if name == "torch one-shot":
            return (lambda x, delta: plain(x, operations.one_shot_all_reduce(delta, "sum", group))), buffer
        return (lambda x, delta: plain(x, operations.two_shot_all_reduce_(delta, "sum", group))), buffer

    def _expected(self, first: Tensor, delta: Tensor) -> Tensor:
        """x after a call: sums in rank order and in fp32, rounded once, by what ranks on CPUs meet through."""
        total, *others = self.host.gather(delta.cpu()).float()
        for other in others:
            total += other
        return first.cpu() + total.to(DTYPE)

    def _beside(self, rows: int) -> dict[str, Any]:
        """A product whose rows ranks add up, with the norm behind, as prompts have it: with the sums taken by the way
        (`us`), and what of that time is hidden which NCCL's sum takes behind the product."""
        if self.device.type != "cuda" or self.group is None:
            return {"missing": "it is hidden by GPUs, beside NCCL"}
        ours, plain, group = *self.norms, self.group
        product = Linear(columns(self.part, SIZE), SIZE, False, DTYPE, self.device)
        torch.manual_seed(self.part.rank)
        torch.nn.init.normal_(product.weight, std=SIZE**-0.5)
        inputs = torch.randn(rows, SIZE // self.part.ranks, device=self.device, dtype=DTYPE)
        product.prepare()
        join(product, self.exchange)
        if product.sending is None or not product.sending.pieces(rows, rows * SIZE * DTYPE.itemsize):
            return {"missing": "nothing carries them"}
        first = torch.ones(rows, SIZE, device=self.device, dtype=DTYPE)
        x = first.clone()
        out = ours(x, product(inputs))
        found: dict[str, Any] = {"bits": _bits(x, out)}
        found["exact"] = torch.equal(x.cpu(), self._expected(first, product._product(inputs)))

        def alone() -> Tensor:
            return product._product(inputs)

        pieces = product.sending.pieces(rows, rows * SIZE * DTYPE.itemsize)
        delta = alone()

        def carried() -> Tensor:
            for piece in pieces:
                self.exchange.send(delta, piece)
            return ours(x, delta)

        def cut() -> Tensor:
            for piece in pieces:
                torch.mm(inputs[piece], product.weight.t(), out=delta[piece])
            return plain(x, delta)

        spent = {
            "product, norm": self._spent(lambda: plain(x, alone())),
            "norm": self._spent(lambda: plain(x, delta)),
            "NCCL between": self._spent(lambda: plain(x, group.add(alone()))),
            "product in pieces, norm": self._spent(cut),
            "carried, norm": self._spent(carried),
            "carried": self._spent(lambda: ours(x, product(inputs))),
        }
        self.exchange.check()
        least, most, now = (median(spent[name]) for name in ("product, norm", "NCCL between", "carried"))
        return {**found, "us": spent["carried"], "hidden": (most - now) / (most - least), "parts_us": spent}

    def _spent(self, call: Callable[[], object], captured: bool = False) -> list[float]:
        """Microseconds of a call, of each round: one after another, or `captured` in a graph, on GPUs."""
        cuda, spans = self.device.type == "cuda", []
        captured = captured and cuda
        once = _captured(call) if captured else call
        number = REPLAYS if captured else ON_CPU
        for _ in range(ROUNDS):
            self.host.meet()
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

    def _replayed(self, first: Tensor, delta: Tensor) -> dict[str, Any]:
        """Many calls, on GPUs from two streams in turn and beside other work: what came of them is looked at."""
        x, bits, cuda = first.clone(), [], self.device.type == "cuda"
        kept, given = torch.empty_like(x), delta.clone()

        def calls() -> None:
            x.copy_(first)
            for _ in range(CALLS):
                given.copy_(delta)
                kept.copy_(self.norms[0](x, given))

        once = _captured(calls, 1) if cuda else calls
        looks = (MANY if cuda else MANY_ON_CPU) // CALLS // LOOKS
        other = torch.randn(1024, 1024, device=self.device, dtype=DTYPE) if cuda else None
        streams = [torch.cuda.Stream() for _ in range(3)] if cuda else []
        for _ in range(LOOKS):
            for i in range(looks):
                if other is None:
                    once()
                    continue
                now, before = streams[i % 2], streams[1 - i % 2]
                now.wait_stream(before)
                with torch.cuda.stream(now):
                    once()
                with torch.cuda.stream(streams[2]):
                    torch.mm(other, other)
            if cuda:
                torch.cuda.synchronize()
            bits.append(_bits(x, kept))
            self.exchange.check()
        return {"calls": LOOKS * looks * CALLS, "bits": bits[0], "exact": len(set(bits)) == 1}

    def close(self) -> None:
        """Nothing is kept."""


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


def _bits(*tensors: Tensor) -> int:
    """A number that differs where bits do."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def main() -> None:
    """See quire.parallel.rank."""
    QUESTIONS["found"] = lambda runner: runner.found
    rank.main(Timed)
