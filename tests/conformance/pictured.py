"""Memories whose sequences have pictures: cross attention to them, and rows in place of tokens, kept in pages, inside
pages of keys and values, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memories import EVERY, Build
from unlike import UNLIKE, Kind, Make, large, unlike

from quire.memory.paged import PagedMemory

WIDE = 24  # pages of pictures that a table has room for, at most


def pictured(make: Make, sight: str = "", *, both_ways: bool = False, row_bytes: int = 8, caching: bool = True) -> Make:
    """The memory that `make` makes, for a model with eyes. A part of a picture counts as 4 tokens."""

    def made(build: Build) -> PagedMemory:
        plain = make(build)
        groups = tuple(
            replace(group, table_width=WIDE * 16 if group.kind in ("cross", "vision") else group.table_width + 1)
            for group in plain.kv_config.groups
        )
        geometry = replace(
            plain.kv_config, groups=groups, sight=sight, row_bytes=row_bytes, part_tokens=4, both_ways=both_ways
        )
        return PagedMemory(
            geometry, max_step_tokens=build.chunk, caching=caching, debug=plain.debug,
            prefix_tokens=build.prefix_tokens,
            association=plain.association,
        )  # fmt: skip

    return made


FULL = {run: Kind(32, run) for run in (1, 4, 16)}
CROSS = {run: Kind(16, run, kind="cross") for run in (1, 4, 16)}
ROWS = {run: Kind(8, run, kind="vision") for run in (1, 4, 16)}
WINDOW = Kind(24, 4, window=6)
PICTURED: dict[str, Make] = {
    **{f"cross-{run}": pictured(unlike(FULL[run], CROSS[run])) for run in FULL},
    **{f"vision-{run}": pictured(unlike(FULL[run], ROWS[run]), "pages") for run in FULL},
    **{f"inside-{run}": pictured(unlike(FULL[run]), "inside") for run in FULL},
    **{f"large-cross-{run}": pictured(large(FULL[run], CROSS[run])) for run in FULL},
    **{f"large-vision-{run}": pictured(large(FULL[run], ROWS[run]), "pages") for run in FULL},
    "off": pictured(unlike(FULL[4]), "off"),
    "off-window": pictured(large(FULL[4], WINDOW), "off"),
    "cross-unlike": pictured(large(WINDOW, Kind(16, 2, kind="cross"), FULL[4], debug=True)),
    "vision-unlike": pictured(large(Kind(8, 2, kind="vision"), WINDOW, FULL[16], association="paper"), "pages"),
    "cross-uncached": pictured(unlike(FULL[4], CROSS[1], debug=True), caching=False),
    "vision-uncached": pictured(unlike(WINDOW, ROWS[4], debug=True), "pages", caching=False),
    "inside-large-rows": pictured(unlike(FULL[4], debug=True), "inside", row_bytes=32),
    "inside-window": pictured(large(FULL[4], WINDOW), "inside", row_bytes=16),
    "both-ways": pictured(large(FULL[4], WINDOW, ROWS[4]), "pages", both_ways=True),
    "both-ways-inside": pictured(unlike(FULL[4]), "inside", both_ways=True),
    "both-ways-off": pictured(unlike(FULL[4]), "off", both_ways=True),
}
LAYOUTS: dict[str, Callable[[Build], Any]] = {
    **EVERY, **{f"unlike-{name}": make for name, make in UNLIKE.items()}, **PICTURED
}  # fmt: skip
"""All memories of the suite."""
