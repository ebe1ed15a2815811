"""Bugs planted in the source: each must be found by the tests that it names, through the message that it causes.

The tests run in forks of one process that has collected them, so that a bug costs what its test costs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from planted_data import BUGS as DATA
from planted_ipc import BUGS as IPC
from planted_memory import BUGS as MEMORY
from planted_server import BUGS as SERVER
from planted_speculation import BUGS as SPECULATION
from planting import Planter

BUGS = {**SERVER, **IPC, **DATA, **MEMORY, **SPECULATION}
TESTS = tuple(dict.fromkeys(test for bug in BUGS.values() for test in bug.tests))

pytestmark = pytest.mark.xdist_group(name="planted")


@pytest.fixture(scope="module")
def planter(request: pytest.FixtureRequest) -> Iterator[Planter]:
    """It collects the files that the bugs of this run need: the gate plants some of them."""
    cases = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in cases if hasattr(item, "callspec")]
    tests = [test for name in names for test in BUGS[name].tests] if len(names) == len(cases) else TESTS
    with Planter([*dict.fromkeys(test.split("::")[0] for test in tests)]) as found:
        yield found


def test_the_tests_pass_without_a_bug(planter: Planter) -> None:
    outcome = planter.run(TESTS, {}, 240)
    assert outcome.outcome == "passed", f"{outcome.outcome}: {outcome.text}"


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(planter: Planter, name: str) -> None:
    bug = BUGS[name]
    outcome = planter.run(bug.tests, dict(edit.source() for edit in bug.edits))
    assert outcome.outcome == "failed", f"the tests say {outcome.outcome}: {outcome.text}"
    errors = "\n".join(line for line in outcome.text.splitlines() if line.startswith("E "))
    assert re.search(bug.message, errors), f"found by another message than {bug.message!r}:\n{outcome.text}"
