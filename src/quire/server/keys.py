"""API keys and admin keys, from a file or the environment. Keys are never logged, and never taken from the command
line."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE, read_bounded_text

KEY_VARIABLE = "QUIRE_API_KEY"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY"


def read_keys(file: str | None, flag: str = "--api-key-file", variable: str = KEY_VARIABLE) -> tuple[str, ...]:
    """Return the keys in `file`, one per line, else the key in the environment's `variable`, else none. `flag` is the
    flag that named the file.

    The variable is removed, so that child processes and readers of this process's environment do not see the key.
    """
    key = os.environ.get(variable, "").strip()
    if variable in os.environ:
        _erase_variable(variable)
        del os.environ[variable]
    if file is None:
        return (key,) if key else ()
    remedy = "Give a text file with one key a line"
    lines = read_bounded_text(file, MAX_BYTES_BY_FILE["keys"], f"{flag} {file}", remedy).split()
    if not lines:
        raise StartupError(f"{flag} {file} holds no key", remedy)
    return tuple(lines)


def _erase_variable(variable: str) -> None:
    """Overwrite a variable in the process's initial environment, which /proc shows even after it is unset."""
    with suppress(AttributeError, OSError):  # without a C library the variable is only unset
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        if at := getenv(os.fsencode(variable)):
            ctypes.memset(at, 0, len(ctypes.string_at(at)))
