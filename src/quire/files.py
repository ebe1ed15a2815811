"""Reading files that others wrote: a checkpoint's, which strangers did, and those that the operator names.

Regular files only, each of a bounded size; a checkpoint's lie in its folder. It doesn't know what they hold.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from quire.errors import StartupError, shown

MIB = 1 << 20
LIMITS = {  # the most bytes that are read, by a file's name in a checkpoint or by what the operator gives
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
MAX_VALUES = 2 << 20  # of a JSON file, about: what they take in memory is a multiple of what they take in the file
AGAIN = "Copy or download the checkpoint again"
CHUNK = 1 << 20


def find(folder: Path, name: str) -> Path | None:
    """Where the file `name` of a checkpoint really is; None if there is none.

    StartupError unless it is a regular file, links followed, within `folder`, within the entry of the hub's cache that
    `folder` is a snapshot of, or among the blobs of an entry, to which older hub clients link from a local folder.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        real, root = path.resolve(strict=True), _root(folder)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise StartupError(f"{shown(name)} in {folder} can't be read: {_reason(error)}", AGAIN) from error
    if not (real.is_relative_to(root) or _is_blob(real)):
        raise StartupError(f"{shown(name)} in {folder} is a link that leads out of it", "Copy the file into the folder")
    if not stat.S_ISREG(mode):
        raise StartupError(f"{shown(name)} in {folder} is not a regular file", AGAIN)
    return real


def _root(folder: Path) -> Path:
    """The folder that a checkpoint's files may be in: a snapshot's are links to its cache entry's blobs."""
    real = folder.resolve()
    entry = real.parent.parent
    return entry if real.parent.name == "snapshots" and entry.name.startswith("models--") else real


def _is_blob(real: Path) -> bool:
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


def read(path: str | Path, limit: int, called: str = "", remedy: str = AGAIN, follow: bool = True) -> bytes:
    """The bytes of a regular file, which StartupError calls `called` (or by its path) if it can't be read or has more
    than `limit`. What a file says of its own size counts for nothing: those of the system say 0. Without `follow`,
    which is for what `find` returned, it must be no link, as it was none then."""
    called = called or str(path)
    data = bytearray()
    try:
        # Not blocking, so that opening a FIFO doesn't wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartupError(f"{called} can't be read: it is not a regular file", remedy)
            while len(data) <= limit and (chunk := file.read(min(CHUNK, limit + 1 - len(data)))):
                data += chunk
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise StartupError(f"{called} can't be read: {_reason(error)}", remedy) from error
    if len(data) > limit:
        raise StartupError(f"{called} can't be read: it has more than {limit} bytes", remedy)
    return bytes(data)


def read_text(path: str | Path, limit: int, called: str = "", remedy: str = AGAIN, follow: bool = True) -> str:
    """As `read`, decoded as UTF-8."""
    called = called or str(path)
    try:
        return read(path, limit, called, remedy, follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{called} can't be read: {_reason(error)}", remedy) from error


def read_object(
    path: str | Path, limit: int, called: str = "", remedy: str = AGAIN, follow: bool = True
) -> dict[str, Any]:
    """The object in a JSON file, read as by `read`; StartupError for anything else."""
    called = called or str(path)
    data = read(path, limit, called, remedy, follow)
    if sum(data.count(mark) for mark in b",[{") > MAX_VALUES:
        raise StartupError(f"{called} can't be read as JSON: it has more than {MAX_VALUES} values", remedy)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{called} can't be read as JSON: {_reason(error)}", remedy) from error
    if not isinstance(value, dict):
        raise StartupError(f"{called} holds a JSON {type(value).__name__}, not an object", remedy)
    return value


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """The object in a checkpoint's JSON file `name`, empty if there is no such file."""
    path = find(folder, name)
    return {} if path is None else read_object(path, LIMITS[name], str(folder / name), follow=False)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__
