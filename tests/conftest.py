"""Settings of all tests: hypothesis profiles (`HYPOTHESIS_PROFILE=soak pytest -m soak` runs the long ones), a share of
large grids, and Triton's interpreter where there is no GPU: it must be told before anything imports Triton, as
transformers does in parts."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings
from targets import gate_cases, left_out

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# httpx's default of 5 s is too short on a busy machine. This holds where a test sets no timeout.
with suppress(ModuleNotFoundError):  # `make test-gpu` runs without httpx
    import httpx

    httpx._config.DEFAULT_TIMEOUT_CONFIG.read = httpx._config.DEFAULT_TIMEOUT_CONFIG.connect = 60.0
    # Each client, and each httpx.get, would read all certificates that the system trusts.
    httpx._transports.default.create_ssl_context = cache(httpx._transports.default.create_ssl_context)

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=slow)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare pytest-timeout's setting where the plugin is not installed, since an unknown setting is an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds after which pytest-timeout ends a test")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of plugins that may not be installed, since an unknown mark is an error."""
    config.addinivalue_line("markers", "timeout(seconds): when pytest-timeout ends the test")
    config.addinivalue_line("markers", "xdist_group(name): tests that pytest-xdist runs in one worker")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which a run of the gate selects nothing: importing them takes long."""
    gate = config.getini("addopts")[-1] == config.option.markexpr and not torch.cuda.is_available()
    path = os.path.relpath(collection_path, config.rootpath)
    return True if gate and left_out(path + "/" * collection_path.is_dir()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect garbage only after the collection of tests, and then never again what it made: each pass takes 1 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the mark of its target: `soak`, `full`, or none for the gate. Of the cases of a test with the mark
    `share(n)` one in n is kept and the others are soak's; targets.py says which of the rest the gate leaves to `full`.
    The order is by a hash, so the same cases are chosen everywhere. On a GPU all cases run."""
    if torch.cuda.is_available():
        return
    functions = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if {"soak", "gpu", "full"}.isdisjoint(mark.name for mark in item.iter_markers()):
            functions[item.nodeid.split("[")[0]].append(item)
    for name, cases in functions.items():
        cases.sort(key=lambda item: crc32(item.name.encode()))
        share, kept = cases[0].get_closest_marker("share"), len(cases)
        if share:
            kept = -(-len(cases) // share.args[0])
        for item in cases[kept:]:
            item.add_marker(pytest.mark.soak)
        most = gate_cases(name)
        for item in [] if most is None else cases[:kept][most:]:
            item.add_marker(pytest.mark.full)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[Any, Any], object]]]:
    """Start ranks as threads, without kernels of our own, of which a process runs one at a time. Each function that a
    test appends to the list is called with the runner of every rank that is built, and its Shard."""
    from echo_ranks import ThreadRank

    import quire.distributed.remote_runner as remote
    from quire.kernels.cpu.library_loader import library
    from quire.startup.loader import build_rank_runner

    changes: list[Callable[[Any, Any], object]] = []

    def build(message: Any) -> Any:
        runner = build_rank_runner(message)
        for change in changes:
            change(runner, message.part)
        return runner

    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    library.cache_clear()
    monkeypatch.setattr(remote, "RemoteRunner", partial(remote.RemoteRunner, start=partial(ThreadRank, build)))
    yield changes
    library.cache_clear()
