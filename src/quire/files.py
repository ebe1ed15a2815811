"""Safe reading of files: those of a checkpoint, which is not trusted, and those that the operator names.

Only regular files of a bounded size are read; files of a checkpoint must be inside its folder.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import StartupError, short_repr

MIB = 1 << 20
MAX_BYTES_BY_FILE = {  # the most bytes to read, by name in a checkpoint or by kind of the operator's file
    "config.json": MIB,
    "generation_config.json": MIB,
    "1_Pooling/config.json": MIB,
    "preprocessor_config.json": MIB,
    "processor_config.json": MIB,
    "special_tokens_map.json": MIB,
    "tokenizer_config.json": 64 * MIB,
    "tokenizer.json": 256 * MIB,
    "model.safetensors.index.json": 64 * MIB,
    "chat template": 64 << 10,
    "keys": MIB,
    "prefixes": 8 * MIB,
    "calibration": MIB,
}
MAX_JSON_VALUES = 2 << 20  # about; in memory they take a multiple of their bytes in the file
DOWNLOAD_AGAIN = "Copy or download the checkpoint again"
READ_CHUNK = 1 << 20


def find_checkpoint_file(folder: Path, name: str) -> Path | None:
    """Return the real path of the file `name` of a checkpoint, or None if there is none.

    Raise StartupError unless, with links resolved, it is a regular file within `folder`, within the hub cache entry of
    which `folder` is a snapshot, or among the blobs of an entry, to which older hub clients link from a local folder.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        real, root = path.resolve(strict=True), _allowed_root(folder)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise StartupError(
            f"{short_repr(name)} in {folder} can't be read: {_error_text(error)}", DOWNLOAD_AGAIN
        ) from error
    if not (real.is_relative_to(root) or _is_hub_blob(real)):
        raise StartupError(
            f"{short_repr(name)} in {folder} is a link that leads out of it", "Copy the file into the folder"
        )
    if not stat.S_ISREG(mode):
        raise StartupError(f"{short_repr(name)} in {folder} is not a regular file", DOWNLOAD_AGAIN)
    return real


def _allowed_root(folder: Path) -> Path:
    """Return the folder that must contain a checkpoint's files. Those of a hub snapshot link to its cache entry."""
    real = folder.resolve()
    entry = real.parent.parent
    return entry if real.parent.name == "snapshots" and entry.name.startswith("models--") else real


def _is_hub_blob(real: Path) -> bool:
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


@contextmanager
def open_regular(path: str | Path, display_name: str, remedy: str, follow: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file. Raise StartupError, which names `display_name`, for another kind of file, and for errors of
    the system, also of those that the caller's block raises. `follow`: see `read_bounded`."""
    try:
        # Non-blocking, so that opening a FIFO does not wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise StartupError(f"{display_name} can't be read: it is not a regular file", remedy)
            yield file
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise StartupError(f"{display_name} can't be read: {_error_text(error)}", remedy) from error


def read_bounded(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> bytes:
    """Return the bytes of a regular file. Raise StartupError, which names `display_name` (by default the path), if it
    can't be read or has more than `max_bytes`. The reported size of the file is not used: it is 0 for files of the
    system. Without `follow` the file must not be a link: for paths of `find_checkpoint_file`, which were none."""
    display_name = display_name or str(path)
    data = bytearray()
    with open_regular(path, display_name, remedy, follow) as file:
        while len(data) <= max_bytes and (chunk := file.read(min(READ_CHUNK, max_bytes + 1 - len(data)))):
            data += chunk
    if len(data) > max_bytes:
        raise StartupError(f"{display_name} can't be read: it has more than {max_bytes} bytes", remedy)
    return bytes(data)


def read_bounded_text(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> str:
    """As `read_bounded`, but return the UTF-8 text."""
    display_name = display_name or str(path)
    try:
        return read_bounded(path, max_bytes, display_name, remedy, follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{display_name} can't be read: {_error_text(error)}", remedy) from error


def read_json_object(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> dict[str, Any]:
    """Return the object in a JSON file, read as by `read_bounded`. Raise StartupError if it has no object."""
    display_name = display_name or str(path)
    data = read_bounded(path, max_bytes, display_name, remedy, follow)
    if sum(data.count(mark) for mark in b",[{") > MAX_JSON_VALUES:
        raise StartupError(f"{display_name} can't be read as JSON: it has more than {MAX_JSON_VALUES} values", remedy)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{display_name} can't be read as JSON: {_error_text(error)}", remedy) from error
    if not isinstance(value, dict):
        raise StartupError(f"{display_name} holds a JSON {type(value).__name__}, not an object", remedy)
    return value


def read_json_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in the JSON file `name` of a checkpoint; empty if there is no such file."""
    path = find_checkpoint_file(folder, name)
    return {} if path is None else read_json_object(path, MAX_BYTES_BY_FILE[name], str(folder / name), follow=False)


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__
