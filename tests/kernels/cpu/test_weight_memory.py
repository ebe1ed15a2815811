"""Where packed weights lie, and what is made ready for them."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.weight_arena import BLOCK_BYTES, WeightArena

SIZE = 8 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is in memory")


def resident(address: int, size: int) -> int:
    """Bytes in memory of these: the system may have put other mappings beside them into one."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0, "it is mapped"
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def kept(memory: WeightArena, size: int) -> Tensor:
    return memory.allocate(1, size, torch.uint8)


def test_memory_of_a_large_weight_is_its_own() -> None:
    """So it is given back with the weight, and small ones go on filling what they had begun."""
    memory = WeightArena()
    small, large, other = (memory.allocate(1, columns, torch.float32) for columns in (16, BLOCK_BYTES // 4, 16))
    assert other.data_ptr() - small.data_ptr() == 64
    assert large.shape == (1, BLOCK_BYTES // 4)
    assert memory.block is not None
    assert not 0 <= large.data_ptr() - small.data_ptr() < len(memory.block)


def test_threads_get_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that find a block full at the same time."""
    memory, interval = WeightArena(), sys.getswitchinterval()
    monkeypatch.setattr("quire.kernels.cpu.weight_arena.BLOCK_BYTES", 1 << 14)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            kept_by_all = [*threads.map(lambda _: [kept(memory, 64) for _ in range(200)], range(40))]
    finally:
        sys.setswitchinterval(interval)
    addresses = [weight.data_ptr() for weights in kept_by_all for weight in weights]
    assert len(set(addresses)) == len(addresses) == 8000


@linux
def test_what_is_ahead_is_taken_and_the_rest_given_back() -> None:
    memory = WeightArena()
    memory.prefault(SIZE)
    assert memory.thread is not None
    memory.thread.join()
    if not memory.prefaulted:
        pytest.skip("Linux is older than 5.14")
    assert memory.prefaulted == SIZE
    first, second = kept(memory, SIZE // 4), kept(memory, SIZE // 4)
    assert second.data_ptr() - first.data_ptr() == SIZE // 4
    assert resident(first.data_ptr(), SIZE) == SIZE
    second.fill_(7)
    memory.finish_block()
    assert memory.prefaulted == 0
    assert resident(first.data_ptr(), SIZE) == SIZE // 2, "and nothing that was taken"
    assert bool((second == 7).all())
    third = kept(memory, SIZE // 4)
    assert not 0 <= third.data_ptr() - first.data_ptr() < SIZE, "what was given back is no other model's"


def test_weights_that_need_more_than_was_ahead() -> None:
    memory = WeightArena()
    memory.prefault(SIZE)
    parts = [kept(memory, SIZE // 2 + 1).fill_(number) for number in range(3)]
    memory.finish_block()
    assert [int(part.unique().item()) for part in parts] == [0, 1, 2]
    memory.prefault(0)
    memory.finish_block()
    memory.finish_block()


def test_it_is_made_ready_before_torch_is_there() -> None:
    code = (
        "import sys; from quire.kernels.cpu.weight_arena import weight_arena; "
        "weight_arena().prefault(1 << 20); weight_arena().finish_block(); "
    )
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], timeout=60, check=False)
    assert done.returncode == 0
