"""Memory on a GPU that the other ranks' GPUs can reach: each rank exports its own, through CUDA's driver (cuIpc*), and
opens the others'. A piece of its own, not one of torch's allocator, whose whole block would be exported.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

HANDLE_BYTES = 64  # bytes of a CUipcMemHandle
LAZY_PEER_ACCESS, NATIVE_ATOMIC = 1, 3  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_DEVICE_P2P_ATTRIBUTE_...


class PeerError(Exception):
    """A call that CUDA's driver refused."""


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
    for told in (library.cuStreamWriteValue64_v2, library.cuStreamWaitValue64_v2):
        told.argtypes = stream, address, ctypes.c_uint64, ctypes.c_uint
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise PeerError(f"{name}: {(text.value or b'?').decode()}")


class ExportedMemory(NamedTuple):
    """A piece of this rank's memory, and by what other processes open it."""

    address: int
    handle: bytes


def export(nbytes: int) -> ExportedMemory:
    """`nbytes` of the current device, zeros. PeerError if there are not so many, or they can't be exported."""
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
    """The address of another process's memory. PeerError if it can't be reached from here."""
    address = ctypes.c_uint64()
    theirs = IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def close(address: int) -> None:
    """Let go of what was opened."""
    with suppress(PeerError):
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def free(address: int) -> None:
    """Give back what was exported, once nobody has it open."""
    with suppress(PeerError):
        _call("cuMemFree_v2", ctypes.c_uint64(address))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy from one device's memory to its own or another's, on a stream, by a copy engine."""
    _call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)


def stream_write_value(address: int, value: int, stream: int) -> None:
    """Write 8 bytes, on a stream: whoever sees them sees what came before on the stream, too."""
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def stream_wait_value(address: int, value: int, stream: int) -> None:
    """On a stream, wait until the 8 bytes there are at least `value`, whoever writes them."""
    _call("cuStreamWaitValue64_v2", stream, address, value, 0)


def as_tensor(address: int, nbytes: int, device: Any) -> Any:
    """Memory of this process's on a GPU, as bytes of torch's, which doesn't own it."""
    import torch

    return torch.as_tensor(_CudaArray(address, nbytes), device=device)


class _CudaArray:
    """What torch asks of another library's array on a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        said = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = said


def has_native_atomics(here: int, there: int) -> bool:
    """Whether device `here` changes device `there`'s memory atomically, as it does over NVLink."""
    value = ctypes.c_int()
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), NATIVE_ATOMIC, here, there)
    return bool(value.value)
