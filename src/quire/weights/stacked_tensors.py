"""Tensors that are stacks of a layer's weights of all experts, read as one tensor for each, by the names that modules
for each expert have.

Granite 4 and Qwen3.5 have [experts, out, in], with the gate's rows before up's. gpt-oss has `experts.gate_up_proj`
[experts, in, 2 * inner] with the gate's and up's columns in turn, `experts.down_proj` [experts, inner, out], and biases
`experts.gate_up_proj_bias` [experts, 2 * inner] and `experts.down_proj_bias` [experts, out].

In MXFP4 (OCP Microscaling Formats 1.0) a weight is two tensors: `_blocks` [experts, rows, columns / 32, 16] has two
numbers (e2m1) in a byte, the first in the low bits, and `_scales` [experts, rows, columns / 32] has for each 32 numbers
the exponent of 2 that multiplies them, plus 127. Rows are then results: gate and up in turn, and nothing is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import StartupError, short_repr
from quire.weights.checkpoint_files import FIT_REMEDY

EXPERTS = re.compile(r"(?P<block>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")
PRODUCTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stack that a model may have in place of modules for each expert -> the products of an expert, which have equally
many rows each, one after another."""
MIXED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks)")
"""A tensor of all experts as gpt-oss has them: rows of the gate and of up are in turn."""
SCALES = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)_scales")
MXFP4_GROUP = 32
"""Numbers that share a scale."""
MXFP4_NAN = 255
"""The scale of blocks that are no numbers."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit numbers."""


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

    def __getitem__(self, at: slice | tuple[slice, slice]) -> Tensor:
        rows, columns = at if isinstance(at, tuple) else (at, slice(None))
        start, stop, _ = rows.indices(self.count)
        part: Tensor = self.stack[self.index, self.first + start : self.first + stop, columns]
        return part


class UnstackedFile:
    """A safetensors file, in whose place it is read. A stack for which `is_stack` is true has a name for each matrix,
    which ends with [i]; one of experts has the names that modules for each expert have. `names` are those of all
    tensors."""

    def __init__(self, file: Any, is_stack: Callable[[str], bool]) -> None:
        self.file, self.is_stack = file, is_stack
        self.slices: dict[str, StackSlice | ExpertSlice] = {}
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
        tensor: Tensor = self.file.get_tensor(key) if part is None else part[:]
        return tensor

    def get_slice(self, key: str) -> Any:
        """Return a tensor that is read when it is indexed."""
        return self.slices.get(key) or self.file.get_slice(key)


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The tensor of one expert within the stacked tensor `key` of a file: `rows` of it, as gate and up are in turn."""

    file: MixedExpertsFile
    key: str
    expert: int
    rows: slice

    def get_shape(self) -> list[int]:
        """Return the shape, [rows, columns] or, of a bias, [rows]."""
        return list(self[:].shape)

    def __getitem__(self, at: Any) -> Tensor:
        part: Tensor = self.file.read_expert(self.key, self.expert)[self.rows][at]
        return part.contiguous()


class MixedExpertsFile(UnstackedFile):
    """A safetensors file whose stacked tensors, as gpt-oss has them, are seen as those of `count` experts. `files` has
    the file of each scales tensor of the checkpoint, since scales need not be in the file of their blocks."""

    def __init__(self, file: Any, path: Path, count: int, files: Mapping[str, Path], device: str) -> None:
        self.path, self.count, self.files, self.device = path, count, files, device
        self.latest: tuple[tuple[str, int], Tensor] | None = None  # gate and up are parts of one tensor
        super().__init__(file, lambda key: False)

    def _unstack(self, key: str) -> Iterator[str]:
        match = MIXED_EXPERTS.fullmatch(key)
        if match is None:
            yield from () if SCALES.fullmatch(key) else (key,)
            return
        self._check(key, match[3])
        kind = "bias" if match[3] == "_bias" else "weight"
        halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for expert in range(self.count):
            for name, rows in (halves if match[2] == "gate_up" else {"down": slice(None)}).items():
                part = f"{match[1]}.{expert}.{name}_proj.{kind}"
                self.slices[part] = ExpertSlice(self, key, expert, rows)
                yield part

    def get_blocks(self, key: str) -> tuple[Tensor, Tensor] | None:
        """Return the blocks [rows, groups, 16] and scales [rows, groups] of an expert's weight in MXFP4. None if the
        tensor is not in MXFP4."""
        part = self.slices.get(key)
        if not isinstance(part, ExpertSlice) or not part.key.endswith("_blocks"):
            return None
        blocks: Tensor = self.file.get_slice(part.key)[part.expert]
        return blocks[part.rows], self._scales(part.key, part.expert, blocks)[part.rows]

    def _check(self, key: str, kind: str) -> None:
        """Raise StartupError if a stacked tensor has not `count` experts."""
        shape = tuple(self.file.get_slice(key).get_shape())
        dims = {"": 3, "_bias": 2, "_blocks": 4}[kind]
        if len(shape) != dims or shape[0] != self.count or (kind == "_blocks" and shape[3] != MXFP4_GROUP // 2):
            wanted = f"{self.count} experts, in {dims} dimensions"
            wanted += f" of which the last is {MXFP4_GROUP // 2}" if kind == "_blocks" else ""
            actual = f"{short_repr(key)} in {self.path} has shape {short_repr(list(shape))}"
            raise StartupError(f"{actual}, but config.json makes it that of {wanted}", FIT_REMEDY)
        if kind == "_blocks" and self.file.get_slice(key).get_dtype() != "U8":
            raise StartupError(f"{short_repr(key)} in {self.path} is not in uint8", "MXFP4 has two numbers in a byte")

    def read_expert(self, key: str, expert: int) -> Tensor:
        """Return an expert's part of a stacked tensor, [rows, columns] or [rows]."""
        if self.latest is None or self.latest[0] != (key, expert):
            tensor: Tensor = self.file.get_slice(key)[expert]
            if key.endswith("_blocks"):
                tensor = dequantize_mxfp4(tensor, self._scales(key, expert, tensor))
            elif tensor.dim() == 2:
                tensor = tensor.t()
            self.latest = (key, expert), tensor
        return self.latest[1]

    def _scales(self, key: str, expert: int, blocks: Tensor) -> Tensor:
        """Return the scales of an expert's blocks."""
        name = key.removesuffix("_blocks") + "_scales"
        if name not in self.files:
            raise StartupError(f"{self.path} has {short_repr(key)}, and no file has {short_repr(name)}", FIT_REMEDY)
        path = self.files[name]
        with nullcontext(self.file) if path == self.path else safe_open(path, "pt", self.device) as file:
            scales = file.get_slice(name)
            shape, dtype = list(scales.get_shape()), scales.get_dtype()
            if shape != [self.count, *blocks.shape[:2]] or dtype != "U8":
                raise StartupError(
                    f"{short_repr(name)} in {self.files[name]} has shape {short_repr(shape)} and dtype {dtype}, for "
                    f"blocks {[self.count, *blocks.shape]}",
                    "MXFP4 has a scale in uint8 for each block of 32 numbers",
                )
            exponents: Tensor = scales[expert]
        if (exponents == MXFP4_NAN).any():
            raise StartupError(f"{short_repr(name)} in {self.files[name]} has the scale 255", "That is no number")
        return exponents


def scale_files(paths: list[Path]) -> dict[str, Path]:
    """Return the file of each tensor of scales of stacked experts."""
    found = dict[str, Path]()
    for path in paths:
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:  # reported when it is loaded
            found |= {key: path for key in file.keys() if SCALES.fullmatch(key)}  # noqa: SIM118 (not a dict)
    return found


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of MXFP4 blocks [rows, groups, 16] with scales [rows, groups], both uint8: fp32 [rows, 32 *
    groups]."""
    table = torch.tensor(E2M1, device=blocks.device)
    numbers = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1)
    exponents = scales.view(torch.float8_e8m0fnu).float()
    return (numbers.flatten(2) * exponents[..., None]).flatten(1)
