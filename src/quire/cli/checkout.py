"""Find the parts of the repository that are not installed: its folders bench/ and papers/."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import quire
from quire.errors import StartupError

CHECKOUT = Path(quire.__file__).parents[2]


def import_from_checkout(name: str) -> ModuleType | None:
    """Return the package in the folder `name` of the checkout that quire runs from, or None if it runs from an
    installation without one. Raise StartupError if another module of that name was imported before."""
    if not (CHECKOUT / name / "__init__.py").is_file() or not (CHECKOUT / "src" / "quire").is_dir():
        return None
    if sys.path[:1] != [str(CHECKOUT)]:
        sys.path.insert(0, str(CHECKOUT))  # before other packages of that name
    module = import_module(name)
    if not Path(module.__file__ or "").is_relative_to(CHECKOUT / name):
        raise StartupError(f"another module named {name} is loaded, {module.__file__}", f"Use {CHECKOUT / name}")
    return module
