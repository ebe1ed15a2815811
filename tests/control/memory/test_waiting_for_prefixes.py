"""A prompt that is being computed is awaited: requests that come together share it, and compute it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from geometries import one_size
from memories import admit_one, reset

from quire.control.memory import LATER
from quire.control.memory.paged import PagedMemory
from quire.control.memory.prefix import Prefixes
from quire.control.request import Sequence

PAGE = 4


def memory(pages: int = 32, prefix_tokens: int = 0) -> PagedMemory:
    geometry = one_size(((0,), None), pages=pages + 1, page_bytes=64, slots=9, width=16, tokens=PAGE)
    return PagedMemory(geometry, chunk=64, prefix_tokens=prefix_tokens)


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

    def counted(name: str) -> Callable[..., Any]:
        sound = getattr(Prefixes, name)
        return lambda *args: (counts.update([name]), sound(*args))[1]

    for name in ("cached", "pinned"):
        monkeypatch.setattr(Prefixes, name, counted(name))
    return counts


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
