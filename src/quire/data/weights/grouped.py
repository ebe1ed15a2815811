"""Weights of checkpoints by AWQ and GPTQ: their packed integers, zeros and scales, as weights of few bits.

A group of a column's numbers shares a scale and a zero: a weight is (number - zero) * scale, and none is lost. Both
methods keep weights as [in, out], eight numbers of four bits in 32: AWQ along the outputs, in an order of its own, GPTQ
along the inputs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.data.kernels.cpu.quantised import Form, Numbers
from quire.data.models.quantization import Few
from quire.errors import StartupError, shown

KINDS = ("qweight", "qzeros", "scales", "g_idx")
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits are of, the lowest first."""
FIT = "The checkpoint must fit its config.json"


class Stored:
    """The tensors of one weight [rows, columns], as they come."""

    def __init__(self, scheme: Few, name: str, rows: int, columns: int) -> None:
        self.scheme, self.name, self.rows, self.columns = scheme, name, rows, columns
        self.tensors: dict[str, Tensor] = {}

    def add(self, kind: str, tensor: Tensor, key: str, path: Path) -> None:
        """StartupError for a tensor of the wrong kind or shape."""
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
        if list(tensor.shape) != expected:
            cause = f"{shown(key)} in {path} has shape {shown(list(tensor.shape))}, but config.json makes it {expected}"
            raise StartupError(cause, FIT)
        floats = kind == "scales"
        if tensor.dtype not in ((torch.float16, torch.bfloat16, torch.float32) if floats else (torch.int32,)):
            kind_of = str(tensor.dtype).removeprefix("torch.")
            raise StartupError(f"{shown(key)} in {path} has dtype {kind_of}", "Numbers are int32, scales are floats")
        if floats and not (tensor.half().isfinite() & (tensor.half().float() == tensor.float())).all():
            raise StartupError(f"{shown(key)} in {path} has a scale that isn't a finite number in fp16", FIT)
        if kind == "g_idx":
            self._check_order(tensor, key, path)
        self.tensors[kind] = tensor

    def _check_order(self, order: Tensor, key: str, path: Path) -> None:
        groups = self.columns // self.scheme.group
        plain = torch.arange(self.columns, dtype=torch.int32) // self.scheme.group
        if not ((order >= 0) & (order < groups)).all():
            raise StartupError(f"{shown(key)} in {path} names a group that isn't there", f"There are {groups}")
        if not self.scheme.ordered and not torch.equal(order.cpu(), plain):
            raise StartupError(f"{shown(key)} in {path} has groups out of order", "config.json must say so: desc_act")

    @property
    def missing(self) -> list[str]:
        needed = ("qweight", "qzeros", "scales", *(("g_idx",) if self.scheme.ordered else ()))
        return [f"{self.name}.{kind}" for kind in needed if kind not in self.tensors]

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [rows, columns], zeros [rows, groups] and scales [rows, groups]."""
        zeros, scales = self.tensors["qzeros"], self.tensors["scales"].t()
        if self.scheme.stored == "awq":
            numbers = unpacked(self.tensors["qweight"], 4)
            order = torch.tensor(AWQ, device=zeros.device).argsort()
            numbers, zeros = numbers[:, :, order].flatten(1), unpacked(zeros, 4)[:, :, order].flatten(1)
            return numbers.t(), zeros.t(), scales
        bits = self.scheme.bits
        numbers = unpacked(self.tensors["qweight"].t(), bits).flatten(1)
        zeros = unpacked(zeros, bits).flatten(1)
        if self.scheme.one_off:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return numbers, zeros.t(), scales

    def numbers(self) -> Numbers:
        """In few bits; the groups are in order."""
        assert not self.scheme.ordered, "columns of a group lie side by side"
        numbers, zeros, scales = self.parts()
        form = Form(self.scheme.bits, self.scheme.group, 0 if self.scheme.bits == 4 else 128, True)
        b = (zeros.to(torch.int16) - form.zero).to(torch.int8)
        b = b.repeat_interleave(self.scheme.group // form.group, 1)
        return Numbers(form, numbers, scales.half(), scales.half(), torch.ones_like(b), b)

    def floats(self) -> Tensor:
        """What it stands for, in fp32 [rows, columns]."""
        numbers, zeros, scales = self.parts()
        order = torch.arange(self.columns, device=numbers.device) // self.scheme.group
        order = self.tensors["g_idx"].long() if self.scheme.ordered else order
        return (numbers.float() - zeros.float()[:, order]) * scales.float()[:, order]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """words int32 [A, B] -> uint8 [A, B, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)
