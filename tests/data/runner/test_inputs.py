"""The inputs of a step against a plain loop over its tokens."""

from __future__ import annotations

import numpy as np
import torch
from geometries import one_size
from hypothesis import given
from hypothesis import strategies as st

from quire.data.runner.inputs import build_batch
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST, Row, Table
from quire.vocabulary.specs import LayerSpec, ModelSpec

SLOTS, WIDTH, SIZE = 6, 4, 4
SPEC = ModelSpec(
    "test", (LayerSpec(1, 2), LayerSpec(1, 2, 3)), vocab_size=50, max_len=16, hidden=4, heads=2, intermediate=4,
    parameters=1,
)  # fmt: skip
GEOMETRY = one_size(((0,), None), ((1,), 3), pages=60, page_bytes=64, slots=SLOTS, width=WIDTH, tokens=SIZE)
GROUPS = GEOMETRY.groups


def a_store() -> Store:
    """Each slot, group and logical page has a page of its own."""
    store = Store(GEOMETRY, SPEC, torch.float32, torch.device("cpu"))
    for slot in range(1, SLOTS):
        for g in range(len(GROUPS)):
            first = 1 + (slot * len(GROUPS) + g) * WIDTH
            store.replay((Table(slot, g, 0, tuple(range(first, first + WIDTH))),))
    return store


@st.composite
def row_of(draw: st.DrawFn, slot: int) -> Row:
    start = draw(st.integers(0, WIDTH * SIZE - 1))
    count = draw(st.integers(1, WIDTH * SIZE - start))
    tokens = draw(st.lists(st.integers(0, 49), min_size=count, max_size=count))
    if draw(st.booleans()):
        tokens[0] = LAST
    return Row(slot, tuple(tokens), start, draw(st.integers(0, 3)))


ROWS = st.permutations(range(1, SLOTS)).flatmap(
    lambda slots: st.integers(1, len(slots)).flatmap(lambda n: st.tuples(*[row_of(slot) for slot in slots[:n]]))
)


@given(ROWS)
def test_a_batch_is_its_rows_one_token_after_another(rows: tuple[Row, ...]) -> None:
    store, last = a_store(), torch.arange(SLOTS) + 100
    batch = build_batch(rows, store, last)
    tokens, positions, slots, ends = [], [], [], []
    pages, offsets = [[] for _ in GROUPS], []
    for row in rows:
        for i, token in enumerate(row.tokens):
            tokens.append(100 + row.slot if token == LAST else token)
            positions.append(row.start + i)
            slots.append(row.slot)
            offsets.append((row.start + i) % SIZE)
            for g, found in enumerate(pages):
                found.append(int(store.host_tables[g][row.slot, (row.start + i) // SIZE]))
        if row.sample:
            ends.append(len(tokens) - 1)
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.token_slots.tolist() == slots
    for cache in store.caches.values():
        found_pages, found_offsets = batch.places(cache)
        assert found_pages.tolist() == pages[cache.group]
        assert found_offsets.tolist() == offsets
    assert batch.ends.tolist() == ends
    assert batch.slots.tolist() == [row.slot for row in rows]
    assert batch.starts.tolist() == [row.start for row in rows]
    assert batch.lengths.tolist() == [len(row.tokens) for row in rows]
    assert [tokens[at] for at in batch.offsets] == [100 + r.slot if r.tokens[0] == LAST else r.tokens[0] for r in rows]
    assert batch.tables is store.tables
    assert all(array.dtype == np.int64 for array in (batch.slots, batch.starts, batch.lengths, batch.offsets))


def test_nothing_of_a_batch_changes_with_the_tables_afterwards() -> None:
    """The next journal may be replayed while a step's writes are under way."""
    store = a_store()
    batch = build_batch((Row(1, (3, 4, 5), 2, 1),), store, torch.zeros(SLOTS, dtype=torch.int64))
    before = [batch.places(cache)[0].clone() for cache in store.caches.values()]
    store.replay((Table(1, 0, 0, (50, 51)), Table(1, 1, 0, (52, 53))))
    for cache, pages in zip(store.caches.values(), before):
        assert torch.equal(batch.places(cache)[0], pages)


@given(ROWS)
def test_what_the_last_layer_is_asked_for(rows: tuple[Row, ...]) -> None:
    """The last token of each row that samples, as a row of its own; the first row's where none samples."""
    batch = build_batch(rows, a_store(), torch.arange(100, 100 + SLOTS))
    asked, ends = batch.narrowed(), np.cumsum([len(row.tokens) for row in rows]) - 1
    at = ends[[i for i, row in enumerate(rows) if row.sample] or [0]].tolist()
    for name in ("tokens", "positions", "token_slots"):
        assert getattr(asked, name).tolist() == getattr(batch, name)[at].tolist()
    assert asked.starts.tolist() == asked.positions.tolist()
    assert asked.slots.tolist() == asked.token_slots.tolist()
    assert asked.ends.tolist() == at
    assert asked.lengths.tolist() == [1] * len(at)
    assert asked.offsets.tolist() == asked.asked.tolist() == list(range(len(at)))
