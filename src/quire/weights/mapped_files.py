"""A checkpoint's file as the system maps it into memory: weights that lie there need no copy, and pages that have been
read can be given back, since the file still has them. Linux only; elsewhere nothing is found."""

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
    """Addresses of one file's private mapping, and a tensor in it, which keeps it: where it was is other memory's place
    afterwards."""

    begin: int
    end: int
    anchor: Tensor

    @staticmethod
    def containing(tensor: Tensor) -> MappedFile | None:
        """The mapping that holds a tensor; None if it lies in other memory."""
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
        """Whether a tensor lies here, is large enough to stay, and where its numbers may lie."""
        begin, size = tensor.data_ptr(), tensor.nbytes
        inside = tensor.is_contiguous() and self.begin <= begin and begin + size <= self.end
        return inside and size >= MIN_MAPPED_BYTES and begin % tensor.element_size() == 0

    def copy_and_release(self, tensor: Tensor, to: Tensor) -> None:
        """What lies here becomes `to`, and nothing of the file is in memory."""
        copy_tensor(tensor, to)
        self.release()

    def release(self) -> None:
        """Give its pages back. Whoever reads them again gets the same from the file; nobody has written any."""
        if hasattr(mmap, "MADV_DONTNEED"):
            size = ctypes.c_size_t(self.end - self.begin)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.begin), size, mmap.MADV_DONTNEED)


def copy_tensor(tensor: Tensor, to: Tensor) -> None:
    """`to` becomes `tensor`, converted. What needs no change is copied by one thread: at every new page
    torch's several would wait for each other, and take four times as long."""
    alike = tensor.dtype == to.dtype and tensor.is_contiguous() and to.is_contiguous()
    if alike and tensor.device.type == to.device.type == "cpu" and tensor.dim():
        to.view(torch.uint8).numpy()[...] = tensor.view(torch.uint8).numpy()
    else:
        to.copy_(tensor)


def trim_memory() -> None:
    """Give back what a start has left behind: what was freed on the way, which malloc would keep for later, where the C
    library can do it; and the code of libraries, of which steps read a part again."""
    own = ctypes.CDLL(None)
    with suppress(OSError, AttributeError):
        own.malloc_trim(0)
    for begin, end in _code_mappings():
        own.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


CODE_MAPPING = re.compile(r"^(\w+)-(\w+) r-xp \w+ \S+ [1-9].*\n(?:\w+: .*\n)*?Anonymous: +0 kB$", re.MULTILINE)
"""Of a file, and nobody has written there."""


def _code_mappings() -> Iterator[tuple[int, int]]:
    """Where libraries' code is mapped. Linux only; elsewhere nothing is found."""
    try:
        said = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for found in CODE_MAPPING.finditer(said):
        yield int(found[1], 16), int(found[2], 16)
