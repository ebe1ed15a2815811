"""GPU memory that the other ranks' GPUs can access: each rank exports its own by CUDA's driver (cuIpc*) and opens the
others'. It is allocated apart from torch, because exporting memory of torch's allocator would export a whole block."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

HANDLE_BYTES = 64  # bytes of a CUipcMemHandle
LAZY_PEER_ACCESS, NATIVE_ATOMIC = 1, 3  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_DEVICE_P2P_ATTRIBUTE_...


class PeerError(Exception):
    """CUDA's driver returned an error."""


class IpcHandle(ctypes.Structure):
    """A CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@lru_cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerError(str(error)) from error
    address, stream = ctypes.c_uint64, ctypes.c_void_p
    library.cuMemcpyDtoDAsync_v2.argtypes = address, address, ctypes.c_size_t, stream
    for function in (library.cuStreamWriteValue64_v2, library.cuStreamWaitValue64_v2):
        function.argtypes = stream, address, ctypes.c_uint64, ctypes.c_uint
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise PeerError(f"{name}: {(text.value or b'?').decode()}")


class ExportedMemory(NamedTuple):
    """An allocation of this rank, and the handle by which other processes open it."""

    address: int
    handle: bytes


def export(nbytes: int) -> ExportedMemory:
    """Allocate and export `nbytes` of zeros on the current device. Raise PeerError if there is not enough memory, or if
    it can't be exported."""
    address, handle = ctypes.c_uint64(), IpcHandle()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    try:
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        _call("cuCtxSynchronize")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except PeerError:
        free(address.value)
        raise
    return ExportedMemory(address.value, bytes(handle.reserved))


def open_handle(handle: bytes) -> int:
    """Open another process's memory and return its address. Raise PeerError if it can't be accessed from here."""
    address = ctypes.c_uint64()
    theirs = IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def close(address: int) -> None:
    """Close what `open_handle` opened."""
    with suppress(PeerError):
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def free(address: int) -> None:
    """Free exported memory. All other processes must have closed it."""
    with suppress(PeerError):
        _call("cuMemFree_v2", ctypes.c_uint64(address))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy from one device's memory to its own or another one's by a copy engine, on a stream."""
    _call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)


def stream_write_value(address: int, value: int, stream: int) -> None:
    """Write 8 bytes, on a stream. A reader of the value also sees all earlier writes of the stream."""
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def stream_wait_value(address: int, value: int, stream: int) -> None:
    """Wait, on a stream, until the 8 bytes are at least `value`."""
    _call("cuStreamWaitValue64_v2", stream, address, value, 0)


def as_tensor(address: int, nbytes: int, device: Any) -> Any:
    """Return GPU memory of this process as a uint8 tensor that does not own it."""
    import torch

    return torch.as_tensor(_CudaArray(address, nbytes), device=device)


class _CudaArray:
    """The interface by which torch wraps another library's GPU array."""

    def __init__(self, address: int, nbytes: int) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface


def has_native_atomics(here: int, there: int) -> bool:
    """Return True if device `here` can access device `there`'s memory atomically, as over NVLink."""
    value = ctypes.c_int()
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), NATIVE_ATOMIC, here, there)
    return bool(value.value)
