"""Child processes that run programs of quire: start, watch and end them, and what such a program does first and last.

No fork, no pickle: a program inherits unnamed sockets, and its arguments are the numbers of their descriptors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn, Self

from quire.errors import StartupError

BOOTSTRAP = (
    "import os, sys; from importlib import import_module; "
    "ours, *folders = sys.argv.pop(1).split(os.pathsep); sys.path[:] = [*folders, *sys.path, ours]; "
    "import_module(sys.argv.pop(1)).main()"
)
KILL_WAIT_SECONDS = 10.0  # seconds for a killed process to end


def program_arguments(module: str, *folders: str) -> tuple[str, ...]:
    """Return Python's arguments that run `main` of a module of quire, or of one in `folders`, which are searched first.
    The folder of this installation is searched last."""
    return "-P", "-c", BOOTSTRAP, os.pathsep.join((str(Path(__file__).parents[2]), *folders)), module


ENGINE_PROGRAM = program_arguments("quire.startup.engine_program")


class ChildProcess:
    """A process of the server that is called `name` in messages, with this process's ends of its connections. It
    inherits the descriptors in `inherited_fds` too, whose numbers are its last arguments, and that of `shared_memory`,
    a file, of which it learns otherwise. It gets these variables in addition to this process's environment."""

    def __init__(
        self, num_connections: int, program: Sequence[str], name: str = "the engine",
        inherited_fds: Sequence[int] = (), variables: Mapping[str, str] = {}, shared_memory: IO[bytes] | None = None,
    ) -> None:  # fmt: skip
        """Start the process. Raise StartupError if the system has no socket or process for it."""
        self.program, self.name, self.variables, self.shared_memory = program, name, variables, shared_memory
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs += [socket.socketpair() for _ in range(num_connections)]
            child_fds = [*(pair[1].fileno() for pair in pairs), *inherited_fds]
            passed_fds = child_fds if shared_memory is None else [*child_fds, shared_memory.fileno()]
            with _sigint_blocked():
                self.process = subprocess.Popen(
                    [sys.executable, *program, *map(str, child_fds)], stdin=subprocess.DEVNULL, pass_fds=passed_fds,
                    env={**os.environ, **variables},
                )  # fmt: skip
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            raise StartupError(f"no process can be started for {name}: {error.strerror}") from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.connections = [ours for ours, _ in pairs]

    def start_again(self) -> ChildProcess:
        """Start another process of the same program, with one connection."""
        return ChildProcess(1, self.program, self.name, variables=self.variables, shared_memory=self.shared_memory)

    def describe_exit(self, timeout: float = 1.0) -> str:
        """Wait up to `timeout` seconds for the end of the process, and describe it in words."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "left its connection, and goes on"
        return describe_exit_code(code)

    def is_stopped(self) -> bool:
        """Return True if the process is stopped by a signal (SIGSTOP), as far as /proc reports it."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def has_exited(self) -> bool:
        """Return True if the process has ended."""
        return self.process.poll() is not None

    def wait_or_kill(self, timeout: float) -> bool:
        """Wait for the end of the process, and kill it after `timeout` seconds. Return True if it ended by itself."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel, for example on a lost GPU
                self.process.wait(KILL_WAIT_SECONDS)
            return False
        return True


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT for a program that is started within, until it calls `ignore_signals`: it would end with a
    traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_exit_code(code: int) -> str:
    """Describe in words how a process ended, given its status: a negative one is a signal."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with status {code}"


class ExternalProcess(ChildProcess):
    """The engine's process, started and watched by another frontend; this one has one connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connections = [connection]

    def describe_exit(self, timeout: float = 1.0) -> str:
        """Return that it is gone; the frontend that started it reports how."""
        return "is gone"

    def is_stopped(self) -> bool:
        """Return False: only the frontend that started the process checks this."""
        return False

    def has_exited(self) -> bool:
        """Return True: there is nothing to end here."""
        return True

    def wait_or_kill(self, timeout: float) -> bool:
        """Return True: there is nothing to wait for."""
        return True


class InterruptGuard:
    """A context that loses no interrupt: Python drops a KeyboardInterrupt that arrives while it releases an import lock
    or collects garbage. It acts only on a main thread whose SIGINT raises KeyboardInterrupt."""

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
        """Raise KeyboardInterrupt if one arrived."""
        if self.interrupted:
            raise KeyboardInterrupt


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM in a child program: a terminal or a service manager sends them to all processes, and
    the first frontend handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # see `_sigint_blocked`


def exit_now(status: int) -> NoReturn:
    """End the program at once, without waiting for threads of libraries, which may hang."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
