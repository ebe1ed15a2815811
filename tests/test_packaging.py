"""The source distribution holds what `make test` needs; the package imports only what it declares; and each rule of
targets.py still matches something."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from targets import GATE_CASES

from quire.kernels.cpu.variants import machine_variants

ROOT = Path(__file__).parent.parent
NAMES = {
    "huggingface-hub": "huggingface_hub", "pillow": "PIL", "prometheus-client": "prometheus_client", "pyyaml": "yaml",
}  # fmt: skip
OPTIONAL = {
    "transformers", "matplotlib", "openai", "httpx", "triton", "cuda", "zmq", "msgspec", "opentelemetry",
    "cryptography", "ray",
}  # fmt: skip


AWAY = ignore_patterns(".*", "__pycache__", "*.egg-info", "*.safetensors", "build", "built", "dist", "measurements")
COMPILER = """#!/bin/sh
{fails}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
exit 0
"""


def test_the_sdist_is_whole(tmp_path: Path) -> None:
    source = copytree(ROOT, tmp_path / "source", ignore=AWAY)
    there = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    assert there <= held


@pytest.mark.skipif(not machine_variants(), reason="no kernels for this kind of machine")
@pytest.mark.parametrize("compiler", ["there", "fails", "missing"])
def test_wheels_hold_what_could_be_built(tmp_path: Path, compiler: str) -> None:
    """The kernels' libraries, for any Python on this kind of machine; installing never fails for them."""
    source = copytree(ROOT, tmp_path / "source", ignore=AWAY)
    cxx = tmp_path / "c++"
    if compiler != "missing":
        cxx.write_text(COMPILER.format(fails="echo 'error: no' >&2; exit 1" if compiler == "fails" else ""))
        cxx.chmod(0o755)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    environment = {**os.environ, "CXX": str(cxx)}
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        held = set(files.namelist())
    folder = "quire/kernels/cpu"
    expected = {f"{folder}/built/{variant.name}.so" for variant in machine_variants()} if compiler == "there" else set()
    assert {name for name in held if name.endswith(".so")} == expected
    assert not [name for name in held if "/objects/" in name]
    natives = {f"{folder}/native/{path.name}" for path in (ROOT / "src" / folder / "native").iterdir()}
    assert natives <= held
    assert f"{folder}/built/sources" in held
    assert wheel.name.endswith("-py3-none-any.whl") == (compiler == "missing")
    assert "-py3-none-" in wheel.name
    if compiler != "there":
        said = "no C++ compiler" if compiler == "missing" else f"{machine_variants()[0].name} is left out: error: no"
        assert f"CPU kernels: {said}" in done.stderr


def test_every_import_is_declared() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split("[<>=]", requirement)[0] for requirement in said]
    declared = {NAMES.get(name, name) for name in names} | OPTIONAL
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.partition(".")[0]
                assert top in declared or top == "quire" or top in sys.stdlib_module_names, (path.name, module)


def test_the_document_names_every_dependency() -> None:
    """Each has a row in docs/dependencies.md, with the bound where one is told; `make` installs a pinned version."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = [
        row.partition(" >= ") for row in re.findall(r"^\| ([a-z0-9].*?) \|", text, re.MULTILINE) if row != "package"
    ]
    assert {name for name, _, _ in rows} == {re.split("[<>=]", requirement)[0] for requirement in said}
    for name, _, bound in rows:
        assert not bound or any(re.match(rf"{name}>={re.escape(bound)}(,|$)", one) for one in said), (name, bound)
    assert len(rows) == 17
    assert "Seventeen direct ones" in text
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {name for name, _, _ in rows} <= pinned


def test_every_rule_names_tests_that_exist() -> None:
    for prefix in GATE_CASES:
        file, _, function = prefix.partition("::")
        found = [path for path in ROOT.glob(f"{file}*") if path.is_dir() or path.suffix == ".py"]
        assert found, f"no test file begins with {file}"
        assert not function or f"def {function}" in found[0].read_text(), f"{file} has no {function}"
