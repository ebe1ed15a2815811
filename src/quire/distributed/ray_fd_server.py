"""Where ranks that another process started fetch what they can't inherit (see ray_rank): a socket in the abstract
namespace, which leaves no file, with a token; whoever comes must be this user's process, on this host.
"""

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

HELLO_SECONDS = 5.0  # seconds for who comes to say who it is
SEND_SECONDS = 60.0  # seconds for a rank to take what is told
MAX_HELLO_BYTES = 4096  # bytes of what it says first


class RankFdServer:
    """The socket, and who waits at it."""

    def __init__(self, ranks: int) -> None:
        """OSError where the system has no socket."""
        self.name, self.token = f"quire-{secrets.token_hex(16)}", secrets.token_hex(32)
        self.pending: dict[int, tuple[socket.socket, int]] = {}  # by ranks: a connection, and the process behind it
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.bind(f"\0{self.name}")
            self.socket.listen(ranks)
        except OSError:
            self.socket.close()
            raise

    def accept(self) -> None:
        """Let who has come wait, if it is this user's and shows the token; else it's sent away."""
        connection, _ = self.socket.accept()
        try:
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            pid, user, _ = CREDENTIALS.unpack(found)
            connection.settimeout(HELLO_SECONDS)
            if user == os.getuid() and pid > 0:  # 0: it's in a container that has processes of its own
                with connection.makefile("rb") as said:
                    told = json.loads(said.readline(MAX_HELLO_BYTES))
                if hmac.compare_digest(str(told["token"]), self.token):
                    self.pending[int(told["rank"])] = connection, pid
                    return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # what it says is nothing that a rank does
        connection.close()

    def send_program(
        self, rank: int, program: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> tuple[int, int]:
        """Make one that waits the program of these arguments, with the descriptors that it inherits, this process's
        folder, output and errors: its number, and a descriptor of it (pidfd). OSError if it's gone."""
        connection, pid = self.pending.pop(rank)
        numbers = [*inherited, *(number for number in (1, 2) if number not in inherited and _is_open(number))]
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        told = json.dumps({
            "program": [*program], "environment": {**environment}, "folder": os.getcwd(), "numbers": numbers,
            "descriptors": soft,
        }).encode()  # fmt: skip
        with connection:
            descriptor = os.pidfd_open(pid)
            try:
                connection.settimeout(SEND_SECONDS)
                connection.sendall(LENGTH.pack(len(told)) + told)
                socket.send_fds(connection, [b"."], numbers)
                if connection.recv(1) != b".":  # so it lived when it was opened, and none other has its number
                    raise OSError("it ended")
            except OSError:
                os.close(descriptor)
                raise
        return pid, descriptor

    def close(self) -> None:
        """Nobody else comes, and who waits is sent away."""
        self.socket.close()
        for connection, _ in self.pending.values():
            connection.close()
        self.pending.clear()


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False
