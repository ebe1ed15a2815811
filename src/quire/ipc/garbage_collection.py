"""Set Python's garbage collector for loading a model and for serving: loaded objects are exempt, and collections are
rare.

A step makes thousands of small tuples that reference counting frees; searching them for cycles costs more than planning
a step. Only quire's own programs change the collector for good; in a library's caller it is paused during the start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 50_000  # objects made and not freed between two collections of the youngest


def freeze_loaded_objects() -> None:
    """Exempt everything that is loaded from collection, and collect less often from then on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector while torch is imported and a model is built, as collections would search all that stays
    again and again, which takes a tenth of the time. Afterwards the collector is as before, and the new objects are in
    the oldest generation, so that the next collection does not search them."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():  # objects that a program froze stay frozen
                gc.freeze()
                gc.unfreeze()  # moves all to the oldest generation
            gc.enable()
