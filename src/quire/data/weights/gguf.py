"""GGUF files, versions 2 and 3: what they say of a model, and its tensors, mapped from the file. No torch here.

The file is data from a stranger: every count, length and offset is checked against its size before anything is made of
it, and texts stay in the file until somebody asks for them, so that reading takes no more memory than the file has. Of
what a tokenizer is made there are bounds here, too.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from quire.data.weights.blocks import KINDS, Blocks, row_bytes
from quire.errors import StartupError, shown
from quire.files import AGAIN

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # keys, and tensors
MAX_NAME = 1 << 16  # bytes of a key
MAX_TEXT = 1 << 24  # bytes of a text that is no array's, which is decoded at once: up to four times as many
MAX_TEXTS = 1 << 20  # texts of all arrays: each is looked at,
MAX_TEXTS_BYTES = 1 << 25  # and a tokenizer takes some 300 bytes for each, and up to twelve for one of these
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4
TEXT, ARRAY, FLAG, FLOAT = 8, 9, 7, 6
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    30: "bf16",
}  # fmt: skip
OTHERS = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip
"""Types that are not read, by their names."""


class Texts(Sequence[str]):
    """An array of texts, each of which is decoded when it is asked for. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, data: mmap.mmap, starts: array[int]) -> None:
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._at(start) for start in self._starts[index]]
        return self._at(self._starts[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._at, self._starts)

    def _at(self, start: int) -> str:
        length = int.from_bytes(self._data[start : start + 8], "little")
        return self._data[start + 8 : start + 8 + length].decode("utf-8", "replace")


class GGUF(NamedTuple):
    """A file: its metadata by key (arrays of numbers are NumPy's, of texts Texts), and its tensors by name, each a
    weight [rows, columns]; what has one dimension is one row. All of them lie in `data`."""

    path: Path
    said: dict[str, Any]
    tensors: dict[str, Blocks]
    data: mmap.mmap

    @property
    def numbers(self) -> int:
        """Of all tensors."""
        return sum(blocks.rows * blocks.columns for blocks in self.tensors.values())

    def release(self) -> None:
        """Give the memory of what has been read back. It is read again where it is asked for again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def is_gguf(path: Path) -> bool:
    """The file is named as one, or begins as one."""
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf":
        return path.exists()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUF:
    """The file, mapped. StartupError, which names it and what is wrong, for anything but a whole file of types that
    are known; the numbers of its tensors aren't looked at."""
    reader = _Reader(path, _mapped(path))
    try:
        said, infos = reader.header()
        parts = said.get("split.count", 1)
        if type(parts) is not int or parts > 1:
            raise StartupError(f"{path} is one of {shown(parts)} parts", "Merge them: llama-gguf-split --merge")
        return GGUF(path, said, reader.tensors(infos, said.get("general.alignment", 32)), reader.data)
    except struct.error:
        reader.refuse("it ends too soon")


def _mapped(path: Path) -> mmap.mmap:
    try:
        # Not blocking, so that opening a FIFO doesn't wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartupError(f"{path} is not a regular file", "Give a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise StartupError(f"{path} is empty", AGAIN) from error
    except OSError as error:
        raise StartupError(f"{path} can't be read: {error.strerror or error}", "Give a GGUF file") from error


class _Info(NamedTuple):
    """What the header says of a tensor: its columns come first, and its offset is from where the data begin."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int


class _Reader:
    """Reads a header from its beginning on; `at` is the byte that comes next. What is cut off is a struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.texts, self.texts_bytes = path, data, 0, 0, 0

    def refuse(self, why: str, remedy: str = AGAIN) -> NoReturn:
        raise StartupError(f"{self.path} is not a readable GGUF file: {why}", remedy)

    def header(self) -> tuple[dict[str, Any], list[_Info]]:
        if self.data[:4] != MAGIC:
            self.refuse(f"it begins with {shown(self.data[:4])}, not with {MAGIC!r}", "Give a GGUF file")
        self.at = 4
        if (version := self.number("I")) not in VERSIONS:
            big = version.to_bytes(4, "little")[::-1] in (v.to_bytes(4, "little") for v in VERSIONS)
            self.refuse(f"its version is {version}" + ", which is big-endian" * big, "Versions 2 and 3 are read")
        counts = self.number("Q"), self.number("Q")
        for count, what in zip(counts, ("tensors", "keys")):
            if count > MAX_ENTRIES:
                self.refuse(f"it says that it has {count} {what}", f"At most {MAX_ENTRIES:,} are read")
        said: dict[str, Any] = {}
        for _ in range(counts[1]):
            key = self.text(MAX_NAME)
            if key in said:
                self.refuse(f"it has the key {shown(key)} twice")
            said[key] = self.value(self.number("I"), key)
        return said, [self.info() for _ in range(counts[0])]

    def number(self, form: str) -> int:
        found: int = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return found

    def text(self, most: int) -> str:
        start, length = self.at + 8, self.number("Q")
        if length > min(most, len(self.data) - start):
            self.refuse(f"a text at byte {self.at - 8} says that it has {length} bytes")
        self.at = start + length
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == TEXT:
            return self.text(MAX_TEXT)
        if kind == ARRAY:
            return self.array(self.number("I"), self.number("Q"), key)
        if kind not in SCALARS:
            self.refuse(f"{shown(key)} has the unknown type {kind}")
        found = self.number(SCALARS[kind])
        if kind == FLAG:
            return bool(found)
        return float(str(np.float32(found))) if kind == FLOAT else found  # 1e-5, not its neighbour in fp32

    def array(self, kind: int, count: int, key: str) -> Any:
        if kind != TEXT and kind not in SCALARS:
            self.refuse(f"{shown(key)} is an array of the type {kind}", "Arrays of numbers and of texts are read")
        size = 8 if kind == TEXT else struct.calcsize(SCALARS[kind])
        if count > (len(self.data) - self.at) // size:
            self.refuse(f"{shown(key)} says that it has {count} entries")
        if kind != TEXT:
            found = np.frombuffer(self.data, np.dtype("<" + SCALARS[kind]), count, self.at)
            self.at += count * size
            return found
        self.texts += count
        if self.texts > MAX_TEXTS:
            self.refuse(f"it has {self.texts} texts in arrays", f"At most {MAX_TEXTS:,} are read")
        return self._texts(count)

    def _texts(self, count: int) -> Texts:
        at, end, starts, length = self.at, len(self.data), array("Q"), struct.Struct("<Q").unpack_from
        for _ in range(count):
            starts.append(at)
            at += 8 + length(self.data, at)[0]
            if at > end:
                self.refuse(f"a text at byte {starts[-1]} ends behind the file's end")
        self.texts_bytes += at - self.at - 8 * count
        if self.texts_bytes > MAX_TEXTS_BYTES:
            self.refuse(
                f"the texts in its arrays have {self.texts_bytes} bytes", f"At most {MAX_TEXTS_BYTES:,} are read"
            )
        self.at = at
        return Texts(self.data, starts)

    def info(self) -> _Info:
        name, dimensions = self.text(MAX_NAME), self.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.refuse(f"the tensor {shown(name)} has {dimensions} dimensions", f"1 to {MAX_DIMENSIONS} are read")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        kind = self.number("I")
        if kind not in TYPES:
            called = OTHERS.get(kind, f"number {kind}")
            self.refuse(
                f"the tensor {shown(name)} has the type {called}", f"Use a file in {', '.join(KINDS)}, or a mix of them"
            )
        return _Info(name, shape, TYPES[kind], self.number("Q"))

    def tensors(self, infos: list[_Info], alignment: Any) -> dict[str, Blocks]:
        """Where each of them is. They lie apart, so that together they are no larger than the file."""
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.refuse(f"general.alignment is {shown(alignment)}", "It must be a power of two")
        begin = -(-self.at // alignment) * alignment
        whole, found, end = np.frombuffer(self.data, np.uint8), dict[str, Blocks](), 0
        for name, shape, kind, offset in sorted(infos, key=lambda info: info.offset):
            columns, rows = shape[0], 1
            for size in shape[1:]:
                rows *= size
            if not columns or not rows or columns % KINDS[kind].numbers:
                self.refuse(f"the tensor {shown(name)} in {kind} has the shape {shown(shape)}")
            size = rows * row_bytes(kind, columns)
            if name in found:
                self.refuse(f"it has the tensor {shown(name)} twice")
            if offset % alignment or offset < end or begin + offset + size > len(whole):
                self.refuse(f"the tensor {shown(name)} has {size} bytes from {offset} on, where they can't be")
            end = offset + size
            data = whole[begin + offset : begin + end].reshape(rows, -1)
            found[name] = Blocks(kind, rows, columns, data)
        return found
