"""Pinned memory that a thread allocates, with a driver that hands out ordinary memory."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest
import torch

from quire.kernels import pinned_memory
from quire.kernels.pinned_memory import PinnedBlock
from quire.worker import host_pool


class Driver:
    """The functions of CUDA's driver that a block needs, of a GPU with `free` bytes. It allocates once `may_go` is set,
    and fails with `status`."""

    def __init__(self, status: int = 0, free: int = 4096) -> None:
        self.free, self.status, self.may_go, self.blocks = free, status, threading.Event(), dict[int, Any]()
        self.contexts: list[int | None] = []  # of the calling thread
        self.may_go.set()

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value = self.free
        return 0

    def cuMemHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: int) -> int:
        assert self.may_go.wait(10)
        if self.status == 0:
            buffer = ctypes.create_string_buffer(size.value)
            address._obj.value = ctypes.addressof(buffer)
            self.blocks[address._obj.value] = buffer
        return self.status

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: object) -> int:
        self.contexts.pop()
        return 0

    def cuMemFreeHost(self, address: ctypes.c_void_p) -> int:
        assert self.contexts == [7]
        del self.blocks[address.value or 0]
        return 0


def allocated(driver: Driver | None, size: int) -> PinnedBlock:
    block = PinnedBlock()
    block.allocate_in_thread(lambda: None if driver is None else (driver, ctypes.c_void_p(7)), size)
    return block


def test_one_tensor_at_a_time_has_the_block_and_gives_it_back() -> None:
    driver = Driver()
    block = allocated(driver, 1000)
    first = block.take(900)
    assert first is not None
    assert (first.dtype, first.shape, [first.data_ptr()]) == (torch.uint8, (900,), list(driver.blocks))
    assert block.take(900) is None
    view, address = first[8:16].view(torch.int64), first.data_ptr()
    del first
    gc.collect()
    assert block.take(900) is None, "a view of the tensor is in use"
    view.fill_(7)
    del view
    gc.collect()
    again = block.take(513)
    assert again is not None
    assert again.data_ptr() == address
    block.free()
    assert driver.blocks, "not while a tensor uses it"
    del again
    gc.collect()
    block.free()
    assert not driver.blocks


@pytest.mark.parametrize(("size", "wanted"), [(1000, 1001), (1000, 512), (1025, 1024), (1000, 0)])
def test_a_block_of_an_unfit_size_is_freed(size: int, wanted: int) -> None:
    """Too small, or larger than the power of two that torch would allocate."""
    driver = Driver()
    block = allocated(driver, size)
    assert block.take(wanted) is None
    assert not driver.blocks
    assert block.take(1000) is None


def test_without_a_driver_or_memory_there_is_no_block() -> None:
    assert PinnedBlock().take(1000) is None
    assert allocated(None, 1000).take(1000) is None
    assert allocated(Driver(status=2), 1000).take(1000) is None
    driver = Driver()
    assert allocated(driver, 0).take(1000) is None
    assert not driver.blocks


def test_no_block_is_larger_than_the_memory_that_it_has_copies_of() -> None:
    """It would take long to allocate, and be too large for the host pages."""
    assert allocated(Driver(free=1000), 1000).take(1000) is not None
    driver = Driver(free=999)
    assert allocated(driver, 1000).take(1000) is None
    assert not driver.blocks


def test_two_engines_that_start_at_once_allocate_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, block = Driver(), PinnedBlock()
    other = threading.Thread(target=lambda: start(), daemon=True)

    def start() -> None:
        block.allocate_in_thread(lambda: (driver, ctypes.c_void_p(7)), 1000)

    def make_thread(**arguments: Any) -> threading.Thread:
        if other.ident is None:
            other.start()
            other.join(0.1)  # it waits, or it is too late
        return threading.Thread(**arguments)

    monkeypatch.setattr(pinned_memory, "Thread", make_thread)
    start()
    other.join(10)
    assert block.take(1000) is not None
    assert len(driver.blocks) == 1


def test_a_block_can_be_allocated_after_free() -> None:
    """As by the second engine of a process, whose first was on a CPU."""
    driver, block = Driver(), PinnedBlock()
    block.free()
    block.allocate_in_thread(lambda: (driver, ctypes.c_void_p(7)), 1000)
    assert block.take(1000) is not None


def test_a_block_that_is_not_needed_any_more_is_freed_by_its_thread() -> None:
    driver = Driver()
    driver.may_go.clear()
    block = allocated(driver, 1000)
    block.free()
    driver.may_go.set()
    assert block.thread is not None
    block.thread.join(10)
    assert not driver.blocks


def test_host_pages_of_a_gpu_are_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is only a name: what host pages need of it is replaced here."""
    driver = Driver()
    block = allocated(driver, 4096)
    monkeypatch.setattr(host_pool, "pinned_block", lambda: block)
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(host_pool, "StagingBuffer", lambda *_, **__: None)
    monkeypatch.setattr(host_pool.HostPool, "record_writes", lambda self: None)

    class Pages:
        device, dtype = torch.device("cuda"), torch.float32

    pool = host_pool.HostPool({512: Pages()}, 4096)  # type: ignore[dict-item]
    assert pool.host_pages[512].shape == (8, 128)
    assert [pool.host_pages[512].data_ptr()] == list(driver.blocks)
    assert pool.host_pages[512].dtype == torch.float32
