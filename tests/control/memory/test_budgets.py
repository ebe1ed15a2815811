"""The policy of layers with a budget against brute force over cells, and a memory of such groups: what it holds before,
at and behind the end of a prompt."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.control.memory import Size, build_memory
from quire.control.memory.paged import PagedMemory
from quire.control.memory.policies import BudgetPolicy, forgets, most_at_once, peak
from quire.control.request import Sequence
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec, Selection

SIZES = [(1, 1), (3, 1), (4, 1), (16, 1), (3, 2), (5, 7)]  # so many tokens fill so many pages


def policy(tokens: int, pages: int, budget: int) -> BudgetPolicy:
    return BudgetPolicy(
        Group((0,), 64, 4, 100, range(1, 200), run_tokens=tokens, run_pages=pages, kind="budget", budget=budget)
    )


def cell(position: int, prompt: int, budget: int) -> int:
    """Which one, counted from the first, a token at this position is given."""
    return position if position < prompt or prompt <= budget else budget + position - prompt


def pages_of(cells: range, tokens: int, pages: int) -> set[int]:
    """A token has `pages` bytes, and so a page `tokens`."""
    return {byte // tokens for one in cells for byte in range(one * pages, (one + 1) * pages)}


@pytest.mark.parametrize("prompt", [1, 6, 7, 8, 20])
@pytest.mark.parametrize(("tokens", "pages"), SIZES)
def test_pages_that_a_step_reads_and_writes(tokens: int, pages: int, prompt: int) -> None:
    subject, seq = policy(tokens, pages, 7), Sequence(1, [3] * prompt)
    steps = [(start, end) for end in range(1, prompt + 1) for start in range(end)]
    steps += [(start, end) for end in range(prompt + 1, 40) for start in range(prompt, end)]
    for start, end in steps:
        last = cell(end - 1, prompt, 7) + 1
        assert set(subject.reads(seq, start, end)) == pages_of(range(last), tokens, pages)
        first = cell(start, prompt, 7)
        if start < prompt == end and prompt > 7:
            first = 0  # what is kept is moved to the front
        assert set(subject.writes(seq, start, end)) == pages_of(range(first, last), tokens, pages)


def test_a_sequence_holds_its_prompt_at_most_or_what_follows_a_budget() -> None:
    subject = policy(4, 1, 8)
    assert forgets(subject)
    most = most_at_once(subject, 16)
    for length in range(1, 60):
        assert peak(subject, length, most) == -(-length // 4), "its prompt may be all but a token of it"
    assert subject.unit == 0, "its pages aren't found by a prefix"


def memory_of(**settings: object) -> PagedMemory:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, page_size=4, swap_gib=0.001, **settings)
    layers = tuple(LayerSpec(1, 4, budget=budget) for budget in (12, 6, None))
    spec = ModelSpec("none", layers, 64, 64, 4, 1, 4, 1, selection=Selection(queries=2))
    memory = build_memory(config, spec, Size(64, 64, 2))
    assert isinstance(memory, PagedMemory)
    return memory


def compute(memory: PagedMemory, seq: Sequence, end: int) -> None:
    assert memory.grow(seq, end)
    memory.check()
    seq.planned = end
    confirm(memory, seq, end)


def confirm(memory: PagedMemory, seq: Sequence, end: int) -> None:
    seq.computed = end
    memory.commit(seq)
    memory.check()


def held(memory: PagedMemory, seq: Sequence) -> list[int]:
    return [len(table) for table in memory.place(seq).tables]


def test_pages_of_a_life() -> None:
    memory, seq = memory_of(), Sequence(1, [5] * 30)
    assert memory.admit([seq], 16) is not None
    compute(memory, seq, 16)
    assert held(memory, seq) == [4, 4, 4]
    compute(memory, seq, 28)
    assert held(memory, seq) == [7, 7, 7]
    assert memory.grow(seq, 30)
    seq.planned = 30
    seq.tokens += [6] * 9
    assert memory.grow(seq, 31), "a step behind one that isn't confirmed"
    seq.planned = 31
    memory.check()
    assert held(memory, seq) == [8, 8, 8]
    before = memory.place(seq).tables
    confirm(memory, seq, 30)
    assert held(memory, seq) == [4, 2, 8], "12 and 6 tokens are kept, and there is one behind them"
    assert all(table == old[: len(table)] for table, old in zip(memory.place(seq).tables, before)), "in place"
    confirm(memory, seq, 31)
    for end, pages in ((32, [4, 2, 8]), (33, [4, 3, 9]), (34, [4, 3, 9]), (37, [5, 4, 10])):
        compute(memory, seq, end)
        assert held(memory, seq) == pages
    usage = memory.account().usage
    assert usage.used == (12 + 7 + 6 + 7 + 37) * 16
    assert usage.internal == (5 * 4 + 4 * 4 + 10 * 4) * 16 - usage.used
    memory.free(seq)
    memory.check()


def test_steps_end_where_a_prompt_does() -> None:
    part = Geometry(Layout.PAGED, 1, 2, (), 2, budget=8, queries=4).part
    assert [part(8, 0, count) for count in (1, 7, 8, 9)] == [1, 7, 8, 9], "it is kept whole"
    assert [part(20, 0, count) for count in (1, 15, 16, 17, 19, 20, 21)] == [1, 15, 16, 16, 16, 20, 20]
    assert [part(20, 16, count) for count in (1, 3, 4, 5)] == [0, 0, 4, 4]
    assert [part(20, 20, count) for count in (1, 7)] == [1, 7]
    assert Geometry(Layout.PAGED, 1, 2, (), 2).part(20, 0, 30) == 30
