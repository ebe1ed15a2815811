"""Find the parts of the repository that are not installed: its folders bench/ and papers/."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import quire

CHECKOUT = Path(quire.__file__).parents[2]


def import_from_checkout(name: str) -> ModuleType | None:
    """Return the package in the folder `name` of the checkout that quire runs from, or None if it runs from an
    installation without one."""
    if not (CHECKOUT / name / "__init__.py").is_file() or not (CHECKOUT / "src" / "quire").is_dir():
        return None
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return import_module(name)
