"""Import torch in a thread while a program imports its own modules. This module imports nothing of quire."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

log = logging.getLogger("quire.startup")
SHARED_PACKAGES = (
    "numpy",
    "numpy.typing",
    "asyncio",
    "concurrent.futures",
    "importlib.metadata",
    "multiprocessing.reduction",
)
"""Packages that both torch and quire import, and that import modules of their own. If one thread imports such a package
while another one imports its module, Python gives one of them a module that is not complete."""


def start_torch_import() -> None:
    """Start a thread that imports torch, unless it is imported. The process does not end before the thread: torch's
    code in C++ can't be interrupted."""
    if "torch" in sys.modules:
        return
    shared_imported = threading.Event()
    threading.Thread(target=_import_torch, args=(shared_imported,), name="quire-imports").start()
    try:
        for name in SHARED_PACKAGES:  # while the thread loads libraries
            with suppress(ImportError):  # it is reported where it is needed
                import_module(name)
    finally:
        shared_imported.set()


def is_cuda_initialized() -> bool:
    """Return True if torch is imported and has chosen a GPU. Another thread may be importing it."""
    return bool(getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)())


def _import_torch(shared_imported: threading.Event) -> None:
    """Import torch after the shared packages. Log a failure, since a second import may fail differently after the
    first."""
    try:
        with suppress(OSError, AttributeError, ImportError, ValueError):
            _load_libraries()
        shared_imported.wait()
        import_module("torch")
    except Exception:
        if threading.main_thread().is_alive():  # else the process ends, where some modules can't be imported
            log.warning("torch can't be imported", exc_info=True)


def _load_libraries() -> None:
    """Load the libraries that torch loads first, among them CUDA's, in the same way. torch holds the interpreter's lock
    while it loads them, and this function does not. A failure is left to torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    path = os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_global_deps.so")
    if os.path.exists(path):
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_GLOBAL)
