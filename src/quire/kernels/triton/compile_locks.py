"""Compiling and loading kernels in several threads, and in several processes, at once.

Triton 3.6 starts each kind of kernel through a small C module, and gives all of these modules one name. When Python
loads such a module a second time it puts what is in it into the module object that this name has then, which another
thread may be about to look into: a kernel would be started with another one's arguments. (Triton 3.7 has one launcher.)

Processes that need the same kernels at the same time would compile all of them each: Triton looks on disk first, and
doesn't know what is being compiled. With a lock for each kernel the first one compiles it, and the others read it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import triton
import triton.runtime.build as build
from triton.runtime.jit import JITFunction

LOCKS = 1024  # files; kernels that share one wait for each other


def serialize_module_loading() -> None:
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


def lock_compilation() -> None:
    """From now on a kernel that this process compiles isn't compiled by others that have called this, and have the same
    cache on disk: they wait until it is there. Once for a process."""
    compiled = JITFunction._do_compile
    if hasattr(compiled, "once_for_all"):
        return

    def compiled_once(self: Any, key: Any, *more: Any, **options: Any) -> Any:
        with _compile_lock(f"{self.cache_key} {key}"):
            return compiled(self, key, *more, **options)

    compiled_once.once_for_all = True  # type: ignore[attr-defined]
    JITFunction._do_compile = compiled_once  # type: ignore[method-assign]


@contextmanager
def _compile_lock(name: str) -> Iterator[None]:
    """Nobody else is here, in any process, with this name. Where the disk has no locks, without one."""
    number = int.from_bytes(sha256(name.encode()).digest()[:4], "little") % LOCKS
    folder = os.path.join(triton.knobs.cache.dir, "quire-locks")
    file = -1
    try:
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            file = os.open(os.path.join(folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        if file >= 0:
            os.close(file)
