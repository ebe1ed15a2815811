"""Processes that are programs of quire's own: how they are started, watched and ended; and what they do first and last.

No fork, no pickle: a program inherits connections without a name, whose descriptors' numbers are its arguments.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self

import quire
from quire.errors import StartupError

BOOTSTRAP = (
    "import sys; from importlib import import_module; "
    "sys.path.append(sys.argv.pop(1)); import_module(sys.argv.pop(1)).main()"
)
KILL_WAIT_SECONDS = 10.0  # seconds for a process that was killed to be gone


def program_arguments(module: str) -> tuple[str, ...]:
    """Python's arguments to run `main` of a module of quire, which is found last where this process has it."""
    return "-P", "-c", BOOTSTRAP, str(Path(quire.__file__).parent.parent), module


class ChildProcess:
    """The engine's process, or another one of the server's that is called `name`, and our ends of its connections. It
    inherits the descriptors in `inherited_fds` too, whose numbers are its last arguments."""

    def __init__(
        self, num_connections: int, program: Sequence[str], name: str = "the engine", inherited_fds: Sequence[int] = ()
    ) -> None:
        """StartupError if the system has no socket or process for it."""
        self.program = program
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs += [socket.socketpair() for _ in range(num_connections)]
            theirs = [*(pair[1].fileno() for pair in pairs), *inherited_fds]
            with _sigint_blocked():
                self.process = subprocess.Popen(
                    [sys.executable, *program, *map(str, theirs)], stdin=subprocess.DEVNULL, pass_fds=theirs
                )
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            raise StartupError(f"no process can be started for {name}: {error.strerror}") from error
        finally:
            for _, their in pairs:
                their.close()
        self.connections = [ours for ours, _ in pairs]

    def describe_exit(self, timeout: float = 1.0) -> str:
        """How it ended."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "left its connection, and goes on"
        return describe_exit_code(code)

    def is_stopped(self) -> bool:
        """It was stopped by a signal (SIGSTOP), as far as the system tells."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def has_exited(self) -> bool:
        """It is gone."""
        return self.process.poll() is not None

    def wait_or_kill(self, timeout: float) -> bool:
        """Wait for its end, which is forced after `timeout` seconds. Whether it ended by itself."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, on a GPU that is gone, say
                self.process.wait(KILL_WAIT_SECONDS)
            return False
        return True


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """A program that is started within is told of no interrupt until it spares them: it would die with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit_code(code: int) -> str:
    """How a process ended, given its status: below 0, by a signal."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with status {code}"


class ExternalProcess(ChildProcess):
    """The engine's process, which another front started and looks after: here is one connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connections = [connection]

    def describe_exit(self, timeout: float = 1.0) -> str:
        """That it is gone; how it ended is said where it was started."""
        return "is gone"

    def is_stopped(self) -> bool:
        """Not for this front to say."""
        return False

    def has_exited(self) -> bool:
        """There is nothing to end here."""
        return True

    def wait_or_kill(self, timeout: float) -> bool:
        """Nothing to wait for."""
        return True


class InterruptGuard:
    """Within, no interrupt is lost: Python drops a KeyboardInterrupt that comes while it lets go of an import's lock,
    or of garbage. Where interrupts raise one, on a main thread; elsewhere nothing is done."""

    def __init__(self) -> None:
        self.interrupted = False
        main = threading.current_thread() is threading.main_thread()
        self._installed = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> Self:
        if self._installed:
            signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_sigint(self, number: int, frame: object) -> None:
        self.interrupted = True
        raise KeyboardInterrupt

    def raise_if_interrupted(self) -> None:
        """Raise it, if one has come."""
        if self.interrupted:
            raise KeyboardInterrupt


def ignore_signals() -> None:
    """In a program: Ctrl-C and SIGTERM, which a terminal or a service manager sends to all, are the first front's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # see Child


def exit_now(status: int) -> NoReturn:
    """End a program at once: threads of libraries may hang."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
