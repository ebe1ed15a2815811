"""Reading files that others wrote: a checkpoint's, which strangers did, and those that the operator names.

Regular files only, each of a bounded size; a checkpoint's lie in its folder. It doesn't know what they hold.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from quire.errors import StartupError, short_repr

MIB = 1 << 20
MAX_BYTES_BY_FILE = {  # the most bytes that are read, by a file's name in a checkpoint or by what the operator gives
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
MAX_JSON_VALUES = 2 << 20  # of a JSON file, about: what they take in memory is a multiple of what they take in the file
DOWNLOAD_AGAIN = "Copy or download the checkpoint again"
READ_CHUNK = 1 << 20


def find_checkpoint_file(folder: Path, name: str) -> Path | None:
    """Where the file `name` of a checkpoint really is; None if there is none.

    StartupError unless it is a regular file, links followed, within `folder`, within the entry of the hub's cache that
    `folder` is a snapshot of, or among the blobs of an entry, to which older hub clients link from a local folder.
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
    """The folder that a checkpoint's files may be in: a snapshot's are links to its cache entry's blobs."""
    real = folder.resolve()
    entry = real.parent.parent
    return entry if real.parent.name == "snapshots" and entry.name.startswith("models--") else real


def _is_hub_blob(real: Path) -> bool:
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


def read_bounded(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> bytes:
    """The bytes of a regular file, which StartupError calls `display_name` (or by its path) if it can't be read or has
    more than `max_bytes`. What a file says of its own size counts for nothing: those of the system say 0. Without
    `follow`, which is for what `find_checkpoint_file` returned, it must be no link, as it was none then."""
    display_name = display_name or str(path)
    data = bytearray()
    try:
        # Not blocking, so that opening a FIFO doesn't wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartupError(f"{display_name} can't be read: it is not a regular file", remedy)
            while len(data) <= max_bytes and (chunk := file.read(min(READ_CHUNK, max_bytes + 1 - len(data)))):
                data += chunk
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise StartupError(f"{display_name} can't be read: {_error_text(error)}", remedy) from error
    if len(data) > max_bytes:
        raise StartupError(f"{display_name} can't be read: it has more than {max_bytes} bytes", remedy)
    return bytes(data)


def read_bounded_text(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> str:
    """As `read_bounded`, decoded as UTF-8."""
    display_name = display_name or str(path)
    try:
        return read_bounded(path, max_bytes, display_name, remedy, follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{display_name} can't be read: {_error_text(error)}", remedy) from error


def read_json_object(
    path: str | Path, max_bytes: int, display_name: str = "", remedy: str = DOWNLOAD_AGAIN, follow: bool = True
) -> dict[str, Any]:
    """The object in a JSON file, read as by `read_bounded`; StartupError for anything else."""
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
    """The object in a checkpoint's JSON file `name`, empty if there is no such file."""
    path = find_checkpoint_file(folder, name)
    return {} if path is None else read_json_object(path, MAX_BYTES_BY_FILE[name], str(folder / name), follow=False)


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__
