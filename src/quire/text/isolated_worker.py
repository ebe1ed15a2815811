"""The child's side of an isolated process (isolated_process.py): its signals, its limits, and frames on descriptors 0
and 1. Imports the standard library alone."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from typing import Any

from quire.protocol.json_frames import HEADER, pack


def set_signals(ending: signal.Signals) -> None:
    """Ignore Ctrl-C, and let `ending` end the process: by inheritance it may be ignored or blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(ending, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [ending])


def set_limits(max_memory: int) -> None:
    """Limit the address space to `max_memory` bytes more than now, where its use is known; allow no core dump, and no
    further file or descriptor."""
    with suppress(OSError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + max_memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
        resource.setrlimit(what, (most, most))


def read_frame() -> bytes | None:
    """Return a frame's body, or None at the end of the input."""
    header = _read_exactly(HEADER)
    return None if header is None else _read_exactly(int.from_bytes(header, "big"))


def _read_exactly(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def write_frame(value: Any) -> None:
    """Write a JSON value."""
    view = memoryview(pack(value))
    while view:
        view = view[os.write(1, view) :]
