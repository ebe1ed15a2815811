"""Kernels are compiled in processes of their own, and the process that needs them finds them on disk."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from waiting import wait_until

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.triton import compile_process
from quire.startup import build, loader

PR_SET_CHILD_SUBREAPER = 36


def test_compiled_there_and_found_here(tmp_path: Path) -> None:
    """For a GPU that isn't here; and what is refused, and what happens if the process is lost."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for.py")), "90", "232448", "132", "1", "apart"],
        capture_output=True, text=True, env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["refused"] == [False] * 5
    (compiled, read), requests = result["at once"]
    assert (compiled, read, requests) == (0, 4, 4), "four kernels, which four threads need, once each and not here"
    assert result["dead"] == [1, 0], "compiled here"
    (compiled, read), requests = result["later"]
    assert (compiled, read) == (1, 0)
    assert requests <= 5 + 4 + 1, "a process that is known to be lost is asked nothing"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[compile_process.KernelCompiler]:
    """A compiler whose process prints lines first, and whose sys.path has what isn't a folder's name."""
    (tmp_path / "sitecustomize.py").write_text("print('hello'); print('1 x'); print('77 1')")
    monkeypatch.setattr(sys, "path", [Path(), "", str(tmp_path), *sys.path])
    compiler = compile_process.KernelCompiler(1)
    yield compiler
    compiler.close()


def test_lines_that_are_no_answer_are_skipped(compiler: compile_process.KernelCompiler) -> None:
    assert not compiler.request("os", "system", "", [])
    assert not compiler.request("os", "system", "", [])
    assert compiler._process is not None, "it still answers"


@pytest.mark.parametrize("function", ["socket.socketpair", "subprocess.Popen"])
def test_a_process_that_cannot_be_started_compiles_nothing(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with too many open files."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(function, fail)
    compiler = compile_process.KernelCompiler(1)
    assert not compiler.request("os", "system", "", [])
    compiler.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_process_that_stands_still_is_ended(
    compiler: compile_process.KernelCompiler, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Also if nothing more can be sent to it."""
    monkeypatch.setattr(compile_process, "ANSWER_SECONDS", 0.5)
    process = compiler._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    if is_full:
        assert compiler._requests is not None
        compiler._requests.settimeout(0.1)
        with suppress(TimeoutError):
            while True:
                compiler._requests.send(b"x" * 100_000)
    assert not compiler.request("os", "system", "", [])
    assert process.wait(10) == -signal.SIGKILL


SERVER = """
import os, sys, time
from pathlib import Path
from quire.kernels.triton import compile_process

def compile(folder, name, *_):
    if name == "lost":
        os._exit(9)
    if name == "failing":
        raise ValueError
    (Path(folder) / name).write_text(str(os.getpid()))
    time.sleep(float(name.startswith("slow")))

compile_process._compile = compile
compile_process._build_launcher = lambda types: compile(*types)
compile_process.serve(2, compile_process.STDIN, compile_process.STDOUT)
"""


def test_a_process_compiles_one_kernel_after_another(tmp_path: Path) -> None:
    """Also after one that fails. If one process dies, all end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        subprocess.Popen([sys.executable, "-c", SERVER], stdin=theirs.fileno(), stdout=subprocess.PIPE) as server,
    ):
        theirs.close()
        assert server.stdout is not None

        def answers(*names: str) -> dict[int, int]:
            assert server.stdout is not None
            for number, name in enumerate(names, 1):
                ours.send(json.dumps([number, str(tmp_path), name]).encode())
            lines = [server.stdout.readline().split() for _ in names]
            return {int(number): int(compiled) for number, compiled in lines}

        ours.send(json.dumps([0, [str(tmp_path), "launcher"]]).encode())
        assert answers("one", "failing", "two", "three") == {1: 1, 2: 0, 3: 1, 4: 1}, "a launcher has no answer"
        assert answers("slow 1", "slow 2", "four") == {1: 1, 2: 1, 3: 1}
        pids = {file.name: file.read_text() for file in tmp_path.iterdir()}
        assert len(pids) == 7
        assert len(set(pids.values())) == 2
        ours.send(json.dumps([1, str(tmp_path), "lost"]).encode())
        assert server.stdout.read() == b"", "closed by all"
        assert server.wait(10) == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_no_process_is_left_as_a_zombie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_lost: bool) -> None:
    """If this one, like the process 1 of a container, gets those whose parent has ended."""
    prctl = ctypes.CDLL(None).prctl
    monkeypatch.setattr(compile_process, "PROGRAM", SERVER)
    compiler = compile_process.KernelCompiler(2)
    server = compiler._process
    assert server is not None
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        assert compiler.request(str(tmp_path), "one", "", [])
        wait_until(lambda: len(psutil.Process(server.pid).children()) == 2, "both are forked")
        children = psutil.Process(server.pid).children()
        if is_lost:
            assert not compiler.request(str(tmp_path), "lost", "", [])
        compiler.close()
        for child in children:
            with pytest.raises(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_launcher_is_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first kernel that needs it."""
    sent: list[Any] = []
    compiler: Any = compile_process.KernelCompiler(1)

    def send(request: bytes) -> None:
        number, *arguments = json.loads(request)
        sent.append((number, arguments[0]))
        if number:
            compiler._waiting.pop(number).set_result(True)

    monkeypatch.setattr(compiler, "_requests", SimpleNamespace(send=send, close=compiler._requests.close))
    for types in (["i32"], ["i32"], [], ["i32", "*fp16"]):
        assert compiler.request("module", "kernel", "", [], types)
    compiler.close()
    assert sent == [(0, ["i32"]), (1, "module"), (2, "module"), (3, "module"), (0, ["i32", "*fp16"]), (4, "module")]
    assert not compiler.request("module", "kernel", "", [])


class StandIn:
    """In place of a KernelCompiler."""

    made: list[StandIn]

    def __init__(self, processes: int) -> None:
        self.processes, self.closed = processes, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """What is started on a machine with a GPU and 40 cores."""
    monkeypatch.setattr(loader, "GPU_DEVICE_FILES", (__file__,))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(40)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(compile_process, "KernelCompiler", StandIn)
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    return StandIn.made


def test_how_many_are_compiled_at_once(made: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 4, 13, 14):
        loader.start_kernel_compiler(EngineConfig(), ranks)
        compile_process.stop_compiler()
    loader.start_kernel_compiler(EngineConfig(device="cpu"))
    loader.start_kernel_compiler(EngineConfig(warm_up=False))
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        loader.start_kernel_compiler(EngineConfig())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(loader, "GPU_DEVICE_FILES", ())
    loader.start_kernel_compiler(EngineConfig())
    assert [one.processes for one in made] == [16, 10, 3], "with fewer cores none is started"


def test_two_engines_that_start_at_once_have_one(made: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def make(processes: int) -> StandIn:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)
        return StandIn(processes)

    monkeypatch.setattr(compile_process, "KernelCompiler", make)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_process.start_compiler, (3, 3)))
    compile_process.stop_compiler()
    assert [one.closed for one in made] == [True], "another would never end"


@pytest.mark.parametrize("error", [None, StartupError("no")])
def test_it_ends_with_the_start(
    made: list[StandIn], monkeypatch: pytest.MonkeyPatch, error: StartupError | None
) -> None:
    running: list[Any] = []

    def build_engine(*_: Any) -> tuple[None, None, tuple[str, ...]]:
        running.append(compile_process.running_compiler())
        if error is not None:
            raise error
        return None, None, ()

    monkeypatch.setattr(build, "build_engine", build_engine)
    with pytest.raises(StartupError) if error is not None else nullcontext():
        build.build(EngineConfig(skip_tokenizer_init=True))
    assert running == made
    assert [one.closed for one in made] == [True]
