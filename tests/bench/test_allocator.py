"""What a page costs: every case of either ledger is measured, and leaves it whole."""

from __future__ import annotations

from argparse import Namespace

import pytest

from quire.bench import allocator
from quire.control.memory.large import LargePages
from quire.control.memory.pages import Ledger


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a tenth of the benchmark's pages, and no collection of all that the tests of this process hold."""
    monkeypatch.setattr(allocator, "PAGES", 625)
    monkeypatch.setattr("gc.collect", lambda: 0)


def test_every_case_is_measured_in_one_level_and_in_two() -> None:
    results = allocator.run(Namespace(repeats=1))
    assert [(one["ledger"], one["case"]) for one in results] == [
        (ledger, case) for ledger in ("one level", "two levels") for case in allocator.CASES
    ]
    assert all(one["us_a_page"] > 0 for one in results)
    assert len(allocator.show(results).splitlines()) == 1 + len(results)


@pytest.mark.parametrize("case", [case for case in allocator.CASES if "evicting" in case])
@pytest.mark.parametrize("build", [allocator.one_level, allocator.two_level])
def test_what_is_said_to_evict_does(case: str, build: type[Ledger] | type[LargePages]) -> None:
    ledger = build()  # type: ignore[call-arg]
    _, pages = allocator.CASES[case](ledger)
    assert ledger.evictions > 0.9 * pages
