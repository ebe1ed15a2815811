"""Programs in processes of their own that get nothing of this one: no files, one connection, and of the environment
what their loader needs.
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
    """A Python, isolated, with these arguments, and the connection that is its input and output. `error_type` where the
    system has none `purpose` (for ..., to ...); `variables` are more names of the environment."""
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise error_type(f"no socket can be had {purpose}: {error.strerror}") from error
    environment = {name: os.environ[name] for name in (*KEPT_VARIABLES, *variables) if name in os.environ}
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", *arguments], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
            env=environment, cwd="/", start_new_session=True,  # so that a terminal's Ctrl-C doesn't reach it
        )  # fmt: skip
    except OSError as error:
        ours.close()
        raise error_type(f"no process can be started {purpose}: {error.strerror}") from error
    finally:
        theirs.close()
    return process, ours


def kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Kill it, and wait until it is gone."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    connection.close()


def package_folders(*names: str) -> list[str]:
    """Those that hold these packages, as far as they are there."""
    specs = [find_spec(name) for name in names]
    places = [spec.submodule_search_locations for spec in specs if spec is not None]
    return list(dict.fromkeys(str(Path(place[0]).resolve().parent) for place in places if place))
