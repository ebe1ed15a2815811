"""Weights of checkpoints by AWQ and GPTQ: their packed integers, zeros and scales, as weights of few bits.

A group of a column's numbers shares a scale and a zero: a weight is (number - zero) * scale, and none is lost. Both
methods keep weights as [in, out], eight numbers of four bits in 32: AWQ along the outputs, in an order of its own, GPTQ
along the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.cpu.quantised import Form, Numbers
from quire.data.models.quantization import Few
from quire.data.weights.slices import Slice
from quire.errors import StartupError, shown

KINDS = ("qweight", "qzeros", "scales", "g_idx")
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits are of, the lowest first."""
FIT = "The checkpoint must fit its config.json"


class Stored:
    """The tensors of one weight [rows, columns], as they come, or what a rank has of them: `cut`, which may lie across
    words and groups, is of this shape. Words and groups that it touches are read whole."""

    def __init__(self, scheme: Few, name: str, rows: int, columns: int, cut: Slice | None = None) -> None:
        self.scheme, self.name, self.rows, self.columns = scheme, name, rows, columns
        self.cut, self.runs = cut, (range(rows),) if cut is None else cut.runs
        self.own = range(columns) if cut is None or cut.columns is None else cut.columns
        self.groups = range(columns // scheme.group) if scheme.ordered else _touched(self.own, scheme.group)
        self.tensors: dict[str, Tensor] = {}

    def read(self, kind: str, file: Any, key: str, path: Path) -> Tensor:
        """A tensor of a safetensors file, which is kept. StartupError for one of the wrong kind or shape."""
        self._check_shape(kind, list(file.get_slice(key).get_shape()), key, path)
        found = self._read(kind, file, key)
        floats = kind == "scales"
        if found.dtype not in ((torch.float16, torch.bfloat16, torch.float32) if floats else (torch.int32,)):
            kind_of = str(found.dtype).removeprefix("torch.")
            raise StartupError(f"{shown(key)} in {path} has dtype {kind_of}", "Numbers are int32, scales are floats")
        if floats and not (found.half().isfinite() & (found.half().float() == found.float())).all():
            raise StartupError(f"{shown(key)} in {path} has a scale that isn't a finite number in fp16", FIT)
        if kind == "g_idx":
            self._check_order(found, key, path)
        self.tensors[kind] = found
        return found

    def _read(self, kind: str, file: Any, key: str) -> Tensor:
        """What is needed of a tensor."""
        if self.cut is None:
            whole: Tensor = file.get_tensor(key)
            return whole
        tensor, per, awq = file.get_slice(key), 32 // self.scheme.bits, self.scheme.stored == "awq"
        if kind == "g_idx":
            own: Tensor = tensor[self.own.start : self.own.stop]
            return own
        words = [_touched(run, per) for run in self.runs]
        down, across = {
            "qweight": (self.own, words) if awq else (_touched(self.own, per), self.runs),
            "qzeros": (self.groups, words), "scales": (self.groups, self.runs),
        }[kind]  # fmt: skip
        return torch.cat([tensor[down.start : down.stop, run.start : run.stop] for run in across], 1)

    def _check_shape(self, kind: str, shape: list[int], key: str, path: Path) -> None:
        per, groups = 32 // self.scheme.bits, self.columns // self.scheme.group
        if self.columns % self.scheme.group or self.rows % per or self.columns % per:
            raise StartupError(
                f"{shown(key)} in {path} is of a weight {[self.rows, self.columns]}, which groups of "
                f"{self.scheme.group} columns and words of {per} numbers don't divide", FIT,
            )  # fmt: skip
        awq = self.scheme.stored == "awq"
        expected = {
            "qweight": [self.columns, self.rows // per] if awq else [self.columns // per, self.rows],
            "qzeros": [groups, self.rows // per], "scales": [groups, self.rows], "g_idx": [self.columns],
        }[kind]  # fmt: skip
        if shape != expected:
            cause = f"{shown(key)} in {path} has shape {shown(shape)}, but config.json makes it {expected}"
            raise StartupError(cause, FIT)

    def _check_order(self, order: Tensor, key: str, path: Path) -> None:
        groups = self.columns // self.scheme.group
        plain = torch.arange(self.own.start, self.own.stop, dtype=torch.int32) // self.scheme.group
        if not ((order >= 0) & (order < groups)).all():
            raise StartupError(f"{shown(key)} in {path} names a group that isn't there", f"There are {groups}")
        if not self.scheme.ordered and not torch.equal(order.cpu(), plain):
            raise StartupError(f"{shown(key)} in {path} has groups out of order", "config.json must say so: desc_act")

    @property
    def missing(self) -> list[str]:
        needed = ("qweight", "qzeros", "scales", *(("g_idx",) if self.scheme.ordered else ()))
        return [f"{self.name}.{kind}" for kind in needed if kind not in self.tensors]

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [rows, columns], zeros [rows, groups] and scales [rows, groups], of those that were read."""
        zeros, scales, bits = self.tensors["qzeros"], self.tensors["scales"].t(), self.scheme.bits
        if self.scheme.stored == "awq":
            numbers = unpacked(self.tensors["qweight"], 4)
            order = torch.tensor(AWQ, device=zeros.device).argsort()
            numbers, zeros = numbers[:, :, order].flatten(1), unpacked(zeros, 4)[:, :, order].flatten(1)
            return within(numbers, self.runs, 8).t(), within(zeros, self.runs, 8).t(), scales
        per = 32 // bits
        numbers = within(unpacked(self.tensors["qweight"].t(), bits).flatten(1), (self.own,), per)
        zeros = within(unpacked(zeros, bits).flatten(1), self.runs, per)
        if self.scheme.one_off:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return numbers, zeros.t(), scales

    def numbers(self) -> Numbers:
        """In few bits; the groups are in order, and whole."""
        assert not self.scheme.ordered, "columns of a group lie side by side"
        assert self.own.start % self.scheme.group == self.own.stop % self.scheme.group == 0, f"{self.own}: no groups"
        numbers, zeros, scales = self.parts()
        form = Form(self.scheme.bits, self.scheme.group, 0 if self.scheme.bits == 4 else 128, True)
        b = (zeros.to(torch.int16) - form.zero).to(torch.int8)
        b = b.repeat_interleave(self.scheme.group // form.group, 1)
        return Numbers(form, numbers, scales.half(), scales.half(), torch.ones_like(b), b)

    def floats(self) -> Tensor:
        """What it stands for, in fp32 [rows, columns]."""
        numbers, zeros, scales = self.parts()
        order = torch.arange(self.own.start, self.own.stop, device=numbers.device) // self.scheme.group
        order = (self.tensors["g_idx"].long() if self.scheme.ordered else order) - self.groups.start
        return (numbers.float() - zeros.float()[:, order]) * scales.float()[:, order]


def _touched(run: range, per: int) -> range:
    """Which words, or groups, of so many each hold a run of numbers."""
    return range(run.start // per, -(-run.stop // per))


def within(numbers: Tensor, runs: Sequence[range], per: int) -> Tensor:
    """numbers [A, B], of the words of `per` numbers that each of the runs touches, one run's behind another's -> those
    of the runs alone [A, C]."""
    parts, at = list[Tensor](), 0
    for run in runs:
        words = _touched(run, per)
        first = at + run.start - words.start * per
        parts.append(numbers[:, first : first + len(run)])
        at += len(words) * per
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """words int32 [A, B] -> uint8 [A, B, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)
