"""A prompt that is being computed is awaited: requests that come together share it, and compute it once."""

from __future__ import annotations

from collections import Counter

import pytest
from geometries import one_size

from quire.control.memory.paged import PagedMemory
from quire.control.memory.pages import Pages
from quire.control.memory.prefix import Prefixes, Reuse
from quire.control.request import Sequence

PAGE = 4


def memory(pages: int = 32, prefix_pages: int = 0) -> PagedMemory:
    geometry = one_size(((0,), None), pages=pages + 1, page_bytes=64, slots=9, width=16, tokens=PAGE)
    return PagedMemory(geometry, chunk=64, prefix_pages=prefix_pages)


def test_the_second_of_two_alike_waits_a_step_and_shares() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    assert paged.admit(first, 64) == 0
    assert paged.admit(second, 64) is None
    first.planned = first.computed = 18
    paged.commit(first)
    assert paged.admit(second, 64) == 16
    assert paged.sharing().saved == 4 * 64  # bytes of four pages
    assert not paged.prefixes.coming
    paged.check()


def test_nobody_waits_for_what_will_not_come() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, list(range(18)))
    assert paged.admit(first, 8) == 0
    paged.free(first)
    assert not paged.prefixes.coming
    assert paged.admit(second, 64) == 0


def test_a_chunk_is_enough_for_one_that_shares_no_more() -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(8), 99, 98, 97])
    assert paged.admit(first, 8) == 0
    assert paged.admit(second, 64) is None
    first.planned = first.computed = 8
    paged.commit(first)
    assert paged.admit(second, 64) == 8


def test_another_salt_a_short_prompt_and_wanted_scores_do_not_wait() -> None:
    paged = memory()
    assert paged.admit(Sequence(1, list(range(18))), 64) == 0
    assert paged.admit(Sequence(2, list(range(18)), salt="other"), 64) == 0
    assert paged.admit(Sequence(3, list(range(4))), 64) == 0
    scored = Sequence(4, list(range(18)))
    scored.reusable = 0
    assert paged.admit(scored, 64) == 0


def lookups(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of what an admission does to find prefixes."""
    counts: Counter[str] = Counter()
    find, chain, pinned = Pages.find, Prefixes.chain, Prefixes.pinned

    def found(pages: Pages, group: int, key: bytes) -> int | None:
        counts["find"] += 1
        return find(pages, group, key)

    def chained(prefixes: Prefixes, seq: Sequence, count: int) -> None:
        counts["chain"] += 1
        chain(prefixes, seq, count)

    def looked(prefixes: Prefixes, seq: Sequence) -> Reuse:
        counts["pinned"] += 1
        return pinned(prefixes, seq)

    monkeypatch.setattr(Pages, "find", found)
    monkeypatch.setattr(Prefixes, "chain", chained)
    monkeypatch.setattr(Prefixes, "pinned", looked)
    return counts


@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_steps_of_waiting_look_nothing_up(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    assert paged.admit(first, 64) == 0
    counts = lookups(monkeypatch)
    for _ in range(steps):
        assert paged.admit(second, 64) is None
        paged.check()
    assert counts == {"pinned": 1, "chain": 1, "find": 1}


def test_the_waiting_one_looks_again_for_what_arrived_and_not_for_what_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = memory()
    first, second = Sequence(1, list(range(18))), Sequence(2, [*range(16), 99, 98])
    other = Sequence(3, [50] * 9)
    assert paged.admit(other, 64) == 0
    assert paged.admit(first, 4) == 0
    counts = lookups(monkeypatch)
    assert paged.admit(second, 64) is None
    other.planned = other.computed = 9
    paged.commit(other)  # pages that nobody waits for
    paged.free(other)
    assert paged.admit(second, 64) is None
    assert counts["pinned"] == 1
    for computed, looked in ((3, 1), (4, 2), (6, 2), (8, 3)):
        assert paged.grow(first, computed)
        first.planned = first.computed = computed
        paged.commit(first)
        for _ in range(5):
            assert paged.admit(second, 64) is None
        assert counts["pinned"] == looked, computed
    paged.free(first)
    assert paged.admit(second, 64) == 8
    assert counts["pinned"] == 4
    paged.check()


@pytest.mark.parametrize("relief", ["pin", "unpin", "reset"])
def test_a_change_of_prefixes_is_looked_at(relief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = memory(prefix_pages=8)
    done = Sequence(1, [60] * 6)
    assert paged.admit(done, 64) == 0
    done.planned = done.computed = 6
    paged.commit(done)
    if relief == "unpin":
        assert paged.pin("p", done)
    assert paged.admit(Sequence(2, list(range(18))), 8) == 0
    second = Sequence(3, [*range(16), 99, 98])
    counts = lookups(monkeypatch)
    assert paged.admit(second, 64) is None
    if relief == "pin":
        assert paged.pin("p", done)
    elif relief == "unpin":
        assert paged.unpin("p")
    else:
        paged.reset_prefix_cache()
    assert paged.admit(second, 64) is None
    assert counts["pinned"] == 2
    paged.check()


def test_another_one_is_not_kept_waiting_by_the_first_that_waits() -> None:
    paged = memory()
    assert paged.admit(Sequence(1, list(range(18))), 64) == 0
    assert paged.admit(Sequence(2, [*range(16), 99, 98]), 64) is None
    assert paged.admit(Sequence(3, [70] * 6), 64) == 0
    assert paged.admit(Sequence(2, [*range(16), 99, 98]), 64) is None
