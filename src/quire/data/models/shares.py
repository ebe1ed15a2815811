"""What can't be divided among ranks yet, refused by name. No torch."""

from __future__ import annotations

from typing import Any

from quire.data.models.quantization import scheme_of
from quire.errors import StartupError
from quire.vocabulary.layout import Part

REMEDY = "Leave --tp out"


def undivided(part: Part, what: str) -> None:
    """StartupError if a rank has only a part of it."""
    if part.ranks > 1:
        raise StartupError(f"--tp is {part.ranks}, and {what} can't be divided among ranks yet", REMEDY)


def check_plain(part: Part, config: dict[str, Any], asked: str | None = None, gguf: bool = False) -> None:
    """StartupError if a rank has only a part of weights that are quantised, as `config` says or --quantization asks
    for, or that are in a GGUF file."""
    what = "the model of a GGUF file" if gguf else "a quantised model" if scheme_of(config, asked) is not None else ""
    if what and part.stages > 1:
        raise StartupError(f"--pp is {part.stages}, and {what} can't be divided into stages yet", "Leave --pp out")
    if what:
        undivided(part, what)
