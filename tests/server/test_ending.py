"""What ends a request, the engine or the process: named in the log, told to clients, and never without a limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import echo_service
import httpx
import pytest
from echo_service import Echo, Running
from fastapi import Request
from starlette.responses import Response
from test_process import TESTS, Process, ask, in_background, process
from waiting import wait_until

from quire.async_llm import AsyncLLM
from quire.errors import EngineDead
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepResult

MORE = """
import quire.cli.serve, quire.server.app, quire.server.shutdown
from quire.async_llm import AsyncLLM

# Shorter limits: for the last responses, between two looks at the engine, for the engine to end, and for a step.
quire.server.shutdown.LAST_RESPONSES_SECONDS, quire.server.shutdown.STALL_CHECK_SECONDS = 1, 0.1
AsyncLLM.close.__defaults__ = (1.0,)
run = quire.cli.serve.run
from dataclasses import replace
quire.cli.serve.run = lambda config, options, say: run(config, replace(options, stall_after=0.5), say)

class Echo(Echo):
    def collect(self, ticket):
        if self.collected == 3:
            {fault}
        return super().collect(ticket)

async def leave():
    raise SystemExit(0)
async def at_once(self):
    await leave()
async def in_a_task(self):
    await asyncio.create_task(leave())
async def in_a_thread(self):
    await asyncio.to_thread(sys.exit, 0)
quire.server.app.Service.version = {version}
"""


class Panic(BaseException):
    """As pyo3's PanicException: not an Exception."""


def faulty(fault: str, version: str = "at_once") -> contextlib.AbstractContextManager[Process]:
    """A server whose fourth step does `fault`, and whose /version raises SystemExit somewhere."""
    return process("--shutdown-timeout", "0.5", pause=0, more=MORE.format(fault=fault, version=version))


def well(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def test_a_step_that_hangs() -> None:
    """Stacks in the log once, health 503, and after SIGTERM the process ends with 1, though the thread doesn't."""
    with faulty("time.sleep(1000)") as server:
        asking, answers = in_background(server.url, 50)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "the stall is noticed")
        time.sleep(1)  # in which a stall that is reported more than once would be
        server.child.send_signal(signal.SIGTERM)
        status, error = server.end(45)
        asking.join()
    assert status == 1, error
    assert error.count("the engine stalled: step 4 has lasted") == 1
    stalled, _, left = error.partition("shutting down")
    assert re.search(r"quire-engine:\n(  .*\n)+.* in step\n(  .*\n)*.* in collect\n", stalled), stalled
    assert "the engine's thread hangs, and the process ends without it" in left
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server is shutting down"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise AssertionError", "AssertionError"),
        ("raise type('PanicException', (BaseException,), {})('slice')", "PanicException: slice"),
    ],
    ids=["SystemExit", "KeyboardInterrupt", "a silent one", "a panic"],
)
def test_whoever_ends_the_engine_is_named(fault: str, name: str) -> None:
    with faulty(fault) as server:
        answer = ask(server.url, 50)
        assert answer.status_code == 503
        assert "engine stopped" in answer.json()["error"]["message"]
        assert not well(server.url)
        status, error = server.end()
    assert status == 1, error
    assert f"the engine stopped: {name}" in error


def test_a_thread_of_a_route_that_hangs() -> None:
    """A template, say. asyncio waits for it without a limit at the end; the process ends nevertheless."""
    program = """
import asyncio, sys, time
from quire.server.shutdown import arm_exit_timer
async def main():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    arm_exit_timer(1.0)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in shutdown_default_executor" in done.stderr or "_do_shutdown" in done.stderr


@pytest.mark.parametrize("root", ["", "/api"])
def test_an_exception_is_logged_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is raised, and whether or not it is an exception, it is a 500 in the same shape."""

    def panic() -> Any:
        raise Panic("index out of bounds")

    def cancel() -> Any:
        raise asyncio.CancelledError

    async def panicking() -> None:
        panic()

    works: list[tuple[Callable[[], Any], type]] = [
        (panic, Panic), (partial(asyncio.to_thread, panic), Panic),
        (lambda: asyncio.ensure_future(panicking()), Panic), (lambda: 1 // 0, ZeroDivisionError),
        (cancel, RuntimeError),
    ]  # fmt: skip

    class Half(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise Panic

    async def half(request: Request) -> Response:
        return Half()

    with echo_service.serving(root_path=root) as running:
        for at, (work, kind) in enumerate(works):

            async def route(request: Request, work: Any = work) -> Response:
                await work()
                raise AssertionError("it was meant to be raised")

            running.app.add_route(f"/{at}", route)
            answer = running.http.get(f"/{at}")
            error = answer.json()["error"]
            assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
            assert (error["message"], error["type"]) == ("internal error", "InternalServerError")
            assert running.http.get("/health").status_code == 200
            assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [kind]
            caplog.clear()
        running.app.add_route("/half", half)
        with pytest.raises(httpx.RemoteProtocolError):  # an answer that has begun is cut
            running.http.get("/half")


@pytest.mark.parametrize(
    ("method", "path", "code", "allow"),
    [
        ("GET", "/nothing", 404, None),
        ("PUT", "/health", 405, "GET, HEAD"),
        ("PUT", "/ping", 405, "GET, HEAD, POST"),
        ("BREW", "/v1/completions", 405, "POST"),
    ],
)
def test_what_libraries_answer(echo: Running, method: str, path: str, code: int, allow: str | None) -> None:
    answer = echo.http.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (code, allow)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("where", ["at_once", "in_a_task", "in_a_thread"])
def test_a_route_that_exits_ends_the_process_with_1(where: str) -> None:
    with faulty("pass", where) as server:
        with contextlib.suppress(httpx.TransportError):  # in a task it ends the event loop at once
            assert httpx.get(f"{server.url}/version").status_code in (500, 503)
        status, error = server.end()
    assert status == 1, error
    assert re.search("SystemExit( in a request ends| ended) the server", error), error


def test_closing_says_whether_the_thread_ended() -> None:
    gate = threading.Event()

    class Stuck(Echo):
        def collect(self, ticket: int) -> StepResult:
            assert gate.wait(60)
            return super().collect(ticket)

    async def work(llm: AsyncLLM) -> None:
        stream = await llm.submit([1, 2], SamplingParams(max_tokens=2))
        began = time.monotonic()
        assert not llm.close(timeout=0.2)
        assert time.monotonic() - began < 30
        gate.set()
        assert llm.close()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass

    asyncio.run(work(AsyncLLM.of(echo_service.built(Stuck()))))  # type: ignore[arg-type]


def test_those_behind_what_ends_the_engine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that were taken together with it, not only later ones."""
    llm = AsyncLLM.of(echo_service.built())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=2)

    def fail(*args: object, **kwargs: object) -> None:
        raise Panic("in a library")

    async def work() -> None:
        monkeypatch.setattr(llm.engine, "add_all", fail)
        with llm.engine_client._engine_loop._wake:  # type: ignore[attr-defined]  # so that the thread takes all of them at once
            asking = [asyncio.ensure_future(llm.submit([1], params)) for _ in range(3)]
            asking.append(asyncio.ensure_future(llm.prefixes()))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        found = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
        assert [type(error) for error in found] == [EngineDead] * 4
        assert "Panic: in a library" in str(found[0])

    asyncio.run(work())
    assert isinstance(llm.error, Panic)
    assert not llm.heartbeat().alive
    assert llm.close()


def test_a_program_that_forgets_to_close_ends() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import echo_service
from quire.async_llm import AsyncLLM
llm = AsyncLLM.of(echo_service.built())
"""
    done = subprocess.run([sys.executable, "-c", program, str(TESTS)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_of_the_loop_are_bounded_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from quire.server.shutdown import LoopErrorLogger

    async def work() -> None:
        loop = asyncio.get_running_loop()
        LoopErrorLogger(loop)
        for _ in range(100):
            loop.call_exception_handler({"message": "accept failed", "exception": OSError("too many open files")})

    with caplog.at_level(logging.ERROR):
        asyncio.run(work())
    assert caplog.text.count("accept failed") == 1
