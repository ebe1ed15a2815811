"""The engine's process, and what becomes of either side when the other is killed, stopped, or says what is no frame."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import echo_service
import httpx
import psutil
import pytest
from echo_service import Echo
from served_process import SERVE, Served, served
from waiting import IDLE, has_ended, wait_until, wait_until_async

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.errors import EngineDead, StartupError
from quire.ipc.child_process import ChildProcess
from quire.ipc.engine_server import ClientConnection
from quire.ipc.frames import STEP_OUTPUTS, FrameCodec
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.process_client import ProcessEngineClient
from quire.ipc.thread_client import ThreadEngineClient
from quire.protocol.sampling_params import SamplingParams

TESTS = Path(__file__).parent.parent
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)


def apart(work: Callable[[AsyncLLM, ProcessEngineClient], Awaitable[None]], **echo: float) -> AsyncLLM:
    """Run a coroutine function with an AsyncLLM whose engine has a process of its own, then close it."""
    model = echo_service.built(Echo(**echo))  # type: ignore[arg-type]
    llm = echo_service.linked(model)
    link = llm.engine_client
    assert isinstance(link, ProcessEngineClient)
    try:
        asyncio.run(work(llm, link))  # type: ignore[arg-type]
    finally:
        llm.close()
    assert link.child.process.poll() is not None
    return llm


async def under_way(llm: AsyncLLM, count: int) -> list[asyncio.Future[None]]:
    """Return the readers of `count` requests, all of which have begun to answer."""
    begun = 0

    async def read(at: int) -> None:
        nonlocal begun
        first = True
        async for _ in await llm.submit([1, 2, at + 1], LONG):
            begun += first
            first = False

    readers = [asyncio.ensure_future(read(at)) for at in range(count)]
    await wait_until_async(lambda: begun == count, "all requests are answered")
    return readers


@pytest.mark.parametrize(
    ("sent", "seen", "told"),
    [
        (signal.SIGKILL, True, r"its process was ended by signal 9 \(SIGKILL\)"),
        (signal.SIGSTOP, True, r"stopped \(SIGSTOP\)"),
        (signal.SIGSTOP, False, "has not been heard of for 1 s and is given up"),
        (None, True, "sent what is no frame"),
    ],
    ids=["killed", "stopped", "hung", "garbled"],
)
def test_an_engine_that_fails_is_named_to_all(
    sent: signal.Signals | None, seen: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung process is one that is not stopped by a signal."""
    monkeypatch.setattr("quire.ipc.process_client.SILENCE_SECONDS", 0.5)
    if not seen:
        monkeypatch.setattr(ChildProcess, "is_stopped", lambda self: False)
        monkeypatch.setattr("quire.ipc.process_client.HANG_SECONDS", 1.0)

    async def work(llm: AsyncLLM, link: ProcessEngineClient) -> None:
        died = asyncio.Event()
        llm.set_death_callback(died.set)
        readers = await under_way(llm, 3)
        began = time.monotonic()
        if sent is None:
            link._frames._buffer += b"\xff" * 12  # before what comes next
        else:
            link.child.process.send_signal(sent)
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert time.monotonic() - began < 15  # requests last 20 s
        assert [type(end) for end in ends] == [EngineDead] * 3
        assert re.search(told, str(ends[0]))
        assert died.is_set()
        assert not llm.heartbeat().alive
        with pytest.raises(EngineDead):
            await llm.submit([1], LONG)

    apart(work, pause=0.1)


def test_a_silent_engine_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not stopped may only be busy: /health reports it, and requests go on when it is back."""
    monkeypatch.setattr(ChildProcess, "is_stopped", lambda self: False)
    monkeypatch.setattr("quire.ipc.process_client.SILENCE_SECONDS", 1.0)

    async def work(llm: AsyncLLM, link: ProcessEngineClient) -> None:
        [reader] = await under_way(llm, 1)
        link.child.process.send_signal(signal.SIGSTOP)
        await wait_until_async(lambda: llm.heartbeat().stalled, "the engine is silent")
        assert "not been heard of for 1 s" in llm.heartbeat().why
        link.child.process.send_signal(signal.SIGCONT)
        await reader
        await wait_until_async(lambda: not llm.heartbeat().stalled, "the engine is heard of again")
        assert llm.heartbeat().alive

    apart(work, pause=0.005)


def test_an_engine_in_a_dead_ones_place_knows_none_of_its_ids() -> None:
    llm, again = AsyncLLM.of(echo_service.built(Echo(fail_at=5))), echo_service.built()  # type: ignore[arg-type]

    async def work() -> None:
        with pytest.raises(EngineDead):
            async for _ in await llm.submit([1], LONG, request_id="mine"):
                pass
        llm.connect(ThreadEngineClient(again.engine, llm.engine_client.ready))
        async for _ in await llm.submit([1], SamplingParams(max_tokens=2), request_id="mine"):
            pass

    asyncio.run(work())
    assert llm.close()


def test_closing_ends_the_process_at_once() -> None:
    async def work(llm: AsyncLLM, link: ProcessEngineClient) -> None:
        readers = await under_way(llm, 2)
        began = time.monotonic()
        assert llm.close()
        assert time.monotonic() - began < 15  # requests last 20 s
        assert link.child.process.returncode == 0
        for reader in readers:
            with pytest.raises(EngineDead, match="closed"):
                await reader

    apart(work, pause=0.1)


def test_a_front_that_leaves_without_a_word_ends_the_engine() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import asyncio, os, signal, echo_service
from quire.protocol.sampling_params import SamplingParams
llm = echo_service.linked(echo_service.built(echo_service.Echo(pause=0.05)))
async def work():
    async for _ in await llm.submit([1], SamplingParams(max_tokens=200, ignore_eos=True)):
        print(llm.engine_client.child.process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(work())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: has_ended(int(done.stdout)), "the engine's process has ended")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "version: 71"),
        (FrameCodec().encode(STEP_OUTPUTS, b""), "is not a kind that clients send"),
    ],
)
def test_what_is_no_frame_closes_the_connection(data: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    host = Mock()
    with ours, theirs:
        reader = threading.Thread(target=ClientConnection(3, theirs).serve, args=(host, None))
        reader.start()
        ours.sendall(data)
        reader.join(30)
        assert ours.recv(100) == b""
    assert "client 3 is disconnected: " in caplog.text
    assert why in caplog.text
    host.enqueue.assert_called_once()  # that it left


@pytest.mark.parametrize(
    ("more", "told"),
    [(["FOLDER"], "config.json"), (["--attention", "triton"], "--attention is triton, which needs a GPU")],
    ids=["model", "flag"],
)
def test_a_start_that_fails_says_why(more: list[str], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--engine-process", "on"]
    command += [str(tmp_path) if word == "FOLDER" else word for word in more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_is_called_off_before_it_starts_is_not_waited_for() -> None:
    """As by a signal during the wait for the end of the dead process; a new one would load for minutes."""
    first = ProcessEngineClient(ChildProcess(1, IDLE))
    first.close(0.0)
    first.cancel_replacement()
    began = time.monotonic()
    with pytest.raises(StartupError, match="replacement was cancelled"):
        first.start_replacement()
    assert time.monotonic() - began < 10
    assert first._replacement.child.has_exited()


def test_a_program_that_ends_at_start_is_named() -> None:
    """So is one that sends bytes that are no frame."""
    garbling = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'x' * 99)"
    for program, said in (
        ("import os; os._exit(7)", "the engine's process ended with status 7 at start"),
        (garbling, "sent what is no frame at start: version: 120"),
    ):
        link = ProcessEngineClient(ChildProcess(1, ("-c", program)))
        with pytest.raises(StartupError, match=said):
            link.wait_ready()
        link.close(1.0)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ValueError('no such kernel\\nbelow')", "ValueError: no such kernel. What it wrote"),
        ("SystemExit(3)", "SystemExit: 3. What it wrote"),
        ("AssertionError()", "AssertionError. What it wrote"),
    ],
)
def test_what_nobody_foresaw_at_start_is_named(raised: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = f"from quire.startup.engine_program import main\ndef build(hello):\n    raise {raised}\nmain(build)"
    link = ProcessEngineClient(ChildProcess(1, ("-c", program)))
    link.send_init(EngineInitMessage(EngineConfig(), (), 60.0, False, logging.WARNING))
    with pytest.raises(StartupError, match=f"the engine's process failed at start: {said}"):
        link.wait_ready()
    link.close(5.0)
    error = capfd.readouterr().err
    assert "the engine can't be built" in error
    assert "Traceback" in error
    assert raised.partition("(")[0] in error


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[Served, psutil.Process]]:
    """`quire serve` with the bundled model, and its engine's process."""
    more = ("--engine-process", "on", *flags)
    with served(folder, *more, env={"QUIRE_API_KEY": ""}, command=SERVE) as server:
        server.ready()
        yield server, engine_of(server)


def engine_of(server: Served) -> psutil.Process:
    return next(one for one in server.processes() if "quire.startup.engine_program" in one.cmdline())


def test_a_server_drains_through_both(tmp_path: Path) -> None:
    """The frontend's process has no torch."""
    with serving(tmp_path) as (server, engine):
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert "torch" not in Path(f"/proc/{server.child.pid}/maps").read_text()
        assert "torch" in Path(f"/proc/{engine.pid}/maps").read_text()
        assert server.process.memory_info().rss < 120_000 * 1024
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for part in (engine, server.process):  # as a service manager does, which asks all of a group
                part.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.child.wait(60) == 0, server.text
    assert has_ended(engine.pid)


def test_an_engine_is_started_again_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("admin-admin-admin-admin\n")
    keys.chmod(0o600)
    flags = ("--on-engine-death", "restart", "--prefix-tokens", "64", "--admin-key-file", str(keys))
    with serving(tmp_path, *flags) as (server, engine):
        url = server.url
        headers = {"Authorization": "Bearer admin-admin-admin-admin"}
        prefix = {"name": "rules", "text": "Once upon a time"}
        assert httpx.post(f"{url}/v1/prefixes", json=prefix, headers=headers, timeout=60).status_code == 200
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        before = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        engine.kill()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, "the server knows")

        def back() -> bool:
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code in (200, 503)
            return httpx.get(f"{url}/health").status_code == 200

        wait_until(back, "the engine is back", 80)
        after = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert after == before
        listed = httpx.get(f"{url}/v1/prefixes", headers=headers).json()["data"]
        assert [(one["id"], one["status"]) for one in listed] == [("rules", "ready")]
        engine_of(server).kill()
        assert server.child.wait(60) == 1
        assert server.text.count("it is started again, once") == 1
