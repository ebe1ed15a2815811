"""Isolated child processes: they inherit one connection and the environment variables that their loader needs, and no
files.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

KILL_SECONDS = 5.0
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment


def start_isolated(
    arguments: Sequence[str], purpose: str, error_type: type[Exception], variables: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an isolated Python with these arguments, and return it with our end of the connection that is its input and
    output. Raise `error_type` if the system refuses; `purpose` completes its message ("for ...", "to ..."). `variables`
    are further environment variables to pass."""
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise error_type(f"no socket can be had {purpose}: {error.strerror}") from error
    environment = {name: os.environ[name] for name in (*KEPT_VARIABLES, *variables) if name in os.environ}
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", *arguments],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,  # so that a terminal's Ctrl-C does not reach it
        )
    except OSError as error:
        ours.close()
        raise error_type(f"no process can be started {purpose}: {error.strerror}") from error
    finally:
        theirs.close()
    return process, ours


def kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Kill the process and wait until it is gone."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    connection.close()


def package_folders(*names: str) -> list[str]:
    """Return the folders that contain these packages, as far as they are installed."""
    specs = [find_spec(name) for name in names]
    locations = [spec.submodule_search_locations for spec in specs if spec is not None]
    return list(dict.fromkeys(str(Path(paths[0]).resolve().parent) for paths in locations if paths))
