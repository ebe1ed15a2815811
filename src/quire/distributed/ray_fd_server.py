"""A socket at which ranks that another process started get what they can't inherit (see ray_rank_bootstrap). It is in
the abstract namespace, which leaves no file, and asks for a token; a client must be a process of this user on this
host."""

from __future__ import annotations

import hmac
import json
import os
import resource
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from quire.distributed.ray_rank_bootstrap import CREDENTIALS, LENGTH

HELLO_SECONDS = 5.0  # timeout of a client's first message
SEND_SECONDS = 60.0  # timeout of sending a program
MAX_HELLO_BYTES = 4096  # bytes of a client's first message


class RankFdServer:
    """The socket, and the connections of ranks that wait for their program."""

    def __init__(self, ranks: int) -> None:
        """Open the socket. Raise OSError if the system has none."""
        self.name, self.token = f"quire-{secrets.token_hex(16)}", secrets.token_hex(32)
        self.pending: dict[int, tuple[socket.socket, int]] = {}  # by rank: the connection, and the pid of its other end
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.bind(f"\0{self.name}")
            self.socket.listen(ranks)
        except OSError:
            self.socket.close()
            raise

    def accept(self) -> None:
        """Accept a connection. Keep it if it is this user's and sends the token, else close it."""
        connection, _ = self.socket.accept()
        try:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            pid, user, _ = CREDENTIALS.unpack(credentials)
            connection.settimeout(HELLO_SECONDS)
            if user == os.getuid() and pid > 0:  # 0: in a container with its own pid namespace
                with connection.makefile("rb") as stream:
                    message = json.loads(stream.readline(MAX_HELLO_BYTES))
                if hmac.compare_digest(str(message["token"]), self.token):
                    self.pending[int(message["rank"])] = connection, pid
                    return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # not a rank's message
        connection.close()

    def send_program(
        self, rank: int, program: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> tuple[int, int]:
        """Send the program of these arguments to a rank that waits, with the inherited descriptors and this process's
        working directory, output and errors. Return its pid and a pidfd. Raise OSError if it has ended."""
        connection, pid = self.pending.pop(rank)
        numbers = [*inherited, *(number for number in (1, 2) if number not in inherited and _is_open(number))]
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        message = json.dumps({
            "program": [*program], "environment": {**environment}, "folder": os.getcwd(), "numbers": numbers,
            "descriptors": soft,
        }).encode()  # fmt: skip
        with connection:
            descriptor = os.pidfd_open(pid)
            try:
                connection.settimeout(SEND_SECONDS)
                connection.sendall(LENGTH.pack(len(message)) + message)
                socket.send_fds(connection, [b"."], numbers)
                if connection.recv(1) != b".":  # it lived when the pidfd was opened, so that is not of another process
                    raise OSError("it ended")
            except OSError:
                os.close(descriptor)
                raise
        return pid, descriptor

    def close(self) -> None:
        """Close the socket and the connections that wait."""
        self.socket.close()
        for connection, _ in self.pending.values():
            connection.close()
        self.pending.clear()


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False
