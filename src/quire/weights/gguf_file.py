"""GGUF files, versions 2 and 3: their metadata, and their tensors, mapped from the file. No torch here.

The file is untrusted: every count, length and offset is checked against the file's size before use. Strings stay in the
file until they are accessed, so that reading takes no more memory than the file's size. The strings of a tokenizer are
bounded as well.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN, open_regular
from quire.weights.gguf_blocks import BLOCK_FORMATS, GGUFTensor, row_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # keys, and tensors
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24  # of a string outside of arrays, which is decoded at once: to up to four times the memory
MAX_STRINGS = 1 << 20  # in all arrays together: a tokenizer takes some 300 bytes for each
MAX_STRINGS_BYTES = 1 << 25  # in all arrays together: a tokenizer takes up to 12 bytes for each of these
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 4
TYPE_STRING, TYPE_ARRAY, TYPE_BOOL, TYPE_FLOAT32 = 8, 9, 7, 6
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
TENSOR_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    30: "bf16", 39: "mxfp4",
}  # fmt: skip
UNSUPPORTED_TYPES = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0",
}  # fmt: skip
"""Names of the types that are not supported."""


class StringArray(Sequence[str]):
    """An array of strings, each decoded on access. Bytes that are not UTF-8 become U+FFFD."""

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


class GGUFFile(NamedTuple):
    """A file: its metadata by key (arrays are NumPy arrays or StringArrays), and its tensors by name, each a weight
    [rows, columns]; a tensor of one dimension is one row. All are views of `data`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(blocks.rows * blocks.columns for blocks in self.tensors.values())

    def release(self) -> None:
        """Give the pages that have been read back to the system. They are read again on the next access."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


def is_gguf(path: Path) -> bool:
    """Return True if the file has the suffix .gguf or begins as a GGUF file."""
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf":
        return path.exists()
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFFile:
    """Map a file and read its header. Raise StartupError, naming the file and the problem, for anything but a complete
    file of supported types; the tensors' numbers are not checked."""
    reader = _HeaderReader(path, _map_file(path))
    try:
        metadata, infos = reader.read_header()
        parts = metadata.get("split.count", 1)
        if type(parts) is not int or parts > 1:
            raise StartupError(f"{path} is one of {short_repr(parts)} parts", "Merge them: llama-gguf-split --merge")
        tensors = reader.map_tensors(infos, metadata.get("general.alignment", 32))
        return GGUFFile(path, metadata, tensors, reader.data)
    except struct.error:
        reader.fail("it ends too soon")


def _map_file(path: Path) -> mmap.mmap:
    with open_regular(path, str(path), "Give a GGUF file") as file:
        if not os.fstat(file.fileno()).st_size:
            raise StartupError(f"{path} is empty", DOWNLOAD_AGAIN)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _TensorInfo(NamedTuple):
    """A tensor in the header: the number of columns is first in `shape`; `offset` is from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int


class _HeaderReader:
    """Reads a header sequentially; `offset` is the next byte. A truncated file is a struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset, self.num_strings, self.strings_bytes = path, data, 0, 0, 0

    def fail(self, reason: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
        raise StartupError(f"{self.path} is not a readable GGUF file: {reason}", remedy)

    def read_header(self) -> tuple[dict[str, Any], list[_TensorInfo]]:
        if self.data[:4] != MAGIC:
            self.fail(f"it begins with {short_repr(self.data[:4])}, not with {MAGIC!r}", "Give a GGUF file")
        self.offset = 4
        if (version := self.read_number("I")) not in VERSIONS:
            big = version.to_bytes(4, "little")[::-1] in (v.to_bytes(4, "little") for v in VERSIONS)
            self.fail(f"its version is {version}" + ", which is big-endian" * big, "Versions 2 and 3 are read")
        counts = self.read_number("Q"), self.read_number("Q")
        for count, what in zip(counts, ("tensors", "keys")):
            if count > MAX_ENTRIES:
                self.fail(f"it says that it has {count} {what}", f"At most {MAX_ENTRIES:,} are read")
        metadata: dict[str, Any] = {}
        for _ in range(counts[1]):
            key = self.read_string(MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"it has the key {short_repr(key)} twice")
            metadata[key] = self.read_value(self.read_number("I"), key)
        return metadata, [self.read_tensor_info() for _ in range(counts[0])]

    def read_number(self, struct_format: str) -> int:
        number: int = struct.unpack_from("<" + struct_format, self.data, self.offset)[0]
        self.offset += struct.calcsize("<" + struct_format)
        return number

    def read_string(self, max_bytes: int) -> str:
        start, length = self.offset + 8, self.read_number("Q")
        if length > min(max_bytes, len(self.data) - start):
            self.fail(f"a text at byte {self.offset - 8} says that it has {length} bytes")
        self.offset = start + length
        return self.data[start : self.offset].decode("utf-8", "replace")

    def read_value(self, value_type: int, key: str) -> Any:
        if value_type == TYPE_STRING:
            return self.read_string(MAX_STRING_BYTES)
        if value_type == TYPE_ARRAY:
            return self.read_array(self.read_number("I"), self.read_number("Q"), key)
        if value_type not in SCALAR_FORMATS:
            self.fail(f"{short_repr(key)} has the unknown type {value_type}")
        number = self.read_number(SCALAR_FORMATS[value_type])
        if value_type == TYPE_BOOL:
            return bool(number)
        return float(str(np.float32(number))) if value_type == TYPE_FLOAT32 else number  # 1e-5, not 9.99999975e-06

    def read_array(self, item_type: int, count: int, key: str) -> Any:
        if item_type != TYPE_STRING and item_type not in SCALAR_FORMATS:
            self.fail(
                f"{short_repr(key)} is an array of the type {item_type}", "Arrays of numbers and of texts are read"
            )
        size = 8 if item_type == TYPE_STRING else struct.calcsize(SCALAR_FORMATS[item_type])
        if count > (len(self.data) - self.offset) // size:
            self.fail(f"{short_repr(key)} says that it has {count} entries")
        if item_type != TYPE_STRING:
            numbers = np.frombuffer(self.data, np.dtype("<" + SCALAR_FORMATS[item_type]), count, self.offset)
            self.offset += count * size
            return numbers
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            self.fail(f"it has {self.num_strings} texts in arrays", f"At most {MAX_STRINGS:,} are read")
        return self._read_strings(count)

    def _read_strings(self, count: int) -> StringArray:
        offset, end, starts, length = self.offset, len(self.data), array("Q"), struct.Struct("<Q").unpack_from
        for _ in range(count):
            starts.append(offset)
            offset += 8 + length(self.data, offset)[0]
            if offset > end:
                self.fail(f"a text at byte {starts[-1]} ends after the file's end")
        self.strings_bytes += offset - self.offset - 8 * count
        if self.strings_bytes > MAX_STRINGS_BYTES:
            self.fail(
                f"the texts in its arrays have {self.strings_bytes} bytes", f"At most {MAX_STRINGS_BYTES:,} are read"
            )
        self.offset = offset
        return StringArray(self.data, starts)

    def read_tensor_info(self) -> _TensorInfo:
        name, dimensions = self.read_string(MAX_KEY_BYTES), self.read_number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(f"the tensor {short_repr(name)} has {dimensions} dimensions", f"1 to {MAX_DIMENSIONS} are read")
        shape = tuple(self.read_number("Q") for _ in range(dimensions))
        kind = self.read_number("I")
        if kind not in TENSOR_TYPES:
            type_name = UNSUPPORTED_TYPES.get(kind, f"number {kind}")
            self.fail(
                f"the tensor {short_repr(name)} has the type {type_name}",
                f"Use a file in {', '.join(BLOCK_FORMATS)}, or a mix of them",
            )
        return _TensorInfo(name, shape, TENSOR_TYPES[kind], self.read_number("Q"))

    def map_tensors(self, infos: list[_TensorInfo], alignment: Any) -> dict[str, GGUFTensor]:
        """Return the tensors as views of the file. Overlapping ones are an error, so that together they are no larger
        than the file."""
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(f"general.alignment is {short_repr(alignment)}", "It must be a power of two")
        begin = -(-self.offset // alignment) * alignment
        whole, tensors, end = np.frombuffer(self.data, np.uint8), dict[str, GGUFTensor](), 0
        for name, shape, kind, offset in sorted(infos, key=lambda info: info.offset):
            columns, rows = shape[0], 1
            for size in shape[1:]:
                rows *= size
            if not columns or not rows or columns % BLOCK_FORMATS[kind].block_size:
                self.fail(f"the tensor {short_repr(name)} in {kind} has the shape {short_repr(shape)}")
            size = rows * row_bytes(kind, columns)
            if name in tensors:
                self.fail(f"it has the tensor {short_repr(name)} twice")
            if offset % alignment or offset < end or begin + offset + size > len(whole):
                self.fail(f"the tensor {short_repr(name)} has {size} bytes from {offset} on, where they can't be")
            end = offset + size
            data = whole[begin + offset : begin + end].reshape(rows, -1)
            tensors[name] = GGUFTensor(kind, rows, columns, data)
        return tensors
