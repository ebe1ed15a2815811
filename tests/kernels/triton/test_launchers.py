"""Modules that Python keeps in one object are nevertheless loaded by several threads at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton.runtime.build as build

from quire.kernels.triton.compile_locks import serialize_module_loading
from quire.worker import warmup

ONE = ModuleType("launcher")
WANTED = [str(number) for number in range(40)]


def shared(name: str, path: str) -> ModuleType:
    """As Python loads a module of this name once more: what is in it goes into the one object, and threads change."""
    ONE.launch = path
    time.sleep(0.001)
    return ONE


def launched(path: str) -> str:
    """What this thread finds in the module that it loaded."""
    module = build._load_module_from_path("launcher", path)
    time.sleep(0.001)
    return module.launch


def test_every_thread_gets_what_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", shared)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(launched, WANTED)) != WANTED, "without care they get one another's"
        serialize_module_loading()
        assert list(pool.map(launched, WANTED)) == WANTED


def test_a_rehearsal_takes_care(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", shared)
    monkeypatch.setattr(warmup, "_run_task", lambda device, task: task())
    monkeypatch.setattr(warmup.os, "cpu_count", lambda: 8)
    found: list[str] = []
    tasks = [lambda path=path: found.append(launched(path)) for path in WANTED]
    monkeypatch.setattr(warmup, "_compile_tasks", lambda runner: tasks)
    runner: Any = SimpleNamespace(device=torch.device("cpu"), exchange=None)
    warmup._compile_kernels(runner)
    assert sorted(found) == sorted(WANTED)
    once = build._load_module_from_path
    serialize_module_loading()
    assert build._load_module_from_path is once


def test_versions_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_load_module_from_path")
    serialize_module_loading()
    assert not hasattr(build, "_load_module_from_path")
