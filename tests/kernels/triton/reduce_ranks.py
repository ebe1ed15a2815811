"""Ranks as processes that share memory and interpret the kernels of `reduce`: `reduce_ranks.py RANKS`; with
PLANTED behind, `early` alone, which must fail.

A program of its own: what the interpreter runs of one process can't wait for what it runs in another thread of it. The
processes are forked, so they have the memory at one address. Each prints nothing unless something differs."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from quire.distributed import copy_engine_allreduce, peer_memory
from quire.distributed.peer_buffers import ONE_SHOT_BYTES, ONE_SHOT_BYTES_DEFAULT
from quire.kernels import peer_memory_layout
from quire.kernels.triton import all_reduce, norm

EPS = 1e-5
MORE = 1 << 16  # bytes for rows that are carried


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed(every: list[Tensor]) -> Tensor:
    """In rank order, in fp32; rounded once."""
    total = every[0].float()
    for other in every[1:]:
        total = total + other.float()
    return total.to(every[0].dtype)


def following(kind: str, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What a norm behind a sum is given: x, its weight, a bias, and the weight of a norm that the sum goes through."""
    bias = random(size, seed=3) if kind == "layer" else None
    behind = random(size, seed=4) if kind == "behind" else None
    return random(rows, size, seed=1), random(size, seed=2), bias, behind


def normed(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, behind: Tensor | None) -> Tensor:
    """As one rank does it: x changes."""
    if bias is not None:
        return norm.layer_norm(x, weight, bias, EPS, delta=total)
    return norm.rms_norm(x, weight, EPS, delta=total, post_norm_weight=behind)


def peers_of(rank: int, addresses: Sequence[int], polls: int, more: int) -> all_reduce.PeerBuffers:
    counters, error = torch.zeros(all_reduce.PROGRAMS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    table = torch.tensor(addresses, dtype=torch.int64)
    one_shot = ONE_SHOT_BYTES.get(len(addresses), ONE_SHOT_BYTES_DEFAULT)
    return all_reduce.PeerBuffers(table, counters, error, rank, len(addresses), polls, tuple(addresses), more, one_shot)


class Rank:
    """One end; `case` counts, so that each has numbers of its own."""

    def __init__(self, rank: int, addresses: list[int]) -> None:
        self.peers = peers_of(rank, addresses, 1 << 24, MORE)
        self.counters, self.error = self.peers.counters, self.peers.error
        self.case = self.call = 0

    def every(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """What each rank has; zeros of both signs are among it, also at one place of all ranks."""
        self.case += 1
        every = [random(*shape, seed=100 * self.case + rank, dtype=dtype) for rank in range(self.peers.ranks)]
        for rank, one in enumerate(every):
            flat = one.view(-1)
            flat[rank::5], flat[4::7], flat[5::7] = 0, -0.0, 0.0
        return every

    def add(self, rows: int, size: int, shots: int, dtype: torch.dtype = torch.float32) -> None:
        every = self.every(rows, size, dtype=dtype)
        got, want = all_reduce.all_reduce(self.peers, every[self.peers.rank].clone(), shots=shots), summed(every)
        assert torch.equal(got, want), f"{rows} rows of {size}, {shots} shots: sums differ"
        assert not (got[want == 0]).signbit().any(), f"{rows} rows of {size}, {shots} shots: a zero has a sign"

    def norm(self, rows: int, size: int, shots: int, kind: str) -> None:
        every, (x, weight, bias, behind) = self.every(rows, size), following(kind, rows, size)
        wide = torch.zeros(rows, size + 16)  # rows of another stride
        wide[:, :size] = every[self.peers.rank]
        want_x = x.clone()
        want = normed(summed(every), want_x, weight, bias, behind)
        got = all_reduce.all_reduce_norm(
            self.peers, x, wide[:, :size], weight, bias, EPS, post_norm_weight=behind, shots=shots
        )
        assert torch.equal(x, want_x), f"{kind}, {rows} rows of {size}, {shots} shots: x differs"
        assert torch.equal(got, want), f"{kind}, {rows} rows of {size}, {shots} shots: norms differ"

    def gather(self, *shape: int, dtype: torch.dtype) -> None:
        every = self.every(*shape, dtype=dtype)
        got = all_reduce.all_gather(self.peers, every[self.peers.rank])
        assert torch.equal(got, torch.stack(every)), f"{shape} of {dtype}: gathered ones differ"


def cases(rank: Rank) -> None:
    """All kinds, mixed, in grids of all sizes: regions are used in turn by each program on its own."""
    size = 40 if rank.peers.ranks == 3 else 48
    for rows, shots in ((1, 1), (5, 2), (2, 1), (1, 2), (3, 0), (1, 1), (19, 2), (18, 1), (1, 1)):
        rank.add(rows, size, shots)
    for kind in ("rms", "layer", "behind"):
        for shots in (1, 2):
            rank.norm(3, size, shots, kind)
    rank.add(2, 72, 1, torch.float16)
    rank.gather(3, 2, dtype=torch.float64)
    rank.gather(2600, dtype=torch.float32)
    rank.gather(1, dtype=torch.int32)
    rank.add(1, 12288, 2)  # rows of which few fit
    all_reduce.PROGRAMS = 2  # as if there were fewer: several launches
    rank.add(2 * all_reduce.exchange_shape(rank.peers.ranks, 8192, 4).two_shot_rows + 1, 8192, 2)
    rank.gather(2 * all_reduce.REGION_BYTES // 4 + 5, dtype=torch.float32)
    assert rank.error.item() == 0, "somebody was waited for in vain"
    assert 20 < rank.counters[0] < 60, f"the first program has counted {rank.counters[0]} calls"
    assert rank.counters[7] == 2, f"one that is seldom needed has counted {rank.counters[7]}"


def tardy(rank: Rank) -> None:
    """Ranks that come late in turn, and that read late what they have waited for, in one phase and in two."""

    def late(builder: InterpreterBuilder) -> None:
        if turn % rank.peers.ranks == rank.peers.rank:
            time.sleep(0.05)

    InterpreterBuilder.create_barrier = late
    for turn in range(8):
        rank.add(1, 32, 1 + turn // 2 % 2)
        rank.gather(4, dtype=torch.int32)


def early(rank: Rank, planted: str = "") -> None:
    """One reads what has come only when another has sent what is for the call that follows: that isn't written over
    it. `planted`: "sums" or "gathers", whose regions are used again one call early."""
    for number, kind in enumerate(("sums", "gathers")):
        late(rank, ctypes.c_int64.from_address(rank.peers.addresses[0] + peer_memory_layout.KERNEL_BYTES + 8 * number))
        for call in range(2):
            rank.call = call
            rank.add(1, 32, 1) if kind == "sums" else rank.gather(4, dtype=torch.int32)
            rank.counters += kind == planted  # it goes by whether they are even
        rank.call = 2


def late(rank: Rank, sent: ctypes.c_int64) -> None:
    """In call 0 the first rank reads nothing of its exchange memory until `sent` says that the second has sent all of
    its call 1."""
    load, mine = InterpreterBuilder.create_masked_load, rank.peers.addresses[rank.peers.rank]

    def note_sent() -> None:
        if rank.peers.rank == 1 and rank.call == 1:
            sent.value = 1

    def loaded(builder: InterpreterBuilder, pointers: Any, *more: Any) -> Any:
        if all_reduce.FLAG_BYTES <= int(pointers.data.flat[0]) - mine < peer_memory_layout.KERNEL_BYTES:
            note_sent()
            end = time.monotonic() + 60
            while rank.peers.rank == 0 and rank.call == 0 and not sent.value and time.monotonic() < end:
                time.sleep(0.001)
        return load(builder, pointers, *more)

    InterpreterBuilder.create_masked_load = loaded
    InterpreterBuilder.create_barrier = lambda builder: note_sent()


class Immediate:
    """A stream, and an event."""

    cuda_stream = 0

    def record(self, stream: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...


def immediate(patch: Callable[[Any, str, Any], None] = setattr, least: int = 4) -> None:
    """A device without streams; pieces are of `least` rows."""

    def wait(address: int, value: int, stream: int) -> None:
        end = time.monotonic() + 60
        while (seen := ctypes.c_int64.from_address(address).value) < value and time.monotonic() < end:
            time.sleep(0.001)
        assert seen == value, f"a flag is {seen}, not {value}"

    for name in ("Stream", "Event", "current_stream"):
        patch(torch.cuda, name, lambda *args, **options: Immediate())
    patch(torch.cuda, "stream", nullcontext)
    patch(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch(peer_memory, "copy", lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes))
    patch(
        peer_memory,
        "stream_write_value",
        lambda at, value, stream: setattr(ctypes.c_int64.from_address(at), "value", value),
    )
    patch(peer_memory, "stream_wait_value", wait)
    patch(copy_engine_allreduce, "MIN_CHUNK_ROWS", least)
    patch(copy_engine_allreduce, "MIN_CHUNK_BYTES", 1)


def silent(rank: Rank) -> None:
    """A rank that never comes is named, and no rank waits for ever."""
    if rank.peers.rank:
        all_reduce.all_reduce(rank.peers._replace(polls=50), torch.ones(1, 16), shots=1)
        assert rank.error.item() == 1, f"rank 0 is missed, and the word is {rank.error.item()}"


def forked(ranks: int, work: Callable[[Rank], None]) -> int:
    """How many ranks failed."""
    shared = [mmap.mmap(-1, peer_memory_layout.KERNEL_BYTES + MORE) for _ in range(ranks)]
    addresses = [torch.frombuffer(memory, dtype=torch.uint8).data_ptr() for memory in shared]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                work(Rank(rank, addresses))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = 0
    for _ in range(ranks):
        ended, status = os.wait()
        children.remove(ended)
        failed += status != 0
        for child in children if status else ():  # they would wait for it
            os.kill(child, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_reduce.PROGRAMS = 8  # the interpreter runs one after another
    works = [partial(early, planted=sys.argv[2])] if sys.argv[2:] else [cases, tardy, early, silent]
    failed = [getattr(work, "__name__", "planted") for work in works if forked(int(sys.argv[1]), work)]
    sys.exit(", ".join(failed) or 0)
