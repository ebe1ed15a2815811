"""Build the kernels: `python src/quire/kernels/cpu/build.py` puts a library for each instruction set that this machine
has into `built/`, next to this file; with `--all` also those of other machines, as in wheels. Needs neither torch nor
an installed quire, because the installation runs it."""

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
    """The libraries, and a line for each library that failed to compile."""

    libraries: list[Path]
    failures: list[str]


def compiler() -> tuple[str, ...] | None:
    """Return the command of CXX, which may have arguments ("ccache g++"), or else of the first usual compiler that is
    installed; None if there is none."""
    from_env = shlex.split(os.environ.get("CXX", ""))
    commands = [from_env] if from_env else [["c++"], ["g++"], ["clang++"]]
    return next(((path, *rest) for name, *rest in commands if (path := shutil.which(name))), None)


def variants() -> Any:
    """Return the module variants.py, loaded by path, because quire may not be importable."""
    spec = importlib.util.spec_from_file_location("variants", HERE / "variants.py")
    assert spec is not None, "variants.py exists"
    assert spec.loader is not None, "variants.py is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(target: Path, objects: Path, native_only: bool = False) -> BuildResult:
    """Build the libraries in `target` and delete all others there. Without a compiler none is built. Objects in
    `objects` are reused unless a source, a header, the flags or the compiler changed. `native_only`: only the variants
    that this machine can run, if it lists its features."""
    cxx, kinds = compiler(), variants()
    has = kinds.cpu_features() if native_only else None
    target.mkdir(parents=True, exist_ok=True)
    built, failures = [], []
    if cxx is None:
        failures.append("no C++ compiler")
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
                built.append(
                    link_library(target / f"{name}.so", (*cxx, *kinds.LINK_FLAGS), [part.result() for part in parts])
                )
            except subprocess.CalledProcessError as error:
                lines = [line for line in error.stderr.splitlines() if "error" in line.lower()] or [str(error)]
                failures.append(f"{name} is left out: {lines[0][:200]}")
    for path in target.glob("*.so"):
        if path not in built:
            path.unlink()
    (target / "sources").write_text(kinds.source_digest())
    return BuildResult(built, failures)


def compiler_version(cxx: tuple[str, ...]) -> bytes:
    """Return the output of the compiler's --version."""
    return subprocess.run([*cxx, "--version"], capture_output=True, check=False).stdout


def compile_source(source: Path, command: tuple[str, ...], common: bytes, objects: Path) -> Path:
    """Return the object of a source, compiled unless it exists. Raise CalledProcessError if the compiler fails."""
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
    """Link the library and replace the old one by a rename, so that a process that has that loaded is not affected."""
    fresh = path.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, "-o", str(fresh), *map(str, objects)], check=True, capture_output=True, text=True)
    os.replace(fresh, path)
    return path


def main() -> None:
    start = time.monotonic()
    result = build(HERE / "built", HERE / "built" / "objects", native_only="--all" not in sys.argv[1:])
    for line in result.failures:
        print(f"CPU kernels: {line}")
    names = ", ".join(path.stem for path in result.libraries)
    print(f"CPU kernels: {names or 'none; quire computes with stock torch'} ({time.monotonic() - start:.1f} s)")


if __name__ == "__main__":
    main()
