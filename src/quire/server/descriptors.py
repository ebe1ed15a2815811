"""Descriptors: how many files and connections this process may have open, and how many of them are for connections."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from quire.errors import StartupError

MAX_DESCRIPTORS = 65_536  # that the limit is raised to
MAX_CONNECTIONS = 8_192
RESERVED_DESCRIPTORS = 32  # for files, and for connections on their way out


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one, or to 65,536 where that allows more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_capacity(requested: int | None = None) -> int:
    """How many connections fit, with what is open now: 8,192 at most, or what is `requested`. StartupError if that
    many, or a single one, don't fit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + RESERVED_DESCRIPTORS
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - taken, MAX_CONNECTIONS)
    if requested is not None and requested < 1:
        raise StartupError(f"--max-connections is {requested}", "It is 1 or more")
    if room < (requested or 1):
        cause = f"{requested or 1} connections don't fit: {soft} files may be open and {taken} are needed otherwise"
        raise StartupError(cause, f"Raise the limit (ulimit -n); {MAX_CONNECTIONS} connections are the most")
    return requested or room
