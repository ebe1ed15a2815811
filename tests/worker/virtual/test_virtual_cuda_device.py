"""The CUDA driver on a device: real bytes, aliases, the device's own account of memory, and an end that leaves nothing.

Kernels that read an unmapped address end the context, and with it the process: that runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from papers.call_latencies import bandwidth, measure_latencies
from quire.worker.virtual import DriverError, open_driver
from quire.worker.virtual.cuda import CudaDriver
from quire.worker.virtual.driver import Driver

pytestmark = pytest.mark.gpu
PAGE = 2 << 20


@pytest.fixture
def driver() -> Iterator[Driver]:
    torch.zeros(1, device="cuda")
    made = open_driver("cuda:0", PAGE)
    yield made
    made.close()


def view(driver: Driver, address: int, pages: int) -> torch.Tensor:
    return driver.tensor(address, (pages, PAGE // 4), (PAGE // 4, 1), torch.float32)


def test_pages_keep_their_bytes_wherever_they_are(driver: Driver) -> None:
    identity, at = driver.reserve(8 * PAGE), driver.reserve(8 * PAGE)
    driver.create(8)
    assert driver.physical() == 8 * PAGE
    driver.map(identity, 0, 8)
    every, some = view(driver, identity, 8), view(driver, at, 8)
    assert not every.any()
    every.copy_(torch.arange(8.0, device="cuda")[:, None].expand(8, PAGE // 4))
    driver.map(at, 6, 2)
    driver.map(at + 4 * PAGE, 3)
    assert some[:2, -1].tolist() == [6.0, 7.0]
    some[4].fill_(9)
    assert every[3].eq(9).all()
    driver.fence()
    driver.unmap(at + 4 * PAGE)
    driver.map(at + 4 * PAGE, 5)
    assert some[4, 0].item() == 5
    assert driver.physical() == driver.counters.physical == 8 * PAGE
    with pytest.raises(DriverError, match=r"float32\[8, 524288\]"):
        driver.close()
    del every, some


def test_cycles_leave_nothing() -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(100):
        driver = CudaDriver(PAGE)
        buffers = [driver.reserve(100 * 2**30) for _ in range(120)]
        driver.create(4)
        driver.map(buffers[0], 0, 4)
        driver.map(buffers[-1] + PAGE, 1)
        driver.close()
    assert torch.cuda.mem_get_info()[0] == before


def test_latencies() -> None:
    work = torch.randn(4096, 4096, device="cuda")
    rows = measure_latencies(CudaDriver(PAGE), pages=64, load=lambda: work @ work)
    assert {row.kind for row in rows} == {"reserve", "create", "map", "access", "unmap", "release", "free"}
    assert bandwidth(rows) > 1


def run(code: str) -> subprocess.CompletedProcess[str]:
    lines = (
        "import torch\n"
        "from quire.worker.virtual import open_driver\n"
        "driver = open_driver('cuda:0', 2 << 20)\n"
        "at = driver.reserve(1 << 30)\n"
        "driver.create(1)\n"
        "driver.map(at, 0)\n"
        "view = driver.tensor(at, (2, 1 << 19), (1 << 19, 1), torch.float32)\n" + code
    )
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("kept", ["", "torch.kept = view"])
def test_a_process_may_end_with_live_tensors(kept: str) -> None:
    done = run(kept)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_overrun_is_an_error_and_not_silence() -> None:
    done = run("print(view[0].sum().item(), flush=True)\nview.sum().item()\nprint('survived')")
    assert done.stdout == "0.0\n", done.stdout
    assert done.returncode != 0
    assert "illegal memory access" in done.stderr
