"""The Ray cluster in which ranks are placed. Anyone who can connect to Ray can run code in it, so a cluster that is not
known to be this user's own, on this host, is used only if --ray-address names it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from quire.errors import StartupError

PROBE_SECONDS = 5.0  # timeout of connecting to an address
LISTEN_STATE = "0A"  # state of a listening socket in /proc/net/tcp


def resolve_ray_address(named: str) -> str:
    """Return HOST:PORT of the cluster of --ray-address or RAY_ADDRESS; "" for a cluster started for the ranks alone.
    Raise StartupError if the address is invalid, does not answer, or is another user's."""
    address = named or os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return ""
    flag = "--ray-address" if named else "RAY_ADDRESS"
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) >= 1 << 16:
        remedy = "Give HOST:PORT, as `ray start` says it; local, or nothing, starts a cluster for the ranks alone"
        raise StartupError(f"{flag} is {address[:80]!r}, which is not HOST:PORT", remedy)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS) as probe:
            local = probe.getsockname()[0] == probe.getpeername()[0]
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"{flag} is {address[:80]}, which does not answer: {reason}", "See `ray status`") from error
    if not named and not (local and listening_users(int(port)) == {os.getuid()}):
        raise StartupError(
            f"RAY_ADDRESS is {address[:80]}, which isn't known to be this user's own cluster on this host",
            f"Give --ray-address {address[:80]} if everyone who connects to it may run code here, or unset RAY_ADDRESS",
        )
    return address


def listening_users(port: int) -> set[int]:
    """Return the ids of users whose processes listen on a port of this host, as far as /proc reports them."""
    users = set[int]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == LISTEN_STATE and int(columns[1].rpartition(":")[2], 16) == port:
                    users.add(int(columns[7]))
    return users
