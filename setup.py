"""Builds the kernels for CPUs with the package where there is a compiler; pyproject.toml says everything else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path("src/quire/kernels/cpu")


def kernels() -> Any:
    """Its build.py, which needs nothing of the package."""
    spec = importlib.util.spec_from_file_location("kernels_build", FOLDER / "build.py")
    assert spec is not None, "it is there"
    assert spec.loader is not None, "it is Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """The libraries go into the package: in place, and for this machine alone, where that is used from here."""

    def run(self) -> None:
        super().run()
        place = FOLDER if self.editable_mode else Path(self.build_lib, *FOLDER.parts[1:])
        made = kernels().build(place / "built", FOLDER / "built" / "objects", native_only=self.editable_mode)
        for line in made.failures:
            print(f"CPU kernels: {line}", file=sys.stderr)


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether a wheel is for one kind of machine."""
        return kernels().compiler() is not None and bool(kernels().variants().machine_variants())


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython})
