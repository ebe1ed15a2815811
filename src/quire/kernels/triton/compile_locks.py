"""Safe compilation and loading of kernels by several threads and processes at once.

Triton 3.6 launches each kind of kernel with a small C module, and all of these modules have one name. When Python loads
a second one, it writes its contents into the module object of that name. A thread that reads this object at that moment
would launch its kernel with the arguments of another. (Triton 3.7 has one launcher.)

Triton does not know which kernels are being compiled, so threads and processes that need the same kernel at the same
time would each compile it. With a lock for each kernel, one of them compiles it and the others load it from disk.
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

from quire.kernels.triton.compile_process import KernelCompiler, fix_cache_key

NUM_LOCK_FILES = 1024  # kernels that share a file wait for each other


def serialize_module_loading() -> None:
    """Patch Triton so that one thread at a time loads a module, and gets a copy of its contents. Compilation is not
    serialized. A second call has no effect, nor has a call if Triton has no such function."""
    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()
    if load is None or hasattr(load, "in_any_thread"):
        return

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    load_alone.in_any_thread = True  # type: ignore[attr-defined]  # a mark on a function
    build._load_module_from_path = load_alone


@contextmanager
def compile_once(compiler: KernelCompiler | None = None) -> Iterator[None]:
    """Return a context in which a kernel is compiled once: of the threads and processes in it that share a cache on
    disk, one compiles the kernel, and the others wait until it is in the cache. `compiler` compiles it, if given.

    If several threads are the first to launch a kernel, each may make Triton's table of its compiled kinds, and the
    last one stays. So what was compiled is kept here too."""
    do_compile, compiled = JITFunction._do_compile, dict[Any, Any]()

    def compile_locked(self: Any, key: Any, signature: Any, device: Any, *arguments: Any, **options: Any) -> Any:
        fix_cache_key(self)
        with _compile_lock(f"{self.cache_key} {key}"):
            name = id(self), device, key
            kernel = compiled.get(name) or self.device_caches[device][0].get(key)
            if kernel is None:  # else another thread was first
                if compiler is not None:
                    compiler.compile(self, key, signature, device, *arguments, **options)
                kernel = do_compile(self, key, signature, device, *arguments, **options)
            compiled[name] = self.device_caches[device][0][key] = kernel
            return kernel

    JITFunction._do_compile = compile_locked
    try:
        yield
    finally:
        JITFunction._do_compile = do_compile


class KernelNotLoaded(Exception):
    """A kernel was launched that is not loaded."""


@contextmanager
def loading_refused() -> Iterator[None]:
    """Return a context in which KernelNotLoaded is raised if this thread launches a kernel that is not loaded."""
    do_compile = JITFunction._do_compile
    thread: int | None = threading.get_ident()

    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            raise KernelNotLoaded(self.fn.__name__)
        return do_compile(self, *arguments, **options)

    JITFunction._do_compile = refuse
    try:
        yield
    finally:
        thread = None  # another engine's thread may have patched Triton meanwhile, and may put `refuse` back later
        JITFunction._do_compile = do_compile


@contextmanager
def _compile_lock(name: str) -> Iterator[None]:
    """Hold the lock of this name, which is shared by all threads and processes; no lock if the file system has none."""
    number = int.from_bytes(sha256(name.encode()).digest()[:4], "little") % NUM_LOCK_FILES
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
