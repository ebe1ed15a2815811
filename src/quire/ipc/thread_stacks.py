"""Format the stacks of all threads of this process, for the log."""

from __future__ import annotations

import sys
import threading
import traceback

MAX_FRAMES = 40  # of a thread; the innermost are kept


def format_thread_stacks() -> str:
    """Return the stacks of all threads as text, the main thread's first."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    parts = [
        f"{threads.get(ident, 'a thread of a library')}:\n{''.join(traceback.format_stack(frame)[-MAX_FRAMES:])}"
        for ident, frame in frames
    ]
    return "\n".join(parts).rstrip()
