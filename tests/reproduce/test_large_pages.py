"""Figures 6 and 8 of Jenga as its memory's ledger has them; a ledger that knows no requests would differ."""

from __future__ import annotations

import pytest

from quire.control.memory.large import LargePages
from quire.reproduce import large_pages
from quire.reproduce.large_pages import ended, figure_6, figure_8, walk
from quire.reproduce.result import DIFFERS, HOLDS


def test_whose_pages_lie_together() -> None:
    naive, aware = ended("none", "one by one"), ended("paper", "one by one")
    assert naive.owners == (("", "B") * 2,) * 4
    assert aware.before == (("A",) * 4, ("B",) * 4, ("A",) * 4, ("B",) * 4)
    assert [ended("bulk", how).back for how in ("one by one", "at once")] == [0, 2]


def test_a_ledger_that_knows_no_requests_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(LargePages):
        def take_all(self, group: int, count: int, owner: int | None = None) -> list[int]:
            return super().take_all(group, count, None)

    monkeypatch.setattr(large_pages, "LargePages", Forgetful)
    verdicts = [result.verdict for result in figure_8().results]
    assert verdicts[:2] == [HOLDS, DIFFERS]


def test_other_places_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, free = walk()
    moved = [one._replace(large=one.large + 1, page=one.page + 2) for one in found]
    monkeypatch.setattr(large_pages, "walk", lambda: (512, moved, [*free[:2], 2]))
    assert [result.verdict for result in figure_6().results] == [DIFFERS] * 3 + [HOLDS] + [DIFFERS] * 2
