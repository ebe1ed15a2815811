"""The memory mapping of a checkpoint's file: weights in it need no copy, and its pages can be released after reading,
since the file still has them. Linux only; elsewhere no mapping is found."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MIN_MAPPED_BYTES = 1 << 20  # bytes of a weight that is not copied


class MappedFile(NamedTuple):
    """The addresses of one file's private mapping. `anchor` is a tensor in it, which keeps the file mapped: otherwise
    other memory could get these addresses."""

    begin: int
    end: int
    anchor: Tensor

    @staticmethod
    def containing(tensor: Tensor) -> MappedFile | None:
        """Return the file mapping that contains a tensor; None if the tensor is in other memory."""
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return None
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        for line in lines:  # begin-end, rights, offset, device, inode, path
            fields = line.split(maxsplit=5)
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            if begin <= address < end:
                return MappedFile(begin, end, tensor) if fields[1].endswith("p") and fields[4] != "0" else None
        return None

    def contains(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in this mapping, aligned, and large enough to be used without a copy."""
        begin, size = tensor.data_ptr(), tensor.nbytes
        inside = tensor.is_contiguous() and self.begin <= begin and begin + size <= self.end
        return inside and size >= MIN_MAPPED_BYTES and begin % tensor.element_size() == 0

    def release(self) -> None:
        """Give the pages back to the system. They are unmodified, and read from the file again on the next access."""
        if hasattr(mmap, "MADV_DONTNEED"):
            size = ctypes.c_size_t(self.end - self.begin)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.begin), size, mmap.MADV_DONTNEED)


def copy_tensor(tensor: Tensor, to: Tensor) -> None:
    """Copy `tensor` to `to`, converted. Without conversion one thread copies: torch's threads would wait for each other
    at every new page, and take four times as long."""
    same_layout = tensor.dtype == to.dtype and tensor.is_contiguous() and to.is_contiguous()
    on_cpu = tensor.device.type == to.device.type == "cpu"
    if same_layout and on_cpu and tensor.dim() and tensor.stride(-1) == to.stride(-1) == 1:
        to.view(torch.uint8).numpy()[...] = tensor.view(torch.uint8).numpy()
    else:
        to.copy_(tensor)


def trim_memory() -> None:
    """Give memory back to the system after a start: freed memory that malloc would keep, if the C library can do it;
    and the code of libraries, of which steps read a part again."""
    libc = ctypes.CDLL(None)
    with suppress(OSError, AttributeError):
        libc.malloc_trim(0)
    for begin, end in _code_mappings():
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


CODE_MAPPING = re.compile(r"^(\w+)-(\w+) r-xp \w+ \S+ [1-9].*\n(?:\w+: .*\n)*?Anonymous: +0 kB$", re.MULTILINE)
"""A mapping of a file with unmodified code, in /proc/self/smaps."""


def _code_mappings() -> Iterator[tuple[int, int]]:
    """Yield the address ranges of libraries' code. Linux only; elsewhere there are none."""
    try:
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for match in CODE_MAPPING.finditer(smaps):
        yield int(match[1], 16), int(match[2], 16)
