"""Weights of a model in host memory while it sleeps. Tensors stay what they are, for all who refer to them: what
leaves the device and comes back, at another address, are the bytes below them, which views of one weight share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

OURS = "quire.data"  # modules of whose objects the attributes are looked at
BESIDE = ("exchange", "normed")  # attributes that lead to what all ranks have in common


class Parked:
    """The bytes of all of a model's tensors on `device`, in host memory until `back`. MemoryError, and nothing changed,
    where that has no room."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors(model, device)}
        storages = [storage for address, storage in found.items() if address and storage.resizable()]
        self.device = device
        self.held = [(storage, _bytes(storage, device).to("cpu", copy=True)) for storage in storages]
        for storage, _ in self.held:
            storage.resize_(0)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(copy.nbytes for _, copy in self.held)

    def back(self) -> None:
        """To the device. What came before there was no room for the rest leaves again."""
        try:
            for storage, copy in self.held:
                storage.resize_(copy.nbytes)
                _bytes(storage, self.device).copy_(copy)
        except BaseException:
            for storage, _ in self.held:
                storage.resize_(0)
            raise
        self.held = []


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload, no-any-return]


def tensors(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
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
            left += [value for name, value in one.items() if name not in BESIDE]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        else:
            left += _parts(one)


def _parts(one: Any) -> list[Any]:
    """What an object of ours holds, a module, or a function that was given some of its arguments, or encloses them."""
    held: list[Any] = []
    if isinstance(one, nn.Module) or type(one).__module__.startswith(OURS):
        held += [vars(one)] if hasattr(one, "__dict__") else []
        held += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    held += [getattr(one, name, None) for name in ("func", "args", "keywords", "__self__")]  # of partial, and methods
    held += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if cell.cell_contents is not one]
    return [part for part in held if part is not None]
