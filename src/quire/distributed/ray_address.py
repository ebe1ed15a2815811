"""Which Ray cluster ranks are placed in. Ray runs the code of whoever reaches it: a cluster that isn't known to be this
user's own, on this host, is used only where --ray-address names it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from quire.errors import StartupError

PROBE_SECONDS = 5.0  # seconds for an address to answer
LISTEN_STATE = "0A"  # the state of a socket in /proc/net/tcp


def resolve_ray_address(named: str) -> str:
    """HOST:PORT of the cluster that --ray-address names, or RAY_ADDRESS; "" for one of the ranks' own. StartupError
    where it's none, where nobody answers, and for strangers'."""
    said = named or os.environ.get("RAY_ADDRESS", "")
    if said in ("", "local"):
        return ""
    flag = "--ray-address" if named else "RAY_ADDRESS"
    host, _, port = said.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) >= 1 << 16:
        remedy = "Give HOST:PORT, as `ray start` says it; local, or nothing, starts a cluster for the ranks alone"
        raise StartupError(f"{flag} is {said[:80]!r}, which is no HOST:PORT", remedy)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as probe:
            local = probe.getsockname()[0] == probe.getpeername()[0]
    except OSError as error:
        said_of_it = error.strerror or str(error)
        raise StartupError(f"{flag} is {said[:80]}, where nobody answers: {said_of_it}", "See `ray status`") from error
    if not named and not (local and listening_users(int(port)) == {os.getuid()}):
        raise StartupError(
            f"RAY_ADDRESS is {said[:80]}, which isn't known to be this user's own cluster on this host",
            f"Give --ray-address {said[:80]} if whoever reaches it may run code here, or unset RAY_ADDRESS",
        )
    return said


def listening_users(port: int) -> set[int]:
    """The users whose processes listen on a port of this host, as far as the system tells."""
    found = set[int]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == LISTEN_STATE and int(columns[1].rpartition(":")[2], 16) == port:
                    found.add(int(columns[7]))
    return found
