"""The CUDA driver over a stand-in for cuda.bindings.driver: which calls it makes, in which order, and what it does when
one fails. The stand-in has CUDA's rules."""

from __future__ import annotations

import builtins
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import StartupError
from quire.worker.virtual import DriverError, open_driver
from quire.worker.virtual.cuda import CudaDriver

MIB = 1 << 20
PAGE = 2 * MIB
OK = 0


class FakeCuda:
    """A device with `pages` pages of memory. Every call is in `log`, its name without "cu"; the k-th of the call named
    `fails[0]` returns an error, k = `fails[1]`."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, pages: int = 64, fails: tuple[str, int] = ("", 0), able: int = 1) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.pages, self.fails, self.able = pages, fails, able
        self.handles: set[str] = set()
        self.mapped: dict[int, list[Any]] = {}  # address -> size, handle, whether accessible
        self.reserved: dict[int, int] = {}
        self.next, self.contexts, self.made = 0x7F00_0000_0000 + MIB, 0, 0
        self.broken = False

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> tuple[Any, ...]:
            self.log.append((name.removeprefix("cu"), *given))
            if name == self.fails[0]:
                self.fails = (name, self.fails[1] - 1)
            if self.broken or (name == self.fails[0] and self.fails[1] == 0):
                return (2, None)
            answer = getattr(self, "_" + name)(*given)
            return (OK, *answer) if isinstance(answer, tuple) else (OK,) if answer is None else (OK, answer)

        return call

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return OK, b"CUDA_ERROR_OUT_OF_MEMORY"

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:
        return OK, b"out of memory"

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGet(self, index: int) -> str:
        return f"gpu{index}"

    def _cuDeviceGetAttribute(self, attribute: int, gpu: str) -> int:
        return self.able

    def _cuMemGetAllocationGranularity(self, kind: Any, flag: int) -> int:
        assert (kind.type, kind.location.type, flag) == (1, 1, 0)
        return PAGE

    def _cuDevicePrimaryCtxRetain(self, gpu: str) -> str:
        self.contexts += 1
        return "primary"

    def _cuDevicePrimaryCtxRelease(self, gpu: str) -> None:
        self.contexts -= 1

    def _cuCtxSetCurrent(self, context: str) -> None: ...

    def _cuCtxSynchronize(self) -> None: ...

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return (self.pages - len(self.handles)) * PAGE, self.pages * PAGE

    def _cuMemAddressReserve(self, size: int, align: int, hint: int, flags: int) -> int:
        self.reserved[self.next] = size
        self.next += size
        return self.next - size

    def _cuMemAddressFree(self, at: int, size: int) -> None:
        assert self.reserved.pop(at) == size
        assert not any(at <= place < at + size for place in self.mapped), "freed with pages mapped"

    def _cuMemCreate(self, size: int, kind: Any, flags: int) -> str:
        assert size % PAGE == 0
        self.made += 1
        self.handles.add(f"h{self.made - 1}")
        return f"h{self.made - 1}"

    def _cuMemRelease(self, handle: str) -> None:
        self.handles.remove(handle)

    def _cuMemMap(self, at: int, size: int, offset: int, handle: str, flags: int) -> None:
        assert at not in self.mapped
        assert any(start <= at and at + size <= start + whole for start, whole in self.reserved.items())
        assert handle in self.handles
        assert offset == flags == 0
        self.mapped[at] = [size, handle, False]

    def _cuMemSetAccess(self, at: int, size: int, access: list[Any], count: int) -> None:
        assert count == len(access) == 1
        assert access[0].flags == 3
        end = at + size
        while at < end:
            self.mapped[at][2] = True
            at += self.mapped[at][0]
        assert at == end

    def _cuMemsetD8(self, at: int, byte: int, size: int) -> None:
        assert self.mapped[at][0] == size
        assert self.mapped[at][2]
        assert byte == 0

    def _cuMemUnmap(self, at: int, size: int) -> None:
        assert self.mapped.pop(at)[0] == size


def test_the_calls_in_their_order() -> None:
    api = FakeCuda()
    driver = CudaDriver(PAGE, 3, api)
    names = [name for name, *_ in api.log]
    assert names == ["Init", "DeviceGet", "DeviceGetAttribute", "MemGetAllocationGranularity",
                     "DevicePrimaryCtxRetain", "CtxSetCurrent"]  # fmt: skip
    assert (driver._allocation_prop.location.id, driver._access_desc.location.id, driver.device.index) == (3, 3, 3)
    at = driver.reserve(5 * PAGE - 1)
    assert at % PAGE == 0
    driver.create(4)
    mark = len(api.log)
    driver.map(at, 1, 2)
    assert api.log[mark:] == [
        ("MemMap", at, PAGE, 0, "h1", 0),
        ("MemMap", at + PAGE, PAGE, 0, "h2", 0),
        ("MemSetAccess", at, 2 * PAGE, [driver._access_desc], 1),
        ("MemsetD8", at, 0, PAGE),
        ("MemsetD8", at + PAGE, 0, PAGE),
        ("CtxSynchronize",),
    ]
    mark = len(api.log)
    driver.unmap(at, 2)
    assert api.log[mark:] == [("MemUnmap", at, PAGE), ("MemUnmap", at + PAGE, PAGE)]
    mark = len(api.log)
    driver.map(at + PAGE, 2, 2)
    assert [name for name, *_ in api.log[mark:]] == 2 * ["MemMap"] + ["MemSetAccess", "MemsetD8", "CtxSynchronize"]
    assert api.log[mark:][3] == ("MemsetD8", at + 2 * PAGE, 0, PAGE), "page 2 has bytes by now"
    mark = len(api.log)
    driver.map(at + 4 * PAGE, 3)
    assert [name for name, *_ in api.log[mark:]] == ["MemMap", "MemSetAccess"]
    assert driver.physical() == driver.counters.physical == 4 * PAGE
    mark = len(api.log)
    driver.close()
    driver.close()
    names = [name for name, *_ in api.log[mark:]]
    assert names == ["CtxSynchronize"] + 3 * ["MemUnmap"] + 4 * ["MemRelease"] + ["MemAddressFree"] + [
        "DevicePrimaryCtxRelease"
    ]
    assert (api.handles, api.mapped, api.reserved, api.contexts) == (set(), {}, {}, 0)
    calls = driver.counters.calls
    assert calls == {"reserve": 1, "create": 4, "map": 5, "access": 3, "unmap": 5, "release": 4, "free": 1}
    assert all(driver.counters.seconds[kind] > 0 for kind in calls)


@pytest.mark.parametrize(
    ("call", "k"), [("cuMemMap", 1), ("cuMemMap", 3), ("cuMemSetAccess", 1), ("cuMemsetD8", 2), ("cuCtxSynchronize", 1)]
)
def test_a_map_that_fails_is_undone(call: str, k: int) -> None:
    api = FakeCuda()
    driver = CudaDriver(PAGE, 0, api)
    at = driver.reserve(8 * PAGE)
    driver.create(8)
    api.fails = (call, k)
    with pytest.raises(DriverError, match=f"{call} failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory"):
        driver.map(at, 2, 4)
    assert not api.mapped
    assert (driver.counters.mapped, driver.counters.maps) == (0, 0)
    mark = len(api.log)
    driver.map(at, 2, 4)
    assert sum(name == "MemsetD8" for name, *_ in api.log[mark:]) == 4, "none of them is known to be zero"
    driver.close()
    assert (api.handles, api.reserved) == (set(), {})


def test_too_little_memory_is_refused_and_given_back() -> None:
    api = FakeCuda(pages=8, fails=("cuMemCreate", 6))
    driver = CudaDriver(PAGE, 0, api)
    with pytest.raises(StartupError) as caught:
        driver.create(12)
    assert str(caught.value) == (
        "12 pages of 2,097,152 bytes can't be had, with 16,777,216 free "
        "(cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory). Lower --kv-gib"
    )
    assert not api.handles
    driver.create(8)
    driver.close()


def test_too_many_addresses_are_refused() -> None:
    api = FakeCuda(fails=("cuMemAddressReserve", 1))
    driver = CudaDriver(PAGE, 0, api)
    with pytest.raises(StartupError, match=r"refuses \(cuMemAddressReserve failed.*--max-model-len"):
        driver.reserve(2**40)
    with pytest.raises(StartupError, match="47 bits"):
        driver.reserve(2**47)
    buffers = [driver.reserve(100 * 2**30) for _ in range(120)]  # the 12 TB of the paper
    assert all(after - before > 100 * 2**30 for before, after in pairwise(buffers))
    driver.close()


@pytest.mark.parametrize("page", [0, MIB, 3 * MIB, 64 << 10])
def test_pages_that_the_device_cannot_map(page: int) -> None:
    api = FakeCuda()
    words = rf"A page of {page:,} bytes is no multiple of the 2,097,152 .* next one up has [24],\d\d\d,\d\d\d"
    with pytest.raises(StartupError, match=words):
        CudaDriver(page, 0, api)
    assert not api.contexts


def test_devices_that_cannot() -> None:
    with pytest.raises(StartupError, match=r"device 1 has no virtual memory management\. Use --memory paged"):
        CudaDriver(PAGE, 1, FakeCuda(able=0))
    with pytest.raises(StartupError, match=r"cuInit failed.*Use --memory paged"):
        CudaDriver(PAGE, 0, FakeCuda(fails=("cuInit", 1)))


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError("No module named 'cuda'")
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(StartupError, match=r"needs the module cuda.bindings .*pip install 'quire\[virtual\]'"):
        open_driver("cuda:0", PAGE)


def test_a_dead_context_is_told_once_all_was_tried() -> None:
    api = FakeCuda()
    driver = CudaDriver(PAGE, 0, api)
    at = driver.reserve(2 * PAGE)
    driver.create(2)
    driver.map(at, 0, 2)
    api.broken = True
    mark = len(api.log)
    with pytest.raises(DriverError, match="cuCtxSynchronize failed"):
        driver.close()
    assert len(api.log[mark:]) == 1 + 2 + 2 + 1 + 1
    driver.close()


def test_the_bindings_have_what_is_called() -> None:
    """Where they are installed: every name that the driver uses, and structures that keep what is put in them."""
    driver = pytest.importorskip("cuda.bindings.driver")
    api = FakeCuda()
    names = [name for name in dir(FakeCuda) if name.startswith("_cu")] + ["_cuGetErrorName", "_cuGetErrorString"]
    assert all(callable(getattr(driver, name[1:])) for name in names)
    for name, members in vars(FakeCuda).items():
        if isinstance(members, SimpleNamespace):
            assert {member: int(getattr(getattr(driver, name), member)) for member in vars(members)} == vars(members)
    for make in (driver.CUmemAllocationProp, driver.CUmemAccessDesc):
        made = make()
        made.location.id = 5
        assert made.location.id == 5
    assert not api.log
