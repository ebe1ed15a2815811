"""The instruction sets that the kernels are built for, and the features of this machine. Imports only the standard
library, because build.py loads this file too."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple


class Variant(NamedTuple):
    """`flags`: for the compiler; `needs`: CPU features that the machine must have."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wno-psabi")
"""Compiler flags of all variants."""
LINK_FLAGS = ("-shared", "-pthread")

_V3 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_VNNI = _V4 | {"avx512_vnni"}
_V4_BF16 = _V4_VNNI | {"avx512_bf16"}
_V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_VNNI_FLAGS = (*_V4_FLAGS, "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")

VARIANTS = {
    "x86_64": (
        Variant("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
                _V4_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
        Variant("avx512bf16", _BF16_FLAGS, _V4_BF16),
        Variant("avx512vnni", _VNNI_FLAGS, _V4_VNNI),
        Variant("avx512", _V4_FLAGS, _V4),
        Variant("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
        Variant("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Variant("neon", ("-march=armv8.2-a+fp16+dotprod",), frozenset({"asimd", "asimdhp", "asimddp"})),),
}  # fmt: skip
"""Variants by machine, the best first."""


def machine_variants() -> tuple[Variant, ...]:
    """Return the variants for this kind of machine, the best first."""
    if os.name != "posix":  # the kernels' threads are POSIX's
        return ()
    machine = platform.machine().lower()
    return VARIANTS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), ())


def source_digest() -> str:
    """Return the digest of the kernels' sources and of the compiler flags. A library with another digest may take other
    arguments or return other numbers."""
    files = sorted((Path(__file__).parent / "native").glob("*.[ch]*"))
    parts = [text for path in files for text in (path.name.encode(), path.read_bytes())]
    flags = COMPILE_FLAGS, LINK_FLAGS, [(variant.name, variant.flags) for variant in machine_variants()]
    return hashlib.sha256(b"\0".join([*parts, repr(flags).encode()])).hexdigest()


CPUINFO = Path("/proc/cpuinfo")


def cpu_features() -> frozenset[str]:
    """Return the features that all CPUs of the machine have, by Linux's names; empty if the system does not list
    them."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimd", "asimdhp", "asimddp"})  # all Apple silicon has these
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    parts = (line.partition(":") for line in lines)
    features = [frozenset(value.split()) for name, _, value in parts if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*features) if features else frozenset()
