"""Settings of all tests: hypothesis profiles (`HYPOTHESIS_PROFILE=soak pytest -m soak` runs the long ones), a share of
large grids, and Triton's interpreter where there is no GPU: it must be told before anything imports Triton, as
transformers does in parts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from zlib import crc32

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Where a test names no other, httpx waits so many seconds: its own 5 pass by where a machine is busy.
httpx._config.DEFAULT_TIMEOUT_CONFIG.read = httpx._config.DEFAULT_TIMEOUT_CONFIG.connect = 60.0

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=slow)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `share(n)` one case in n of those that aren't soak's is run, always the same ones; the
    others are left to soak. On a GPU all of them are."""
    if torch.cuda.is_available():
        return
    grids = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("soak"):
            continue
        grids[item.nodeid.split("[")[0]].append(item)
    for cases in grids.values():
        grid = sorted(cases, key=lambda item: crc32(item.name.encode()))
        mark = grid[0].get_closest_marker("share")
        for item in grid[-(-len(grid) // mark.args[0]) :] if mark else ():
            item.add_marker(pytest.mark.soak)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are threads: without kernels of our own, of which a process runs one at a time."""
    from echo_ranks import ThreadRank

    import quire.parallel.remote as remote
    from quire.data.kernels.cpu.loading import library
    from quire.shard import build_rank

    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    library.cache_clear()
    runner = partial(remote.RemoteRunner, start=partial(ThreadRank, build_rank))
    monkeypatch.setattr(remote, "RemoteRunner", runner)
    yield
    library.cache_clear()
