"""Modules that Python keeps in one object are nevertheless loaded by several threads at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import triton.runtime.build as build

from quire.kernels.triton.loading import in_threads

ONE = ModuleType("launcher")


def shared(name: str, path: str) -> ModuleType:
    """As Python loads a module of this name once more: what is in it goes into the one object, and threads change."""
    ONE.launch = path
    time.sleep(0.001)
    return ONE


def launches() -> list[str]:
    """What each of many threads finds in the module that it loaded."""

    def load(path: str) -> str:
        module = build._load_module_from_path("launcher", path)
        time.sleep(0.001)
        return module.launch

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(load, map(str, range(40))))


def test_every_thread_gets_what_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", shared)
    wanted = [str(number) for number in range(40)]
    assert launches() != wanted, "without care they get one another's"
    with in_threads():
        assert launches() == wanted
    assert build._load_module_from_path is shared


def test_versions_without_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_load_module_from_path")
    with in_threads():
        assert not hasattr(build, "_load_module_from_path")
