"""The store: replaying a journal has the effect of its entries one after another on the bytes, whether pages have one
size or several; layers tile pages."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from geometries import one_size
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.data.runner import host_pool
from quire.data.runner.hazards import launches
from quire.data.runner.store import Store
from quire.vocabulary.plan import Copy, Entry, In, Journal, Out, Poison, Table
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec

PAGES, HOST, SLOTS, WIDTH = 7, 3, 3, 5
SPEC = ModelSpec(
    "test", (LayerSpec(1, 2), LayerSpec(2, 2, 4), LayerSpec(1, 2)), vocab_size=9, max_len=10, hidden=4, heads=2,
    intermediate=4, parameters=1,
)  # fmt: skip
SETS = (((0, 2), None), ((1,), 4))  # pages of 2 tokens: 2 x 2 x 2 numbers a layer and head
GEOMETRY = one_size(*SETS, pages=PAGES, page_bytes=64, slots=SLOTS, width=WIDTH, tokens=2, host=HOST)
CPU = torch.device("cpu")
Shapes = tuple[tuple[int, int, int], ...]  # of each group's one layer: key heads, their size, tokens of a page


def unlike(shapes: Shapes, pages: int = 8) -> tuple[Geometry, ModelSpec]:
    """Groups that share all bytes, as pages of one memory that is divided in two ways."""
    layers = tuple(LayerSpec(kv, dim) for kv, dim, _ in shapes)
    sizes = [layer.token_bytes(4) * tokens for layer, (_, _, tokens) in zip(layers, shapes)]
    size = pages * max(sizes)
    groups = tuple(
        Group((i,), own, own // tokens, WIDTH, range(1, size // own), range(1, size // 2 // own + 1), tokens)
        for i, (own, (_, _, tokens)) in enumerate(zip(sizes, shapes))
    )
    spec = ModelSpec("test", layers, vocab_size=9, max_len=8, hidden=4, heads=42, intermediate=4, parameters=1)
    return Geometry(Layout.PAGED, size, SLOTS, groups, 4, size // 2), spec


UNLIKE = {"3:2": unlike(((3, 1, 4), (2, 1, 4))), "84:1": unlike(((21, 2, 2), (1, 1, 1)))}
EVERY = {"1:1": (GEOMETRY, SPEC), **UNLIKE}


def pages_of(store: Store) -> Tensor:
    """All pages, of one size."""
    (pages,) = store.sized.values()
    return pages


def host_of(store: Store) -> Tensor:
    (host,) = store.pool.host.values()
    return host


def a_store(device: torch.device = CPU, geometry: Geometry = GEOMETRY, spec: ModelSpec = SPEC) -> Store:
    """Every number of the device and of host memory is another one."""
    store = Store(geometry, spec, torch.float32, device)
    store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
    for host in store.pool.host.values():  # views of the same bytes
        host.copy_(-torch.arange(host.numel()).view_as(host) - 1)
    return store


def one_at_a_time(journal: Journal, store: Store, bytes_: np.ndarray, host: np.ndarray) -> list[np.ndarray]:
    """What a journal means: its effect on the bytes of the device and of host memory; and the tables."""
    tables = [t.copy() for t in store.host_tables]

    def of(memory: np.ndarray, group: int, page: int) -> np.ndarray:
        size = store.sizes[group]
        return memory[page * size : (page + 1) * size]

    for entry in journal:
        match entry:
            case Table(slot, group, at, pages):
                tables[group][slot, at : at + len(pages)] = pages
            case Copy(group, src, dst):
                of(bytes_, group, dst)[:] = of(bytes_, group, src).copy()
            case Out(group, page, place):
                of(host, group, place - 1)[:] = of(bytes_, group, page)
            case In(group, place, page):
                of(bytes_, group, page)[:] = of(host, group, place - 1)
            case Poison(group, page):
                of(bytes_, group, page)[:] = 255  # no number in any dtype
    return tables


def check(store: Store, *journals: Journal, late: bool = False) -> None:
    """`late`: swaps are held up, so that they come after whatever doesn't wait for them."""
    host = max(store.pool.host.values(), key=torch.numel)

    def contents() -> list[np.ndarray]:
        if store.device.type != "cpu":
            torch.cuda.synchronize()
        return [x.reshape(-1).cpu().numpy().view(np.uint8).copy() for x in (store.buffer, host)]

    for journal in journals:
        bytes_, there = contents()
        tables = one_at_a_time(journal, store, bytes_, there)
        if late:
            with torch.cuda.stream(store.pool.side):
                torch.cuda._sleep(LONG // 10)
        store.replay(journal)
        assert all((got == expected).all() for got, expected in zip(contents(), (bytes_, there)))
        for table, kept, expected in zip(store.tables, store.host_tables, tables):
            assert (table.cpu().numpy() == expected).all()
            assert (kept == expected).all()


def journals_of(geometry: Geometry) -> st.SearchStrategy[list[Journal]]:
    """Entries of any kind, or, where pages have one size, runs of one kind too; of few pages, so that they meet."""
    kinds: list[st.SearchStrategy[Entry]] = []
    for g, group in enumerate(geometry.groups):
        # Those in the bytes of the large group's first pages.
        page = st.integers(1, min(3 * geometry.groups[0].page_bytes // group.page_bytes, group.ids[-1]))
        place, own = st.integers(1, min(group.host_ids[-1], 9)), st.just(g)
        kinds += [st.builds(Copy, own, page, page)] * 2
        kinds += [st.builds(Out, own, page, place), st.builds(In, own, place, page), st.builds(Poison, own, page)]
        tables = st.lists(page, max_size=2).map(tuple)
        kinds.append(st.builds(Table, st.integers(0, SLOTS - 1), own, st.integers(0, WIDTH - 2), tables))
    mixed = st.lists(st.one_of(kinds), max_size=14).map(tuple)
    if len({group.page_bytes for group in geometry.groups}) > 1:
        return st.lists(mixed, min_size=1, max_size=2)
    runs = st.lists(st.one_of([st.lists(kind, min_size=1, max_size=6) for kind in kinds]), max_size=6)
    whole = runs.map(lambda runs: tuple(entry for run in runs for entry in run))
    return st.lists(mixed | whole, min_size=1, max_size=3)


LOST = (Copy(0, 3, 4), Copy(1, 5, 4))  # of unlike groups these are unlike pages of one number
EMPTY = (Table(0, 0, 0, ()), Table(1, 0, 0, (1, 2)))  # as many pages as entries, but not one each
EXAMPLES: list[list[Journal]] = [
    [(Copy(0, 1, 2), Copy(0, 2, 3), Copy(0, 3, 4))],  # a chain: each reads what the one before wrote
    [(Copy(0, 1, 2), Copy(0, 3, 1))],  # a source that is overwritten afterwards
    [(Copy(0, 1, 2), Copy(0, 2, 1))],
    [(Copy(0, 1, 3), Copy(0, 2, 3))],  # the later one stays
    [(Poison(0, 1), Copy(0, 2, 1), Poison(0, 2))],
    [(Copy(0, 1, 2), Poison(0, 1))],
    [(Out(0, 1, 1), Copy(0, 2, 1), In(0, 1, 3))],
    [(In(0, 1, 1), Out(0, 1, 2)), (Out(0, 2, 1), In(0, 1, 3))],
    [EMPTY],
    [(Table(1, 0, 0, (1, 2, 3)), Copy(0, 1, 2), Table(1, 0, 1, (4,)), Copy(0, 2, 3), Table(1, 0, 1, (5,)))],
    [LOST],
    [(Copy(0, 1, 2), Copy(1, 3, 4))],  # in 3:2 the latter overwrites a part of the former
    [(Copy(1, 5, 1), Copy(0, 1, 3), Copy(1, 2, 6))],
    [(Out(0, 1, 1), Poison(1, 2), In(0, 1, 1), Out(1, 2, 3), In(1, 1, 6))],
    [(In(1, 2, 3), Out(1, 3, 2), In(0, 1, 2))],
]


@pytest.mark.parametrize("name", EVERY)
def test_replay_is_one_entry_after_another(name: str) -> None:
    geometry, spec = EVERY[name]

    @settings(max_examples=200)
    @given(journals_of(geometry))
    def replayed(journals: list[Journal]) -> None:
        check(a_store(CPU, geometry, spec), *journals)

    for journals in EXAMPLES:
        check(a_store(CPU, geometry, spec), *journals)
    replayed()


@given(st.lists(st.builds(Copy, st.integers(0, 1), *[st.integers(1, PAGES - 1)] * 2), max_size=12))
def test_copies_at_once_have_no_order(entries: list[Copy]) -> None:
    """No pair of a batch writes what another one reads: a GPU makes them in any order."""
    batches = [launch.moves for launch in launches(entries, (64, 64))]
    assert all(not set(batch) & set(batch.values()) for batch in batches)
    assert sum(map(len, batches)) <= len(entries)


def test_tables_between_copies_do_not_part_them() -> None:
    """A beam step writes Copy, Table, Copy, Table: one launch all the same."""
    store, batches = a_store(), []
    store._copy = lambda moves, size: batches.append(moves)
    store.replay((Copy(0, 1, 4), Table(1, 0, 0, (4,)), Copy(0, 2, 5), Table(2, 0, 0, (5,)), Copy(1, 3, 6)))
    assert batches == [{4: 1, 5: 2, 6: 3}]


@pytest.mark.parametrize("room", [0, 8 * 64, 2**18])
def test_small_pages_move_together_and_large_ones_alone(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "CPU_BYTES", room)
    pages = torch.arange(40 * 16, dtype=torch.float32).view(40, 16)
    pool = host_pool.HostPool({64: pages.clone()}, 30 * 64, debug=True)
    pool.out({host: 39 - host for host in range(1, 28)}, 64)
    assert torch.equal(pool.host[64][1:28], pages.flip(0)[1:28])
    pool.back({page: 1 + page % 27 for page in range(35)}, 64)
    assert torch.equal(pool.pages[64][:35], pages.flip(0)[[1 + page % 27 for page in range(35)]])
    assert torch.equal(pool.pages[64][35:], pages[35:])


def test_a_swap_that_lost_something_is_noticed_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(GEOMETRY, SPEC, torch.float32, CPU, debug=True)
    store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
    store.replay((Out(0, 1, 2), In(0, 2, 3), Out(0, 4, 1)))
    monkeypatch.setattr(host_pool, "_gather", lambda *args: None)
    with pytest.raises(AssertionError, match="page 5 and row 0 of the host pages differ"):
        store.replay((Out(0, 5, 1),))


def test_a_new_store_is_finite_and_names_scratch() -> None:
    """Padding resolves to page 0, which nothing ever writes on purpose."""
    store = Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu"))
    assert not any(table.any() for table in store.tables)
    assert store.buffer.isfinite().all()
    assert [view.shape for view in store.views] == [(PAGES, 16)] * 2
    assert host_of(store).shape == (HOST, 16)


def test_the_layers_of_a_group_tile_each_page() -> None:
    """Keys and values of a group's layers are every number of a page, once, in the order of the layers."""
    store = a_store()
    assert [cache.group for cache in store.caches.values()] == [0, 1, 0]
    assert [cache.window for cache in store.caches.values()] == [None, 4, None]
    for group in GEOMETRY.groups:
        for page in range(PAGES):
            views = [x[page].flatten() for i in group.layers for x in (store.caches[i].keys, store.caches[i].values)]
            assert torch.equal(torch.cat(views), store.views[0][page])
    store.caches[2].values[3] = 0.5
    assert (store.views[0][3] == 0.5).sum() == 4


# On a GPU: rows, copies and poison on one stream, swaps on another, in any relation of their speeds.

LARGE = one_size(*SETS, pages=PAGES, page_bytes=2**20, slots=SLOTS, width=WIDTH, tokens=2, host=HOST)
BOTH = pytest.mark.parametrize("geometry", [GEOMETRY, LARGE], ids=["small", "large"])  # by a kernel, by copy engines
LONG = 50_000_000  # cycles, 25 ms or more


def on_gpu(geometry: Geometry, spec: ModelSpec = SPEC) -> Store:
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
    def replayed(journals: list[Journal], late: bool) -> None:
        store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
        check(store, *journals, late=late)

    replayed()


@pytest.mark.gpu
@BOTH
def test_a_page_is_written_again_after_it_left(geometry: Geometry) -> None:
    """By a copy, a poison, an In, or by rows after a table named it: a swap that is held up still reads it whole."""
    store = on_gpu(geometry)
    whole = pages_of(store).cpu()
    for entry in (Copy(0, 3, 1), Poison(0, 1), In(0, 2, 1), Table(1, 0, 0, (1,))):
        pages_of(store).copy_(whole)
        torch.cuda.synchronize()
        with torch.cuda.stream(store.pool.side):
            torch.cuda._sleep(LONG)
        store.replay((Out(0, 1, 1), entry))
        pages_of(store)[1].fill_(-0.5)  # the step's rows
        torch.cuda.synchronize()
        assert torch.equal(host_of(store)[0], whole[1]), entry


@pytest.mark.gpu
@BOTH
def test_rows_read_what_came_back(geometry: Geometry) -> None:
    store = on_gpu(geometry)
    with torch.cuda.stream(store.pool.side):
        torch.cuda._sleep(LONG)
    store.replay((In(0, 2, 5), Copy(0, 5, 4)))
    rows = pages_of(store)[5].clone()
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), host_of(store)[1])
    assert torch.equal(pages_of(store)[4].cpu(), host_of(store)[1])


@pytest.mark.gpu
@BOTH
def test_a_copy_leaves_as_it_was_copied(geometry: Geometry) -> None:
    store = on_gpu(geometry)
    wanted = pages_of(store)[3].cpu()
    torch.cuda._sleep(LONG)
    store.replay((Copy(0, 3, 1), Out(0, 1, 1), In(0, 1, 2)))
    torch.cuda.synchronize()
    assert torch.equal(host_of(store)[0], wanted)
    assert torch.equal(pages_of(store)[2].cpu(), wanted)


@pytest.mark.gpu
@BOTH
def test_pages_leave_and_come_while_the_step_before_computes(geometry: Geometry) -> None:
    store = on_gpu(geometry)
    torch.cuda._sleep(4 * LONG)
    computed = torch.cuda.Event()
    computed.record()
    store.replay((Out(0, 1, 1), In(0, 2, 3)))
    store.pool.side.synchronize()
    assert not computed.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_thousand_deltas_cost_the_host_little() -> None:
    store = a_store(torch.device("cuda"), replace(GEOMETRY, slots=1025))
    journal = tuple(Table(slot, 0, slot % WIDTH, (1,)) for slot in range(1, 1025))
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        store.replay(journal)
        seconds.append(time.perf_counter() - began)
    assert (torch.stack(store.tables).cpu().numpy() == np.stack(store.host_tables)).all()
    assert min(seconds) < 0.5e-3
