"""Finds the kernels' library that suits this machine, and says which; how many threads it has. Whether there is one can
be asked before torch is imported."""

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
    """What is built, if anything, is built from the sources that lie beside it."""
    try:
        return (BUILT / "sources").read_text(encoding="ascii") == source_digest()
    except OSError:
        return False


def find_library(variant_name: str = "", has: Set[str] | None = None) -> Path | None:
    """The best library that is built and that a machine with the features `has` runs (none: this one's);
    `variant_name`: that one, "off" none. StartupError if there is no such name."""
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
    """Those features that the system lets this process use: the tiles of AMX want to be asked for."""
    tiles = {name for name in has if name.startswith("amx_")}
    return frozenset(has) - (tiles if tiles and not _tiles_allowed() else frozenset())


def _tiles_allowed() -> bool:
    """Ask Linux for the registers of AMX, for all threads: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18)) == 0)


@lru_cache(maxsize=1)
def library() -> Library | None:
    """The process's own, with as many threads as torch; None where there is none. QUIRE_CPU_KERNELS names one, or is
    "off"."""
    path = find_library(os.environ.get("QUIRE_CPU_KERNELS", ""))
    if path is None:
        return None
    import torch

    from quire.kernels.cpu.library import Library

    try:
        return Library(path, torch.get_num_threads())
    except OSError:  # it was built for a newer system
        return None


def use_threads(threads: int | None) -> None:
    """As many for torch and for the kernels; None: what suits this process, unless OMP_NUM_THREADS says it."""
    import torch

    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        here = available_cores()
        threads = None if here is None else here.threads
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    found = library()
    if found is not None and found.threads != torch.get_num_threads():
        try:
            found.resize(torch.get_num_threads())
        except OSError as error:
            raise StartupError(f"--threads is {torch.get_num_threads()}, and {error}", "Ask for fewer") from error


def describe() -> str:
    """What computes on the CPU, for the lines at start; and what to do where the kernels are missing."""
    import torch

    threads = torch.get_num_threads()
    found, here = library(), available_cores()
    on = f"{threads} thread{'s' * (threads != 1)}" + (f" ({here})" if here is not None else "")
    if found is not None:
        return f"CPU kernels {found.path.stem}, {on}"
    return f"stock torch computes, which is slower, {on}: {missing_reason()}"


def missing_reason() -> str:
    """Why there is no library, and the remedy."""
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
