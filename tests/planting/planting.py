"""Runs tests on a changed source of the package, for planted bugs and for mutants."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Edit(NamedTuple):
    """A change of one file, whose path is below src/quire: the text `old`, which is there once, becomes `new`."""

    file: str
    old: str
    new: str

    def source(self) -> tuple[str, str]:
        """Return the file's path and its changed source. AssertionError if `old` is not there exactly once."""
        path = (ROOT / "src" / "quire" / self.file).resolve()
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} holds {text.count(self.old)} times, not once: {self.old!r}"
        return str(path), text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """How a run of tests ended: see zygote.py; `text` is the report of the test that failed."""

    outcome: str
    text: str


class Planter:
    """A process that has collected `files` and runs some of their tests, each time in a fork of its own."""

    def __init__(self, files: Sequence[str], *options: str) -> None:
        mine, other = socket.socketpair()
        self.folder = tempfile.TemporaryDirectory()
        log = Path(self.folder.name, "log")  # no pipe: nothing would read what the forks print
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for name in [name for name in self.environment if name.startswith("PYTEST_XDIST")]:
            del self.environment[name]
        with other, log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-vvv", "-m", "", "-p", "zygote", "-p", "no:cacheprovider", *options,
                 *files],
                cwd=ROOT, env={**self.environment, "TEST_ZYGOTE": str(other.fileno())}, pass_fds=[other.fileno()],
                stdout=output, stderr=output,
            )  # fmt: skip
        self.link, self.stream = mine, mine.makefile("rw")
        first = self.stream.readline()
        if not first:
            self.process.wait()
            raise RuntimeError(f"the tests were not collected:\n{log.read_text()[-4000:]}")
        self.tests = int(json.loads(first)["tests"])

    def run(self, tests: Sequence[str], sources: dict[str, str], seconds: float = 60) -> Outcome:
        """Run `tests` on the changed sources until one fails; a change outside functions takes a fresh process."""
        planted = Path(self.folder.name, "planted.json")
        planted.write_text(json.dumps(sources))
        request = {"sources": sources, "planted": str(planted), "tests": list(tests), "seconds": seconds}
        self.stream.write(json.dumps(request) + "\n")
        self.stream.flush()
        outcome = Outcome(**json.loads(self.stream.readline()))
        return self.fresh(tests, planted, seconds) if outcome.outcome == "module" else outcome

    def fresh(self, tests: Sequence[str], planted: Path, seconds: float) -> Outcome:
        options = ["-vvv", "-x", "-m", "", "-p", "no:cacheprovider", "-n", "0"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**self.environment, "TEST_PLANTED": str(planted)}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=seconds + 20)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return Outcome("timeout", "")
        test = next((name for name in tests if f"{name} FAILED" in output or f"{name} ERROR" in output), "")
        outcome = {0: "passed", 1: "failed"}.get(process.returncode, "crashed")
        return Outcome(outcome, f"{test}\n{output[-20_000:]}")

    def close(self) -> None:
        self.stream.close()
        self.link.close()
        self.process.wait(timeout=60)
        self.folder.cleanup()

    def __enter__(self) -> Planter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
