"""Layer policies against brute force over positions."""

from __future__ import annotations

import pytest
from unlike import KNOWN

from quire.memory.policies import POLICIES, BudgetPolicy, LayerPolicy, max_pages_at_once, peak_pages
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sequence import Sequence

SIZES = [(1, 1), (3, 1), (4, 1), (16, 1), (16, 15), (3, 2), (5, 7)]  # so many tokens fill so many pages
WINDOWS = [None, 1, 2, 4, 5, 7, 16, -1, -4, -5, -12]
"""How far a token sees back; below 0: the tokens of a chunk."""


def pages_of(position: int, tokens: int, pages: int) -> range:
    """The pages that the token at a position lies in, by its first and its last byte: a token has `pages` bytes, and
    so a page `tokens`."""
    return range(position * pages // tokens, ((position + 1) * pages - 1) // tokens + 1)


def needed(start: int, end: int, tokens: int, pages: int, window: int | None) -> set[int]:
    """Pages of all positions that tokens [start, end) see, each for itself."""
    lows = [0 if window is None else max(0, p - window + 1) for p in range(start, end)]
    if window is not None and window < 0:
        lows = [max(low for low in range(p + 1) if low % -window == 0) for p in range(start, end)]
    seen = {position for low, p in zip(lows, range(start, end)) for position in range(low, p + 1)}
    return {page for position in seen for page in pages_of(position, tokens, pages)}


def policy(tokens: int, pages: int, window: int | None) -> LayerPolicy:
    group = KVCacheGroup(
        (0,), 64, 4, 100, range(1, 200), run_tokens=tokens, run_pages=pages,
        window=window if window is not None and window > 0 else None,
        chunk=-window if window is not None and window < 0 else None,
        kind="full" if window is None else "window" if window > 0 else "chunked",
    )  # fmt: skip
    return POLICIES[group.kind](group)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tokens", "pages"), SIZES)
def test_pages_that_are_read_are_those_that_are_seen_or_written(tokens: int, pages: int, window: int | None) -> None:
    subject = policy(tokens, pages, window)
    for start in range(40):
        for end in range(start + 1, 44):
            wanted = needed(start, end, tokens, pages, window)
            assert set(subject.reads(None, start, end)) == wanted
            written = {page for position in range(start, end) for page in pages_of(position, tokens, pages)}
            assert set(subject.writes(None, start, end)) == written
            assert written <= wanted
        assert not subject.writes(None, start, start) or start * pages % tokens


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tokens", "pages"), SIZES)
def test_a_hit_requires_the_pages_before_it_that_the_next_token_sees(
    tokens: int, pages: int, window: int | None
) -> None:
    subject = policy(tokens, pages, window)
    for hit in range(44):
        before = {page for position in range(hit) for page in pages_of(position, tokens, pages)}
        assert set(subject.required(None, hit)) == needed(hit, hit + 1, tokens, pages, window) & before


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("window", [*WINDOWS[1:], 33, -33])
@pytest.mark.parametrize(("tokens", "pages"), [*SIZES, (8, 3)])
def test_the_peak_is_the_most_that_a_sequence_ever_holds(tokens: int, pages: int, window: int, chunk: int) -> None:
    """A step is planned before the one before it is confirmed, wherever chunks begin."""
    subject, full = policy(tokens, pages, window), policy(tokens, pages, None)
    group, most = subject.group, max_pages_at_once(subject, chunk)
    assert most == max(
        group.num_pages(computed + 2 * chunk) - subject.reads(None, computed, computed + 1).start
        for computed in range(3 * tokens * abs(window))
    )
    assert [peak_pages(subject, length, most) for length in (9, 10**6)] == [min(group.num_pages(9), most), most]
    assert peak_pages(full, 100, max_pages_at_once(full, chunk)) == group.num_pages(100)


@pytest.mark.parametrize(("tokens", "pages"), SIZES)
@pytest.mark.parametrize("chunk", [1, 4, 5, 12])
def test_nothing_is_needed_behind_a_border(tokens: int, pages: int, chunk: int) -> None:
    """And there only: at the least number of whole pages that end where a chunk does."""
    subject = policy(tokens, pages, -chunk)
    ends = [hit for hit in range(1, 200) if hit * pages % tokens == 0 and not subject.required(None, hit)]
    assert ends == [hit for hit in range(1, 200) if hit * pages % tokens == 0 and hit % chunk == 0]
    borders = [hit for hit in range(tokens, 200, tokens) if not subject.required(None, hit)]
    assert borders == [subject.group.tokens_in_pages(page) for page in range(subject.border, 200 * pages,
    subject.border)
                       if subject.group.tokens_in_pages(page) < 200]  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_pages_that_are_written_are_among_those_that_are_read(kind: str) -> None:
    """Room is made for what is read, and only for that."""
    window, chunk = 5 if kind == "window" else None, 7 if kind == "chunked" else None
    group = KVCacheGroup(
        (0,), 64, 4, 100, range(1, 200), run_tokens=5, run_pages=2, window=window, kind=kind, chunk=chunk, budget=7
    )
    subject = KNOWN[kind](group)
    for seq in (None, Sequence(1, [1] * 18)):
        for start in range(40):
            for end in range(start + 1, 44):
                assert set(subject.writes(seq, start, end)) <= set(subject.reads(seq, start, end))


# Layers with a budget, over cells


def budgeted(tokens: int, pages: int, budget: int) -> BudgetPolicy:
    return BudgetPolicy(
        KVCacheGroup((0,), 64, 4, 100, range(1, 200), run_tokens=tokens, run_pages=pages, kind="budget", budget=budget)
    )


def cell(position: int, prompt: int, budget: int) -> int:
    """Which one, counted from the first, a token at this position is given."""
    return position if position < prompt or prompt <= budget else budget + position - prompt


def pages_of_cells(cells: range, tokens: int, pages: int) -> set[int]:
    """A token has `pages` bytes, and so a page `tokens`."""
    return {byte // tokens for one in cells for byte in range(one * pages, (one + 1) * pages)}


@pytest.mark.parametrize("prompt", [1, 6, 7, 8, 20])
@pytest.mark.parametrize(("tokens", "pages"), SIZES)
def test_pages_that_a_step_reads_and_writes(tokens: int, pages: int, prompt: int) -> None:
    subject, seq = budgeted(tokens, pages, 7), Sequence(1, [3] * prompt)
    steps = [(start, end) for end in range(1, prompt + 1) for start in range(end)]
    steps += [(start, end) for end in range(prompt + 1, 40) for start in range(prompt, end)]
    for start, end in steps:
        last = cell(end - 1, prompt, 7) + 1
        assert set(subject.reads(seq, start, end)) == pages_of_cells(range(last), tokens, pages)
        first = cell(start, prompt, 7)
        if start < prompt == end and prompt > 7:
            first = 0  # what is kept is moved to the front
        assert set(subject.writes(seq, start, end)) == pages_of_cells(range(first, last), tokens, pages)


def test_steps_end_where_a_prompt_does() -> None:
    part = KVCacheConfig(KVCacheLayout.PAGED, 1, 2, (), 2, budget=8, queries=4).clip_chunk
    assert [part(8, 0, count) for count in (1, 7, 8, 9)] == [1, 7, 8, 9], "it is kept whole"
    assert [part(20, 0, count) for count in (1, 15, 16, 17, 19, 20, 21)] == [1, 15, 16, 16, 16, 20, 20]
    assert [part(20, 16, count) for count in (1, 3, 4, 5)] == [0, 0, 4, 4]
    assert [part(20, 20, count) for count in (1, 7)] == [1, 7]
    assert KVCacheConfig(KVCacheLayout.PAGED, 1, 2, (), 2).clip_chunk(20, 0, 30) == 30
