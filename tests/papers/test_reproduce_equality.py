"""Every memory: equal tokens by every way, whose differences, ties and missing preemptions are told; and one trace
through each, in both ways. Verdicts can fail."""

from __future__ import annotations

import pytest

from papers import equality, memories
from papers.equality import CUTS, Answer, Way, _verdicts, compare, groups, same_tokens, ways
from papers.result import DIFFERS, HOLDS, MEASURED
from quire.config import MEMORIES, PREEMPTIONS, RESERVED_MEMORIES
from quire.memory.answers import Usage

NOBODY = {"swap": 0, "recompute": 0}


@pytest.mark.soak
def test_a_small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "LENGTHS", (20, 24, 30))
    monkeypatch.setattr(equality, "NEW", 12)
    monkeypatch.setattr(equality, "PAGES", (16,))
    monkeypatch.setattr(equality, "SHORT_PAGES", (4,))
    monkeypatch.setattr(equality, "BATCHES", (4,))
    monkeypatch.setattr(equality, "LITTLE", 48)
    monkeypatch.setattr(equality, "MOST_LEN", 48)
    done = same_tokens()
    assert {result.verdict for result in done.results} == {HOLDS}
    in_pages, windowed = len(MEMORIES) - len(RESERVED_MEMORIES), len(CUTS) + 2
    whole = len(MEMORIES) + windowed + (in_pages + windowed - 1) * len(PREEMPTIONS)
    assert len(done.results) == whole + 1
    assert [result.paper for result in done.results[: len(MEMORIES)]] == [36] * len(MEMORIES)
    assert "0 swapped, 0 recomputed" not in done.text
    assert done.draw().axes


def test_ways_are_every_memory_and_every_preemption() -> None:
    found = list(ways())
    assert len(found) == len(set(found))
    assert {way.memory for way in found} == set(MEMORIES)
    assert {way.preemption for way in found if way.tokens == equality.LITTLE} == set(PREEMPTIONS)
    assert {way.batch for way in found} == set(equality.BATCHES)


def test_what_is_compared() -> None:
    reference = [Answer([1, 2, 3], [1.0, 1e-7, 1.0])]
    same = compare(Way(), reference, reference, [[1, 2, 4]], NOBODY)
    assert (same.tokens, same.equal, same.ties, same.asked, same.transformers) == (3, 3, 0, 3, 2)
    near = compare(Way(), reference, reference, [[1, 3, 4]], NOBODY)
    assert (near.asked, near.transformers) == (1, 1)
    tied = compare(Way(), [Answer([1, 9, 3], [])], reference, None, NOBODY)
    assert (tied.tokens, tied.equal, tied.ties, tied.transformers) == (1, 1, 1, None)
    other = compare(Way(), [Answer([9, 2, 3], [])], reference, None, NOBODY)
    assert (other.tokens, other.equal, other.ties) == (3, 0, 0)


def test_verdicts() -> None:
    reference = [Answer([1, 2], [1.0, 1.0])]
    good = compare(Way(), reference, reference, [[1, 2]], NOBODY)
    wrong = compare(Way("ft"), [Answer([1, 3], [1.0, 1.0])], reference, [[1, 2]], NOBODY)
    short = Way(tokens=equality.LITTLE, preemption="swap")
    calm = compare(short, reference, reference, [[1, 2]], {"swap": 0, "recompute": 3})
    swapped = compare(short._replace(preemption="auto"), reference, reference, [[1, 2]], {"swap": 1, "recompute": 0})
    assert [group.holds for group in groups([good, wrong, calm, swapped])] == [True, False, False, True]
    assert [result.verdict for result in _verdicts([good, wrong])][:2] == [HOLDS, DIFFERS]


def test_a_tie_excuses_its_own_sequence() -> None:
    """Two sequences part from transformers': one at a tie, one for no reason."""
    reference = [Answer([1, 2], [1.0, 1e-7]), Answer([5, 6], [1.0, 1.0])]
    tied = [Answer([1, 3], [1.0, 1e-7]), reference[1]]
    only = compare(Way(), tied, reference, [[1, 2], [5, 6]], NOBODY)
    assert (only.ties, only.asked, only.transformers) == (1, 3, 3)
    assert _verdicts([only])[-1].verdict == HOLDS
    both = compare(Way(), tied, reference, [[1, 2], [5, 7]], NOBODY)
    assert (both.ties, both.asked, both.transformers) == (1, 3, 2)
    assert _verdicts([both])[-1].verdict == DIFFERS


# One trace through every memory


def test_every_memory_serves_the_trace() -> None:
    windows = memories.WINDOWED._replace(workload="longdoc@2")
    runs = [
        *memories.simulated(memories.Case("simulated", "", "alpaca", 40, 200.0)), *memories.windowed(windows),
        *memories.real(memories.Case("real", "", "alpaca", 3, 1000.0)),
    ]  # fmt: skip
    assert [run.memory for run in runs] == 3 * list(MEMORIES)
    for run in runs:
        assert 0 < run.share("used") <= 1
        assert run.batch > 0
        assert run.normalised > 0
        assert run.requests_per_s > 0
    assert all(memory in memories._text(runs) for memory in MEMORIES)
    results = memories._verdicts(runs)
    assert sum(result.verdict == MEASURED for result in results) == 3 * 3 * len(MEMORIES)
    assert {result.real_or_simulated for result in results} == {"simulated", "real"}
    assert len(memories._draw(runs).axes) == 9


def ran(memory: str, used: int, batch: float, normalised: float) -> memories.Ran:
    return memories.Ran("real", memory, Usage(used, 40, 10, 60 - used, 30, 500), batch, normalised, 1.0, 0)


def test_verdicts_follow_the_order() -> None:
    best_first = [ran(memory, 50 - 10 * i, 20.0 - i, 0.1 + i) for i, memory in enumerate(memories.ORDER)]
    assert best_first[0].share("used") == 0.5  # cached and free memory don't count
    claims = [result.verdict for result in memories._verdicts(best_first) if result.verdict != MEASURED]
    assert claims == [HOLDS] * 4
    worst_first = [run._replace(memory=memory) for run, memory in zip(best_first, reversed(memories.ORDER))]
    claims = [result.verdict for result in memories._verdicts(worst_first) if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 4


def test_windows_are_judged_against_uniform_pages() -> None:
    paged, uniform = (ran(memory, used, batch, 0.1)._replace(by=memories.WINDOWS) for memory, used, batch in (
        ("paged", 50, 4.0), ("uniform", 30, 3.0)))  # fmt: skip
    claims = [result.verdict for result in memories._verdicts([paged, uniform]) if result.verdict != MEASURED]
    assert claims == [HOLDS] * 2
    swapped = [paged._replace(memory="uniform"), uniform._replace(memory="paged")]
    claims = [result.verdict for result in memories._verdicts(swapped) if result.verdict != MEASURED]
    assert claims == [DIFFERS] * 2
    assert {result.real_or_simulated for result in memories._verdicts(swapped)} == {"simulated"}
