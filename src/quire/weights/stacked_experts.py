"""Checkpoints that have the weights of a layer's experts in one tensor (Qwen3.5), read as those of one expert each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

STACKED = re.compile(r"(?P<block>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
PRODUCTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A tensor [experts, rows, columns] -> the products of which it has equally many rows, one after another."""


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """A weight of one expert: `count` rows of a tensor's `expert`, from `first` on. `tensor` is a slice of a
    safetensors file."""

    tensor: Any
    expert: int
    first: int
    count: int

    def get_shape(self) -> list[int]:
        """Return the weight's shape."""
        return [self.count, self.tensor.get_shape()[2]]

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, columns = at
        start, stop, _ = rows.indices(self.count)
        part: Tensor = self.tensor[self.expert, self.first + start : self.first + stop, columns]
        return part


class UnstackedFile:
    """A safetensors file, in whose place it is read: stacked experts have the names that separate ones have. `names`
    are those of all tensors."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.experts: dict[str, ExpertSlice] = {}
        self.names = [name for key in file.keys() for name in self._unstack(key)]  # noqa: SIM118 (not a dict)

    def _unstack(self, key: str) -> Iterator[str]:
        """Yield the names of a tensor's parts, or its own."""
        match, shape = STACKED.fullmatch(key), []
        if match is not None:
            tensor = self.file.get_slice(key)
            shape = tensor.get_shape()
        if match is None or len(shape) != 3:
            yield key
            return
        products = PRODUCTS[match["kind"]]
        count = shape[1] // len(products)
        for expert in range(shape[0]):
            for number, product in enumerate(products):
                name = f"{match['block']}.{expert}.{product}.weight"
                self.experts[name] = ExpertSlice(tensor, expert, number * count, count)
                yield name

    def get_tensor(self, key: str) -> Tensor:
        """Return a tensor."""
        part = self.experts.get(key)
        tensor: Tensor = self.file.get_tensor(key) if part is None else part[:, :]
        return tensor

    def get_slice(self, key: str) -> Any:
        """Return a tensor that is read when it is indexed."""
        return self.experts.get(key) or self.file.get_slice(key)
