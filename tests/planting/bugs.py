"""The type of a bug planted in the service: edits of the source, the tests that find it, and their message."""

from __future__ import annotations

from typing import NamedTuple

from planting import Edit


class Bug(NamedTuple):
    """A planted bug. `edits` change the source, each of another file; one of `tests` (node ids) fails with a message
    that the regex `message` matches."""

    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    message: str


def bug(file: str, old: str, new: str, test: str, message: str) -> Bug:
    """Return a bug of one edit that one test finds."""
    return Bug((Edit(file, old, new),), (test,), message)
