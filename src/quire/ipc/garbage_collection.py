"""Python's garbage collector, while a model is loaded and in a process that serves: what is loaded stays, and
collections are few.

A step makes thousands of small tuples that reference counting frees; searching them for cycles costs more than a step's
planning. For programs of our own only: a library leaves its caller's collector alone, but for the time of a start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 50_000  # objects made and not freed between two collections of the youngest


def freeze_loaded_objects() -> None:
    """Call once everything is loaded: the collector leaves it alone from then on, and comes less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """While torch is imported and a model is built: each collection would look at what the ones before it found to
    stay, a tenth of the time. Afterwards the collector is as it was, and what was made meanwhile counts as old: the
    next collection would look at all of it."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():  # of a program's own
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
