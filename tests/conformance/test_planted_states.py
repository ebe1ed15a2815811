"""Bugs of running states: each is planted, and must be caught at every depth; also with every check taken away but the
tokens that come out."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from test_planted import WRONG, Patch, Plant, every_depth, found_by, instead_of, only_outputs
from test_planted_unlike import STATES, run
from unlike import FULL, UNLIKE, WINDOW, Kind, unlike

from quire.control.memory.paged import PagedMemory
from quire.control.memory.policies import StatePolicy
from quire.control.memory.tables import PageTables
from quire.sim.cells import WORD, Pages, Running
from quire.sim.echo import EchoRunner
from quire.vocabulary.plan import Copy, Row, Sampled

STATE = Kind(64, 8, kind="state")
MEMORIES = [
    unlike(FULL, STATE), unlike(STATE, WINDOW, Kind(16, 2)), UNLIKE["large-states-34-1"], UNLIKE["states-boundary"]
]  # fmt: skip


def of(pages: Pages, slot: int, position: int, late: int = 0) -> int:
    """The state in the page where that after `position` tokens should be, whatever it says of itself."""
    if position == 0:
        return 0
    run = pages.group.run_tokens
    page = int(pages.table[slot, max(position - 1 - late, 0) // run])
    return int(struct.unpack("<qq", pages.pages[page, : 2 * WORD].tobytes())[1])


def put(pages: Pages, slot: int, position: int, state: int, late: int = 0) -> None:
    page = int(pages.table[slot, max(position - late, 0) // pages.group.run_tokens])
    pages.pages[page] = np.resize(np.frombuffer(struct.pack("<qq", position + 1, state), np.uint8), pages.full)


def trusted(patch: Patch) -> None:
    """A runner that takes for a state whatever lies where it should be."""
    patch.setattr(Running, "_of", staticmethod(of))


@instead_of(EchoRunner, "compute")
def state_advanced_twice(compute: Any, runner: EchoRunner, row: Row) -> Sampled:
    """A step's first token is what the step before computed last: once in a while it goes into the state again."""
    for group in runner.groups:
        if isinstance(group.rule, Running) and row.start % 5 == 4:
            state = of(group, row.slot, row.start)
            put(group, row.slot, row.start - 1, Running._advanced(state, row.start - 1, 0))
    return compute(runner, row)


@instead_of(PageTables, "_shared")
def fork_shares_the_running_state(shared: Any, memory: PagedMemory, *arguments: object) -> list[tuple[int, int]]:
    """What a branch goes on from isn't copied before it is written."""
    return [(g, at) for g, at in shared(memory, *arguments) if memory.groups[g].kind != "state"]


@instead_of(EchoRunner, "replay")
def lost_copy_of_a_state(replay: Any, runner: EchoRunner, entry: object) -> None:
    """Branches get pages of their own, in which nothing is."""
    if not isinstance(entry, Copy) or not isinstance(runner.groups[entry.group].rule, Running):
        replay(runner, entry)


def checkpoint_a_token_late(patch: Patch) -> None:
    """The state goes on into the next page a token behind the border: alone, no sequence sees it."""
    patch.setattr(Running, "_of", staticmethod(lambda pages, slot, position: of(pages, slot, position, late=1)))

    def write(rule: Running, pages: Pages, slot: int, position: int, token: int, state: int) -> None:
        after = rule._advanced(of(pages, slot, position, late=1), position, token)
        put(pages, slot, position, after, late=1)

    patch.setattr(Running, "write", write)


def hit_without_a_checkpoint(patch: Patch) -> None:
    """A prefix may end within a run, if the state at the end of that run is there."""
    patch.setattr(StatePolicy, "unit", property(lambda policy: 4 if policy.group.run_tokens % 4 == 0 else 1))


PLANTED: dict[str, tuple[Plant, str]] = {  # bugs, and how the failures begin that they cause
    "a state advanced twice": (state_advanced_twice, WRONG),
    "a fork that shares the running state": (fork_shares_the_running_state, STATES),
    "a copy of a state that is lost": (lost_copy_of_a_state, STATES),
    "a checkpoint a token late": (checkpoint_a_token_late, WRONG),
    "a hit at a length without a checkpoint": (hit_without_a_checkpoint, STATES),
}


def run_all(depth: int) -> None:
    for make in MEMORIES:
        run(make, depth, prefix_tokens=16)


@every_depth
def test_the_traces_pass_without_a_bug(depth: int) -> None:
    run_all(depth)


@every_depth
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str, depth: int, monkeypatch: Patch) -> None:
    plant, message = PLANTED[name]
    plant(monkeypatch)
    with found_by(message):
        run_all(depth)


def only_tokens(patch: Patch) -> None:
    """States say nothing of themselves, and nothing is checked of the memory or of what it gives."""
    only_outputs(patch)
    trusted(patch)
    patch.setattr(Pages, "page", lambda pages, slot, logical: int(pages.table[slot, logical]))


@every_depth
def test_the_traces_pass_with_tokens_only(depth: int, monkeypatch: Patch) -> None:
    only_tokens(monkeypatch)
    run_all(depth)


@every_depth
@pytest.mark.parametrize("name", PLANTED)
def test_wrong_tokens_alone_show_it(name: str, depth: int, monkeypatch: Patch) -> None:
    only_tokens(monkeypatch)
    PLANTED[name][0](monkeypatch)
    with found_by(WRONG):
        run_all(depth)
