"""Builds the kernels: `python src/quire/kernels/cpu/build.py` puts a library for each instruction set that this
machine has into `built/`, next to this file; with `--all` those for other machines too, as wheels have them. It runs
without torch, and without quire being installed: whoever installs it runs it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class BuildResult(NamedTuple):
    """The libraries; and what the compiler refused, a line for each that is left out."""

    libraries: list[Path]
    failures: list[str]


def compiler() -> tuple[str, ...] | None:
    """CXX, which may have arguments ("ccache g++"), or the first of the usual names that is there."""
    named = shlex.split(os.environ.get("CXX", ""))
    commands = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next(((found, *rest) for name, *rest in commands if (found := shutil.which(name))), None)


def variants() -> Any:
    """The module beside this one."""
    spec = importlib.util.spec_from_file_location("variants", HERE / "variants.py")
    assert spec is not None, "it is there"
    assert spec.loader is not None, "it is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target: Path, objects: Path, native_only: bool = False) -> BuildResult:
    """The libraries, in `target`, where no others stay; none without a compiler. What is in `objects` from before is
    compiled again where a source, a header, the flags or the compiler changed. `native_only`: of those only what this
    machine runs, if it says what it has."""
    cxx, kinds = compiler(), variants()
    has = kinds.cpu_features() if native_only else None
    target.mkdir(parents=True, exist_ok=True)
    made, refused = [], []
    if cxx is None:
        refused.append("no C++ compiler")
    else:
        objects.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            common = compiler_version(cxx) + b"".join(
                path.read_bytes() for path in sorted((HERE / "native").glob("*.h"))
            )
            tasks = {
                variant.name: [
                    threads.submit(
                        compile_source, source, (*cxx, *kinds.COMPILE_FLAGS, *variant.flags), common, objects
                    )
                    for source in sorted((HERE / "native").glob("*.cpp"))
                ]
                for variant in kinds.machine_variants()
                if not has or variant.needs <= has
            }
        for name, parts in tasks.items():
            try:
                made.append(
                    link_library(target / f"{name}.so", (*cxx, *kinds.LINK_FLAGS), [part.result() for part in parts])
                )
            except subprocess.CalledProcessError as error:
                lines = [line for line in error.stderr.splitlines() if "error" in line.lower()] or [str(error)]
                refused.append(f"{name} is left out: {lines[0][:200]}")
    for path in target.glob("*.so"):
        if path not in made:
            path.unlink()
    (target / "sources").write_text(kinds.source_digest())
    return BuildResult(made, refused)


def compiler_version(cxx: tuple[str, ...]) -> bytes:
    """Which compiler it is."""
    return subprocess.run([*cxx, "--version"], capture_output=True, check=False).stdout


def compile_source(source: Path, command: tuple[str, ...], common: bytes, objects: Path) -> Path:
    """The object of a source; the one from before if nothing changed. CalledProcessError where the compiler refuses."""
    digest = hashlib.sha256(b"\0".join((common, source.read_bytes(), *map(str.encode, command)))).hexdigest()
    path = objects / f"{source.stem}-{digest[:24]}.o"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(fresh)], check=True, capture_output=True, text=True
        )
        sys.stderr.write(done.stderr)
        os.replace(fresh, path)
    return path


def link_library(path: Path, command: tuple[str, ...], objects: list[Path]) -> Path:
    """The library; one that a process has open stays what it is there."""
    fresh = path.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-o", str(fresh), *map(str, objects)], check=True, capture_output=True, text=True)
    os.replace(fresh, path)
    return path


def main() -> None:
    began = time.monotonic()
    made = build(HERE / "built", HERE / "built" / "objects", native_only="--all" not in sys.argv[1:])
    for line in made.failures:
        print(f"CPU kernels: {line}")
    names = ", ".join(path.stem for path in made.libraries)
    print(f"CPU kernels: {names or 'none; quire computes with stock torch'} ({time.monotonic() - began:.1f} s)")


if __name__ == "__main__":
    main()
