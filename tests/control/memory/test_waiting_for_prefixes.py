"""A prompt that is being computed is awaited: requests that come together share it, and compute it once."""

from __future__ import annotations

from collections import Counter

import pytest
from geometries import one_size
from memories import admit_one, insides, reset

from quire.control.memory import LATER
from quire.control.memory.paged import PagedMemory
from quire.control.memory.prefix import Prefixes, Reuse
from quire.control.request import Sequence

PAGE = 4


def memory(pages: int = 32, prefix_tokens: int = 0) -> PagedMemory:
    geometry = one_size(((0,), None), pages=pages + 1, page_bytes=64, slots=9, width=16, tokens=PAGE)
    return PagedMemory(geometry, chunk=64, prefix_tokens=prefix_tokens)


def test_the_second_of_two_alike_waits_a_step_and_shares() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    assert admit_one(paged, first, 64) == 0
    assert admit_one(paged, second, 64) is LATER
    first.planned = first.computed = 18
    paged.commit(first)
    assert admit_one(paged, second, 64) == 16
    assert paged.account().sharing.saved == 4 * 64  # bytes of four pages
    assert not paged.prefixes.coming
    paged.check()


def test_nobody_waits_for_what_will_not_come() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, list(range(18)))
    assert admit_one(paged, first, 8) == 0
    paged.free(first)
    assert not paged.prefixes.coming
    assert admit_one(paged, second, 64) == 0


def test_a_chunk_is_enough_for_one_that_shares_no_more() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(8), 99, 98, 97])
    assert admit_one(paged, first, 8) == 0
    assert admit_one(paged, second, 64) is LATER
    first.planned = first.computed = 8
    paged.commit(first)
    assert admit_one(paged, second, 64) == 8


def test_another_salt_a_short_prompt_and_wanted_scores_do_not_wait() -> None:
    paged = memory()
    assert admit_one(paged, Sequence(1, list(range(18))), 64) == 0
    assert admit_one(paged, Sequence(2, list(range(18)), salt="other"), 64) == 0
    assert admit_one(paged, Sequence(3, list(range(4))), 64) == 0
    scored = Sequence(4, list(range(18)))
    scored.reusable = 0
    assert admit_one(paged, scored, 64) == 0


def lookups(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of what an admission does to find prefixes."""
    counts: Counter[str] = Counter()
    cached, chain, pinned = Prefixes.cached, Prefixes.chain, Prefixes.pinned

    def found(prefixes: Prefixes, seq: Sequence, known: int = 0) -> Reuse:
        counts["cached"] += 1
        return cached(prefixes, seq, known)

    def chained(prefixes: Prefixes, seq: Sequence, tokens: int) -> None:
        counts["chain"] += 1
        chain(prefixes, seq, tokens)

    def looked(prefixes: Prefixes, seq: Sequence) -> Reuse:
        counts["pinned"] += 1
        return pinned(prefixes, seq)

    monkeypatch.setattr(Prefixes, "cached", found)
    monkeypatch.setattr(Prefixes, "chain", chained)
    monkeypatch.setattr(Prefixes, "pinned", looked)
    return counts


@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_steps_of_waiting_look_nothing_up(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    assert admit_one(paged, first, 64) == 0
    counts = lookups(monkeypatch)
    for _ in range(steps):
        assert admit_one(paged, second, 64) is LATER
        paged.check()
    assert counts == {"pinned": 1, "chain": 1, "cached": 1}


def test_the_waiting_one_looks_again_for_what_arrived_and_not_for_what_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    other = Sequence(3, [50] * 9)
    assert admit_one(paged, other, 64) == 0
    assert admit_one(paged, first, 4) == 0
    counts = lookups(monkeypatch)
    assert admit_one(paged, second, 64) is LATER
    other.planned = other.computed = 9
    paged.commit(other)  # pages that nobody waits for
    paged.free(other)
    assert admit_one(paged, second, 64) is LATER
    assert counts["pinned"] == 1
    for computed, looked in ((3, 1), (4, 2), (6, 2), (8, 3)):
        assert paged.grow(first, computed)
        first.planned = first.computed = computed
        paged.commit(first)
        for _ in range(5):
            assert admit_one(paged, second, 64) is LATER
        assert counts["pinned"] == looked, computed
    paged.free(first)
    assert admit_one(paged, second, 64) == 8
    assert counts["pinned"] == 4
    paged.check()


@pytest.mark.parametrize("relief", ["pin", "unpin", "reset"])
def test_a_change_of_prefixes_is_looked_at(relief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = memory(prefix_tokens=8 * PAGE)
    done = Sequence(1, [60] * 6)
    assert admit_one(paged, done, 64) == 0
    done.planned = done.computed = 6
    paged.commit(done)
    if relief == "unpin":
        assert paged.prefixes.pin("p", done)
    assert admit_one(paged, Sequence(2, list(range(18))), 8) == 0
    second = Sequence(3, [*range(16), 99, 98])
    counts = lookups(monkeypatch)
    assert admit_one(paged, second, 64) is LATER
    if relief == "pin":
        assert paged.prefixes.pin("p", done)
    elif relief == "unpin":
        assert paged.prefixes.unpin("p")
    else:
        reset(paged)
    # What is being computed since before a reset is nobody else's.
    assert admit_one(paged, second, 64) == (0 if relief == "reset" else LATER)
    assert counts["pinned"] == 2
    paged.check()


def test_another_one_is_not_kept_waiting_by_the_first_that_waits() -> None:
    paged = memory()
    assert admit_one(paged, Sequence(1, list(range(18))), 64) == 0
    assert admit_one(paged, Sequence(2, [*range(16), 99, 98]), 64) is LATER
    assert admit_one(paged, Sequence(3, [70] * 6), 64) == 0
    assert admit_one(paged, Sequence(2, [*range(16), 99, 98]), 64) is LATER


def test_all_who_wait_for_one_page_are_let_in_when_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look once each, wait without looking, and look again when it is there; also if one of them gives up."""
    paged = memory(pages=64)
    first = Sequence(1, list(range(18)))
    others = [Sequence(id, [*range(16), 90 + id, 98]) for id in range(2, 7)]
    assert admit_one(paged, first, 64) == 0
    counts = lookups(monkeypatch)
    for _ in range(10):
        for other in others:
            assert admit_one(paged, other, 64) is LATER
        paged.check()
    assert counts["pinned"] == counts["cached"] == len(others)
    first.planned = first.computed = 18
    paged.commit(first)
    paged.check()
    assert [admit_one(paged, other, 64) for other in others[1:]] == [16] * (len(others) - 1)
    paged.check()
    assert paged.account().sharing.saved == 4 * 64 * (len(others) - 1)


def test_two_pages_have_waiters_of_their_own() -> None:
    """One who shares the first page only is let in when that arrives, and the other one isn't."""
    paged = memory()
    first, near, far = (
        Sequence(id, tokens) for id, tokens in ((1, [*range(18)]), (2, [*range(4), 9, 9]), (3, [*range(9), 9]))
    )
    assert admit_one(paged, first, 64) == 0
    assert admit_one(paged, near, 64) is LATER
    assert admit_one(paged, far, 64) is LATER
    first.planned = first.computed = 4
    paged.commit(first)
    assert admit_one(paged, near, 64) == 4
    assert admit_one(paged, far, 64) is LATER
    first.planned = first.computed = 8
    paged.commit(first)
    assert admit_one(paged, far, 64) == 8
    paged.check()


def test_who_is_told_to_come_later_holds_nothing() -> None:
    """Nothing changes by it: neither pages, nor slots, nor what is counted as looked up."""
    paged = memory()
    assert admit_one(paged, Sequence(1, list(range(18))), 64) == 0
    before = insides(paged)
    for _ in range(3):
        assert admit_one(paged, Sequence(2, list(range(18))), 64) is LATER
    assert insides(paged) == before
    paged.check()
