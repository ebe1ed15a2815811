"""Tensors over addresses, mapped or not, from DLPack capsules made by ctypes: no compiled extension, any strides.

torch takes the device from the capsule and reads no byte. (With `__cuda_array_interface__` torch asks the driver for
the pointer's device, which fails for addresses with nothing mapped.)
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quire.worker.virtual.driver import DriverError

DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLPack's device types
DLPACK_INT, DLPACK_UINT, DLPACK_FLOAT, DLPACK_BFLOAT = 0, 1, 2, 4  # DLPack's dtype codes
CAPSULE_NAME = b"dltensor"
MAX_NAMED_TENSORS = 8  # tensors that an error names


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor, with DLDevice and DLDataType written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    """DLPack's DLManagedTensor. `deleter` would be called once the last tensor over it is gone; it is NULL."""

    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _TensorRecord(NamedTuple):
    """A tensor that lives while a view of it does, and the structs that torch reads when the last one is freed."""

    name: str
    storage: StorageWeakRef
    struct: _DLManagedTensor
    sizes: Any


class DLPackTensors:
    """The tensors over one driver's addresses, and which of them, or views of them, live. torch calls no deleter when
    it frees one: that may happen during an exception, where Python cannot run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._records: list[_TensorRecord] = []
        atexit.register(self.abandon)

    def create(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor whose first element is at `address`; strides in elements, not negative."""
        assert len(shape) == len(strides), f"{len(shape)} sizes and {len(strides)} strides"
        assert address % dtype.itemsize == 0, f"{address:#x} is no multiple of an element's {dtype.itemsize} bytes"
        sizes = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
        struct = _DLManagedTensor()
        inner = struct.dl_tensor
        inner.data, inner.ndim, inner.lanes = address, len(shape), 1
        cuda = self.device.type == "cuda"
        inner.device_type, inner.device_id = (DLPACK_CUDA, self.device.index or 0) if cuda else (DLPACK_CPU, 0)
        inner.code, inner.bits = _dlpack_type(dtype)
        inner.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
        inner.strides = ctypes.cast(ctypes.byref(sizes, 8 * len(shape)), ctypes.POINTER(ctypes.c_int64))
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(_make_capsule(ctypes.addressof(struct)))
        name = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        self._records = [record for record in self._records if not record.storage.expired()]
        self._records.append(_TensorRecord(name, StorageWeakRef(tensor.untyped_storage()), struct, sizes))
        return tensor.view(dtype)

    @property
    def live_names(self) -> list[str]:
        """Dtype and shape of each live tensor, in the order of creation."""
        return [record.name for record in self._records if not record.storage.expired()]

    def check_none_alive(self) -> None:
        """Raise DriverError if a tensor lives, whose memory must not be unmapped."""
        if live := self.live_names:
            first, more = ", ".join(live[:MAX_NAMED_TENSORS]), len(live) - MAX_NAMED_TENSORS
            raise DriverError("close", f"tensors live over these addresses: {first}{f' and {more} more' * (more > 0)}")

    def abandon(self) -> None:
        """Forget all tensors, but leak the structs of live ones, which torch reads when it frees them."""
        atexit.unregister(self.abandon)
        for record in self._records:
            if not record.storage.expired():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(record.struct))
        self._records.clear()


def _dlpack_type(dtype: torch.dtype) -> tuple[int, int]:
    """Return DLPack's code and bits of an element. One-byte dtypes are imported as bytes and viewed as their dtype."""
    assert not dtype.is_complex, f"no tensors of {dtype} over addresses"
    if dtype.itemsize == 1:
        return DLPACK_UINT, 8
    kind = DLPACK_BFLOAT if dtype == torch.bfloat16 else DLPACK_FLOAT if dtype.is_floating_point else DLPACK_INT
    return kind, 8 * dtype.itemsize


def _make_capsule(at: int) -> object:
    """Return a PyCapsule of the struct at this address. torch renames it when it takes over the struct."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule: object = make(at, CAPSULE_NAME, None)
    return capsule
