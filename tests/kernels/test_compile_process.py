"""Kernels are compiled in processes of their own, and the process that needs them finds them on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.triton import compile_process
from quire.startup import build, loader


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
    monkeypatch.setattr(compile_process, "KernelCompiler", StandIn)
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    return StandIn.made


def test_how_many_are_compiled_at_once(made: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 4, 13, 14):
        loader.start_kernel_compiler(EngineConfig(), ranks)
        compile_process.stop_compiler()
    loader.start_kernel_compiler(EngineConfig(device="cpu"))
    loader.start_kernel_compiler(EngineConfig(warm_up=False))
    monkeypatch.setattr(loader, "GPU_DEVICE_FILES", ())
    loader.start_kernel_compiler(EngineConfig())
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
