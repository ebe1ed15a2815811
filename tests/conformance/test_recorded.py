"""The steps of recorded traces: none may change but for a reason that is named here.

Five things were changed on purpose. Four are taken back for the comparison: a request that would find more a step later
no longer holds up those behind it; how much a sequence holds at once under a window is derived from what it reads, a
page less than an estimate had it; branches that come back share what they have in common under windows too; and a
sequence's pages are released from its last tokens to its first in all groups together, with what its windows left a
short while ago. The fifth is named trace by trace: branches that come back find room for all of them or change nothing;
before, those admitted until one found none were sent away again, which left table entries behind and the cache in
another order.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest
from recorded import CASES, FILE, Case, record
from traces import Watched

from quire.control.memory import paged
from quire.control.memory.arrivals import Arrivals
from quire.control.memory.policies import FAR, LayerPolicy, forgets
from quire.control.memory.retention import Retention
from quire.control.memory.tables import PageTables
from quire.control.request import Sequence

SENT_AWAY = {  # the first step that differs
    "paged-1-0-1": 25, "paged-1-5-2": 30, "paged-1-7-2": 52, "paged-4-1-2": 68, "paged-4-5-2": 17, "paged-4-7-2": 10,
    "uncached-1-2": 60, "uncached-5-2": 19, "uncached-7-2": 10, "poisoned-1-2": 68, "poisoned-5-2": 17,
    "poisoned-7-2": 10, "layer-tables-5-2": 17, "layer-tables-6-1": 51, "layer-tables-7-2": 10,
}  # fmt: skip


@cache
def before() -> dict[str, list[Any]]:
    with gzip.open(FILE) as file:
        found: dict[str, list[Any]] = json.load(file)
    return found


def canonical(steps: list[Any]) -> list[Any]:
    """Steps with host pages named by the order in which they are filled: which one it is doesn't matter."""
    filled: dict[int, int] = {}
    count = 0
    told = []
    for births, journal, rows in json.loads(json.dumps(steps)):
        entries = []
        for entry in journal:
            if entry[0] == "o":
                count += 1
                filled[entry[3]] = count
                entry = [*entry[:3], count]
            elif entry[0] == "i":
                entry = [*entry[:2], filled[entry[2]], entry[3]]
            entries.append(entry)
        told.append([births, entries, rows])
    return told


def as_estimated(policy: LayerPolicy, chunk: int, back: int) -> int:
    if not forgets(policy):
        return FAR
    assert policy.group.window is not None
    return -(-(policy.group.window + 2 * chunk) // policy.group.page_tokens) + 1


COMMON = Arrivals._common


def only_where_all_is_held(door: Arrivals, seq: Sequence, index: int, owners: dict[bytes, int]) -> tuple[int, int]:
    return (0, index) if door.memory.forgets else COMMON(door, seq, index, owners)


@pytest.mark.share(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_the_recorded_ones(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Watched.admit

    def held_up(memory: Watched, *arguments: Any) -> Any:
        admitted = admit(memory, *arguments)
        return admitted if isinstance(admitted, list) else None

    monkeypatch.setattr(Watched, "admit", held_up)
    monkeypatch.setattr(paged, "most_at_once", as_estimated)
    monkeypatch.setattr(paged, "Retention", lambda pages, policies, *_: Retention(pages, policies, "paper"))
    monkeypatch.setattr(Arrivals, "_common", only_where_all_is_held)
    monkeypatch.setitem(PageTables.__init__.__kwdefaults__, "aligned", 0)
    was, now = canonical(before()[str(case)]), canonical(record(case)[0])
    differs = next((i for i, (a, b) in enumerate(zip(was, now)) if a != b), None)
    assert differs == SENT_AWAY.get(str(case)), f"step {differs}: {was[differs or 0]}, now {now[differs or 0]}"
    assert differs is not None or len(now) == len(was)
