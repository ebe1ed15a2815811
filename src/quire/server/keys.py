"""API keys and admin keys, from a file or the environment. A key is never shown, nor taken from the command line."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE, read_bounded_text

KEY_VARIABLE = "QUIRE_API_KEY"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY"


def read_keys(file: str | None, flag: str = "--api-key-file", variable: str = KEY_VARIABLE) -> tuple[str, ...]:
    """Keys: lines of `file`, which `flag` named, else what the environment's `variable` holds, else none.

    The variable is gone afterwards: no child inherits it, and nothing that reads this process's environment finds it.
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
    """Overwrite a variable where the system keeps it: /proc shows a process's first environment, whatever was unset."""
    with suppress(AttributeError, OSError):  # no C library to ask: unsetting it must do
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        if at := getenv(os.fsencode(variable)):
            ctypes.memset(at, 0, len(ctypes.string_at(at)))
