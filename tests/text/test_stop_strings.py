"""Stop strings, compared with brute force over the whole text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InputError
from quire.text.stop import Automaton, StopStrings

words = st.text("ab", min_size=1, max_size=5)


def brute(text: str, stops: list[str], include: bool = False, start: int = 0) -> tuple[str, str | None]:
    """The text up to the first match that ends behind `start` characters, and the match."""
    for end in range(start + 1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.text("abc", max_size=40), st.lists(words, max_size=4), st.lists(st.integers(0, 40)), st.booleans())
def test_equals_brute_force_whatever_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    watch = StopStrings(Automaton(tuple(stops)), include)
    borders = [0, *sorted(cuts), len(text)]
    shown, found, arrived = "", None, ""
    for start, end in pairwise(borders):
        piece, found = watch.push(text[start:end])
        arrived, shown = arrived + text[start:end], shown + piece
        if found is None:  # held back: just what may still become a stop string
            held = arrived[len(shown) :]
            longest = max((n for s in stops for n in range(len(s)) if arrived.endswith(s[:n])), default=0)
            assert len(held) == longest
    shown += watch.flush()
    assert (shown, found) == brute(text, stops, include)


def test_a_stop_over_three_tokens_is_never_leaked() -> None:
    watch = StopStrings(Automaton(("</end>",)))
    assert watch.push("text <") == ("text ", None)
    assert watch.push("/en") == ("", None)
    assert watch.push("d> more") == ("", "</end>")
    assert watch.push("and more") == ("", "</end>")
    assert watch.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        Automaton(("a", ""))


def test_adversarial_text_costs_linear_time() -> None:
    stops = tuple("a" * 255 + end for end in "bcdefghijklmnopq")
    times: dict[int, list[float]] = {10_000: [], 80_000: []}
    for count in (10_000, 80_000) * 3:
        watch, start = StopStrings(Automaton(stops)), time.thread_time()
        for _ in range(count):
            watch.push("a")
        times[count].append((time.thread_time() - start) / count)
    assert min(times[80_000]) < 3 * max(times[10_000]), times
    assert min(times[80_000]) < 100e-6
