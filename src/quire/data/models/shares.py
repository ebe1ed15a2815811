"""What can't be divided among ranks yet, refused by name. No torch."""

from __future__ import annotations

from typing import Any

from quire.data.models.quantization import Few, scheme_of
from quire.errors import StartupError
from quire.vocabulary.layout import Part

REMEDY = "Leave --tp out"


def undivided(part: Part, what: str) -> None:
    """StartupError if a rank has only a part of it."""
    if part.ranks > 1:
        raise StartupError(f"--tp is {part.ranks}, and {what} can't be divided among ranks yet", REMEDY)


def check_plain(part: Part, config: dict[str, Any], asked: str | None = None) -> None:
    """StartupError if a rank has only a part of weights whose groups may lie across it: as `config` says they are
    quantised, or --quantization asks for."""
    scheme = scheme_of(config, asked) if part.ranks > 1 else None
    if isinstance(scheme, Few) and scheme.stored in ("awq", "gptq"):
        undivided(part, f"a model that was quantised by {scheme.stored.upper()}")
