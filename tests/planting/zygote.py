"""A pytest plugin that collects tests once, then runs some of them for each change of the source, in a fork.

It reads requests from the file descriptor TEST_ZYGOTE, one JSON object a line, and answers each with one line:
`{"sources": {path: source}, "planted": file, "tests": [node id], "seconds": limit}` with `{"outcome": .., "text": ..}`.
Outcomes: "passed"; "failed", with the report of the first test that fails; "timeout"; "crashed"; "module", where the
change is outside functions, so that it takes a fresh process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

FAILED: list[pytest.TestReport] = []
OPTIMIZED = 1  # set in co_flags of functions, not of modules and classes


def parts(code: CodeType) -> list[CodeType]:
    """Return the code and all code nested in it, in order."""
    return [code, *(part for const in code.co_consts if isinstance(const, CodeType) for part in parts(const))]


def shape(code: CodeType, deep: bool) -> tuple[Any, ...]:
    """Return what makes code behave as it does, lines aside."""
    consts = [
        shape(const, deep) if isinstance(const, CodeType) else (type(const), const)
        for const in code.co_consts
        if deep or not isinstance(const, CodeType)
    ]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable, tuple(consts))


def replace(path: str, source: str) -> bool:
    """Give the functions of an imported module the code of another source; return False if that is not possible."""
    old = parts(compile(Path(path).read_text(), path, "exec", dont_inherit=True))
    new = parts(compile(source, path, "exec", dont_inherit=True))
    if [code.co_qualname for code in old] != [code.co_qualname for code in new]:
        return False
    changed = {}
    for before, after in zip(old, new):
        if not before.co_flags & OPTIMIZED:
            if shape(before, False) != shape(after, False):
                return False
        elif before.co_freevars != after.co_freevars:
            return False  # a function's closure cannot be changed
        elif shape(before, True) != shape(after, True):
            changed[before.co_qualname, before.co_firstlineno] = after
    found = set()
    gc.unfreeze()  # get_objects leaves out what is frozen
    objects = gc.get_objects()
    gc.freeze()
    for function in objects:
        if type(function) is FunctionType and function.__code__.co_filename == path:
            key = function.__code__.co_qualname, function.__code__.co_firstlineno
            if key in changed:
                function.__code__ = changed[key]
                found.add(key)
    outer = {key for key in changed if "<locals>" not in key[0]}
    return bool(changed) and outer <= found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the reports of a fork's tests that fail."""
    if report.failed:
        FAILED.append(report)


def work(session: pytest.Session, request: dict[str, Any], items: list[pytest.Item], answer: Path) -> None:
    """In the fork: make the change, run the tests until one fails, and write the outcome."""
    os.setsid()
    if request["sources"]:
        os.environ["TEST_PLANTED"] = request["planted"]
    if not all(replace(path, source) for path, source in request["sources"].items()):
        answer.write_text(json.dumps({"outcome": "module", "text": ""}))
        return
    for item, after in zip(items, [*items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if FAILED:
            text = f"{item.nodeid}\n{FAILED[0].longreprtext[-20_000:]}"
            answer.write_text(json.dumps({"outcome": "failed", "text": text}))
            return
    answer.write_text(json.dumps({"outcome": "passed", "text": ""}))


def ran(session: pytest.Session, request: dict[str, Any], items: list[pytest.Item]) -> dict[str, Any]:
    """Fork, and return what the fork wrote."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        pid = os.fork()
        if not pid:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                work(session, request, items, answer)
            except BaseException:
                answer.write_text(json.dumps({"outcome": "crashed", "text": traceback.format_exc()}))
            finally:
                os._exit(0)
        end = time.monotonic() + request["seconds"]
        watch = os.pidfd_open(pid)
        ended = bool(select.select([watch], [], [], max(0.0, end - time.monotonic()))[0])
        os.close(watch)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text())
            return result
        return {"outcome": "crashed" if ended else "timeout", "text": ""}


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    items = {item.nodeid: item for item in session.items}
    with socket.socket(fileno=int(os.environ["TEST_ZYGOTE"])) as link, link.makefile("rw") as stream:
        stream.write(json.dumps({"tests": len(items)}) + "\n")
        stream.flush()
        for line in stream:
            request = json.loads(line)
            missing = [name for name in request["tests"] if name not in items]
            if missing:
                result = {"outcome": "missing", "text": f"no such tests: {missing}"}
            else:
                result = ran(session, request, [items[name] for name in request["tests"]])
            stream.write(json.dumps(result) + "\n")
            stream.flush()
    return True
