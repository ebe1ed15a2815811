"""Kernels are compiled in processes of their own, and the process that needs them finds them on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.triton import compile_process
from quire.startup import build, early


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


def test_a_process_that_stands_still_is_ended(
    compiler: compile_process.KernelCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing more can be written to it."""
    monkeypatch.setattr(compile_process, "ANSWER_SECONDS", 0.5)
    process = compiler._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert not compiler.request("os", "system", "x" * 300_000, [])
    assert process.wait(10) == -signal.SIGKILL


SERVER = """
import os, sys, time
from pathlib import Path
from quire.kernels.triton import compile_process

def compile(folder, name, *_):
    os.read(0, 1)  # nothing of the server's input
    if name == "lost":
        os._exit(9)
    if name == "failing":
        raise ValueError
    (Path(folder) / name).write_text(str(os.getpid()))
    time.sleep(float(name.startswith("slow")))

compile_process._compile = compile
compile_process._build_launcher = lambda types: compile(*types)
compile_process.Server(2, compile_process.STDOUT).run()
"""


def test_a_process_compiles_one_kernel_after_another(tmp_path: Path) -> None:
    """Also after one that fails; a process that is lost is replaced; and all end with the server."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None

        def answers(*names: str, launcher: str = "") -> dict[int, int]:
            assert server.stdin is not None
            assert server.stdout is not None
            types = [str(tmp_path), launcher] * bool(launcher)
            for number, name in enumerate(names, 1):
                server.stdin.write(json.dumps([number, types, str(tmp_path), name]).encode() + b"\n")
            return dict(sorted(tuple(map(int, server.stdout.readline().split())) for _ in names))  # type: ignore[misc]

        def pids() -> dict[str, str]:
            return {file.name: file.read_text() for file in tmp_path.iterdir()}

        assert answers("one") == {1: 1}
        assert answers("failing") == {1: 0}
        assert answers("two") == {1: 1}
        assert len(set(pids().values())) == 1
        assert answers("slow 1", "slow 2", "slow 3", "long") == dict.fromkeys(range(1, 5), 1)
        assert len(set(pids().values())) == 2, "at most two"
        before = set(pids().values())
        assert answers("lost", "lost", "lost", "slow 4", "slow 5") == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
        assert {pids()["slow 4"], pids()["slow 5"]}.isdisjoint(before), "others took the place of two"
        assert answers("slow 6", "slow 7", launcher="launcher") == {1: 1, 2: 1}
        assert "launcher" in pids()
        (tmp_path / "launcher").unlink()
        assert answers("three", launcher="launcher") == {1: 1}
        assert "launcher" not in pids(), "it is built once"
        left = {pid for pid in pids().values() if Path(f"/proc/{pid}").exists()}
        assert len(left) == 2
        server.kill()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in left):
            return
        time.sleep(0.1)
    raise AssertionError("a process outlived the server")


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
    monkeypatch.setattr(early, "GPU_DEVICE_FILES", (__file__,))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(40)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(compile_process, "KernelCompiler", StandIn)
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    return StandIn.made


def test_how_many_are_compiled_at_once(made: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 4, 13, 14):
        early.start_kernel_compiler(EngineConfig(), ranks)
        compile_process.stop_compiler()
    early.start_kernel_compiler(EngineConfig(device="cpu"))
    early.start_kernel_compiler(EngineConfig(warm_up=False))
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        early.start_kernel_compiler(EngineConfig())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(early, "GPU_DEVICE_FILES", ())
    early.start_kernel_compiler(EngineConfig())
    assert [one.processes for one in made] == [16, 10, 3], "with fewer cores none is started"


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
