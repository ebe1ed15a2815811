"""Sums that three ranks and more have carried: every rank's streams are simulated, the kernels interpreted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import memory_checker
import pytest
import torch
from device_streams import World
from reduce_ranks import EPS, normed, peers_of, summed
from torch import Tensor

from quire.config import EngineConfig
from quire.distributed import copy_engine_allreduce as module
from quire.distributed import device_exchange, peer_buffers, peer_memory
from quire.distributed.copy_engine_allreduce import (
    CopyEngineAllReduce,
    TwoShotCopyEngineAllReduce,
    make_copy_engine_all_reduce,
)
from quire.distributed.device_exchange import WARMUP_BYTES, DeviceExchange, fastest_prefix
from quire.kernels.peer_memory_layout import COPY_BYTES, KERNEL_BYTES, copy_region_bytes
from quire.kernels.triton import copy_engine_allreduce
from quire.kernels.triton.all_reduce import MAX_PEERS
from quire.kernels.triton.copy_engine_allreduce import PARTS, SUMS, flag_offset, owned_rows, parts_layout
from quire.kernels.triton.copy_engine_pair import MAX_PIECES, region_offset
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import Shard
from quire.startup.memory_plan import plan_memory

if torch.cuda.is_available():
    pytest.skip("kernels are interpreted here", allow_module_level=True)

CPU = torch.device("cpu")
SIZE, ROOM, POLLS = 16, 1 << 14, 20
KERNELS = ("_add_up", "_await_own", "_finish")
KINDS = ("rms", "sum", "layer", "behind")


class Ranks:
    """Ranks whose GPUs are `world`. What a call leaves is in `found`, what it should leave in `wanted`, by rank."""

    def __init__(self, world: World, ranks: int) -> None:
        self.world, self.ranks = world, ranks
        self.memories = [torch.zeros(KERNEL_BYTES + ROOM, dtype=torch.uint8) for _ in range(ranks)]
        self.addresses = tuple(memory.data_ptr() for memory in self.memories)
        self.carriers, self.computing = [], []
        for rank in range(ranks):
            world.owner = rank
            self.carriers.append(make_copy_engine_all_reduce(peers_of(rank, self.addresses, POLLS, ROOM), CPU))
            self.computing.append(torch.cuda.Stream())
        self.found: list[list[tuple[Tensor, ...]]] = [[] for _ in range(ranks)]
        self.wanted: list[tuple[Tensor, ...]] = []

    def call(self, rows: int, kind: str, silent: int | None = None, hasty: int | None = None) -> None:
        """Queue a product, its sum and what follows; rank `silent` does nothing, `hasty` doesn't await the sums."""
        number = len(self.wanted)
        torch.manual_seed(number)
        every = [torch.randn(rows, SIZE) for _ in self.carriers]
        for rank, one in enumerate(every):
            one.view(-1)[rank :: self.ranks + 2], one.view(-1)[self.ranks + 1 :: self.ranks + 2] = 0.0, -0.0
        x, weight = torch.randn(rows, SIZE), torch.randn(SIZE)
        bias, behind = (torch.randn(SIZE) if kind == one else None for one in ("layer", "behind"))
        self.wanted.append(wanted(summed(every), x.clone(), weight, bias, behind, kind))
        for rank, carrier in enumerate(self.carriers):
            if rank == silent:
                continue
            with self.world.on(self.computing[rank]):
                delta, mine = torch.empty(rows, SIZE), x.clone()
                for piece in carrier.split_rows(rows, delta.nbytes):
                    self.world.put(partial(delta[piece].copy_, every[rank][piece]))
                    carrier.send_rows(delta, piece)
                if rank == hasty:
                    carrier.pending_delta = None
                elif kind == "sum":
                    self.found[rank].append((carrier.finish(None, None, None, 0.0, None).view(-1),))
                else:
                    self.found[rank].append((carrier.finish(mine, weight, bias, EPS, behind), mine))
                if kind != "sum":
                    self.world.put(partial(delta.fill_, torch.nan))  # it's somebody else's memory

    def wrong(self) -> set[int]:
        """Of which ranks something isn't what it should be, to the bit."""
        return {
            rank
            for rank, found in enumerate(self.found)
            for got, want in zip(found, self.wanted)
            if not all(torch.equal(one.view(torch.int32), two.view(torch.int32)) for one, two in zip(got, want))
        }

    @property
    def missed(self) -> list[int]:
        """Whom each rank names, from 1 on."""
        return [int(carrier.peers.error) for carrier in self.carriers]


def wanted(total: Tensor, x: Tensor, weight: Tensor, bias: Any, behind: Any, kind: str) -> tuple[Tensor, ...]:
    if kind == "sum":
        return ((total + 0.0).view(-1),)
    return normed(total, x, weight, bias, behind), x


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Ranks]:
    """Of a seed, and a number of ranks."""
    monkeypatch.setattr(memory_checker.Bounds, "check", lambda *args: None)  # kernels write what isn't given to them
    monkeypatch.setattr(module, "MIN_CHUNK_ROWS", 3)
    monkeypatch.setattr(module, "MIN_CHUNK_BYTES", 1)
    kernels = {name: getattr(copy_engine_allreduce, name) for name in KERNELS}

    def make(seed: int, ranks: int) -> Ranks:
        world = World(seed)
        world.install(monkeypatch)
        for name, kernel in kernels.items():
            monkeypatch.setattr(copy_engine_allreduce, name, Queued(world, name, kernel))
        return Ranks(world, ranks)

    return make


class Queued:
    """A kernel that is launched on a simulated stream; `launches` are the names of all, as they come."""

    launches: ClassVar[list[str]] = []

    def __init__(self, world: World, name: str, kernel: Any) -> None:
        self.world, self.name, self.kernel = world, name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        def work() -> None:
            self.launches.append(self.name)
            self.kernel[grid](*given, **options)

        world = self.world
        if self.name == "_add_up":
            world.brief(work)
        elif self.name == "_await_own":
            table, _, me, _, _, _, call, piece, rows, ranks = given[:10]
            world.put(work, sums_arrived(table, me, call, piece, rows, ranks, [me]), work)
        else:
            table, me, (call, piece, rows), ranks = given[6], given[8], given[13:16], len(given[6])
            world.fill(work, sums_arrived(table, me, call, piece, rows, ranks, range(ranks)))


def sums_arrived(
    table: Tensor, me: int, call: int, piece: int, rows: int, ranks: int, owners: Iterable[int]
) -> Callable[[], bool]:
    """Return a function that tells whether all sums of `owners` have come to rank `me`."""
    pieces = [slice(at, min(at + piece, rows)) for at in range(0, rows, piece)]
    words = [
        ctypes.c_int64.from_address(int(table[me]) + flag_offset(SUMS, number, owner))
        for number, some in enumerate(pieces)
        for owner in owners
        if owned_rows(some, owner, ranks).start < some.stop
    ]
    return lambda: all(word.value == call for word in words)


@pytest.mark.parametrize(("ranks", "seeds"), [(4, 2), (3, 3), (8, 1)])
def test_sums_are_those_in_rank_order_whatever_runs_first(
    made: Callable[[int, int], Ranks], ranks: int, seeds: int
) -> None:
    for seed in range(seeds):
        group = made(seed, ranks)
        # In the last pieces, and in the fourth call's of four rows, some ranks own nothing.
        for rows, kind in zip((7, 9, 6, 26, 10, 13), 2 * KINDS):
            group.call(rows, kind)
        group.world.run()
        assert not any(group.missed), "a rank was waited for in vain"
        assert all(len(found) == 6 for found in group.found)
        assert not group.wrong()


def test_sums_that_nobody_wants_after_all_are_waited_for(made: Callable[[int, int], Ranks]) -> None:
    group = made(0, 3)
    group.call(7, "rms")
    for rank, carrier in enumerate(group.carriers):
        with group.world.on(group.computing[rank]):
            other = torch.ones(6, SIZE)
            for piece in carrier.split_rows(6, other.nbytes):
                carrier.send_rows(other, piece)
            carrier.finish_and_discard()
            assert carrier.pending_delta is None
    group.call(7, "layer")
    group.world.run()
    assert not any(group.missed)
    assert not group.wrong()


def test_a_rank_without_a_word_is_named_and_all_queues_end(made: Callable[[int, int], Ranks]) -> None:
    for seed in range(4):
        group = made(seed, 4)
        group.call(9, "rms")
        for _ in range(2):
            group.call(9, "sum", silent=2)
        group.world.run()
        assert group.missed == [3, 3, 0, 3]


@pytest.mark.parametrize(
    ("phase", "shift"),
    [(PARTS, -1), (SUMS, -1), (SUMS, 1)],
)
def test_a_flag_of_another_call_is_none(
    made: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch, phase: int, shift: int
) -> None:
    """Rank 1's of the second call; of parts only an earlier one, as a stream that waits for them takes a later one."""
    group = made(0, 3)
    write, ours = peer_memory.stream_write_value, {flag_offset(phase, number, 1) for number in range(MAX_PIECES)}

    def planted(address: int, value: int, stream: int) -> None:
        there = {address - base for base in group.addresses}
        write(address, value + shift * (value == 2 and bool(there & ours)), stream)

    monkeypatch.setattr(peer_memory, "stream_write_value", planted)
    for _ in range(2):
        group.call(7, "sum")
    group.world.run()
    assert {0, 2} & {rank for rank, missed in enumerate(group.missed) if missed == 2}


def test_a_share_that_goes_to_another_owner_is_noticed(
    made: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's to ranks 1 and 2, changed over."""
    group = made(0, 3)
    copy, (_, one, two) = peer_memory.copy, group.addresses

    def planted(target: int, source: int, nbytes: int, stream: int) -> None:
        if group.world.streams[stream].owner == 0:
            target += two - one if target in range(one, one + KERNEL_BYTES + ROOM) else one - two
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(peer_memory, "copy", planted)
    group.call(7, "rms")
    group.world.run()
    assert group.wrong() == {0, 1, 2}


@pytest.mark.parametrize("hasty", [None, 1])
def test_a_region_is_written_again_once_it_was_read(made: Callable[[int, int], Ranks], hasty: int | None) -> None:
    """One rank's streams are in front of all others'. A `hasty` rank, which doesn't await the first call's sums before
    it sends what the next one's are made of, is noticed."""
    for first in range(3) if hasty is None else [hasty]:
        group = made(0, 3)
        for call, rows in enumerate((7, 9, 7) if hasty is None else (7, 7)):
            group.call(rows, "rms", hasty=None if call else hasty)
        group.world.run(first)
        assert {0, 2} & group.wrong() if hasty else not group.wrong()


@pytest.mark.parametrize("ranks", range(3, MAX_PEERS + 1))
def test_a_whole_step_of_a_wide_model_is_carried(
    made: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """8,192 rows of 8,192 numbers of 16 bits, and no byte behind the memory that is planned."""
    one = made(0, ranks).carriers[0]
    monkeypatch.setattr(module, "MIN_CHUNK_ROWS", 1024)
    monkeypatch.setattr(module, "MIN_CHUNK_BYTES", 16 << 20)
    one.peers = one.peers._replace(copy_bytes=copy_region_bytes(COPY_BYTES))
    whole, row = KERNEL_BYTES + copy_region_bytes(COPY_BYTES), 8192 * 2
    parts_from, sums_from = (region_offset(one.peers, region) for region in (PARTS, SUMS))
    pieces = one.split_rows(8192, 8192 * row)
    assert len(pieces) == MAX_PIECES
    assert one.split_rows(8193, 8193 * row) == ()
    assert parts_from % 16 == sums_from % 16 == 0
    assert flag_offset(SUMS, MAX_PIECES, 0) <= parts_from
    for rows in (2048, 2049, 5000, 8191, 8192):
        pieces = one.split_rows(rows, rows * row)
        first, share = parts_layout(ranks, pieces[0].stop, pieces[-1])
        assert parts_from + (first + (ranks - 1) * share) * row <= sums_from
        sums = sums_from + rows * row
        assert sums <= whole
    assert sums == whole, "none is planned that isn't used"


def test_a_rehearsal_launches_what_a_call_does_within_its_scratch(
    made: Callable[[int, int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows as long as others are exchanged at most: 64 KiB."""
    group = made(0, 8)
    monkeypatch.setattr(Queued, "launches", launched := [])
    whole = KERNEL_BYTES + WARMUP_BYTES
    scratch = torch.zeros(whole + WARMUP_BYTES, dtype=torch.uint8)
    scratch[whole:] = 0xFF  # read as fp32, this is NaN
    there = (scratch.data_ptr(),) * 8
    alone = group.carriers[7].peers._replace(
        table=torch.tensor(there), addresses=there, polls=0, copy_bytes=WARMUP_BYTES
    )
    x, delta = torch.ones(2, 3, 1 << 14).unbind(0)
    group.carriers[7].warm_up(alone, x, delta, torch.ones(1 << 14), None, EPS, None)
    group.world.run()
    assert set(launched) == set(KERNELS)
    assert group.carriers[7].call == 0
    assert (scratch[whole:] == 0xFF).all()
    sums = region_offset(alone, SUMS)
    assert torch.equal(scratch[sums : sums + (1 << 16)].view(torch.float32), delta[0])
    assert torch.equal(delta, torch.ones_like(delta)), "a rehearsal changes nothing"


class Host:
    """Where ranks meet that all are alike."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def all_gather(self, x: Tensor) -> Tensor:
        return x.expand(self.ranks, *x.shape)

    def barrier(self, factor: float) -> None:
        """Nobody is late."""


def planned(ranks: int) -> int:
    """Bytes that a memory plan has for a rank's exchange."""
    config, spec = EngineConfig(tp=ranks), read_spec(named_config("opt-66b"), Shard(0, ranks))
    return plan_memory(config.per_rank(), spec, "opt-66b", "float16", 2, "cuda", device_bytes=256 << 30).peer_bytes


@pytest.mark.parametrize(
    ("ranks", "kind"), [(3, TwoShotCopyEngineAllReduce), (8, TwoShotCopyEngineAllReduce), (2, CopyEngineAllReduce)]
)
def test_any_number_of_ranks_has_memory_for_what_is_carried(
    monkeypatch: pytest.MonkeyPatch, ranks: int, kind: type[CopyEngineAllReduce]
) -> None:
    World(0).install(monkeypatch)
    exported, host = [], Host(ranks)

    def export(nbytes: int) -> peer_memory.ExportedMemory:
        exported.append(nbytes)
        return peer_memory.ExportedMemory(1 << 20, b"")

    monkeypatch.setattr(peer_memory, "export", export)
    monkeypatch.setattr(peer_memory, "open_handle", lambda handle: 1 << 20)
    monkeypatch.setattr(peer_memory, "stream_write_value", lambda *args: None)
    monkeypatch.setattr(peer_buffers, "_unreachable", lambda *args: "")
    found, why = peer_buffers.open_peer_buffers(Shard(0, ranks), CPU, range(ranks), host, 1.0)  # type: ignore[arg-type]
    assert why == ""
    assert exported == [planned(ranks)], "what a rank allocates is in the memory plan"
    assert exported == [KERNEL_BYTES + found.copy_bytes]
    assert found.copy_bytes == copy_region_bytes(COPY_BYTES)
    exchange = DeviceExchange(Shard(0, ranks), CPU, host, found, None)  # type: ignore[arg-type]
    assert type(exchange.copy_engine) is kind
    assert len(exchange.split_rows(8192, 8192 * 8192 * 2)) == MAX_PIECES


def test_more_ranks_than_reach_each_other_have_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "export", lambda nbytes: pytest.fail("memory is allocated"))
    found, why = peer_buffers.open_peer_buffers(Shard(0, 9), CPU, range(9), Host(9), 1.0)  # type: ignore[arg-type]
    assert (found, why) == (None, "more than 8 ranks")
    assert planned(9) == 0


def test_a_driver_that_does_not_say_what_is_reached_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange through NCCL then."""

    def refused() -> Any:
        raise peer_memory.PeerError("libcuda.so.1: no such file")

    monkeypatch.setattr(peer_memory, "_library", refused)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: True)
    found, why = peer_buffers.open_peer_buffers(Shard(0, 2), CPU, range(2), Host(2), 1.0)  # type: ignore[arg-type]
    assert (found, why) == (None, "libcuda.so.1: no such file")


def test_ranks_measure_up_to_how_many_bytes_one_phase_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """And agree: the slowest rank counts."""
    memory = torch.zeros(KERNEL_BYTES, dtype=torch.uint8)
    peers, timed = peers_of(0, (memory.data_ptr(),) * 4, POLLS, 0), []

    class Others(Host):
        def all_reduce_max(self, x: Tensor) -> Tensor:
            return x.maximum(torch.tensor([[0.0] * 6, [45.0] * 6]))

    def seconds_of(call: Any, capture: object) -> float:
        assert capture is timed
        shots, rows = call.args
        timed.append((shots, rows))
        return rows if shots == 1 else 20 + rows / 2

    monkeypatch.setattr(memory_checker.Bounds, "check", lambda *args: None)
    monkeypatch.setattr(device_exchange, "seconds_of", seconds_of)
    exchange = DeviceExchange(Shard(0, 4), CPU, Others(4), peers, None)  # type: ignore[arg-type]
    before = peers.counters.clone()
    for _ in range(2):  # the second call has no effect
        exchange.measure_sums(16, torch.float32, timed)  # type: ignore[arg-type]
    assert timed == [(shots, rows) for shots in (1, 2) for rows in (1, 4, 16, 64, 256, 1024)]
    assert exchange.peers.one_shot_bytes == 32 * 16 * 4, "16 rows take 16 in one phase and 45 in two; 64 rows 64 and 52"
    assert torch.equal(peers.counters, before), "compiling counts as no call"
    DeviceExchange(Shard(0, 4), CPU, Others(4), None, object()).measure_sums(16, torch.float32, timed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [([1, 2, 9], [2, 3, 4], 2), ([3, 1, 9], [2, 3, 4], 2), ([3, 4], [1, 1], 0), ([1, 1], [1, 2], 2), ([], [], 0)],
)
def test_the_fastest_prefix_forgives_a_time_that_is_off(first: list[int], second: list[int], count: int) -> None:
    assert fastest_prefix(first, second) == count
