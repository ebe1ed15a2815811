"""Programs that import torch in a thread while they import their own modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import quire.bench
import quire.cli
from quire.startup import engine_program, torch_import

PROGRAM = """
import sys
from quire.startup.torch_import import is_cuda_initialized, start_torch_import
light = len(sys.modules)
start_torch_import()
states = [is_cuda_initialized()]
import quire.startup.build, torch
print(light, *states, is_cuda_initialized(), torch.ones(2).sum().item())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", program]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)


def test_torch_is_imported_in_a_thread_beside_quire() -> None:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    light, before, after, total = done.stdout.split()
    assert int(light) < 150, "the thread starts before most modules are imported"
    assert (before, after, total) == ("False", "False", "2.0")


def test_a_program_that_fails_meanwhile_ends_as_it_would_have() -> None:
    done = run("import sys; from quire.startup.torch_import import *; start_torch_import(); sys.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_torch_that_can_not_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(name: str) -> None:
        raise OSError(f"{name} is broken")

    monkeypatch.setattr(torch_import, "import_module", failing)
    monkeypatch.setattr(torch_import, "find_spec", lambda name: None)
    (event := threading.Event()).set()
    torch_import._import_torch(event)
    assert "torch can't be imported" in caplog.text
    assert "torch is broken" in caplog.text


IMPORTS = """
import json, sys
from importlib import import_module
from quire.startup.torch_import import SHARED_PACKAGES
def imported(names):
    before = set(sys.modules)
    for name in names:
        import_module(name)
    return sorted(set(sys.modules) - before)
first, main = json.loads(sys.argv[1])
imported([*first, *SHARED_PACKAGES])
print(json.dumps(imported(main)))
"""
PATHS = [  # what is imported before the thread starts, and meanwhile
    (["quire.startup.engine_program"], ["quire.ipc.engine_server", "quire.startup.build"]),
    (["quire.cli"], ["quire.cli.generate", "quire.cli.chat", "quire.llm", "quire.startup.build"]),
    (["quire.cli"], ["quire.cli.run_batch", "quire.async_llm", "quire.server.app", "quire.startup.build"]),
    (["quire.cli", "quire.bench"], ["quire.bench.runs", "quire.bench.preemption", "quire.startup.build"]),
]


def imported(first: list[str], main: list[str]) -> set[str]:
    arguments = [sys.executable, "-c", IMPORTS, json.dumps([first, main])]
    return set(json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout))


@pytest.mark.parametrize(("first", "main"), PATHS)
def test_no_package_is_half_imported(first: list[str], main: list[str]) -> None:
    """If both threads import a package, it does not import modules of its own that both import."""
    ours = imported(first, main)
    assert "torch" not in ours
    shared = ours & imported(first, ["torch"])
    packages = {name.rpartition(".")[0] for name in shared} & shared
    for package in sorted(packages):
        own = {name for name in imported([], [package]) & shared if name.startswith(f"{package}.")}
        assert not own, f"{package} must be one of SHARED_PACKAGES: it imports {sorted(own)}"


def test_the_libraries_are_those_that_torch_loads_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[bytes, int]] = []
    library = SimpleNamespace(dlopen=SimpleNamespace())
    library.dlopen = type("Function", (), {"__call__": lambda self, *arguments: calls.append(arguments)})()
    monkeypatch.setattr(torch_import.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch_import, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    torch_import._load_libraries()
    assert calls == [], "there is none"
    (tmp_path / "lib").mkdir()
    (path := tmp_path / "lib" / "libtorch_global_deps.so").touch()
    torch_import._load_libraries()
    assert calls == [(os.fsencode(path), os.RTLD_NOW | os.RTLD_GLOBAL)]


def test_commands_with_an_engine_of_their_own_start_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    for module in (quire.cli, quire.bench):
        monkeypatch.setattr(module, "start_torch_import", lambda: started.append("import"))
    monkeypatch.setattr(quire.cli, "start_gpu_work", lambda config: started.append(config.device))
    monkeypatch.setattr(
        quire.cli, "import_module", lambda name: SimpleNamespace(generate=lambda args: 0, plan=lambda args: 0)
    )
    for arguments, expected in (
        (["generate", "--device", "cpu"], 2), (["plan"], 0), (["bench", "list"], 0),
        (["bench", "kernels", "--help"], 0),
        (["bench", "latency", "--help"], 0), (["bench", "serve", "--url", "http://x", "--no-such"], 0),
        (["bench", "latency", "--no-such-flag"], 1),
    ):  # fmt: skip
        started.clear()
        with suppress(SystemExit):
            quire.cli.main(arguments) if arguments[0] != "bench" else quire.bench.main(arguments[1:])
        assert started == ["import", "cpu"][:expected], arguments


def test_the_engine_s_process_starts_the_import_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(engine_program, "start_torch_import", lambda: seen.append(threading.active_count()))
    monkeypatch.setattr(engine_program.gc, "disable", lambda: None)
    monkeypatch.setattr(engine_program.sys, "argv", ["engine"])
    for build in (None, lambda hello: None):
        monkeypatch.setattr("quire.ipc.engine_server.serve_clients", lambda build, connections: 5)
        monkeypatch.setattr("quire.ipc.child_process.exit_now", lambda status: None)
        engine_program.main(build)  # type: ignore[arg-type]
    assert len(seen) == 1, "not for a test's engine"
    light = run("import quire.startup.engine_program, sys; print(len(sys.modules))")
    assert int(light.stdout) < 150
