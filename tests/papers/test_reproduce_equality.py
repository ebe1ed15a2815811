"""Equal tokens by every way: what is compared, what ties excuse, and preemptions that must happen."""

from __future__ import annotations

from typing import Any

import pytest

from papers import equality
from papers.entry import MET, MISSED
from papers.equality import CUTS, Answer, Sweep, Way, compare, group_point, same_tokens, ways
from papers.pagedattention import C5
from quire.config import MEMORIES, PREEMPTIONS, RESERVED_MEMORIES

NONE = {"swap": 0, "recompute": 0}
REFERENCE = [Answer([1, 2, 3], [1.0, 1e-7, 1.0])]


def judged(*points: dict[str, Any]) -> list[str]:
    return [result.verdict for result in C5.results(points)]


@pytest.mark.soak
def test_a_small_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    done = C5.judge(same_tokens(Sweep((20, 24, 30), 12, (16,), (4,), (4,), 48)))
    assert {result.verdict for result in done.results} == {MET}
    in_pages, windowed = len(MEMORIES) - len(RESERVED_MEMORIES), len(CUTS) + 2
    whole = len(MEMORIES) + windowed + (in_pages + windowed - 1) * len(PREEMPTIONS)
    assert len(done.results) == whole + 2
    assert [result.paper for result in done.results[: len(MEMORIES)]] == [36] * len(MEMORIES)
    assert done.draw().axes


def test_ways_are_every_memory_and_every_preemption() -> None:
    sweep = Sweep()
    found = list(ways(sweep))
    assert len(found) == len(set(found)) == 216
    assert {way.memory for way in found} == set(MEMORIES)
    assert {way.preemption for way in found if way.tokens == sweep.little} == set(PREEMPTIONS)
    assert {way.batch for way in found} == set(sweep.batches)
    assert {way.group for way in found if way.windows and way.tokens == equality.PLENTY} == {
        *(f"windows, paged {cut}" for cut in CUTS), "windows, uniform", "windows, virtual",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "oracle", "counts"),
    [
        ([1, 2, 3], [1, 2, 4], (3, 3, 0, 3, 2)),
        ([1, 2, 3], [1, 3, 4], (3, 3, 0, 1, 1)),  # a tie
        ([1, 9, 3], None, (1, 1, 1, 0, 0)),
        ([9, 2, 3], None, (3, 0, 0, 0, 0)),
    ],
)
def test_what_is_compared(tokens: list[int], oracle: list[int] | None, counts: tuple[int, ...]) -> None:
    answers = [Answer(tokens, REFERENCE[0].margins)]
    assert tuple(compare(answers, REFERENCE, oracle and [oracle]).values()) == counts


def test_claims_can_fail() -> None:
    same = compare(REFERENCE, REFERENCE, [[1, 2, 3]])
    good = group_point("paged", [(Way(), same | NONE)])
    wrong = group_point("ft", [(Way("ft"), compare([Answer([1, 2, 4], [1.0] * 3)], REFERENCE, [[1, 2, 3]]) | NONE)])
    assert judged(good) == [MET] * 3
    assert judged(good, wrong) == [MET, MISSED, MET, MISSED]
    short = Way(tokens=240, preemption="swap")
    calm = group_point(short.group, [(short, same | {"swap": 0, "recompute": 3})])
    auto = short._replace(preemption="auto")
    swapped = group_point(auto.group, [(auto, same | {"swap": 1, "recompute": 0})])
    assert judged(calm)[1] == MISSED, "nothing was swapped"
    assert judged(swapped)[1] == MET


def test_a_tie_excuses_its_own_sequence() -> None:
    """Two sequences part from transformers': one at a tie, one for no reason."""
    reference = [Answer([1, 2], [1.0, 1e-7]), Answer([5, 6], [1.0, 1.0])]
    tied = [Answer([1, 3], [1.0, 1e-7]), reference[1]]
    assert tuple(compare(tied, reference, [[1, 2], [5, 6]]).values()) == (3, 3, 1, 3, 3)
    assert tuple(compare(tied, reference, [[1, 2], [5, 7]]).values()) == (3, 3, 1, 3, 2)
