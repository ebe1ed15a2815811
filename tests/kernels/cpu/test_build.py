"""How the kernels are built: with compilers that pretend, and the sources with the one that is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.cpu.build import HERE, compiler
from quire.kernels.cpu.variants import COMPILE_FLAGS, Variant, machine_variants

NAMES = [variant.name for variant in machine_variants()]
COMPILER = """#!/bin/sh
case "$*" in *{refused}*) echo "c++: error: what is {refused}?" >&2; exit 1;; esac
echo "$*" >> {log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
exit 0
"""

pytestmark = pytest.mark.skipif(not NAMES, reason="no kernels for this kind of machine")


class Kernels:
    """A copy of the sources, and a compiler for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "kernels", folder / "log"
        away = shutil.ignore_patterns("built", "__pycache__")
        shutil.copytree(HERE, self.folder, ignore=away)
        self.sources = len(list((self.folder / "native").glob("*.cpp")))

    def build(
        self, refused: str = "nothing at all", cxx: str | None = None, here: bool = False
    ) -> tuple[list[str], int, str]:
        """The libraries' names, how often something was compiled, and what was printed."""
        fake = self.log.with_name("c++")
        fake.write_text(COMPILER.format(refused=f'"{refused}"', log=self.log))
        fake.chmod(0o755)
        self.log.write_text("")
        environment = {**os.environ, "CXX": cxx or str(fake)}
        command = [sys.executable, str(self.folder / "build.py"), *(() if here else ("--all",))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        built = sorted(path.stem for path in (self.folder / "built").glob("*.so"))
        return built, sum(" -c " in line for line in self.log.read_text().splitlines()), done.stdout


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    return Kernels(tmp_path)


def test_what_changed_is_compiled_again(kernels: Kernels) -> None:
    all_of = len(NAMES) * kernels.sources
    assert kernels.build()[:2] == (sorted(NAMES), all_of)
    assert kernels.build()[:2] == (sorted(NAMES), 0)
    source = kernels.folder / "native" / "norm.cpp"
    source.write_text(source.read_text() + "\n")
    assert kernels.build()[:2] == (sorted(NAMES), len(NAMES))
    header = kernels.folder / "native" / "quire.h"
    header.write_text(header.read_text() + "\n")
    assert kernels.build()[:2] == (sorted(NAMES), all_of)


@pytest.mark.skipif("avx2" not in NAMES, reason="other machines have other names for what they have")
@pytest.mark.parametrize(
    ("features", "built"),
    [
        (sorted(machine_variants()[-1].needs) if NAMES else [], ["avx2"]),
        (sorted(machine_variants()[-1].needs | {"avx_vnni", "avx512f"}) if NAMES else [], ["avx2", "avxvnni"]),
        (sorted(machine_variants()[0].needs) if NAMES else [], sorted({*NAMES} - {"avxvnni"})),
        (["fpu"], []),
        ([], sorted(NAMES)),
    ],
    ids=["avx2", "avxvnni", "amx", "an old one", "one that names none"],
)
def test_in_place_only_what_this_machine_runs_is_built(kernels: Kernels, features: list[str], built: list[str]) -> None:
    cpuinfo = kernels.folder / "cpuinfo"
    cpuinfo.write_text(f"flags : {' '.join(features)}\n" if features else "")
    script = kernels.folder / "variants.py"
    script.write_text(script.read_text().replace('Path("/proc/cpuinfo")', f"Path({str(cpuinfo)!r})"))
    assert kernels.build(here=True)[0] == built
    assert kernels.build()[0] == sorted(NAMES)


@pytest.mark.parametrize("flag", ["-O3", "-pthread", machine_variants()[0].flags[0] if NAMES else ""])
def test_libraries_of_other_flags_are_built_again_and_not_loaded(kernels: Kernels, flag: str) -> None:
    def digests() -> tuple[str, str]:
        """Of what is built, and of what would be."""
        command = [sys.executable, "-c", "from variants import source_digest; print(source_digest(), end='')"]
        done = subprocess.run(command, cwd=kernels.folder, capture_output=True, text=True, check=True)
        return (kernels.folder / "built" / "sources").read_text(), done.stdout

    kernels.build()
    before = digests()
    assert before[0] == before[1]
    path = kernels.folder / "variants.py"
    path.write_text(path.read_text().replace(f'"{flag}"', f'"{flag}", "-DOTHER"'))
    assert digests()[0] == before[0] != digests()[1]
    others = [variant for variant in machine_variants() if flag in (*COMPILE_FLAGS, *variant.flags)]
    assert kernels.build()[:2] == (sorted(NAMES), len(others) * kernels.sources)
    assert digests()[0] == digests()[1]


def test_a_variant_that_the_compiler_lacks_is_left_out(kernels: Kernels) -> None:
    kernels.build()
    source = kernels.folder / "native" / "norm.cpp"
    source.write_text(source.read_text() + "\n")  # the libraries that there are don't stay
    flag = machine_variants()[0].flags[-1]
    built, _, printed = kernels.build(refused=flag)
    assert built == sorted(name for name, variant in zip(NAMES, machine_variants()) if flag not in variant.flags)
    assert f"CPU kernels: {NAMES[0]} is left out: c++: error: what is {flag}?" in printed.splitlines()


@pytest.mark.parametrize("cxx", ["/nowhere/c++", ""])
def test_without_a_compiler_nothing_is_built(kernels: Kernels, cxx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.build()
    if not cxx:
        monkeypatch.setenv("PATH", str(kernels.folder))
    built, _, printed = kernels.build(cxx=cxx or "c++")
    assert built == []
    assert "CPU kernels: no C++ compiler\nCPU kernels: none; quire computes with stock torch" in printed


FEW = ("amx", "avx2", "neon")
"""Sets whose sources are compiled each time; the others in the soak."""


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v.name in FEW else pytest.mark.soak, id=v.name) for v in machine_variants()]
)
def test_sources_give_no_warnings(variant: Variant) -> None:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no compiler")
    for source in sorted((HERE / "native").glob("*.cpp")):
        command = [*cxx, *COMPILE_FLAGS, *variant.flags, "-Werror", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized command" in done.stderr:
            pytest.skip("this compiler knows no such instructions")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif("avx2" not in NAMES, reason="other machines have other names for what they have")
@pytest.mark.parametrize("variant", machine_variants(), ids=NAMES)
def test_what_the_compiler_may_use_is_needed(variant: Variant) -> None:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no compiler")
    command = [*cxx, *variant.flags, "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this compiler knows no such instructions")
    macros = {name.strip("_").lower() for name in re.findall(r"#define (__[A-Z0-9_]+__) 1$", done.stdout, re.MULTILINE)}
    called = {"bmi": "bmi1", "lzcnt": "abm", "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    known = {"avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"}
    may = {called.get(name, name) for name in macros if name in known or name.startswith(("avx512", "amx_"))}
    assert may <= variant.needs
