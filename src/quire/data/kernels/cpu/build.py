"""Builds the kernels: `python src/quire/data/kernels/cpu/build.py` puts a library for each instruction set into
`built/`, next to this file. It runs without torch, and without quire being installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror",
    "-Wno-psabi",
)  # fmt: skip


def compiler() -> str | None:
    """CXX, or the first of the usual names that is there."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(target: Path) -> list[Path]:
    """The libraries, in `target`. CalledProcessError where the compiler refuses, with what it said."""
    spec = importlib.util.spec_from_file_location("variants", HERE / "variants.py")
    assert spec is not None, "it is there"
    assert spec.loader is not None, "it is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cxx = compiler()
    if cxx is None:
        return []
    target.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in (HERE / "native").glob("*.cpp"))

    def one(name: str, flags: tuple[str, ...]) -> Path:
        path = target / f"{name}.so"
        fresh = path.with_suffix(f".{os.getpid()}")
        command = [cxx, *FLAGS, *flags, "-o", str(fresh), *sources]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(fresh, path)
        return path

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda variant: one(variant.name, variant.flags), module.variants()))


if __name__ == "__main__":
    try:
        print("\n".join(map(str, build(HERE / "built"))) or "no compiler")
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
