"""The first moments of a rank that Ray placed: run by its path, as a child of Ray's actor, with the standard library
alone. It fetches from the engine's process what a rank inherits where that starts it (descriptors, the environment,
the folder), and becomes the rank's program.

The engine's socket is in the abstract namespace, which is this host's. Both ends look at whose the other's process is,
and the engine asks for a token.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
ANSWER_SECONDS = 60.0  # seconds that the engine may take for each answer
LENGTH = struct.Struct("<I")  # bytes of JSON that follow
CREDENTIALS = struct.Struct("3i")  # process, user, group


def main() -> None:
    """One line on standard input says the engine's socket, the token, the rank and the process of the actor."""
    said = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != said["parent"]:
        sys.exit("the actor is gone")
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(ANSWER_SECONDS)
        try:
            door.connect("\0" + said["name"])
        except OSError as error:
            sys.exit(f"the engine's process isn't on the host, or in the container, of Ray's worker: {error.strerror}")
        told, descriptors = fetch_program(door, said)
    exec_program(told, descriptors)


def fetch_program(door: socket.socket, said: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What the engine tells of the rank, and descriptors."""
    _, user, _ = CREDENTIALS.unpack(door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        sys.exit(f"the engine's process is user {user}'s, and Ray's worker is user {os.getuid()}'s")
    door.sendall(json.dumps({"token": said["token"], "rank": said["rank"]}).encode() + b"\n")
    (length,) = LENGTH.unpack(receive_exactly(door, LENGTH.size))
    told = json.loads(receive_exactly(door, length))
    _, descriptors, _, _ = socket.recv_fds(door, 1, len(told["numbers"]))
    if len(descriptors) != len(told["numbers"]):
        sys.exit(f"{len(descriptors)} of {len(told['numbers'])} descriptors came (`ulimit -n` of Ray's worker)")
    door.sendall(b".")
    return told, descriptors


def receive_exactly(door: socket.socket, count: int) -> bytes:
    """So many bytes."""
    found = bytearray()
    while len(found) < count:
        data = door.recv(count - len(found))
        if not data:
            sys.exit("the engine's process refused this rank")
        found += data
    return bytes(found)


def exec_program(program: dict[str, Any], descriptors: list[int]) -> None:
    """Be the rank's program: descriptors have the numbers that they have in the engine's process."""
    numbers = program["numbers"]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)  # they came inheritable
        for descriptor, number in zip(apart, numbers):
            os.dup2(descriptor, number, inheritable=True)
    except OSError as error:
        sys.exit(f"no descriptors up to {max(numbers) + len(numbers)} (`ulimit -n` of Ray's worker): {error.strerror}")
    soft = program["descriptors"]
    fits = soft != resource.RLIM_INFINITY and (most == resource.RLIM_INFINITY or soft <= most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft if fits else most, most))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir(program["folder"])
    os.execve(program["program"][0], program["program"], program["environment"])


if __name__ == "__main__":
    main()
