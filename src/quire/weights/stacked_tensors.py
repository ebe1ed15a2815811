"""Tensors that are stacks of a layer's weights of all experts (Granite 4, Qwen3.5), read as one tensor for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EXPERTS = re.compile(r"(?P<block>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
PRODUCTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stack that a model may have in place of modules for each expert -> the products of an expert, which have equally
many rows each, one after another."""


@dataclass(frozen=True, slots=True)
class StackSlice:
    """A matrix in a stack: `count` rows of its `index`-th matrix, from `first` on. `stack` is a slice of a safetensors
    file."""

    stack: Any
    index: int
    first: int
    count: int

    def get_shape(self) -> list[int]:
        """Return the matrix's shape."""
        return [self.count, *self.stack.get_shape()[2:]]

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, columns = at
        start, stop, _ = rows.indices(self.count)
        part: Tensor = self.stack[self.index, self.first + start : self.first + stop, columns]
        return part


class UnstackedFile:
    """A safetensors file, in whose place it is read. A stack for which `is_stack` is true has a name for each matrix,
    which ends with [i]; one of experts has the names that modules for each expert have. `names` are those of all
    tensors."""

    def __init__(self, file: Any, is_stack: Callable[[str], bool]) -> None:
        self.file, self.is_stack = file, is_stack
        self.slices: dict[str, StackSlice] = {}
        self.names = [name for key in file.keys() for name in self._unstack(key)]  # noqa: SIM118 (not a dict)

    def _unstack(self, key: str) -> Iterator[str]:
        """Yield the names of a tensor's matrices, or its own."""
        experts, is_stack = EXPERTS.fullmatch(key), self.is_stack(key)
        stack = self.file.get_slice(key) if experts is not None or is_stack else None
        shape = [] if stack is None else stack.get_shape()
        if len(shape) != 3:
            yield key
            return
        endings = ("",) if is_stack or experts is None else PRODUCTS[experts["kind"]]
        count = shape[1] // len(endings)
        for index in range(shape[0]):
            for number, ending in enumerate(endings):
                name = f"{experts['block']}.{index}.{ending}.weight" if experts and ending else f"{key}[{index}]"
                self.slices[name] = StackSlice(stack, index, number * count, count)
                yield name

    def get_tensor(self, key: str) -> Tensor:
        """Return a tensor."""
        part = self.slices.get(key)
        tensor: Tensor = self.file.get_tensor(key) if part is None else part[:, :]
        return tensor

    def get_slice(self, key: str) -> Any:
        """Return a tensor that is read when it is indexed."""
        return self.slices.get(key) or self.file.get_slice(key)
