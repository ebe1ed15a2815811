"""The index of registered prefixes finds what a scan of all of them finds, at a cost that their number does not set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.control.memory.index import PrefixIndex, Stop
from quire.control.memory.pages import SCRATCH, Pages
from quire.control.memory.policies import FullPolicy, LayerPolicy, WindowPolicy
from quire.control.memory.prefix import Prefixes, Reuse
from quire.control.request import Sequence

# Two kinds of tokens, so that prefixes share long beginnings; a run of equal ones makes pages of equal content.
PROMPTS = st.lists(st.sampled_from((7, 7, 7, 8)), min_size=1, max_size=20)
SALTS = st.sampled_from(("", "", "tenant"))
NAMES = st.sampled_from([f"p{i}" for i in range(24)])


def prefixes_of(size: int, windows: list[int | None]) -> Prefixes:
    policies: list[LayerPolicy] = [FullPolicy(size) if w is None else WindowPolicy(size, w) for w in windows]
    return Prefixes(Pages(4000, len(windows)), policies, size, "model")


def register(prefixes: Prefixes, name: str, tokens: list[int], salt: str) -> None:
    """As a memory does when a sequence of these tokens was computed: windows have dropped what is behind them."""
    seq = Sequence(0, [*tokens, 1], salt=salt)
    seq.computed = len(tokens)
    tables = []
    for g, policy in enumerate(prefixes.policies):
        count = -(-len(tokens) // prefixes.page_tokens)
        first = min(policy.live(len(tokens), len(tokens) + 1).start, count)
        tables.append([SCRATCH] * first + [prefixes.pages.take(g, 0) for _ in range(count - first)])
    prefixes.register(name, seq, tables)
    for table in tables:
        prefixes.pages.release_all(table)


def scanned(prefixes: Prefixes, seq: Sequence) -> Reuse:
    """The longest use of any prefix, the oldest of several, by looking at all of them."""
    best = Reuse(0, [[] for _ in prefixes.policies])
    limit = min(seq.reusable, len(seq.tokens) - 1)
    for prefix in prefixes.registered.values():
        if prefix.salt == seq.salt:
            found = prefixes.of(seq, prefix.tokens, prefix.tables, limit, len(prefix.tokens))
            best = max(best, found, key=lambda reuse: reuse.tokens)
    return best


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_index_finds_what_a_scan_finds(data: st.DataObject) -> None:
    windows: list[int | None] = data.draw(st.sampled_from(([None], [None], [None, 6], [3], [1, None])))
    prefixes = prefixes_of(data.draw(st.sampled_from((1, 2, 4, 16))), windows)
    for name, tokens, salt in data.draw(st.lists(st.tuples(NAMES, PROMPTS, SALTS), max_size=40)):
        if not prefixes.release(name):
            register(prefixes, name, tokens, salt)
    prefixes.check()
    prefixes.pages.check()
    for id, (tokens, salt) in enumerate(data.draw(st.lists(st.tuples(PROMPTS, SALTS), min_size=1, max_size=10))):
        seq = Sequence(id, tokens, salt=salt)
        seq.reusable = data.draw(st.sampled_from((seq.reusable, 0, 5)))
        # A prompt that begins as a prefix does, then goes on by itself; random ones seldom share much.
        if prefixes.registered and data.draw(st.booleans()):
            shared = data.draw(st.sampled_from(list(prefixes.registered.values()))).tokens
            seq.tokens = [*shared[: data.draw(st.integers(0, len(shared)))], *tokens]
        assert prefixes.pinned(seq) == scanned(prefixes, seq)
    for name in list(prefixes.registered):
        assert prefixes.release(name)
    prefixes.check()
    assert not prefixes.index.names
    assert not prefixes.index.tails
    assert not prefixes.pins
    assert prefixes.pages.available == prefixes.pages.total


def test_the_longest_wins_down_to_a_part_of_a_page() -> None:
    prefixes = prefixes_of(4, [None])
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
    prefixes = prefixes_of(4, [None])
    prefixes.index = index = Counted(4)
    for i in range(count):  # the same beginning, then a page of its own and part of another
        register(prefixes, str(i), [*range(8), 100 + i, 1, 2, 3, 4, 5], "")
    compared = 0
    of = Prefixes.of

    def counted(*args: object) -> Reuse:
        nonlocal compared
        compared += 1
        return of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Prefixes, "of", counted)
    index.asked = 0
    whole, begun = [*range(8), 100 + count // 2, 1, 2, 3, 4, 5, 6], [*range(8), 99, 98, 97, 96, 95]
    assert prefixes.pinned(Sequence(1, whole)).tokens == 14
    assert prefixes.pinned(Sequence(2, begun)).tokens == 8
    assert prefixes.pinned(Sequence(3, [55] * 20)).tokens == 0
    assert (compared, index.asked) == (2, 10)  # 4 keys, 4 keys of which the last is unknown, 2


def test_a_lookup_hashes_one_page_beyond_what_is_known() -> None:
    prefixes = prefixes_of(4, [None])
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
