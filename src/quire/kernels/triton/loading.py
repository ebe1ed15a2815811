"""Loading kernels in several threads at once.

Triton 3.6 starts each kind of kernel through a small C module, and gives all of these modules one name. When Python
loads such a module a second time it puts what is in it into the module object that this name has then, which another
kernel may be about to look into: it would be started with another one's arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import triton.runtime.build as build


@contextmanager
def in_threads() -> Iterator[None]:
    """Meanwhile a module is loaded by one thread at a time, which gets what was in it then as an object of its own.
    Compiling modules isn't held up. Without effect on versions of Triton that load no modules."""
    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None:
        yield
        return

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load
