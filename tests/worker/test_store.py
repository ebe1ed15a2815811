"""The store: replaying a journal has the effect of its entries one after another on the bytes, whether pages have one
size or several; layers tile pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from geometries import one_size
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import StartupError
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, ModelSpec, StateTensor
from quire.protocol.step_plan import PageCopy, PageOp, PageOps, Poison, SeqSlice, SwapIn, SwapOut, TableWrite
from quire.worker import hazards, host_pool
from quire.worker import store as module
from quire.worker.cache_views import check_kv_cache_config, state_caches
from quire.worker.hazards import batch_page_ops, pages_overlap
from quire.worker.staging_buffer import StagingBuffer
from quire.worker.state_checker import StateChecker
from quire.worker.store import Store

PAGES, HOST, SLOTS, WIDTH = 7, 3, 3, 5
SPEC = ModelSpec(
    "test", (LayerSpec(1, 2), LayerSpec(2, 2, 4), LayerSpec(1, 2)), vocab_size=9, max_len=10, hidden=4, heads=2,
    intermediate=4, parameters=1,
)  # fmt: skip
SETS = (((0, 2), None), ((1,), 4))  # pages of 2 tokens: 2 x 2 x 2 numbers a layer and head
GEOMETRY = one_size(*SETS, pages=PAGES, page_bytes=64, slots=SLOTS, width=WIDTH, tokens=2, host=HOST)
CPU = torch.device("cpu")
Shapes = tuple[tuple[int, int, int], ...]  # of each group's one layer: key heads, their size, tokens of a page


def unlike(shapes: Shapes, pages: int = 8) -> tuple[KVCacheConfig, ModelSpec]:
    """Groups that share all bytes, as pages of one memory that is divided in two ways."""
    layers = tuple(LayerSpec(kv, dim) for kv, dim, _ in shapes)
    sizes = [layer.token_bytes(4) * tokens for layer, (_, _, tokens) in zip(layers, shapes)]
    size = pages * max(sizes)
    groups = tuple(
        KVCacheGroup((i,), own, own // tokens, WIDTH, range(1, size // own), range(1, size // 2 // own + 1), tokens)
        for i, (own, (_, _, tokens)) in enumerate(zip(sizes, shapes))
    )
    spec = ModelSpec("test", layers, vocab_size=9, max_len=8, hidden=4, heads=42, intermediate=4, parameters=1)
    return KVCacheConfig(KVCacheLayout.PAGED, size, SLOTS, groups, 4, size // 2), spec


UNLIKE = {"3:2": unlike(((3, 1, 4), (2, 1, 4))), "84:1": unlike(((21, 2, 2), (1, 1, 1)))}
EVERY = {"1:1": (GEOMETRY, SPEC), **UNLIKE}


def pages_of(store: Store) -> Tensor:
    """All pages, of one size."""
    (pages,) = store.pages_by_size.values()
    return pages


def host_of(store: Store) -> Tensor:
    (host,) = store.host_pool.host_pages.values()
    return host


def a_store(device: torch.device = CPU, geometry: KVCacheConfig = GEOMETRY, spec: ModelSpec = SPEC) -> Store:
    """Every number of the device and of host memory is another one."""
    store = Store(geometry, spec, torch.float32, device)
    store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
    for host in store.host_pool.host_pages.values():  # views of the same bytes
        host.copy_(-torch.arange(host.numel()).view_as(host) - 1)
    return store


def one_at_a_time(journal: PageOps, store: Store, bytes_: np.ndarray, host: np.ndarray) -> list[np.ndarray]:
    """What a journal means: its effect on the bytes of the device and of host memory; and the tables."""
    tables = [t.copy() for t in store.host_tables]

    def of(memory: np.ndarray, group: int, page: int) -> np.ndarray:
        size = store.page_sizes[group]
        return memory[page * size : (page + 1) * size]

    for entry in journal:
        match entry:
            case TableWrite(slot, group, at, pages):
                tables[group][slot, at : at + len(pages)] = pages
            case PageCopy(group, src, dst):
                of(bytes_, group, dst)[:] = of(bytes_, group, src).copy()
            case SwapOut(group, page, place):
                of(host, group, place - 1)[:] = of(bytes_, group, page)
            case SwapIn(group, place, page):
                of(bytes_, group, page)[:] = of(host, group, place - 1)
            case Poison(group, page):
                of(bytes_, group, page)[:] = 255  # no number in any dtype
    return tables


def check(store: Store, *journals: PageOps, late: bool = False) -> None:
    """`late`: swaps are held up, so that they come after whatever doesn't wait for them."""
    host = max(store.host_pool.host_pages.values(), key=torch.numel)

    def contents() -> list[np.ndarray]:
        if store.device.type != "cpu":
            torch.cuda.synchronize()
        return [x.reshape(-1).cpu().numpy().view(np.uint8).copy() for x in (store.buffer, host)]

    for journal in journals:
        bytes_, there = contents()
        tables = one_at_a_time(journal, store, bytes_, there)
        if late:
            with torch.cuda.stream(store.host_pool.swap_stream):
                torch.cuda._sleep(LONG // 10)
        store.apply_page_ops(journal)
        assert all((got == expected).all() for got, expected in zip(contents(), (bytes_, there)))
        for table, kept, expected in zip(store.tables, store.host_tables, tables):
            assert (table.cpu().numpy() == expected).all()
            assert (kept == expected).all()


def journals_of(geometry: KVCacheConfig) -> st.SearchStrategy[list[PageOps]]:
    """Entries of any kind, or, where pages have one size, runs of one kind too; of few pages, so that they meet."""
    kinds: list[st.SearchStrategy[PageOp]] = []
    for g, group in enumerate(geometry.groups):
        # Those in the bytes of the large group's first pages.
        page = st.integers(1, min(3 * geometry.groups[0].page_bytes // group.page_bytes, group.ids[-1]))
        place, own = st.integers(1, min(group.host_ids[-1], 9)), st.just(g)
        kinds += [st.builds(PageCopy, own, page, page)] * 2
        kinds += [
            st.builds(SwapOut, own, page, place),
            st.builds(SwapIn, own, place, page),
            st.builds(Poison, own, page),
        ]
        tables = st.lists(page, max_size=2).map(tuple)
        kinds.append(st.builds(TableWrite, st.integers(0, SLOTS - 1), own, st.integers(0, WIDTH - 2), tables))
    mixed = st.lists(st.one_of(kinds), max_size=14).map(tuple)
    if len({group.page_bytes for group in geometry.groups}) > 1:
        return st.lists(mixed, min_size=1, max_size=2)
    runs = st.lists(st.one_of([st.lists(kind, min_size=1, max_size=6) for kind in kinds]), max_size=6)
    whole = runs.map(lambda runs: tuple(entry for run in runs for entry in run))
    return st.lists(mixed | whole, min_size=1, max_size=3)


LOST = (PageCopy(0, 3, 4), PageCopy(1, 5, 4))  # of unlike groups these are unlike pages of one number
EMPTY = (TableWrite(0, 0, 0, ()), TableWrite(1, 0, 0, (1, 2)))  # as many pages as entries, but not one each
EXAMPLES: list[list[PageOps]] = [
    [(PageCopy(0, 1, 2), PageCopy(0, 2, 3), PageCopy(0, 3, 4))],  # a chain: each reads what the one before wrote
    [(PageCopy(0, 1, 2), PageCopy(0, 3, 1))],  # a source that is overwritten afterwards
    [(PageCopy(0, 1, 2), PageCopy(0, 2, 1))],
    [(PageCopy(0, 1, 3), PageCopy(0, 2, 3))],  # the later one stays
    [(Poison(0, 1), PageCopy(0, 2, 1), Poison(0, 2))],
    [(PageCopy(0, 1, 2), Poison(0, 1))],
    [(SwapOut(0, 1, 1), PageCopy(0, 2, 1), SwapIn(0, 1, 3))],
    [(SwapIn(0, 1, 1), SwapOut(0, 1, 2)), (SwapOut(0, 2, 1), SwapIn(0, 1, 3))],
    [EMPTY],
    [
        (
            TableWrite(1, 0, 0, (1, 2, 3)),
            PageCopy(0, 1, 2),
            TableWrite(1, 0, 1, (4,)),
            PageCopy(0, 2, 3),
            TableWrite(1, 0, 1, (5,)),
        )
    ],
    [LOST],
    [(PageCopy(0, 1, 2), PageCopy(1, 3, 4))],  # in 3:2 the latter overwrites a part of the former
    [(PageCopy(1, 5, 1), PageCopy(0, 1, 3), PageCopy(1, 2, 6))],
    [(SwapOut(0, 1, 1), Poison(1, 2), SwapIn(0, 1, 1), SwapOut(1, 2, 3), SwapIn(1, 1, 6))],
    [(SwapIn(1, 2, 3), SwapOut(1, 3, 2), SwapIn(0, 1, 2))],
]


@pytest.mark.parametrize("name", EVERY)
def test_replay_is_one_entry_after_another(name: str) -> None:
    geometry, spec = EVERY[name]

    @settings(max_examples=200)
    @given(journals_of(geometry))
    def replayed(journals: list[PageOps]) -> None:
        check(a_store(CPU, geometry, spec), *journals)

    for journals in EXAMPLES:
        check(a_store(CPU, geometry, spec), *journals)
    replayed()


@given(st.lists(st.builds(PageCopy, st.integers(0, 1), *[st.integers(1, PAGES - 1)] * 2), max_size=12))
def test_copies_at_once_have_no_order(entries: list[PageCopy]) -> None:
    """No pair of a batch writes what another one reads: a GPU makes them in any order."""
    batches = [launch.moves for launch in batch_page_ops(entries, (64, 64))]
    assert all(not set(batch) & set(batch.values()) for batch in batches)
    assert sum(map(len, batches)) <= len(entries)


def test_tables_between_copies_do_not_part_them() -> None:
    """A beam step writes Copy, Table, Copy, Table: one launch all the same."""
    store, batches = a_store(), []
    store._copy = lambda moves, size: batches.append(moves)
    store.apply_page_ops(
        (PageCopy(0, 1, 4), TableWrite(1, 0, 0, (4,)), PageCopy(0, 2, 5), TableWrite(2, 0, 0, (5,)), PageCopy(1, 3, 6))
    )
    assert batches == [{4: 1, 5: 2, 6: 3}]


@pytest.mark.parametrize("room", [0, 8 * 64, 2**18])
def test_small_pages_move_together_and_large_ones_alone(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "CPU_GATHER_BYTES", room)
    pages = torch.arange(40 * 16, dtype=torch.float32).view(40, 16)
    pool = host_pool.HostPool({64: pages.clone()}, 30 * 64, debug=True)
    pool.swap_out({host: 39 - host for host in range(1, 28)}, 64)
    assert torch.equal(pool.host_pages[64][1:28], pages.flip(0)[1:28])
    pool.swap_in({page: 1 + page % 27 for page in range(35)}, 64)
    assert torch.equal(pool.pages[64][:35], pages.flip(0)[[1 + page % 27 for page in range(35)]])
    assert torch.equal(pool.pages[64][35:], pages[35:])


def test_a_swap_that_lost_something_is_noticed_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(GEOMETRY, SPEC, torch.float32, CPU, debug=True)
    store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
    store.apply_page_ops((SwapOut(0, 1, 2), SwapIn(0, 2, 3), SwapOut(0, 4, 1)))
    monkeypatch.setattr(host_pool, "_gather_on_cpu", lambda *args: None)
    with pytest.raises(AssertionError, match="page 5 and row 0 of the host pages differ"):
        store.apply_page_ops((SwapOut(0, 5, 1),))


def test_the_layers_of_a_group_tile_each_page() -> None:
    """Keys and values of a group's layers are every number of a page, once, in the order of the layers."""
    new = Store(GEOMETRY, SPEC, torch.float32, CPU)
    assert new.buffer.isfinite().all()
    assert not any(table.any() for table in new.tables), "padding resolves to page 0, which nothing writes on purpose"
    store = a_store()
    assert [view.shape for view in store.group_pages] == [(PAGES, 16)] * 2
    assert host_of(store).shape == (HOST, 16)
    assert [cache.group for cache in store.caches.values()] == [0, 1, 0]
    assert [cache.window for cache in store.caches.values()] == [None, 4, None]
    for group in GEOMETRY.groups:
        for page in range(PAGES):
            views = [x[page].flatten() for i in group.layers for x in (store.caches[i].keys, store.caches[i].values)]
            assert torch.equal(torch.cat(views), store.group_pages[0][page])
    store.caches[2].values[3] = 0.5
    assert (store.group_pages[0][3] == 0.5).sum() == 4


# Groups whose pages differ in size: launches are as few as hazards allow, and what can't be laid out is refused.


@pytest.mark.parametrize("name", UNLIKE)
def test_bugs_that_launches_of_unlike_pages_may_have_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is forgotten; or the large page 2 is read, its first bytes are written as a small page, and it is read
    again."""
    large, small = (group.page_bytes for group in UNLIKE[name][0].groups)
    around = (PageCopy(0, 2, 1), PageCopy(1, 6 * large // small, 2 * large // small), PageCopy(0, 2, 4))
    forgets: Any = lambda entries, sizes: hazards._batch_one_size(entries, sizes[0])  # noqa: E731
    overlooks: Any = lambda page, size, other: range(page, page + 1)  # noqa: E731
    for where, function, wrong, journal in (
        (module, "batch_page_ops", forgets, LOST), (hazards, "_overlapping_pages", overlooks, around),
    ):  # fmt: skip
        check(a_store(CPU, *UNLIKE[name]), journal)
        with monkeypatch.context() as patch:
            patch.setattr(where, function, wrong)
            with pytest.raises(AssertionError):
                check(a_store(CPU, *UNLIKE[name]), journal)


@pytest.mark.parametrize("name", UNLIKE)
def test_the_later_write_stays(name: str) -> None:
    """Where a small page is written, then the large one around it, by a launch that began before."""
    large, small = (group.page_bytes for group in UNLIKE[name][0].groups)
    made = a_store(CPU, *UNLIKE[name])
    check(made, (PageCopy(0, 4, 5), PageCopy(1, 6 * large // small, 3 * large // small), PageCopy(0, 4, 3)))
    check(made, (SwapIn(0, 1, 5), Poison(1, 3 * large // small), SwapIn(0, 2, 3)))


def test_work_of_unlike_groups_is_put_together() -> None:
    """Alternating groups and kinds, no two of which touch the same bytes: one launch for each kind and size."""
    first = [PageCopy(0, 10 + i, 20 + i) for i in range(4)]
    second = [PageCopy(1, 100 + i, 110 + i) for i in range(4)]
    mixed = [entry for pair in zip(first, second) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in batch_page_ops(mixed, (96, 64))] == [
        (PageCopy, 96, 4),
        (PageCopy, 64, 4),
    ]
    outs = [SwapOut(g, 200 + i, 1 + i) for i, g in ((0, 0), (3, 1), (3, 0), (9, 1))]
    both = [entry for pair in zip(outs, first) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in batch_page_ops(both, (96, 64))] == [
        (SwapOut, 96, 2), (PageCopy, 96, 4), (SwapOut, 64, 2),
    ]  # fmt: skip
    chain = [PageCopy(0, 10, 20), PageCopy(1, 100, 110), PageCopy(0, 20, 21), PageCopy(1, 101, 111)]
    assert [(x.size, x.moves) for x in batch_page_ops(chain, (96, 64))] == [
        (96, {20: 10}), (64, {110: 100}), (96, {21: 20}), (64, {111: 101}),
    ]  # fmt: skip


def test_overlap_is_that_of_the_bytes() -> None:
    for page, other_page, size, other in product(range(10), range(10), range(1, 8), range(1, 8)):
        ours, theirs = (set(range(p * s, (p + 1) * s)) for p, s in ((page, size), (other_page, other)))
        assert pages_overlap({page}, size, {other_page}, other) == bool(ours & theirs)


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"page_bytes": 98}, "a page of 98 bytes.* numbers of 4 bytes"),
        ({"run_tokens": 64, "run_pages": 15}, "64 tokens fill 15 pages"),
        ({"page_bytes": 64}, "a page of 64 bytes doesn't hold 4 tokens of 24 bytes"),
    ],
)
def test_what_cannot_be_viewed_is_refused_at_start(change: dict[str, int], numbers: str) -> None:
    geometry, spec = UNLIKE["3:2"]
    geometry = replace(geometry, groups=(replace(geometry.groups[0], **change), geometry.groups[1]))
    with pytest.raises(StartupError, match=numbers):
        Store(geometry, spec, torch.float32, CPU)


def test_pages_that_do_not_hold_states_are_refused() -> None:
    """They are too small, or a part would not be aligned; and states of other numbers than planned are a mistake."""
    state = StateTensor("conv", (24, 3), 4), StateTensor("ssm", (24, 8), 4)
    spec = ModelSpec("jamba", (LayerSpec(0, 0, state_tensors=state),), 64, 256, 32, 4, 48, 10**4)
    states = spec.layers[0].state_bytes
    for size in (states - 16, states + 8, states):
        group = KVCacheGroup((0,), size, size // 8, WIDTH, range(1, 4), range(1, 4), 8, kind="state")
        geometry = KVCacheConfig(KVCacheLayout.PAGED, 4 * size, SLOTS, (group,), 4)
        if size != states:
            with pytest.raises(StartupError, match=f"a page of {size:,} bytes doesn't hold states of {states:,} bytes"):
                check_kv_cache_config(geometry, spec)
    with pytest.raises(AssertionError, match="ssm has elements of 4 bytes, and the runner's have 2"):
        state_caches(torch.zeros(states), geometry, spec, torch.bfloat16)


def test_more_pages_than_have_numbers_are_refused() -> None:
    geometry, spec = UNLIKE["84:1"]
    with pytest.raises(StartupError, match=r"pages of 8; at most 2,147,483,647"):
        check_kv_cache_config(replace(geometry, bytes=2**35), spec)


# On a GPU: rows, copies and poison on one stream, swaps on another, in any relation of their speeds.

LARGE = one_size(*SETS, pages=PAGES, page_bytes=2**20, slots=SLOTS, width=WIDTH, tokens=2, host=HOST)
BOTH = pytest.mark.parametrize("geometry", [GEOMETRY, LARGE], ids=["small", "large"])  # by a kernel, by copy engines
LONG = 50_000_000  # cycles, 25 ms or more


def on_gpu(geometry: KVCacheConfig, spec: ModelSpec = SPEC) -> Store:
    store = a_store(torch.device("cuda"), geometry, spec)
    torch.cuda.synchronize()
    return store


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EVERY, "large"])
def test_replay_on_a_gpu(name: str) -> None:
    geometry, spec = EVERY.get(name, (LARGE, SPEC))
    store = on_gpu(geometry, spec)

    @settings(max_examples=40, deadline=None)
    @given(journals_of(geometry), st.booleans())
    @example([EMPTY], False)
    def replayed(journals: list[PageOps], late: bool) -> None:
        store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
        check(store, *journals, late=late)

    replayed()


@pytest.mark.gpu
@BOTH
def test_a_page_is_written_again_after_it_left(geometry: KVCacheConfig) -> None:
    """By a copy, a poison, an In, or by rows after a table named it: a swap that is held up still reads it whole."""
    store = on_gpu(geometry)
    whole = pages_of(store).cpu()
    for entry in (PageCopy(0, 3, 1), Poison(0, 1), SwapIn(0, 2, 1), TableWrite(1, 0, 0, (1,))):
        pages_of(store).copy_(whole)
        torch.cuda.synchronize()
        with torch.cuda.stream(store.host_pool.swap_stream):
            torch.cuda._sleep(LONG)
        store.apply_page_ops((SwapOut(0, 1, 1), entry))
        pages_of(store)[1].fill_(-0.5)  # the step's rows
        torch.cuda.synchronize()
        assert torch.equal(host_of(store)[0], whole[1]), entry


@pytest.mark.gpu
@BOTH
def test_rows_read_what_came_back(geometry: KVCacheConfig) -> None:
    store = on_gpu(geometry)
    with torch.cuda.stream(store.host_pool.swap_stream):
        torch.cuda._sleep(LONG)
    store.apply_page_ops((SwapIn(0, 2, 5), PageCopy(0, 5, 4)))
    rows = pages_of(store)[5].clone()
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), host_of(store)[1])
    assert torch.equal(pages_of(store)[4].cpu(), host_of(store)[1])


@pytest.mark.gpu
@BOTH
def test_a_copy_leaves_as_it_was_copied(geometry: KVCacheConfig) -> None:
    store = on_gpu(geometry)
    wanted = pages_of(store)[3].cpu()
    torch.cuda._sleep(LONG)
    store.apply_page_ops((PageCopy(0, 3, 1), SwapOut(0, 1, 1), SwapIn(0, 1, 2)))
    torch.cuda.synchronize()
    assert torch.equal(host_of(store)[0], wanted)
    assert torch.equal(pages_of(store)[2].cpu(), wanted)


@pytest.mark.gpu
@BOTH
def test_pages_leave_and_come_while_the_step_before_computes(geometry: KVCacheConfig) -> None:
    store = on_gpu(geometry)
    torch.cuda._sleep(4 * LONG)
    computed = torch.cuda.Event()
    computed.record()
    store.apply_page_ops((SwapOut(0, 1, 1), SwapIn(0, 2, 3)))
    store.host_pool.swap_stream.synchronize()
    assert not computed.query()
    torch.cuda.synchronize()


class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
def test_a_thousand_deltas_take_as_many_operations_as_ten() -> None:
    store = a_store(torch.device("cuda"), replace(GEOMETRY, slots=1025))
    counts = []
    for slots in (10, 1024):
        with Operations() as operations:
            store.apply_page_ops(tuple(TableWrite(slot, 0, slot % WIDTH, (1,)) for slot in range(1, slots + 1)))
        counts.append(operations.count)
    assert (torch.stack(store.tables).cpu().numpy() == np.stack(store.host_tables)).all()
    assert 0 < counts[0] == counts[1]


# Staging brings arrays to the device as they were, however often its memory is used again.


GPU = torch.device("cuda")
ARRAYS = [np.arange(7), np.ones((3, 5), dtype=np.float32), np.zeros(0, dtype=np.int64), np.array([[True], [False]])]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 4096])
def test_arrays_arrive_behind_a_slow_device(size: int) -> None:
    """The ring goes round several times while the device is held up, and larger arrays go around it."""
    staging = StagingBuffer(GPU, num_segments=3, segment_bytes=size)
    torch.cuda._sleep(20_000_000)
    sent = [(np.full(n, n), staging.upload(np.full(n, n))) for n in range(1, 60)]
    several = [(arrays, staging.upload_all(arrays)) for arrays in [ARRAYS] * 20]
    out = torch.zeros(9, dtype=torch.int64, device=GPU)
    assert staging.upload(np.arange(9), out) is out
    assert out.tolist() == list(range(9))
    for arrays, tensors in [*several, *(([array], [tensor]) for array, tensor in sent)]:
        for array, tensor in zip(arrays, tensors):
            assert tensor.shape == array.shape
            assert (tensor.cpu().numpy() == array).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_uploading_waits_for_nothing() -> None:
    staging = StagingBuffer(GPU)
    staging.upload(np.arange(9))
    torch.cuda._sleep(100_000_000)
    held = torch.cuda.Event()
    held.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            staging.upload_all([np.arange(4096), np.arange(4096)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not held.query()


# In debug mode a row that goes on from another state than its own is noticed, whatever brought it there.


RUN = 4
STATES = KVCacheGroup((0,), 16, 16, 4, range(1, 20), range(1, 4), RUN, kind="state")
TOKENS = KVCacheGroup((1,), 16, 1, 4, range(1, 20), range(1, 4), 16)


class Played:
    """Steps of sequences in slots 1 and 2, whose tables are written here."""

    def __init__(self) -> None:
        self.seen = StateChecker(KVCacheConfig(KVCacheLayout.PAGED, 16 * 20, 3, (TOKENS, STATES), 4))
        self.tables = [np.zeros((3, 4), dtype=np.int64) for _ in range(2)]

    def step(self, *entries: PageOp, rows: tuple[tuple[int, int, int], ...] = ()) -> None:
        """`rows`: slot, start, and how many tokens."""
        for entry in entries:
            if isinstance(entry, TableWrite):
                self.tables[entry.group][entry.slot, entry.first_page : entry.first_page + len(entry.pages)] = (
                    entry.pages
                )
        self.seen.apply_page_ops(entries)
        self.seen.check_and_advance(
            [SeqSlice(slot, (7,) * count, start, 1) for slot, start, count in rows], self.tables
        )


def begun() -> Played:
    """Slot 1 has computed ten tokens, in pages 5, 6 and 7."""
    played = Played()
    played.step(Poison(1, 5), TableWrite(1, 1, 0, (5, 6, 7)), rows=((1, 0, 3),))
    played.step(rows=((1, 3, 6),))
    played.step(rows=((1, 9, 1),))
    return played


def test_a_sequence_goes_on_from_its_latest_state_or_a_checkpoint() -> None:
    played = begun()
    played.step(TableWrite(2, 1, 0, (5, 8)), rows=((1, 10, 1), (2, 4, 4)))
    played.step(PageCopy(1, 7, 9), TableWrite(2, 1, 0, (5, 6, 9)), rows=((1, 11, 1), (2, 11, 5)))
    away = (SwapOut(1, 7, 2), Poison(1, 7), SwapIn(1, 2, 10), TableWrite(1, 1, 2, (10,)))
    tokens = (PageCopy(0, 10, 12), Poison(0, 10), SwapOut(0, 6, 1), SwapIn(0, 1, 10))  # whose pages are not looked at
    played.step(*away, *tokens, rows=((0, 3, 1), (0, 0, 1), (1, 12, 1)))  # padding reads scratch


WRONG: dict[str, Callable[[Played], None]] = {
    "twice": lambda played: played.step(rows=((1, 9, 1),)),
    "left out": lambda played: played.step(rows=((1, 11, 1),)),
    "no checkpoint there": lambda played: played.step(TableWrite(2, 1, 0, (5, 6, 7)), rows=((2, 9, 1),)),
    "a fork that shares": lambda played: (
        played.step(TableWrite(2, 1, 0, (5, 6, 7)), rows=((1, 10, 1),)), played.step(rows=((2, 10, 1),))
    )[0],
    "poisoned": lambda played: played.step(Poison(1, 7), rows=((1, 10, 1),)),
    "another's": lambda played: played.step(TableWrite(1, 1, 2, (11,)), rows=((1, 10, 1),)),
    "copied too early": lambda played: (
        played.step(PageCopy(1, 7, 12), rows=((1, 10, 1),)), played.step(TableWrite(1, 1, 2, (12,)), rows=((1, 11, 1),))
    )[0],
    "copied from nothing": lambda played: played.step(PageCopy(1, 13, 7), rows=((1, 10, 1),)),
    "swapped in from another's place": lambda played: played.step(SwapOut(1, 6, 1), SwapIn(1, 1, 7), rows=((1, 10,
    1),)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_states_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=r"slot \d goes on after \d+ tokens from page \d+ of group 1, whose state"):
        WRONG[name](begun())
