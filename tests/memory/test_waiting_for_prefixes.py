"""A prompt that is being computed is awaited: requests that come together share it, and compute it once."""

from __future__ import annotations

from quire.memory.paged import PagedMemory
from quire.request import Sequence
from quire.specs import Geometry, Group, Layout

PAGE = 4


def memory(pages: int = 32) -> PagedMemory:
    group = Group((0,), PAGE, 64)
    return PagedMemory(Geometry(Layout.PAGED, pages + 1, 64, 9, 16, (group,), 4), chunk=64)


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
