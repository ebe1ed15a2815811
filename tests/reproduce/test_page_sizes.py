"""The sweep over page sizes: a small one runs, and its verdicts follow the numbers."""

from __future__ import annotations

import pytest

from quire.reproduce import page_sizes
from quire.reproduce.page_sizes import Point, Trace, _verdicts, sweep
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED


def test_larger_pages_waste_more_and_serve_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sizes, "TRACES", {"alpaca": Trace(60.0, 3.0, (16,))})
    monkeypatch.setattr("quire.reproduce.serving.CROWD", 1)
    small, large = sweep("alpaca", (16, 256))
    assert 0 < small.internal < 0.25 < 0.5 < large.internal < 1
    assert small.running > large.running
    assert small.highest > large.highest > 0


def points(highest: dict[int, float], internal: dict[int, float]) -> list[Point]:
    return [
        Point(workload, page, internal[page], 10.0, 0, rate)
        for workload in ("sharegpt", "alpaca")
        for page, rate in highest.items()
    ]


def test_verdicts_follow_the_numbers() -> None:
    waste = {1: 0.0, 16: 0.1, 32: 0.2, 128: 0.3, 256: 0.4}
    paper = _verdicts(points({1: 10.0, 16: 10.0, 32: 9.5, 128: 9.0, 256: 8.0}, waste))
    claims = [result.verdict for result in paper if result.verdict != MEASURED]
    assert claims == [HOLDS, HOLDS, HOLDS, HOLDS, DIFFERS, HOLDS]  # alpaca: pages of 128 are as good
    other = _verdicts(points({1: 10.0, 16: 8.0, 32: 9.5, 128: 9.0, 256: 9.5}, waste | {256: 0.0}))
    claims = [result.verdict for result in other if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 6
    assert {result.real_or_simulated for result in paper} == {"simulated"}
