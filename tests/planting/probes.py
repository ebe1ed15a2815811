"""Records which blocks of the package each test runs, in every process that the test starts.

A block is a body: of a function, of a side of an `if`, of a loop, of an exception handler, of a case. Each sets one
byte of a file that all processes of a test worker map, which costs tens of nanoseconds. coverage.py makes the suite
twice as slow and has to be started in each child process. It is a pytest plugin; tools/mutants.py reads the result.

Blocks that a shared fixture runs count for the first test that uses it."""

from __future__ import annotations

import ast
import hashlib
import json
import marshal
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

SRC = Path(__file__).resolve().parents[2] / "src" / "quire"
FOLDER = os.environ.get("TEST_PROBES")
NAME = "__quire_probes__"


class Blocks(ast.NodeTransformer):
    """Adds a statement to the beginning of each block that sets its byte, and collects the blocks' lines.

    Functions that Triton compiles are left out: Triton reads their source from the file."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = 0  # last line of the enclosing block
        self.lines: list[tuple[int, int]] = []  # first and last line of each block; (line, line - 1) of a missing else

    def probe(self, first: int, last: int) -> ast.stmt:
        self.lines.append((first, last))
        statement = ast.parse(f"{NAME}[{self.base + len(self.lines) - 1}] = 1").body[0]
        return ast.fix_missing_locations(ast.increment_lineno(statement, first - 1))

    def block(self, body: list[ast.stmt], line: int = 0, last: int = 0) -> list[ast.stmt]:
        """Return the body with its probe after its docstring; a missing `else` gets a body of its probe alone."""
        first, last = (body[0].lineno, body[-1].end_lineno or 0) if body else (line, last or line - 1)
        probe = self.probe(first, last)
        outer, self.end = self.end, last
        body = [self.visit(statement) for statement in body]
        self.end = outer
        at = int(bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
        return [*body[:at], probe, *body[at:]]

    def visit_FunctionDef(self, node: Any) -> Any:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return node
        node.body = self.block(node.body)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> Any:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        end = node.end_lineno or 0
        leaves = isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break)
        node.body = self.block(node.body)
        # What follows an early exit is the other branch.
        rest = (end + 1, self.end) if leaves and self.end > end else (node.lineno, 0)
        node.orelse = self.block(node.orelse, *rest)
        return node

    def visit_loop(self, node: Any) -> Any:
        node.body = self.block(node.body)
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node

    visit_For = visit_AsyncFor = visit_While = visit_loop

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        node.body = self.block(node.body)
        return node

    visit_match_case = visit_ExceptHandler  # type: ignore[assignment]


def instrument(source: str, path: str, base: int) -> tuple[CodeType, list[tuple[int, int]]]:
    tree, blocks = ast.parse(source), Blocks(base)
    tree = blocks.visit(tree)
    after = 0
    while after < len(tree.body) and (
        isinstance(tree.body[after], ast.Expr) or getattr(tree.body[after], "module", "") == "__future__"
    ):
        after += 1
    tree.body.insert(after, ast.fix_missing_locations(ast.parse(f"from probes import BYTES as {NAME}").body[0]))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True), blocks.lines


def prepare(folder: Path) -> None:
    """Instrument the whole package: `folder` gets the code of each file, and an index of the blocks."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "code").mkdir(parents=True)
    index: dict[str, Any] = {}
    base = 0
    for path in sorted(SRC.rglob("*.py")):
        code, lines = instrument(path.read_text(), str(path), base)
        coded(folder, str(path)).write_bytes(marshal.dumps(code))
        index[str(path)] = {"base": base, "lines": lines}
        base += len(lines)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "size").write_text(str(base))


def coded(folder: Path, path: str) -> Path:
    """Return the file that holds the instrumented code of `path`."""
    return folder / "code" / hashlib.sha256(path.encode()).hexdigest()


def probed(path: str) -> CodeType | None:
    """Return the instrumented code of a file of the package, None of another file."""
    assert FOLDER is not None, "TEST_PROBES names the folder that prepare() wrote"
    file = coded(Path(FOLDER), path)
    if not file.exists():
        return None
    code: CodeType = marshal.loads(file.read_bytes())
    return code


def mapped(folder: Path) -> mmap.mmap:
    """Map the bytes that this test worker and its children set; the worker names the file in the environment."""
    path = Path(os.environ.setdefault("TEST_PROBE_BYTES", str(folder / f"bytes-{os.getpid()}")))
    size = int((folder / "size").read_text())
    if not path.exists():
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def without_group(name: str) -> str:
    """Return a test's name without the group that pytest-xdist adds to it."""
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


class Recorder:
    """Writes, after each test, a line with its name, seconds and blocks."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"tests-{os.getpid()}.jsonl").open("a", buffering=1)

    def record(self, name: str, seconds: float) -> None:
        import numpy as np

        found = np.flatnonzero(np.frombuffer(BYTES[:], np.uint8)).tolist()  # a copy: other threads go on
        BYTES[:] = bytes(len(BYTES))
        self.file.write(json.dumps({"test": name, "seconds": round(seconds, 3), "blocks": found}) + "\n")


if FOLDER:
    BYTES = mapped(Path(FOLDER))

    def pytest_configure(config: Any) -> None:
        """Start recording in a process that runs tests: a worker, or the one process of a run without workers."""
        import pytest

        if os.environ.get("PYTEST_XDIST_WORKER") is None and getattr(config.option, "numprocesses", None):
            os.environ.pop("TEST_PROBE_BYTES", None)  # each worker maps bytes of its own
            return
        recorder = Recorder(Path(FOLDER or ""))

        class Plugin:
            @pytest.hookimpl(wrapper=True, tryfirst=True)
            def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
                BYTES[:] = bytes(len(BYTES))  # importing the tests has set some
                begin = time.perf_counter()
                result = yield
                recorder.record(without_group(item.nodeid), time.perf_counter() - begin)
                return result

        config.pluginmanager.register(Plugin())


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
