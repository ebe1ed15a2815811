"""Weights of a sleeping model in host memory. Tensor objects are not replaced: only their storages, which views of one
weight share, leave the device and come back at another address.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# The attributes of objects of these modules are searched for tensors.
SCANNED_MODULES = ("quire.kernels.", "quire.layers.", "quire.models.", "quire.weights.", "quire.worker.")
SHARED_ATTRIBUTES = ("exchange", "all_reduce_norm")  # not searched: shared by all ranks


class OffloadedWeights:
    """Moves the storages of all tensors of `model` on `device` to host memory, until `restore`. Raises MemoryError and
    changes nothing if host memory does not suffice."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        by_address = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in device_tensors(model, device)
        }
        storages = [storage for address, storage in by_address.items() if address and storage.resizable()]
        self.device = device
        self.host_copies = [(storage, _byte_view(storage, device).to("cpu", copy=True)) for storage in storages]
        for storage, _ in self.host_copies:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.nbytes for _, copy in self.host_copies)

    def restore(self) -> None:
        """Move the storages back to the device. If memory does not suffice, raise the error and leave none there."""
        try:
            for storage, copy in self.host_copies:
                storage.resize_(copy.nbytes)
                _byte_view(storage, self.device).copy_(copy)
        except BaseException:
            for storage, _ in self.host_copies:
                storage.resize_(0)
            raise
        self.host_copies = []


def _byte_view(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def device_tensors(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Yield all tensors on `device` that a model's modules refer to: parameters, buffers, and other attributes."""
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.device.type == device.type:
                yield value
        elif isinstance(value, dict):
            left += [item for name, item in value.items() if name not in SHARED_ATTRIBUTES]
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
        else:
            left += _children(value)


def _children(value: Any) -> list[Any]:
    """Return what a module, an object of quire, a partial, a method or a closure refers to."""
    children: list[Any] = []
    if isinstance(value, nn.Module) or type(value).__module__.startswith(SCANNED_MODULES):
        children += [vars(value)] if hasattr(value, "__dict__") else []
        children += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    children += [getattr(value, name, None) for name in ("func", "args", "keywords", "__self__")]
    children += [
        cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell.cell_contents is not value
    ]
    return [part for part in children if part is not None]
