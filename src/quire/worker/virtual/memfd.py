"""Virtual memory on a CPU, on Linux: one anonymous file (memfd) holds the pages, mmap maps them at addresses.

Access to an address without a page faults (SIGSEGV), for reads too. The process should start programs, not fork: a
forked child shares the pages, like all MAP_SHARED memory (MADV_DONTFORK would be needed after each map, and mappings
that differ in it don't merge). The file is closed in started programs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import torch

from quire.errors import StartupError
from quire.worker.virtual.dlpack_tensors import DLPackTensors
from quire.worker.virtual.driver import Driver, DriverError, check_page_size

RESERVE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000)
MAP_FIXED, PROT_NONE = 0x10, 0  # of Linux; not in the module mmap
MADV_POPULATE_WRITE = 23  # from Linux 5.14
POPULATE_BYTES = 1 << 28  # bytes zeroed by one call; signals are handled between calls
MAP_FAILED = ctypes.c_void_p(-1).value
MAX_MAP_COUNT_FILE = Path("/proc/sys/vm/max_map_count")


class MemfdDriver(Driver):
    """A driver of pages of any multiple of the system's page size. Consecutive pages at consecutive addresses are one
    mapping of the process, even if mapped separately."""

    def __init__(self, page: int) -> None:
        super().__init__(page)
        self.granularity = mmap.PAGESIZE
        if not hasattr(os, "memfd_create"):
            raise StartupError(f"The memory 'virtual' needs Linux, this is {sys.platform}", "Use --memory paged")
        check_page_size(page, self.granularity, "system")
        self.device = torch.device("cpu")
        self.tensors = DLPackTensors(self.device)
        self._libc = _load_libc()
        self._file = os.memfd_create("quire-pages", os.MFD_CLOEXEC)
        self._is_open = True

    def _allocate_addresses(self, nbytes: int) -> int:
        began = time.perf_counter()
        start: int = self._libc.mmap(None, nbytes, PROT_NONE, RESERVE_FLAGS, -1, 0)
        if start == MAP_FAILED:
            raise DriverError("mmap", _errno_message())
        self.calls.record_call("reserve", began)
        return start

    def create(self, count: int) -> None:
        assert not self.mapping_table.num_pages, "pages are created once"
        began, nbytes = time.perf_counter(), count * self.page
        try:
            os.ftruncate(self._file, nbytes)
            for at in range(0, nbytes, POPULATE_BYTES):
                self._populate(at, min(POPULATE_BYTES, nbytes - at))
        except OSError as error:
            os.ftruncate(self._file, 0)
            cause = f"{count:,} pages of {self.page:,} bytes of virtual memory can't be had ({error.strerror})"
            raise StartupError(cause, "Lower --kv-gib") from None
        self.mapping_table.num_pages = count
        self.calls.record_call("create", began)

    def map(self, address: int, page: int, count: int = 1) -> None:
        self.mapping_table.check_map(address, page, count)
        began, size = time.perf_counter(), count * self.page
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if self._libc.mmap(address, size, both, MAP_FLAGS | MAP_FIXED, self._file, page * self.page) == MAP_FAILED:
            reason = _errno_message()
            self._remap_reserved(address, size)  # a failed map may have removed the reservation
            raise DriverError("mmap", f"{reason}, mapping {count} pages at {address:#x}")
        self.calls.record_call("map", began)
        self.mapping_table.record_map(address, page, count)

    def unmap(self, address: int, count: int = 1) -> None:
        self.mapping_table.check_unmap(address, count)
        began = time.perf_counter()
        if not self._remap_reserved(address, count * self.page):
            raise DriverError("mmap", f"{_errno_message()}, unmapping {count} pages at {address:#x}")
        self.calls.record_call("unmap", began)
        self.mapping_table.record_unmap(address, count)

    def fence(self) -> None:
        """Do nothing: on a CPU no work is enqueued."""

    def physical(self) -> int:
        return 512 * os.fstat(self._file).st_blocks if self._is_open else 0

    def close(self) -> None:
        if not self._is_open:
            return
        self.tensors.check_none_alive()
        self._is_open = False
        for start, whole in self._reservations:
            began = time.perf_counter()
            self._libc.munmap(start, whole)
            self.calls.record_call("free", began)
        began = time.perf_counter()
        os.close(self._file)
        self.calls.record_call("release", began)
        self.mapping_table.reset()
        self.tensors.abandon()

    def _populate(self, at: int, nbytes: int) -> None:
        """Make the system allocate and zero these bytes of the file, through a temporary mapping."""
        both = mmap.PROT_READ | mmap.PROT_WRITE
        start = self._libc.mmap(None, nbytes, both, mmap.MAP_SHARED, self._file, at)
        if start == MAP_FAILED:
            raise OSError(ctypes.get_errno(), _errno_message())
        try:
            if self._libc.madvise(start, nbytes, MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code != 22:  # EINVAL: an older kernel
                    raise OSError(code, os.strerror(code))
                ctypes.memset(start, 0, nbytes)
        finally:
            self._libc.munmap(start, nbytes)

    def _remap_reserved(self, address: int, nbytes: int) -> bool:
        """Replace mappings by a reservation, in one call, so that no other thread's mmap can take the addresses. Return
        False if it fails."""
        done: bool = self._libc.mmap(address, nbytes, PROT_NONE, RESERVE_FLAGS | MAP_FIXED, -1, 0) != MAP_FAILED
        return done


def check_map_count(worst: int, limit: int | None = None) -> None:
    """Raise StartupError if `worst` mappings are more than half of what a process may have (`limit`, or
    vm.max_map_count): beyond it any allocation in the process can fail. An isolated page or run of pages is two
    mappings, its own and the gap after it; a reservation is one more."""
    if limit is None:
        limit = int(MAX_MAP_COUNT_FILE.read_text())
    if worst > limit // 2:
        cause = f"The memory 'virtual' can come to {worst:,} mappings, more than half of vm.max_map_count = {limit:,}"
        raise StartupError(
            cause,
            "Use a smaller --max-num-seqs or --max-model-len or a larger --virtual-page-kib, or set vm.max_map_count "
            f"to {2 * worst:,} with sysctl",
        )


def _load_libc() -> ctypes.CDLL:
    """Return libc with mmap, munmap and madvise: Python's mmap cannot choose addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


def _errno_message() -> str:
    return os.strerror(ctypes.get_errno())
