"""nn.ModuleList, typed by its elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

from torch import nn

Element = TypeVar("Element", bound=nn.Module)


def module_list(modules: Iterable[Element]) -> Sequence[Element]:
    """Return an nn.ModuleList of `modules`. Its own type says only that its elements are modules."""
    return cast(Sequence[Element], nn.ModuleList(modules))
