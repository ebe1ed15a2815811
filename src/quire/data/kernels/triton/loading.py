"""Loading kernels in several threads at once.

Triton 3.6 starts each kind of kernel through a small C module, and gives all of these modules one name. When Python
loads such a module a second time it puts what is in it into the module object that this name has then, which another
thread may be about to look into: a kernel would be started with another one's arguments. (Triton 3.7 has one launcher.)
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import triton.runtime.build as build


def in_any_thread() -> None:
    """From now on one thread at a time loads a module, and gets what was in it then as an object of its own. Compiling
    modules isn't held up. Once for a process; without effect where Triton has no such function."""
    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None or hasattr(load, "in_any_thread"):
        return

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    load_alone.in_any_thread = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_alone
