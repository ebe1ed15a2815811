"""A digest by which nodes compare their copies of a checkpoint."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.errors import StartupError

SAMPLES = 64  # blocks of each file that are read
SAMPLE_BYTES = 4096
MAX_THREADS = 32  # each reads a file: disks of a network take milliseconds for a block
SUFFIXES = (".json", ".safetensors", ".gguf")


def checkpoint_digest(path: Path) -> str:
    """Return a digest of a model's folder or file: of the names, sizes and evenly spaced blocks of its files, first and
    last block included. Reading whole files would take minutes. Raise StartupError if there is no such model."""
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            digests = list(pool.map(_file_digest, files))
    except OSError as error:
        raise StartupError(f"{error.filename or path} can't be read: {error.strerror}") from error
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name}\0{size}\0".encode())
    last = max(size - SAMPLE_BYTES, 0)
    with file.open("rb") as stream:
        for start in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()
