"""Weights of AWQ and GPTQ checkpoints: their packed integers, zeros and scales, as low-bit weights without loss.

A group of numbers of a column shares a scale and a zero: a weight is (number - zero) * scale. Both methods store
weights as [in, out], eight numbers of four bits in a 32-bit word: AWQ along the outputs, in AWQ_ORDER, GPTQ along the
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import StartupError, short_repr
from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight
from quire.models.quantization import LowBitScheme
from quire.weights.checkpoint_files import FIT_REMEDY
from quire.weights.tensor_slices import TensorSlice

TENSOR_KINDS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each four bits of a word, the lowest first."""


class PackedWeight:
    """The tensors of one weight [rows, columns], read one by one; or of a rank's `tensor_slice` of it. A slice may end
    within words and groups: these are read whole."""

    def __init__(
        self, scheme: LowBitScheme, name: str, rows: int, columns: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        self.scheme, self.name, self.rows, self.columns = scheme, name, rows, columns
        self.tensor_slice = tensor_slice
        self.row_ranges = (range(rows),) if tensor_slice is None else tensor_slice.row_ranges
        self.column_range = range(columns)
        if tensor_slice is not None and tensor_slice.columns is not None:
            self.column_range = tensor_slice.columns
        self.group_range = range(columns // scheme.group_size)
        if not scheme.desc_act:
            self.group_range = _word_range(self.column_range, scheme.group_size)
        self.tensors: dict[str, Tensor] = {}

    def read(self, kind: str, file: Any, key: str, path: Path) -> Tensor:
        """Read a tensor of a safetensors file into `tensors`, and return it. Raise StartupError for a wrong dtype,
        shape or value."""
        self._check_shape(kind, list(file.get_slice(key).get_shape()), key, path)
        tensor = self._read(kind, file, key)
        floats = kind == "scales"
        if tensor.dtype not in ((torch.float16, torch.bfloat16, torch.float32) if floats else (torch.int32,)):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise StartupError(f"{short_repr(key)} in {path} has dtype {dtype}", "Numbers are int32, scales are floats")
        if floats and not (tensor.half().isfinite() & (tensor.half().float() == tensor.float())).all():
            raise StartupError(
                f"{short_repr(key)} in {path} has a scale that isn't a finite number in fp16", FIT_REMEDY
            )
        if kind == "g_idx":
            self._check_order(tensor, key, path)
        self.tensors[kind] = tensor
        return tensor

    def _read(self, kind: str, file: Any, key: str) -> Tensor:
        """Read a tensor, or the part of it that the slice needs."""
        if self.tensor_slice is None:
            whole: Tensor = file.get_tensor(key)
            return whole
        tensor, per, awq = file.get_slice(key), 32 // self.scheme.bits, self.scheme.stored == "awq"
        if kind == "g_idx":
            order: Tensor = tensor[self.column_range.start : self.column_range.stop]
            return order
        words = [_word_range(run, per) for run in self.row_ranges]
        down, across = {
            "qweight": (self.column_range, words) if awq else (_word_range(self.column_range, per), self.row_ranges),
            "qzeros": (self.group_range, words), "scales": (self.group_range, self.row_ranges),
        }[kind]  # fmt: skip
        return torch.cat([tensor[down.start : down.stop, run.start : run.stop] for run in across], 1)

    def _check_shape(self, kind: str, shape: list[int], key: str, path: Path) -> None:
        per, groups = 32 // self.scheme.bits, self.columns // self.scheme.group_size
        if self.columns % self.scheme.group_size or self.rows % per or self.columns % per:
            raise StartupError(
                f"{short_repr(key)} in {path} is of a weight {[self.rows, self.columns]}, which groups of "
                f"{self.scheme.group_size} columns and words of {per} numbers don't divide", FIT_REMEDY,
            )  # fmt: skip
        awq = self.scheme.stored == "awq"
        expected = {
            "qweight": [self.columns, self.rows // per] if awq else [self.columns // per, self.rows],
            "qzeros": [groups, self.rows // per], "scales": [groups, self.rows], "g_idx": [self.columns],
        }[kind]  # fmt: skip
        if shape != expected:
            cause = f"{short_repr(key)} in {path} has shape {short_repr(shape)}, but config.json makes it {expected}"
            raise StartupError(cause, FIT_REMEDY)

    def _check_order(self, order: Tensor, key: str, path: Path) -> None:
        groups = self.columns // self.scheme.group_size
        columns = torch.arange(self.column_range.start, self.column_range.stop, dtype=torch.int32)
        if not ((order >= 0) & (order < groups)).all():
            raise StartupError(f"{short_repr(key)} in {path} names a group that isn't there", f"There are {groups}")
        if not self.scheme.desc_act and not torch.equal(order.cpu(), columns // self.scheme.group_size):
            raise StartupError(
                f"{short_repr(key)} in {path} has groups out of order", "config.json must say so: desc_act"
            )

    @property
    def missing_tensors(self) -> list[str]:
        needed = ("qweight", "qzeros", "scales", *(("g_idx",) if self.scheme.desc_act else ()))
        return [f"{self.name}.{kind}" for kind in needed if kind not in self.tensors]

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers [rows, columns], zeros [rows, groups] and scales [rows, groups] that were read."""
        zeros, scales, bits = self.tensors["qzeros"], self.tensors["scales"].t(), self.scheme.bits
        if self.scheme.stored == "awq":
            numbers = unpack_bits(self.tensors["qweight"], 4)
            order = torch.tensor(AWQ_ORDER, device=zeros.device).argsort()
            numbers, zeros = numbers[:, :, order].flatten(1), unpack_bits(zeros, 4)[:, :, order].flatten(1)
            return select_ranges(numbers, self.row_ranges, 8).t(), select_ranges(zeros, self.row_ranges, 8).t(), scales
        per = 32 // bits
        numbers = select_ranges(unpack_bits(self.tensors["qweight"].t(), bits).flatten(1), (self.column_range,), per)
        zeros = select_ranges(unpack_bits(zeros, bits).flatten(1), self.row_ranges, per)
        if self.scheme.zeros_minus_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return numbers, zeros.t(), scales

    def to_low_bit(self) -> LowBitWeight:
        """Return the weight in few bits; its groups must be in order, and whole."""
        assert not self.scheme.desc_act, "the columns of a group are adjacent"
        assert (
            self.column_range.start % self.scheme.group_size == self.column_range.stop % self.scheme.group_size == 0
        ), f"{self.column_range}: no groups"
        return _low_bit_weight(self.scheme, *self.unpack())

    def dequantize(self) -> Tensor:
        """Return the weight in fp32 [rows, columns]."""
        numbers, zeros, scales = self.unpack()
        columns = torch.arange(self.column_range.start, self.column_range.stop, device=numbers.device)
        groups = self.tensors["g_idx"].long() if self.scheme.desc_act else columns // self.scheme.group_size
        groups = groups - self.group_range.start
        return (numbers.float() - zeros.float()[:, groups]) * scales.float()[:, groups]


def _low_bit_weight(scheme: LowBitScheme, numbers: Tensor, zeros: Tensor, scales: Tensor) -> LowBitWeight:
    form = LowBitFormat(scheme.bits, scheme.group_size, 0 if scheme.bits == 4 else 128, True)
    b = (zeros.to(torch.int16) - form.zero).to(torch.int8)
    b = b.repeat_interleave(scheme.group_size // form.group, 1)
    return LowBitWeight(form, numbers, scales.half(), scales.half(), torch.ones_like(b), b)


def quantize_groups(weight: Tensor, scheme: LowBitScheme) -> LowBitWeight:
    """Round a weight [rows, columns] to the nearest numbers of the groups of `scheme`, as AWQ and GPTQ store them."""
    groups, most = torch.unflatten(weight.float().cpu(), 1, (-1, scheme.group_size)), (1 << scheme.bits) - 1
    least = groups.amin(2).clamp(max=0)
    scales = ((groups.amax(2).clamp(min=0) - least) / most).half()
    by = torch.where(scales > 0, scales, 1).float()
    zeros = (-least / by).round().clamp(0, most)
    numbers = (groups / by[:, :, None] + zeros[:, :, None]).round().clamp(0, most)
    return _low_bit_weight(scheme, numbers.to(torch.uint8).flatten(1), zeros.to(torch.uint8), scales)


def _word_range(run: range, per_word: int) -> range:
    """Return the words, or groups, of `per_word` numbers each that contain a run of numbers."""
    return range(run.start // per_word, -(-run.stop // per_word))


def select_ranges(numbers: Tensor, ranges: Sequence[range], per_word: int) -> Tensor:
    """Return the numbers of `ranges` alone, [A, C], from those of all the words that contain them, [A, B], each range's
    words after those of the one before."""
    parts, offset = list[Tensor](), 0
    for run in ranges:
        words = _word_range(run, per_word)
        first = offset + run.start - words.start * per_word
        parts.append(numbers[:, first : first + len(run)])
        offset += len(words) * per_word
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpack words int32 [A, B] to uint8 [A, B, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)
