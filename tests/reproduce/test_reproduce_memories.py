"""One trace through every memory: a small one runs in both ways, and the verdicts can fail."""

from __future__ import annotations

from quire.config import MEMORIES
from quire.control.memory import Usage
from quire.reproduce.memories import (
    ORDER,
    WINDOWED,
    WINDOWS,
    Case,
    Ran,
    _draw,
    _text,
    _verdicts,
    real,
    simulated,
    windowed,
)
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED


def test_every_memory_serves_the_trace() -> None:
    windows = WINDOWED._replace(workload="longdoc@2")
    runs = [
        *simulated(Case("simulated", "", "alpaca", 40, 200.0)), *windowed(windows),
        *real(Case("real", "", "alpaca", 3, 1000.0)),
    ]  # fmt: skip
    assert [run.memory for run in runs] == 3 * list(MEMORIES)
    for run in runs:
        assert 0 < run.share("used") <= 1
        assert run.batch > 0
        assert run.normalised > 0
        assert run.requests_per_s > 0
    assert all(memory in _text(runs) for memory in MEMORIES)
    results = _verdicts(runs)
    assert sum(result.verdict == MEASURED for result in results) == 3 * 3 * len(MEMORIES)
    assert {result.real_or_simulated for result in results} == {"simulated", "real"}
    assert len(_draw(runs).axes) == 9


def ran(memory: str, used: int, batch: float, normalised: float) -> Ran:
    return Ran("real", memory, Usage(used, 40, 10, 60 - used, 30, 500), batch, normalised, 1.0, 0)


def test_verdicts_follow_the_order() -> None:
    best_first = [ran(memory, 50 - 10 * i, 20.0 - i, 0.1 + i) for i, memory in enumerate(ORDER)]
    assert best_first[0].share("used") == 0.5  # cached and free memory don't count
    claims = [result.verdict for result in _verdicts(best_first) if result.verdict != MEASURED]
    assert claims == [HOLDS] * 4
    worst_first = [run._replace(memory=memory) for run, memory in zip(best_first, reversed(ORDER))]
    claims = [result.verdict for result in _verdicts(worst_first) if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 4


def test_windows_are_judged_against_uniform_pages() -> None:
    paged, uniform = (ran(memory, used, batch, 0.1)._replace(by=WINDOWS) for memory, used, batch in (
        ("paged", 50, 4.0), ("uniform", 30, 3.0)))  # fmt: skip
    claims = [result.verdict for result in _verdicts([paged, uniform]) if result.verdict != MEASURED]
    assert claims == [HOLDS] * 2
    swapped = [paged._replace(memory="uniform"), uniform._replace(memory="paged")]
    claims = [result.verdict for result in _verdicts(swapped) if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 2
    assert {result.real_or_simulated for result in _verdicts(swapped)} == {"simulated"}
