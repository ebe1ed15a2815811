"""Descriptors: how many files and connections this process may have open, and how many of them are for connections."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from quire.errors import StartupError

MOST_DESCRIPTORS = 65_536  # that the limit is raised to
MOST_CONNECTIONS = 8_192
RESERVE = 32  # for files, and for connections on their way out


def raise_limit() -> None:
    """Raise the soft limit to the hard one, or to 65,536 where that allows more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def capacity(asked: int | None = None) -> int:
    """How many connections fit, with what is open now: 8,192 at most, or what is `asked`. StartupError if that many,
    or a single one, don't fit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + RESERVE
    room = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - taken, MOST_CONNECTIONS)
    if asked is not None and asked < 1:
        raise StartupError(f"--max-connections is {asked}", "It is 1 or more")
    if room < (asked or 1):
        cause = f"{asked or 1} connections don't fit: {soft} files may be open and {taken} are needed otherwise"
        raise StartupError(cause, f"Raise the limit (ulimit -n); {MOST_CONNECTIONS} connections are the most")
    return asked or room
