"""Engines over virtual memory that come and go: nothing of one is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def cycle() -> int:
    """Open an engine, serve a few requests, close it: the addresses that it reserved."""
    config = EngineConfig.of(
        model="tiny", memory="virtual", virtual_page_kib=4, kv_tokens=1024, max_num_batched_tokens=64, max_num_seqs=8,
        max_model_len=256, threads=1,
    )  # fmt: skip
    engine = build(config).engine
    for i in range(3):
        engine.add(str(i), [5 + i, 6, 7, 8], SamplingParams(n=2, seed=i, max_tokens=4, ignore_eos=True))
    tokens = 0
    while engine.has_unfinished_requests:
        tokens += sum(len(output.tokens) for output in engine.step())
    assert tokens == 24
    store = engine.runner.store
    reserved = sum(store._buffer_bytes(group) * group.parts for group in store.kv_config.groups)
    del store
    engine.close()
    return reserved


def state() -> tuple[int, int, int]:
    """Mappings of pages, open files, and all addresses of this process."""
    gc.collect()
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return Path("/proc/self/maps").read_text().count("quire-pages"), len(os.listdir("/proc/self/fd")), addresses


def run(cycles: int) -> None:
    for _ in range(3):
        reserved = cycle()
    before = state()
    for _ in range(cycles - 5):
        cycle()
    after = []
    for _ in range(5):  # malloc keeps some of what was freed, each time another part
        cycle()
        after.append(state())
    pages, files, _ = after[-1]
    assert pages == 0
    assert files <= before[1]  # others' connections may have ended
    assert min(addresses for _, _, addresses in after) - before[2] < cycles * reserved // 10


@pytest.mark.parametrize("cycles", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_engines_leave_nothing_mapped(cycles: int) -> None:
    """In a process of its own, with one arena of malloc: each of others' arenas reserves 64 MiB at any time."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, __file__, str(cycles)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    run(int(sys.argv[1]))
