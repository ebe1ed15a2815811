"""Tensors over addresses, mapped or not, as DLPack capsules made by ctypes: no compiled extension, any strides.

torch takes the device from the capsule and looks at no byte. (`__cuda_array_interface__` won't do: there torch asks
the driver whose the pointer is, which it can't tell of addresses with nothing mapped.)
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quire.worker.virtual.driver import DriverError

DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLPack's numbers of devices
DLPACK_INT, DLPACK_UINT, DLPACK_FLOAT, DLPACK_BFLOAT = 0, 1, 2, 4  # ... and of kinds of numbers
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
    """A tensor, while any view of it lives, and what torch reads when the last one goes."""

    name: str
    storage: StorageWeakRef
    struct: _DLManagedTensor
    sizes: Any


class DLPackTensors:
    """The tensors over one driver's addresses, and which of them live; whatever views the last one of. torch calls
    nothing of ours when it lets go of one: that may be in the midst of an exception, where Python can't run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._records: list[_TensorRecord] = []
        atexit.register(self.abandon)

    def create(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor whose first element is at `address`; strides in elements, none negative."""
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
        made: torch.Tensor = torch.utils.dlpack.from_dlpack(_make_capsule(ctypes.addressof(struct)))
        name = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        self._records = [one for one in self._records if not one.storage.expired()]
        self._records.append(_TensorRecord(name, StorageWeakRef(made.untyped_storage()), struct, sizes))
        return made.view(dtype)

    @property
    def live_names(self) -> list[str]:
        """Type and shape of each tensor that lives, in the order made."""
        return [one.name for one in self._records if not one.storage.expired()]

    def check_none_alive(self) -> None:
        """DriverError if a tensor lives, whose memory must not go."""
        if live := self.live_names:
            first, more = ", ".join(live[:MAX_NAMED_TENSORS]), len(live) - MAX_NAMED_TENSORS
            raise DriverError("close", f"tensors live over these addresses: {first}{f' and {more} more' * (more > 0)}")

    def abandon(self) -> None:
        """Tensors that live on are no longer our business, but for what torch reads when it lets go of them, however
        late that is."""
        atexit.unregister(self.abandon)
        for one in self._records:
            if not one.storage.expired():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one.struct))
        self._records.clear()


def _dlpack_type(dtype: torch.dtype) -> tuple[int, int]:
    """DLPack's kind and bits of an element. A byte is just that to it, and viewed as its type after."""
    assert not dtype.is_complex, f"no tensors of {dtype} over addresses"
    if dtype.itemsize == 1:
        return DLPACK_UINT, 8
    kind = DLPACK_BFLOAT if dtype == torch.bfloat16 else DLPACK_FLOAT if dtype.is_floating_point else DLPACK_INT
    return kind, 8 * dtype.itemsize


def _make_capsule(at: int) -> object:
    """A PyCapsule around the struct at this address. torch renames it once the struct is its own."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: object = make(at, CAPSULE_NAME, None)
    return made
