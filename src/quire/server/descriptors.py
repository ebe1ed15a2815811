"""Limits on open files and connections of this process."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from quire.errors import StartupError

MAX_DESCRIPTORS = 65_536  # the limit of open files is raised to this
MAX_CONNECTIONS = 8_192
RESERVED_DESCRIPTORS = 32  # for files, and for connections that are being closed


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, but to at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_capacity(requested: int | None = None) -> int:
    """Return how many connections can be opened: `requested`, or else as many as the limit of open files allows, at
    most 8,192. Raise StartupError if `requested`, or even one, exceeds that limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + RESERVED_DESCRIPTORS
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - taken, MAX_CONNECTIONS)
    if requested is not None and requested < 1:
        raise StartupError(f"--max-connections is {requested}", "It is 1 or more")
    if room < (requested or 1):
        cause = f"{requested or 1} connections don't fit: {soft} files may be open and {taken} are needed otherwise"
        raise StartupError(cause, f"Raise the limit (ulimit -n); the most connections are {MAX_CONNECTIONS}")
    return requested or room
