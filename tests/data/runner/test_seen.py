"""In debug mode a row that goes on from another state than its own is noticed, whatever brought it there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.data.runner.seen import SeenTokens
from quire.vocabulary.plan import Copy, Entry, In, Out, Poison, Row, Table
from quire.vocabulary.specs import Geometry, Group, Layout

RUN = 4
STATES = Group((0,), 16, 16, 4, range(1, 20), range(1, 4), RUN, kind="state")
TOKENS = Group((1,), 16, 1, 4, range(1, 20), range(1, 4), 16)


class Played:
    """Steps of sequences in slots 1 and 2, whose tables are written here."""

    def __init__(self) -> None:
        self.seen = SeenTokens(Geometry(Layout.PAGED, 16 * 20, 3, (TOKENS, STATES), 4))
        self.tables = [np.zeros((3, 4), dtype=np.int64) for _ in range(2)]

    def step(self, *entries: Entry, rows: tuple[tuple[int, int, int], ...] = ()) -> None:
        """`rows`: slot, start, and how many tokens."""
        for entry in entries:
            if isinstance(entry, Table):
                self.tables[entry.group][entry.slot, entry.at : entry.at + len(entry.pages)] = entry.pages
        self.seen.replay(entries)
        self.seen.advance([Row(slot, (7,) * count, start, 1) for slot, start, count in rows], self.tables)


def begun() -> Played:
    """Slot 1 has computed ten tokens, in pages 5, 6 and 7."""
    played = Played()
    played.step(Poison(1, 5), Table(1, 1, 0, (5, 6, 7)), rows=((1, 0, 3),))
    played.step(rows=((1, 3, 6),))
    played.step(rows=((1, 9, 1),))
    return played


def test_a_sequence_goes_on_from_its_latest_state_or_a_checkpoint() -> None:
    played = begun()
    played.step(Table(2, 1, 0, (5, 8)), rows=((1, 10, 1), (2, 4, 4)))
    played.step(Copy(1, 7, 9), Table(2, 1, 0, (5, 6, 9)), rows=((1, 11, 1), (2, 11, 5)))
    played.step(Out(1, 7, 2), Poison(1, 7), In(1, 2, 10), Table(1, 1, 2, (10,)), rows=((1, 12, 1),))


WRONG: dict[str, Callable[[Played], None]] = {
    "twice": lambda played: played.step(rows=((1, 9, 1),)),
    "left out": lambda played: played.step(rows=((1, 11, 1),)),
    "no checkpoint there": lambda played: played.step(Table(2, 1, 0, (5, 6, 7)), rows=((2, 9, 1),)),
    "a fork that shares": lambda played: (
        played.step(Table(2, 1, 0, (5, 6, 7)), rows=((1, 10, 1),)), played.step(rows=((2, 10, 1),))
    )[0],
    "poisoned": lambda played: played.step(Poison(1, 7), rows=((1, 10, 1),)),
    "another's": lambda played: played.step(Table(1, 1, 2, (11,)), rows=((1, 10, 1),)),
    "copied too early": lambda played: (
        played.step(Copy(1, 7, 12), rows=((1, 10, 1),)), played.step(Table(1, 1, 2, (12,)), rows=((1, 11, 1),))
    )[0],
    "copied from nothing": lambda played: played.step(Copy(1, 13, 7), rows=((1, 10, 1),)),
    "swapped in from another's place": lambda played: played.step(Out(1, 6, 1), In(1, 1, 7), rows=((1, 10, 1),)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_states_are_refused(name: str) -> None:
    with pytest.raises(
        AssertionError, match=r"slot \d goes on behind \d+ tokens from page \d+ of group 1, whose state"
    ):
        WRONG[name](begun())


def test_padding_reads_scratch() -> None:
    played = begun()
    played.step(rows=((0, 3, 1), (0, 0, 1), (1, 10, 1)))


def test_pages_of_tokens_are_not_looked_at() -> None:
    played = begun()
    played.step(Copy(0, 7, 12), Poison(0, 7), Out(0, 6, 1), In(0, 1, 7), rows=((1, 10, 1),))
