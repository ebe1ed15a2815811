"""Tensors of a checkpoint that hold the weights of all experts of a layer, [experts, rows, columns], read as one tensor
for each part of an expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class StackedFile:
    """An open safetensors file whose stacked tensors are seen as their parts: part p of expert e of "x" is "x.e.p".

    `names` are those of all tensors. `parts` has, by the end of a stacked tensor's name, the number of equal parts into
    which the rows of an expert are divided. Other tensors are as they are."""

    def __init__(self, file: Any, parts: Mapping[str, int]) -> None:
        self.file, self.pieces = file, dict[str, tuple[str, int, slice]]()
        self.names = list[str]()
        self.latest: tuple[str, Tensor] | None = None
        for key in file.keys():  # noqa: SIM118 (not a dict)
            count = next((count for suffix, count in parts.items() if key.endswith(suffix)), 0)
            shape: list[int] = file.get_slice(key).get_shape() if count else []
            if len(shape) != 3 or shape[1] % count:
                self.names.append(key)
                continue
            rows = shape[1] // count
            for name, expert, part in ((f"{key}.{e}.{p}", e, p) for e in range(shape[0]) for p in range(count)):
                self.pieces[name] = key, expert, slice(part * rows, (part + 1) * rows)
                self.names.append(name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, or a view of a part of one."""
        if name not in self.pieces:
            tensor: Tensor = self.file.get_tensor(name)
            return tensor
        key, expert, rows = self.pieces[name]
        if self.latest is None or self.latest[0] != key:
            self.latest = None
            self.latest = key, self.file.get_tensor(key)
        return self.latest[1][expert, rows]

    def get_slice(self, name: str) -> Any:
        """Return the tensor, of which only the rows and columns that are then indexed are needed."""
        return PartSlice(self.get_tensor(name)) if name in self.pieces else self.file.get_slice(name)


class PartSlice:
    """A slice, as safetensors has them, of a tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return [*self.tensor.shape]

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]
