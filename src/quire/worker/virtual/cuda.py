"""Virtual memory on a GPU: CUDA's own calls (cuMem*), through `cuda.bindings.driver`, in torch's context.

One handle is one page and one mapping: CUDA unmaps only whole mappings. Unmapping does not wait for kernels, so call
`fence` first. A thread that did not open the driver must call torch.cuda.set_device before it uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from quire.errors import StartupError
from quire.worker.virtual.dlpack_tensors import DLPackTensors
from quire.worker.virtual.driver import Driver, DriverError, check_page_size

USE_PAGED = "Use --memory paged"


class CudaDriver(Driver):
    """A driver of pages of any multiple of the granularity (2 MiB on current GPUs) of CUDA device `index`.

    The content of a new page is undefined, so `map` zeroes a page when it is mapped for the first time, and waits for
    the device. If every page is mapped once at start, later maps do not wait."""

    def __init__(self, page: int, index: int = 0, api: Any = None) -> None:
        """`api` replaces the module cuda.bindings.driver in tests."""
        super().__init__(page)
        self._api = api or _bindings()
        self.device = torch.device("cuda", index)
        self.granularity = self._query_device(index)
        check_page_size(page, self.granularity, "device")
        self._call(
            "cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._cu_device)
        )  # the one that torch uses
        self.tensors = DLPackTensors(self.device)
        self._handles: list[Any] = []  # by page
        self._never_mapped: set[int] = set()
        self._free_bytes = 0  # of the device before `create`
        self._is_open = True

    def _allocate_addresses(self, nbytes: int) -> int:
        return int(self._timed_call("reserve", "cuMemAddressReserve", nbytes, 0, 0, 0))

    def create(self, count: int) -> None:
        assert not self.mapping_table.num_pages, "pages are created once"
        self._free_bytes, _ = self._call("cuMemGetInfo")
        try:
            for _ in range(count):
                self._handles.append(self._timed_call("create", "cuMemCreate", self.page, self._allocation_prop, 0))
        except DriverError as error:
            while self._handles:
                self._timed_call("release", "cuMemRelease", self._handles.pop())
            cause = f"{count:,} pages of {self.page:,} bytes can't be had, with {self._free_bytes:,} free ({error})"
            raise StartupError(cause, "Lower --kv-gib") from None
        self.mapping_table.num_pages = count
        self._never_mapped = set(range(count))

    def map(self, address: int, page: int, count: int = 1) -> None:
        self.mapping_table.check_map(address, page, count)
        size, done = self.page, 0
        try:
            for handle in self._handles[page : page + count]:
                self._timed_call("map", "cuMemMap", address + done * size, size, 0, handle, 0)
                done += 1
            self._timed_call("access", "cuMemSetAccess", address, count * size, [self._access_desc], 1)
            if self._never_mapped:
                self._zero(address, page, count)
        except BaseException:
            for at in range(address, address + done * size, size):
                self._timed_call("unmap", "cuMemUnmap", at, size)
            raise
        self.mapping_table.record_map(address, page, count)

    def unmap(self, address: int, count: int = 1) -> None:
        self.mapping_table.check_unmap(address, count)
        for at in range(address, address + count * self.page, self.page):
            self._timed_call("unmap", "cuMemUnmap", at, self.page)
            self.mapping_table.record_unmap(at, 1)

    def fence(self) -> None:
        """Wait for all streams of the device's context. Not while a graph is captured."""
        self._call("cuCtxSynchronize")

    def physical(self) -> int:
        """Return the decrease of the device's free bytes since `create`: for tests, correct while no other process
        allocates."""
        return self._free_bytes - self._call("cuMemGetInfo")[0] if self._handles else 0

    def close(self) -> None:
        """See Driver. After a fault every call in the context fails: try all of them and raise the first error."""
        if not self._is_open:
            return
        self.tensors.check_none_alive()
        self._is_open, failures = False, []
        for kind, *call in self._release_calls():
            try:
                self._timed_call(kind, *call) if kind else self._call(*call)
            except DriverError as error:
                failures.append(error)
        self._handles.clear()
        self.mapping_table.reset()
        self.tensors.abandon()
        if failures:
            raise failures[0]

    def _release_calls(self) -> Iterator[tuple[Any, ...]]:
        """Yield the kinds and calls that release everything, in order."""
        yield "", "cuCtxSynchronize"
        yield from (("unmap", "cuMemUnmap", at, self.page) for at in self.mapping_table.page_by_address)
        yield from (("release", "cuMemRelease", handle) for handle in self._handles)
        yield from (("free", "cuMemAddressFree", start, whole) for start, whole in self._reservations)
        yield "", "cuDevicePrimaryCtxRelease", self._cu_device

    def _query_device(self, index: int) -> int:
        """Prepare the descriptors of pages and access for a device; return its granularity."""
        api = self._api
        able = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._allocation_prop, self._access_desc = api.CUmemAllocationProp(), api.CUmemAccessDesc()
        self._allocation_prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for place in (self._allocation_prop.location, self._access_desc.location):
            place.type, place.id = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._access_desc.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuInit", 0)
            self._cu_device = self._call("cuDeviceGet", index)
            if self._call("cuDeviceGetAttribute", able, self._cu_device):
                return int(self._call("cuMemGetAllocationGranularity", self._allocation_prop, least))
        except (DriverError, RuntimeError) as error:  # RuntimeError: the bindings find no driver to call
            raise StartupError(f"CUDA device {index} can't be asked for virtual memory ({error})", USE_PAGED) from None
        raise StartupError(f"CUDA device {index} has no virtual memory management", USE_PAGED)

    def _zero(self, address: int, page: int, count: int) -> None:
        """Zero those of these pages, mapped at `address`, that were never mapped, and wait for the device."""
        fresh = self._never_mapped.intersection(range(page, page + count))
        for new_page in sorted(fresh):
            self._call("cuMemsetD8", address + (new_page - page) * self.page, 0, self.page)
        if fresh:
            self.fence()
            self._never_mapped -= fresh

    def _timed_call(self, kind: str, name: str, *args: Any) -> Any:
        began = time.perf_counter()
        result = self._call(name, *args)
        self.calls.record_call(kind, began)
        return result

    def _call(self, name: str, *args: Any) -> Any:
        """Return the result of a call: None, a value, or a tuple. Raise DriverError with CUDA's message if it fails."""
        api = self._api
        code, *results = getattr(api, name)(*args)
        if code != api.CUresult.CUDA_SUCCESS:
            texts = [text.decode() for _, text in (api.cuGetErrorName(code), api.cuGetErrorString(code)) if text]
            raise DriverError(name, ": ".join(texts) or str(code))
        return tuple(results) if len(results) > 1 else results[0] if results else None


def _bindings() -> Any:
    try:
        # The module exists only with the extra [virtual].
        from cuda.bindings import driver  # type: ignore[import-not-found]  # installed beside a GPU
    except ImportError as error:
        cause = f"The memory 'virtual' on a GPU needs the module cuda.bindings ({error})"
        raise StartupError(cause, "Install it with: pip install 'quire[virtual]'") from None
    return driver
