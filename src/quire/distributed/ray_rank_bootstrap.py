"""The start of a rank that Ray placed: run by its path, as a child of Ray's actor, with the standard library alone. It
gets from the engine's process what a rank inherits when that starts it (descriptors, environment, working directory),
and then executes the rank's program.

The engine's socket is in the abstract namespace of this host. Both ends check the user of the other process, and the
engine checks a token."""

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
ANSWER_SECONDS = 60.0  # timeout of the engine's replies
LENGTH = struct.Struct("<I")  # bytes of JSON that follow
CREDENTIALS = struct.Struct("3i")  # process, user, group


def main() -> None:
    """Start the rank. One line of JSON on standard input has the engine's socket, the token, the rank and the actor's
    pid."""
    message = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != message["parent"]:
        sys.exit("the actor is gone")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect("\0" + message["name"])
        except OSError as error:
            sys.exit(f"the engine's process isn't on the host, or in the container, of Ray's worker: {error.strerror}")
        program, descriptors = fetch_program(connection, message)
    exec_program(program, descriptors)


def fetch_program(connection: socket.socket, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return what the engine sends for this rank, and the descriptors."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.getuid():
        sys.exit(f"the engine's process is user {user}'s, and Ray's worker is user {os.getuid()}'s")
    connection.sendall(json.dumps({"token": message["token"], "rank": message["rank"]}).encode() + b"\n")
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    program = json.loads(receive_exactly(connection, length))
    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(program["numbers"]))
    if len(descriptors) != len(program["numbers"]):
        sys.exit(f"{len(descriptors)} of {len(program['numbers'])} descriptors came (`ulimit -n` of Ray's worker)")
    connection.sendall(b".")
    return program, descriptors


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Receive `count` bytes."""
    received = bytearray()
    while len(received) < count:
        data = connection.recv(count - len(received))
        if not data:
            sys.exit("the engine's process refused this rank")
        received += data
    return bytes(received)


def exec_program(program: dict[str, Any], descriptors: list[int]) -> None:
    """Execute the rank's program, with descriptors under the numbers that they have in the engine's process."""
    numbers = program["numbers"]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)  # the originals are inheritable
        for descriptor, number in zip(copies, numbers):
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
