"""A pytest plugin that records where the time of the tests goes, and the summary of what it recorded.

PYTHONPATH=tools TEST_PROFILE=folder pytest -p profile_tests -n 3 python tools/profile_tests.py folder --out
docs/measurements/tests.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("TEST_PROFILE")


def cpu() -> float:
    """Return the CPU seconds of this process, its threads, and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Recorder:
    """Appends one JSON line for each phase of a test and each fixture that is set up, to a file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def record(self, kind: str, name: str, nodeid: str, wall: float, used: float) -> None:
        line = {"kind": kind, "name": name, "test": nodeid, "wall": round(wall, 4), "cpu": round(used, 4)}
        self.file.write(json.dumps(line) + "\n")


if FOLDER:
    import pytest

    recorder = Recorder(Path(FOLDER))

    def timed(kind: str, name: str, nodeid: str) -> Iterator[Any]:
        wall, used = time.perf_counter(), cpu()
        result = yield
        recorder.record(kind, name, nodeid, time.perf_counter() - wall, cpu() - used)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(item: pytest.Item) -> Iterator[Any]:
        return (yield from timed("phase", "setup", item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
        return (yield from timed("phase", "call", item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
        return (yield from timed("phase", "teardown", item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
        return (yield from timed("fixture", fixturedef.argname, request.node.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(session: pytest.Session) -> Iterator[Any]:
        return (yield from timed("phase", "collection", ""))


def summary(folder: Path) -> dict[str, Any]:
    """Return totals by phase, by file and by fixture, and the tests that take 1 s or more. A fixture's seconds include
    those of the fixtures that it requests; CPU seconds of a child process count where it ends."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    fixtures: dict[str, Counter[str]] = defaultdict(Counter)
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            file = entry["test"].split("::")[0]
            values = {"wall": entry["wall"], "cpu": entry["cpu"]}
            if entry["kind"] == "fixture":
                fixtures[f"{file or 'session'}: {entry['name']}"].update(values | {"times": 1})
                continue
            phases[entry["name"]].update(values)
            if file:
                files[file].update(values | {"tests": int(entry["name"] == "call")})
                tests[entry["test"]].update(values)

    def rows(table: dict[str, Counter[str]], least: float) -> dict[str, dict[str, float]]:
        ordered = sorted(table.items(), key=lambda row: -row[1]["wall"])
        return {name: {key: round(x, 2) for key, x in row.items()} for name, row in ordered if row["wall"] >= least}

    return {
        "phases": rows(phases, 0),
        "files": rows(files, 0.5),
        "fixtures": rows(fixtures, 0.5),
        "tests": rows(tests, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Summarise what the plugin recorded in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(summary(args.folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
