"""A digest by which nodes compare their copies of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.errors import StartupError

SAMPLES = 64  # blocks of each file that are read
SAMPLE_BYTES = 4096
SUFFIXES = (".json", ".safetensors", ".gguf")


def checkpoint_digest(path: Path) -> str:
    """Return a digest of a model's folder or file: of the names, sizes and evenly spaced blocks of its files, first and
    last block included. Reading whole files would take minutes. Raise StartupError if there is no such model."""
    digest = hashlib.sha256()
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            last = max(size - SAMPLE_BYTES, 0)
            with file.open("rb") as stream:
                for start in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                    stream.seek(start)
                    digest.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise StartupError(f"{error.filename or path} can't be read: {error.strerror}") from error
    return digest.hexdigest()
