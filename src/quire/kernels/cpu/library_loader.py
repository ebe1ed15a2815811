"""Selection of the kernels' library for this machine, and of its threads. `find_library` does not import torch."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Set
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import StartupError
from quire.kernels.cpu.cores import available_cores
from quire.kernels.cpu.variants import cpu_features, machine_variants, source_digest

if TYPE_CHECKING:
    from quire.kernels.cpu.library import Library

BUILT = Path(__file__).parent / "built"
KERNELS_OFF = "off"


def is_current() -> bool:
    """Return True if the libraries in `built/` were built from the sources of this installation."""
    try:
        return (BUILT / "sources").read_text(encoding="ascii") == source_digest()
    except OSError:
        return False


def find_library(variant_name: str = "", has: Set[str] | None = None) -> Path | None:
    """Return the best built library that a machine with the features `has` can run (None: this machine), or None.
    `variant_name` permits only that variant, "off" no library. Raise StartupError if there is no such variant."""
    names = [variant.name for variant in machine_variants()]
    if variant_name and variant_name not in (KERNELS_OFF, *names):
        raise StartupError(
            f"QUIRE_CPU_KERNELS is {variant_name[:80]!r}", f"Choose one of: {', '.join([*names, KERNELS_OFF])}"
        )
    has = usable_features(cpu_features()) if has is None else has
    for variant in machine_variants() if is_current() else ():
        path = BUILT / f"{variant.name}.so"
        if variant.needs <= has and variant_name in ("", variant.name) and path.exists():
            return path
    return None


def usable_features(has: Set[str]) -> frozenset[str]:
    """Return the features that the system permits this process to use: AMX tiles need a permission."""
    tiles = {name for name in has if name.startswith("amx_")}
    return frozenset(has) - (tiles if tiles and not _tiles_allowed() else frozenset())


def _tiles_allowed() -> bool:
    """Request the AMX registers for all threads, by arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Return True if
    Linux permits them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18)) == 0)


@lru_cache(maxsize=1)
def library() -> Library | None:
    """Return the process's library, with as many threads as torch, or None. QUIRE_CPU_KERNELS names the variant, or is
    "off"."""
    path = find_library(os.environ.get("QUIRE_CPU_KERNELS", ""))
    if path is None:
        return None
    import torch

    from quire.kernels.cpu.library import Library

    try:
        return Library(path, torch.get_num_threads())
    except OSError:  # it was built for another system, for example one with a newer C library
        return None


def required_library() -> Library:
    """Return the process's library, of which the caller has checked that there is one."""
    kernels = library()
    assert kernels is not None, "there are no CPU kernels; check has_kernels first"
    return kernels


def use_threads(threads: int | None) -> None:
    """Set the number of threads of torch and of the kernels. None: one for each available core, unless OMP_NUM_THREADS
    is set. Raise StartupError if the system cannot start them."""
    import torch

    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        cores = available_cores()
        threads = None if cores is None else cores.threads
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    kernels = library()
    if kernels is not None and kernels.threads != torch.get_num_threads():
        try:
            kernels.resize(torch.get_num_threads())
        except OSError as error:
            raise StartupError(f"--threads is {torch.get_num_threads()}, and {error}", "Ask for fewer") from error


def describe() -> str:
    """Return what computes on the CPU, for the startup messages; without kernels also the reason and the remedy."""
    import torch

    threads = torch.get_num_threads()
    kernels, cores = library(), available_cores()
    on = f"{threads} thread{'s' * (threads != 1)}" + (f" ({cores})" if cores is not None else "")
    if kernels is not None:
        return f"CPU kernels {kernels.path.stem}, {on}"
    return f"stock torch computes, which is slower, {on}: {missing_reason()}"


def missing_reason() -> str:
    """Return why there is no library, and the remedy."""
    if os.environ.get("QUIRE_CPU_KERNELS") == KERNELS_OFF:
        return "QUIRE_CPU_KERNELS is off"
    built = [variant for variant in machine_variants() if (BUILT / f"{variant.name}.so").exists()]
    if not machine_variants():
        return f"quire has no kernels for {platform.system()} on {platform.machine()}"
    has = cpu_features()
    lacks = ", ".join(sorted((built or machine_variants())[-1].needs - usable_features(has)))
    if not built and (not has or not lacks):
        return "quire's kernels aren't built; install a C++ compiler (g++ or clang++), then quire again"
    if built and not is_current():
        return "quire's kernels were built from other sources; install quire again"
    if lacks:
        return f"this CPU lacks {lacks[:80]}"
    if find_library(os.environ.get("QUIRE_CPU_KERNELS", "")) is None:
        return f"QUIRE_CPU_KERNELS is {os.environ['QUIRE_CPU_KERNELS'][:80]!r}, which isn't built or can't run here"
    return "quire's kernels were built for another system; install quire again, with a C++ compiler (g++ or clang++)"
