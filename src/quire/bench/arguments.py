"""Command-line arguments of measurements that are numbers."""

from __future__ import annotations

import argparse

Number = int | float | list[int] | None


def add_numbers(parser: argparse.ArgumentParser, group: str, **numbers: tuple[Number, str]) -> argparse._ArgumentGroup:
    """Add and return a group of arguments, given by their names, defaults and meanings. A list takes several ones."""
    added = parser.add_argument_group(group)
    for name, (default, meaning) in numbers.items():
        several, kind = isinstance(default, list), float if isinstance(default, float) else int
        values = default if isinstance(default, list) else [default]
        shown = "" if default is None else f" (default: {' '.join(map(str, values))})"
        added.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, nargs="+" if several else None,
                           metavar="X" if kind is float else "N", help=meaning + shown)  # fmt: skip
    return added
