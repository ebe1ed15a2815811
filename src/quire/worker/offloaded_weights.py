"""Weights of a model in host memory while it sleeps. Tensors stay what they are, for all who refer to them: what
leaves the device and comes back, at another address, are the bytes below them, which views of one weight share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Modules of whose objects the attributes are looked at.
SCANNED_MODULES = ("quire.kernels.", "quire.layers.", "quire.models.", "quire.weights.", "quire.worker.")
SHARED_ATTRIBUTES = ("exchange", "all_reduce_norm")  # attributes that lead to what all ranks have in common


class OffloadedWeights:
    """The bytes of all of a model's tensors on `device`, in host memory until `restore`. MemoryError, and nothing
    changed, where that has no room."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in device_tensors(model, device)
        }
        storages = [storage for address, storage in found.items() if address and storage.resizable()]
        self.device = device
        self.host_copies = [(storage, _byte_view(storage, device).to("cpu", copy=True)) for storage in storages]
        for storage, _ in self.host_copies:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return sum(copy.nbytes for _, copy in self.host_copies)

    def restore(self) -> None:
        """To the device. What came before there was no room for the rest leaves again."""
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
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload, no-any-return]


def device_tensors(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """All tensors on a device that a model's modules hold: parameters, buffers, and those among other attributes."""
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device.type == device.type:
                yield one
        elif isinstance(one, dict):
            left += [value for name, value in one.items() if name not in SHARED_ATTRIBUTES]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        else:
            left += _children(one)


def _children(value: Any) -> list[Any]:
    """What an object of ours holds, a module, or a function that was given some of its arguments, or encloses them."""
    held: list[Any] = []
    if isinstance(value, nn.Module) or type(value).__module__.startswith(SCANNED_MODULES):
        held += [vars(value)] if hasattr(value, "__dict__") else []
        held += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    held += [getattr(value, name, None) for name in ("func", "args", "keywords", "__self__")]  # of partial, and methods
    held += [
        cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell.cell_contents is not value
    ]
    return [part for part in held if part is not None]
