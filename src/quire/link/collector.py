"""Python's garbage collector in a process that serves: what is loaded stays, and collections are few.

A step makes thousands of small tuples that reference counting frees; searching them for cycles costs more than a step's
planning. For programs of our own only: a library leaves its caller's collector alone.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # objects made and not freed between two collections of the youngest


def spare_the_loaded() -> None:
    """Call once everything is loaded: the collector leaves it alone from then on, and comes less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 50)
