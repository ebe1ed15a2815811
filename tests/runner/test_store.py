"""The store: replaying a journal has the effect of its entries one after another; layers tile pages."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from quire.plan import Copy, Entry, In, Journal, Out, Poison, Table
from quire.runner.store import Store
from quire.specs import Geometry, Group, LayerSpec, Layout, ModelSpec

PAGES, HOST, SLOTS, WIDTH = 7, 3, 3, 5
SPEC = ModelSpec(
    "test", (LayerSpec(1, 2), LayerSpec(2, 2, 4), LayerSpec(1, 2)), vocab_size=9, max_len=10, hidden=4, heads=2,
    intermediate=4, parameters=1,
)  # fmt: skip
GROUPS = (Group((0, 2), 2, 64), Group((1,), 2, 64, 4))  # pages of 2 tokens: 2 x 2 x 2 numbers a layer and head
GEOMETRY = Geometry(Layout.PAGED, PAGES, 64, SLOTS, WIDTH, GROUPS, itemsize=4, host_pages=HOST)


def a_store() -> Store:
    """Every number of every page and host page is another one."""
    store = Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu"))
    store.buffer.copy_(torch.arange(len(store.buffer)) + 1)
    store.host.copy_(-torch.arange(store.host.numel()).view_as(store.host) - 1)
    return store


def one_at_a_time(journal: Journal, pages: Tensor, host: Tensor, tables: Tensor) -> None:
    """What a journal means."""
    for entry in journal:
        match entry:
            case Table(slot, group, at, ids):
                for i, page in enumerate(ids):
                    tables[group, slot, at + i] = page
            case Copy(_, src, dst):
                pages[dst] = pages[src].clone()
            case Out(_, page, place):
                host[place] = pages[page]
            case In(_, place, page):
                pages[page] = host[place]
            case Poison(_, page):
                pages[page] = torch.nan


page, place, group = st.integers(1, PAGES - 1), st.integers(1, HOST), st.integers(0, 1)
COPIES = st.builds(Copy, group, page, page)
TABLES = st.integers(0, WIDTH - 1).flatmap(
    lambda at: st.builds(
        Table, st.integers(0, SLOTS - 1), group, st.just(at), st.lists(page, max_size=WIDTH - at).map(tuple)
    )
)
OUTS, INS = st.builds(Out, group, page, place), st.builds(In, group, place, page)
POISONS = st.builds(Poison, group, page)
KINDS = (COPIES, TABLES, OUTS, INS, POISONS)
RUNS = st.lists(st.one_of([st.lists(kind, min_size=1, max_size=6) for kind in KINDS]), max_size=6)
JOURNALS = RUNS.map(lambda runs: tuple(entry for run in runs for entry in run)) | st.lists(
    st.one_of(KINDS), max_size=16
).map(tuple)


@given(st.lists(JOURNALS, min_size=1, max_size=3))
@example([(Copy(0, 1, 2), Copy(0, 2, 3), Copy(0, 3, 4))])  # a chain: each reads what the one before wrote
@example([(Copy(0, 1, 2), Copy(0, 3, 1))])  # a source that is overwritten afterwards
@example([(Copy(0, 1, 2), Copy(0, 2, 1))])
@example([(Copy(0, 1, 3), Copy(0, 2, 3))])  # the later one stays
@example([(Poison(0, 1), Copy(0, 2, 1), Poison(0, 2))])
@example([(Copy(0, 1, 2), Poison(0, 1))])
@example([(Out(0, 1, 1), Copy(0, 2, 1), In(0, 1, 3))])
@example([(In(0, 1, 1), Out(0, 1, 2)), (Out(0, 2, 1), In(0, 1, 3))])
def test_replay_is_one_entry_after_another(journals: list[tuple[Entry, ...]]) -> None:
    store = a_store()
    pages, host, tables = store.pages.clone(), store.host.clone(), store.tables.clone()
    for journal in journals:
        store.replay(journal)
        one_at_a_time(journal, pages, host, tables)
        torch.testing.assert_close(store.pages, pages, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(store.host, host, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(store.tables, tables)
        assert (store.host_tables == tables.numpy()).all()


def test_a_new_store_is_finite_and_names_scratch() -> None:
    """Padding resolves to page 0, which nothing ever writes on purpose."""
    store = Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu"))
    assert not store.tables.any()
    assert store.pages.isfinite().all()
    assert store.pages.shape == (PAGES, 16)
    assert store.host.shape == (HOST + 1, 16)


def test_the_layers_of_a_group_tile_each_page() -> None:
    """Keys and values of a group's layers are every number of a page, once, in the order of the layers."""
    store = a_store()
    assert [cache.group for cache in store.caches] == [0, 1, 0]
    assert [cache.window for cache in store.caches] == [None, 4, None]
    for group in GROUPS:
        for page in range(PAGES):
            views = [view[page].flatten() for i in group.layers for view in store.caches[i].views()]
            assert torch.equal(torch.cat(views), store.pages[page])
    store.caches[2].views()[1][3] = 0.5
    assert (store.pages[3] == 0.5).sum() == 4
