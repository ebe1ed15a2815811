"""The sweep over page sizes: a small one runs, and its verdicts follow the numbers."""

from __future__ import annotations

import math
from functools import partial

import pytest

from quire.errors import StartupError
from quire.reproduce import page_sizes
from quire.reproduce.page_sizes import Point, Trace, _verdicts, sweep
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.serving import in_parallel


@pytest.mark.soak
def test_larger_pages_waste_more_and_serve_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sizes, "TRACES", {"alpaca": Trace(60.0, 4.0, (16,))})
    monkeypatch.setattr(page_sizes, "in_parallel", partial(in_parallel, most=1))
    monkeypatch.setattr("quire.reproduce.serving.CROWD", 1)
    small, large = sweep((16, 256))
    assert 0 < small.internal < 0.25 < 0.5 < large.internal < 1
    assert small.running > large.running
    assert small.highest > large.highest > 0


def test_neither_ramp_nor_drain_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come at once and take long: as many run at all times when any come."""
    monkeypatch.setattr(page_sizes, "highest_rate", lambda *_: 1.0)
    whole = page_sizes.point("alpaca", Trace(20.0, 10.0, (16,)), 16, 1.0)
    monkeypatch.setattr(page_sizes, "WARM", 0.0)
    with_ramp = page_sizes.point("alpaca", Trace(20.0, 10.0, (16,)), 16, 1.0)
    assert whole.running > with_ramp.running > 0


def test_traces_too_short_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sizes, "highest_rate", lambda *_: math.inf)
    with pytest.raises(StartupError, match="sustain any rate, or none"):
        page_sizes.point("alpaca", Trace(20.0, 2.0, (16,)), 16, 1.0)


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
    # alpaca: pages of 128 sustain less than those of 16 and 32, and are nearly as good
    assert claims == [HOLDS, HOLDS, HOLDS, HOLDS, HOLDS, HOLDS, DIFFERS, HOLDS]
    missed = _verdicts(points({1: 10.0, 16: 10.0, 32: 9.5, 128: 9.4, 256: 9.3}, waste))
    claims = [result.verdict for result in missed if result.verdict != MEASURED]
    assert claims[5] == DIFFERS, "a search's error is no difference"
    other = _verdicts(points({1: 10.0, 16: 8.0, 32: 9.5, 128: 9.0, 256: 9.5}, waste | {256: 0.0}))
    claims = [result.verdict for result in other if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 8
    assert {result.real_or_simulated for result in paper} == {"simulated"}
