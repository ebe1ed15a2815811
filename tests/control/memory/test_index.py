"""The index of registered prefixes finds what a scan of all of them finds, at a cost that their number does not set."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.control.memory.index import PrefixIndex, Stop
from quire.control.memory.pages import SCRATCH
from quire.control.memory.prefix import Prefixes, Reuse
from quire.control.memory.tables import PageTables, Tables
from quire.control.request import Sequence
from quire.vocabulary.specs import Geometry, Group, Layout

# Two kinds of tokens, so that prefixes share long beginnings; a run of equal ones makes pages of equal content.
PROMPTS = st.lists(st.sampled_from((7, 7, 7, 8)), min_size=1, max_size=20)
SALTS = st.sampled_from(("", "", "tenant"))
NAMES = st.sampled_from([f"p{i}" for i in range(24)])
PAGES = 8000


def prefixes_of(*groups: tuple[int, int | None]) -> Prefixes:
    """Of groups with so many tokens in a page, and a window."""
    kinds = tuple(
        Group((g,), 64, 64 // size, 64, range(1, PAGES + 1), range(0), size, 1, w, "full" if w is None else "window")
        for g, (size, w) in enumerate(groups)
    )
    tables = PageTables(Geometry(Layout.PAGED, (PAGES + 1) * 64, 3, kinds, 2))
    return Prefixes(tables, "model", [PAGES] * len(kinds))


def register(prefixes: Prefixes, name: str, tokens: list[int], salt: str) -> None:
    """As a memory does when a sequence of these tokens was computed: windows have dropped what is behind them."""
    seq = Sequence(0, [*tokens, 1], salt=salt)
    seq.computed = seq.planned = len(tokens)
    tables: Tables = []
    for g, policy in enumerate(prefixes.policies):
        need = policy.required(seq, len(tokens))
        tables.append([SCRATCH] * need.start + [prefixes.pages.take(g) for _ in need])
    prefixes.tables.reside(seq, tables)
    assert prefixes.pin(name, seq)
    prefixes.tables.free(seq)


def scanned(prefixes: Prefixes, salts: dict[str, str], seq: Sequence) -> Reuse:
    """The longest use of any prefix, the oldest of several, by looking at all of them, a token at a time."""
    best = Reuse(0, [[] for _ in prefixes.policies])
    limit = min(seq.reusable, len(seq.tokens) - 1)
    stride = math.lcm(*(policy.group.run_tokens for policy in prefixes.policies))
    for name, prefix in prefixes.registered.items():
        if salts[name] != seq.salt:
            continue
        count = 0
        while count < min(limit, len(prefix.tokens)) and seq.tokens[count] == prefix.tokens[count]:
            count += 1
        if count < len(prefix.tokens):
            count -= count % stride
        needs = [policy.required(seq, count) for policy in prefixes.policies]
        pages = [[table[i] for i in need] for need, table in zip(needs, prefix.tables)]
        if count > best.tokens and all(all(held) for held in pages):
            best = Reuse(count, [[SCRATCH] * need.start + held for need, held in zip(needs, pages)])
    return best


def check_pages(prefixes: Prefixes) -> None:
    """All that names pages is the registered prefixes."""
    named: list[dict[int, int]] = [{} for _ in prefixes.policies]
    for (g, page), count in prefixes.pins.items():
        named[g][page] = count
    prefixes.pages.check(named)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_index_finds_what_a_scan_finds(data: st.DataObject) -> None:
    windows: list[int | None] = data.draw(st.sampled_from(([None], [None], [None, 6], [3], [1, None])))
    size = data.draw(st.sampled_from((1, 2, 4, 16)))
    times = data.draw(st.sampled_from((1, 1, 2, 3)))  # a page of every other group holds so many times as much
    prefixes = prefixes_of(*((size * (times if g % 2 else 1), window) for g, window in enumerate(windows)))
    salts: dict[str, str] = {}
    for name, tokens, salt in data.draw(st.lists(st.tuples(NAMES, PROMPTS, SALTS), max_size=40)):
        if not prefixes.unpin(name):
            register(prefixes, name, tokens, salt)
            salts[name] = salt
    prefixes.check()
    check_pages(prefixes)
    for id, (tokens, salt) in enumerate(data.draw(st.lists(st.tuples(PROMPTS, SALTS), min_size=1, max_size=10))):
        seq = Sequence(id, tokens, salt=salt)
        seq.reusable = data.draw(st.sampled_from((seq.reusable, 0, 5)))
        # A prompt that begins as a prefix does, then goes on by itself; random ones seldom share much.
        if prefixes.registered and data.draw(st.booleans()):
            shared = data.draw(st.sampled_from(list(prefixes.registered.values()))).tokens
            seq.tokens = [*shared[: data.draw(st.integers(0, len(shared)))], *tokens]
        assert prefixes.pinned(seq) == scanned(prefixes, salts, seq)
    for name in list(prefixes.registered):
        assert prefixes.unpin(name)
    prefixes.check()
    check_pages(prefixes)
    assert not prefixes.index.names
    assert not prefixes.index.tails
    assert not prefixes.pins
    assert [pool.available for pool in prefixes.pages.pools] == [PAGES]


def test_the_longest_wins_down_to_a_part_of_a_page() -> None:
    prefixes = prefixes_of((4, None))
    for name, length in (("one", 1), ("three", 3), ("page", 4), ("nine", 9), ("eleven", 11)):
        register(prefixes, name, list(range(length)), "")
    found = [prefixes.pinned(Sequence(0, [*range(length), 99])).tokens for length in range(13)]
    assert found == [0, 1, 1, 3, 4, 4, 4, 4, 8, 9, 9, 11, 11]


class Counted(PrefixIndex):
    """Counts the questions that its owner asks, and those that a lookup asks of the table of names."""

    def __init__(self, page_tokens: int) -> None:
        super().__init__(page_tokens)
        self.asked = 0

    def __contains__(self, key: bytes) -> bool:
        self.asked += 1
        return super().__contains__(key)


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_lookup_costs_the_same_among_one_and_a_thousand(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = prefixes_of((4, None))
    prefixes.index = index = Counted(4)
    for i in range(count):  # the same beginning, then a page of its own and part of another
        register(prefixes, str(i), [*range(8), 100 + i, 1, 2, 3, 4, 5], "")
    compared = 0
    part = Prefixes.part

    def counted(prefixes: Prefixes, tables: Tables, tokens: int) -> Tables | None:
        nonlocal compared
        compared += 1
        return part(prefixes, tables, tokens)

    monkeypatch.setattr(Prefixes, "part", counted)
    index.asked = 0
    whole, begun = [*range(8), 100 + count // 2, 1, 2, 3, 4, 5, 6], [*range(8), 99, 98, 97, 96, 95]
    assert prefixes.pinned(Sequence(1, whole)).tokens == 14
    assert prefixes.pinned(Sequence(2, begun)).tokens == 8
    assert prefixes.pinned(Sequence(3, [55] * 20)).tokens == 0
    assert (compared, index.asked) == (2, 10)  # 4 keys, 4 keys of which the last is unknown, 2


def test_a_lookup_hashes_one_page_beyond_what_is_known() -> None:
    prefixes = prefixes_of((4, None))
    register(prefixes, "p", list(range(8)), "")
    seq = Sequence(1, [*range(4), *[9] * 96])
    assert prefixes.pinned(seq).tokens == 4
    assert len(seq.keys) == 2


def test_stops_that_are_not_usable_lead_on() -> None:
    index = PrefixIndex(2)
    stops = [Stop(b"0", (), False), Stop(b"1", (), False), Stop(b"2", (), True), Stop(b"2", (5,), True)]
    index.add("a", stops)
    index.add("b", stops[:3])
    assert index.find([b"0", b"1"], [1, 2, 3, 4, 5, 6], 6) is None
    assert index.find([b"0", b"1", b"2"], [1, 2, 3, 4, 5, 6], 3) is None
    assert index.find([b"0", b"1", b"2"], [1, 2, 3, 4, 5, 6], 4) == "a"
    index.remove("a", stops)
    assert index.find([b"0", b"1", b"2"], [1, 2, 3, 4, 5, 6], 6) == "b"
    index.remove("b", stops[:3])
    assert b"0" not in index
    assert not index.names
