"""Groups whose pages differ in size: launches are as few as hazards allow, and what can't be laid out is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_store import CPU, LOST, UNLIKE, a_store, check

from quire.data.runner import hazards, store
from quire.data.runner.hazards import launches
from quire.data.runner.store import Store
from quire.data.runner.views import check_geometry
from quire.errors import StartupError
from quire.vocabulary.plan import Copy, In, Out, Poison

every = pytest.mark.parametrize("name", UNLIKE)


@every
def test_a_launch_that_forgets_the_group_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "launches", lambda entries, sizes: hazards._alike(entries, sizes[0]))
    with pytest.raises(AssertionError):
        check(a_store(CPU, *UNLIKE[name]), LOST)


@every
def test_a_hazard_between_unlike_pages_that_is_overlooked_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large page 2 is read, then its first bytes are written as a small page, then it is read again."""
    large, small = (group.page_bytes for group in UNLIKE[name][0].groups)
    journal = (Copy(0, 2, 1), Copy(1, 6 * large // small, 2 * large // small), Copy(0, 2, 4))
    check(a_store(CPU, *UNLIKE[name]), journal)
    monkeypatch.setattr(hazards, "_touched", lambda page, size, other: range(page, page + 1))
    with pytest.raises(AssertionError):
        check(a_store(CPU, *UNLIKE[name]), journal)


@every
def test_the_later_write_stays(name: str) -> None:
    """Where a small page is written, then the large one around it, by a launch that began before."""
    large, small = (group.page_bytes for group in UNLIKE[name][0].groups)
    made = a_store(CPU, *UNLIKE[name])
    check(made, (Copy(0, 4, 5), Copy(1, 6 * large // small, 3 * large // small), Copy(0, 4, 3)))
    check(made, (In(0, 1, 5), Poison(1, 3 * large // small), In(0, 2, 3)))


def test_work_of_unlike_groups_is_put_together() -> None:
    """Alternating groups and kinds, no two of which touch the same bytes: one launch for each kind and size."""
    first = [Copy(0, 10 + i, 20 + i) for i in range(4)]
    second = [Copy(1, 100 + i, 110 + i) for i in range(4)]
    mixed = [entry for pair in zip(first, second) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in launches(mixed, (96, 64))] == [(Copy, 96, 4), (Copy, 64, 4)]
    outs = [Out(g, 200 + i, 1 + i) for i, g in ((0, 0), (3, 1), (3, 0), (9, 1))]
    both = [entry for pair in zip(outs, first) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in launches(both, (96, 64))] == [
        (Out, 96, 2), (Copy, 96, 4), (Out, 64, 2),
    ]  # fmt: skip
    chain = [Copy(0, 10, 20), Copy(1, 100, 110), Copy(0, 20, 21), Copy(1, 101, 111)]
    assert [(x.size, x.moves) for x in launches(chain, (96, 64))] == [
        (96, {20: 10}), (64, {110: 100}), (96, {21: 20}), (64, {111: 101}),
    ]  # fmt: skip


def test_overlap_is_that_of_the_bytes() -> None:
    for page, other_page, size, other in product(range(10), range(10), range(1, 8), range(1, 8)):
        ours, theirs = (set(range(p * s, (p + 1) * s)) for p, s in ((page, size), (other_page, other)))
        assert hazards.overlap({page}, size, {other_page}, other) == bool(ours & theirs)


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"page_bytes": 98}, "a page of 98 bytes.* numbers of 4 bytes"),
        ({"run_tokens": 64, "run_pages": 15}, "64 tokens fill 15 pages"),
        ({"page_bytes": 64}, "a page of 64 bytes doesn't hold 4 tokens of 24 bytes"),
    ],
)
def test_what_cannot_be_viewed_is_refused_at_start(change: dict[str, int], numbers: str) -> None:
    geometry, spec = UNLIKE["3:2"]
    geometry = replace(geometry, groups=(replace(geometry.groups[0], **change), geometry.groups[1]))
    with pytest.raises(StartupError, match=numbers):
        Store(geometry, spec, torch.float32, CPU)


def test_more_pages_than_have_numbers_are_refused() -> None:
    geometry, spec = UNLIKE["84:1"]
    with pytest.raises(StartupError, match=r"pages of 8; at most 2,147,483,647"):
        check_geometry(replace(geometry, bytes=2**35), spec)
