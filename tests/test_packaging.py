"""The source distribution holds what `make test` needs; the package imports only what it declares."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).parent.parent
NAMES = {
    "huggingface-hub": "huggingface_hub", "pillow": "PIL", "prometheus-client": "prometheus_client", "pyyaml": "yaml",
}  # fmt: skip
OPTIONAL = {"transformers", "matplotlib", "openai", "httpx", "triton", "cuda"}


def test_the_sdist_is_whole(tmp_path: Path) -> None:
    away = ignore_patterns(".*", "__pycache__", "*.egg-info", "*.safetensors", "build", "dist", "measurements")
    source = copytree(ROOT, tmp_path / "source", ignore=away)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    there = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {name for name in there if ".egg-info" not in name} <= held


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
