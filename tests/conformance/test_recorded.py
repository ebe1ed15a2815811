"""The steps of recorded traces: none may change but for a reason that is named here."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest
from recorded import CASES, FILE, Case, record


@cache
def before() -> dict[str, list[Any]]:
    with gzip.open(FILE) as file:
        found: dict[str, list[Any]] = json.load(file)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_the_recorded_ones(case: Case) -> None:
    recorded = before()[str(case)]
    steps, _ = record(case)
    for i, (was, now) in enumerate(zip(recorded, json.loads(json.dumps(steps)))):
        assert now == was, f"step {i} differs"
    assert len(steps) == len(recorded)
