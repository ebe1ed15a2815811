"""Checkpoints that have the weights of all experts of a layer in one tensor, as gpt-oss has: they are read like a
checkpoint with tensors for each expert, by the names that Qwen's experts have.

`experts.gate_up_proj` [experts, in, 2 * inner] has the gate's and up's columns in turn, `experts.down_proj` is
[experts, inner, out], and biases are `experts.gate_up_proj_bias` [experts, 2 * inner] and `experts.down_proj_bias`
[experts, out].

In MXFP4 (OCP Microscaling Formats 1.0) a weight is two tensors: `_blocks` [experts, rows, columns / 32, 16] has two
numbers (e2m1) in a byte, the first in the low bits, and `_scales` [experts, rows, columns / 32] has for each 32 numbers
the exponent of 2 that multiplies them, plus 127. Rows are then results: gate and up in turn, and nothing is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import StartupError, short_repr
from quire.weights.checkpoint_files import FIT_REMEDY

STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks)")
SCALES = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)_scales")
MXFP4_GROUP = 32
"""Numbers that share a scale."""
MXFP4_NAN = 255
"""The scale of blocks that are no numbers."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit numbers."""


class ExpertPart(NamedTuple):
    """The tensor of one expert within the stacked tensor `key`: the gate (0), up (1) or all of its rows (None)."""

    key: str
    expert: int
    half: int | None


@dataclass(frozen=True)
class TensorView:
    """A tensor in memory with the methods of a slice of a safetensors file."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self.tensor[index]
        return found.contiguous()


class StackedExperts:
    """An open safetensors file whose stacked tensors are seen as those of `count` experts. `files` has the file of each
    scales tensor of the checkpoint, since scales need not be in the file of their blocks."""

    def __init__(self, file: Any, path: Path, count: int, files: Mapping[str, Path], device: str) -> None:
        self.file, self.path, self.count, self.files, self.device = file, path, count, files, device
        self.parts: dict[str, ExpertPart] = {}
        self.latest: tuple[tuple[str, int], Tensor] | None = None  # gate and up are parts of one tensor

    @property
    def names(self) -> Iterator[str]:
        """Yield the names of the file's tensors, with those of each expert for a stacked one. Raise StartupError if
        that has not `count` experts."""
        for key in self.file.keys():  # noqa: SIM118 (not a dict)
            match = STACKED.fullmatch(key)
            if match is None:
                if SCALES.fullmatch(key) is None:
                    yield key
                continue
            self._check(key, match[3])
            kind, names = "bias" if match[3] == "_bias" else "weight", ("gate", "up")
            for expert in range(self.count):
                for half, name in enumerate(names) if match[2] == "gate_up" else ((None, "down"),):
                    part = f"{match[1]}.{expert}.{name}_proj.{kind}"
                    self.parts[part] = ExpertPart(key, expert, half)
                    yield part

    def get_tensor(self, key: str) -> Tensor:
        """Return a tensor, or that of one expert: [rows, columns] or, of a bias, [rows]."""
        part = self.parts.get(key)
        if part is None:
            whole: Tensor = self.file.get_tensor(key)
            return whole
        tensor = self._expert(part.key, part.expert)
        return tensor.contiguous() if part.half is None else tensor[part.half :: 2].contiguous()

    def get_slice(self, key: str) -> Any:
        """Return a tensor from which parts can be read."""
        return TensorView(self.get_tensor(key)) if key in self.parts else self.file.get_slice(key)

    def get_blocks(self, key: str) -> tuple[Tensor, Tensor] | None:
        """Return the blocks [rows, groups, 16] and scales [rows, groups] of an expert's weight in MXFP4. None if the
        tensor is not in MXFP4."""
        part = self.parts.get(key)
        if part is None or not part.key.endswith("_blocks"):
            return None
        blocks: Tensor = self.file.get_slice(part.key)[part.expert]
        scales, own = self._scales(part.key, part.expert, blocks), slice(part.half, None, 1 if part.half is None else 2)
        return blocks[own], scales[own]

    def _check(self, key: str, kind: str) -> None:
        shape = tuple(self.file.get_slice(key).get_shape())
        dims = {"": 3, "_bias": 2, "_blocks": 4}[kind]
        if len(shape) != dims or shape[0] != self.count or (kind == "_blocks" and shape[3] != MXFP4_GROUP // 2):
            wanted = f"{self.count} experts, in {dims} dimensions"
            wanted += f" of which the last is {MXFP4_GROUP // 2}" if kind == "_blocks" else ""
            actual = f"{short_repr(key)} in {self.path} has shape {short_repr(list(shape))}"
            raise StartupError(f"{actual}, but config.json makes it that of {wanted}", FIT_REMEDY)
        if kind == "_blocks" and self.file.get_slice(key).get_dtype() != "U8":
            raise StartupError(f"{short_repr(key)} in {self.path} is not in uint8", "MXFP4 has two numbers in a byte")

    def _expert(self, key: str, expert: int) -> Tensor:
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
