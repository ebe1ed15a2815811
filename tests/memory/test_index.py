"""The index of registered prefixes finds what a scan of all of them finds, at a cost that their number does not set."""

from __future__ import annotations

import math
from collections import Counter
from unittest.mock import Mock

import pytest
from geometries import one_size
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import MEMORIES, Build, admit_one, reset

from quire.memory.answers import DEFERRED
from quire.memory.page_pool import SCRATCH
from quire.memory.page_tables import PageTables
from quire.memory.paged import PagedMemory
from quire.memory.prefix_cache import PrefixCache, PrefixHit
from quire.memory.seq_pages import Tables
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sequence import Sequence

# Two kinds of tokens, so that prefixes share long beginnings; a run of equal ones makes pages of equal content.
PROMPTS = st.lists(st.sampled_from((7, 7, 7, 8)), min_size=1, max_size=20)
SALTS = st.sampled_from(("", "", "tenant"))
NAMES = st.sampled_from([f"p{i}" for i in range(24)])
PAGES = 8000


def prefixes_of(*groups: tuple[int, int | None]) -> PrefixCache:
    """Of groups with so many tokens in a page, and a window."""
    kinds = tuple(
        KVCacheGroup(
            (g,), 64, 64 // size, 64, range(1, PAGES + 1), range(0), size, 1, w, "full" if w is None else "window"
        )
        for g, (size, w) in enumerate(groups)
    )
    tables = PageTables(KVCacheConfig(KVCacheLayout.PAGED, (PAGES + 1) * 64, 3, kinds, 2))
    return PrefixCache(tables, "model", [PAGES] * len(kinds))


def register(prefixes: PrefixCache, name: str, tokens: list[int], salt: str) -> None:
    """As a memory does when a sequence of these tokens was computed: windows have dropped what is behind them."""
    seq = Sequence(0, [*tokens, 1], cache_salt=salt)
    seq.computed = seq.planned = len(tokens)
    tables: Tables = []
    for g, policy in enumerate(prefixes.policies):
        need = policy.required(seq, len(tokens))
        tables.append([SCRATCH] * need.start + [prefixes.page_pool.allocate_one(g) for _ in need])
    prefixes.page_tables.attach(seq, tables)
    assert prefixes.pin(name, seq)
    prefixes.page_tables.free(seq)


def scanned(prefixes: PrefixCache, salts: dict[str, str], seq: Sequence) -> PrefixHit:
    """The longest use of any prefix, the oldest of several, by looking at all of them, a token at a time."""
    best = PrefixHit(0, [[] for _ in prefixes.policies])
    limit = min(seq.max_prefix_hit, len(seq.tokens) - 1)
    stride = math.lcm(*(policy.group.run_tokens for policy in prefixes.policies))
    for name, prefix in prefixes.registered_prefixes.items():
        if salts[name] != seq.cache_salt:
            continue
        count = 0
        while count < min(limit, len(prefix.tokens)) and seq.tokens[count] == prefix.tokens[count]:
            count += 1
        if count < len(prefix.tokens):
            count -= count % stride
        needs = [policy.required(seq, count) for policy in prefixes.policies]
        pages = [[table[i] for i in need] for need, table in zip(needs, prefix.tables)]
        if count > best.tokens and all(all(held) for held in pages):
            best = PrefixHit(count, [[SCRATCH] * need.start + held for need, held in zip(needs, pages)])
    return best


def check_pages(prefixes: PrefixCache) -> None:
    """All that names pages is the registered prefixes."""
    named: list[dict[int, int]] = [{} for _ in prefixes.policies]
    for (g, page), count in prefixes.pin_counts.items():
        named[g][page] = count
    prefixes.page_pool.check(named)


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
        seq = Sequence(id, tokens, cache_salt=salt)
        seq.max_prefix_hit = data.draw(st.sampled_from((seq.max_prefix_hit, 0, 5)))
        # A prompt that begins as a prefix does, then goes on by itself; random ones seldom share much.
        if prefixes.registered_prefixes and data.draw(st.booleans()):
            shared = data.draw(st.sampled_from(list(prefixes.registered_prefixes.values()))).tokens
            seq.tokens = [*shared[: data.draw(st.integers(0, len(shared)))], *tokens]
        assert prefixes.find_registered(seq) == scanned(prefixes, salts, seq)
    for name in list(prefixes.registered_prefixes):
        assert prefixes.unpin(name)
    prefixes.check()
    check_pages(prefixes)
    assert not prefixes.registered_index.names_by_end
    assert not prefixes.registered_index.tail_lengths
    assert not prefixes.pin_counts
    assert [pool.available for pool in prefixes.page_pool.size_classes] == [PAGES]


def test_the_longest_wins_down_to_a_part_of_a_page() -> None:
    prefixes = prefixes_of((4, None))
    for name, length in (("one", 1), ("three", 3), ("page", 4), ("nine", 9), ("eleven", 11)):
        register(prefixes, name, list(range(length)), "")
    found = [prefixes.find_registered(Sequence(0, [*range(length), 99])).tokens for length in range(13)]
    assert found == [0, 1, 1, 3, 4, 4, 4, 4, 8, 9, 9, 11, 11]


def test_a_lookup_hashes_one_page_beyond_what_is_known() -> None:
    prefixes = prefixes_of((4, None))
    register(prefixes, "p", list(range(8)), "")
    seq = Sequence(1, [*range(4), *[9] * 96])
    assert prefixes.find_registered(seq).tokens == 4
    assert len(seq.page_keys) == 2


# The pages of registered prefixes are counted as prefixes come and go


def registered(memory: PagedMemory, name: str, tokens: list[int]) -> None:
    seq = Sequence(1, [*tokens, 1])
    reused = admit_one(memory, seq, 64)
    assert isinstance(reused, int)
    assert memory.grow(seq, len(seq.tokens))
    seq.planned = seq.computed = len(tokens)
    memory.commit(seq)
    assert memory.prefix_cache.pin(name, seq)
    memory.free(seq)
    memory.check()


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_counts_its_pins(name: str) -> None:
    memory = MEMORIES[name](Build(prefix_tokens=64))
    for i in range(3):
        registered(memory, str(i), [5] * (3 + 5 * i))
    for i in (1, 0, 2):
        assert memory.prefix_cache.unpin(str(i))
        memory.check()
    assert memory.prefix_cache.pin_counts == Counter()
    assert not memory.prefix_cache.registered_prefixes
    assert sum(memory.page_pool.used) == 0


@pytest.mark.parametrize("name", ["paged-4", "mixed"])
def test_no_load_evicts_a_registered_prefix(name: str) -> None:
    """Others take all pages that are left, again and again; nobody gets its pages."""
    memory = MEMORIES[name](Build(tokens=128, prefix_tokens=40))
    prefix = list(range(10))
    registered(memory, "kept", prefix)
    for id in range(2, 12):
        seqs, begin = list[Sequence](), 1000 * id
        while admit_one(memory, seq := Sequence(100 * id + len(seqs), list(range(begin, begin + 24))), 64) is not None:
            assert memory.grow(seq, 24)
            seq.planned = seq.computed = 24
            memory.commit(seq)
            seqs.append(seq)
            begin += 24
        assert seqs
        for seq in seqs:
            memory.free(seq)
    assert memory.page_pool.evictions > 0
    assert admit_one(memory, Sequence(9999, [*prefix, 1]), 64) == 10
    memory.check()


def test_the_check_sees_a_lost_pin_and_a_lost_name() -> None:
    memory = MEMORIES["paged-4"](Build(prefix_tokens=40))
    registered(memory, "a", list(range(10)))
    prefixes = memory.prefix_cache
    page = next(iter(prefixes.pin_counts))
    prefixes.pin_counts[page] += 1
    with pytest.raises(AssertionError, match="pins"):
        memory.check()
    prefixes.pin_counts[page] -= 1
    memory.check()
    stop = next(iter(prefixes.registered_index.names_by_end))
    names = prefixes.registered_index.names_by_end.pop(stop)
    with pytest.raises(AssertionError, match="index"):
        memory.check()
    prefixes.registered_index.names_by_end[stop] = names
    key = next(iter(prefixes.registered_index.tail_lengths))
    del prefixes.registered_index.tail_lengths[key]
    with pytest.raises(AssertionError, match="tail lengths"):
        memory.check()


# A prompt that is being computed is awaited


PAGE = 4


def memory(pages: int = 32, prefix_tokens: int = 0) -> PagedMemory:
    geometry = one_size(((0,), None), pages=pages + 1, page_bytes=64, slots=9, width=16, tokens=PAGE)
    return PagedMemory(geometry, max_step_tokens=64, prefix_tokens=prefix_tokens)


def test_another_salt_a_short_prompt_and_wanted_scores_do_not_wait() -> None:
    paged = memory()
    assert admit_one(paged, Sequence(1, list(range(18))), 64) == 0
    assert admit_one(paged, Sequence(2, list(range(18)), cache_salt="other"), 64) == 0
    assert admit_one(paged, Sequence(3, list(range(4))), 64) == 0
    scored = Sequence(4, list(range(18)))
    scored.max_prefix_hit = 0
    assert admit_one(paged, scored, 64) == 0


def lookups(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Look-ups of prefixes from here on."""
    looked = Mock(side_effect=PrefixCache.find_registered)
    monkeypatch.setattr(PrefixCache, "find_registered", lambda *args: looked(*args))
    return looked


def test_the_waiting_one_looks_again_for_what_arrived_and_not_for_what_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    other = Sequence(3, [50] * 9)
    assert admit_one(paged, other, 64) == 0
    assert admit_one(paged, first, 4) == 0
    looked = lookups(monkeypatch)
    assert admit_one(paged, second, 64) is DEFERRED
    other.planned = other.computed = 9
    paged.commit(other)  # pages that nobody waits for
    paged.free(other)
    assert admit_one(paged, second, 64) is DEFERRED
    assert looked.call_count == 1
    for computed, times in ((3, 1), (4, 2), (6, 2), (8, 3)):
        assert paged.grow(first, computed)
        first.planned = first.computed = computed
        paged.commit(first)
        for _ in range(5):
            assert admit_one(paged, second, 64) is DEFERRED
        assert looked.call_count == times, computed
    paged.free(first)
    assert admit_one(paged, second, 64) == 8
    assert looked.call_count == 4
    paged.check()


@pytest.mark.parametrize("relief", ["pin", "unpin", "reset"])
def test_a_change_of_prefixes_is_looked_at(relief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = memory(prefix_tokens=8 * PAGE)
    done = Sequence(1, [60] * 6)
    assert admit_one(paged, done, 64) == 0
    done.planned = done.computed = 6
    paged.commit(done)
    if relief == "unpin":
        assert paged.prefix_cache.pin("p", done)
    assert admit_one(paged, Sequence(2, list(range(18))), 8) == 0
    second = Sequence(3, [*range(16), 99, 98])
    looked = lookups(monkeypatch)
    assert admit_one(paged, second, 64) is DEFERRED
    if relief == "pin":
        assert paged.prefix_cache.pin("p", done)
    elif relief == "unpin":
        assert paged.prefix_cache.unpin("p")
    else:
        reset(paged)
    # What is being computed since before a reset is nobody else's.
    assert admit_one(paged, second, 64) == (0 if relief == "reset" else DEFERRED)
    assert looked.call_count == 2
    paged.check()


def test_two_pages_have_waiters_of_their_own() -> None:
    """One who shares the first page only is let in when that arrives, and the other one isn't."""
    paged = memory()
    first, near, far = (
        Sequence(id, tokens) for id, tokens in ((1, [*range(18)]), (2, [*range(4), 9, 9]), (3, [*range(9), 9]))
    )
    assert admit_one(paged, first, 64) == 0
    assert admit_one(paged, near, 64) is DEFERRED
    assert admit_one(paged, far, 64) is DEFERRED
    first.planned = first.computed = 4
    paged.commit(first)
    assert admit_one(paged, near, 64) == 4
    assert admit_one(paged, far, 64) is DEFERRED
    first.planned = first.computed = 8
    paged.commit(first)
    assert admit_one(paged, far, 64) == 8
    paged.check()
