"""The index of registered prefixes: the longest one that a sequence begins with, found without looking at the others.

A stop is a place where the use of a prefix can end: after each of its whole pages, and after its last, partly filled
page (PagedAttention §4.4, Figure 10). Stops are named by the chained key of the whole pages before them (see
quire.memory.prefix_cache), which names the tokens and the salt too, and by the tokens of the partial page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PrefixEnd(NamedTuple):
    """A place in a prefix: after the whole pages that `key` names, and after `tail`, fewer tokens than a page. Not
    `is_usable` if pages before it are gone; then it only leads to the stops behind it."""

    key: bytes
    tail: tuple[int, ...]
    is_usable: bool


class PrefixIndex:
    """Names of prefixes by their stops. The cost of a lookup depends on the prefix found, not on how many there are."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.names_by_end: dict[
            tuple[bytes, tuple[int, ...]], dict[str, None]
        ] = {}  # usable stops; the oldest name first
        self.tail_lengths: dict[bytes, Counter[int]] = {}  # lengths of the tails behind a key, how many stops each

    def __contains__(self, key: bytes) -> bool:
        """Some prefix has the whole pages that `key` names."""
        return key in self.tail_lengths

    def add(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Index a prefix by all of its stops."""
        for key, tail, usable in ends:
            self.tail_lengths.setdefault(key, Counter())[len(tail)] += 1
            if usable:
                self.names_by_end.setdefault((key, tail), {})[name] = None

    def remove(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Undo `add` of the same stops."""
        for key, tail, usable in ends:
            lengths = self.tail_lengths[key]
            lengths[len(tail)] -= 1
            if not lengths[len(tail)]:
                del lengths[len(tail)]
            if not lengths:
                del self.tail_lengths[key]
            if usable:
                names = self.names_by_end[key, tail]
                del names[name]
                if not names:
                    del self.names_by_end[key, tail]

    def find(self, keys: Sequence[bytes], tokens: Sequence[int], limit: int) -> str | None:
        """The prefix with the furthest usable stop within tokens[:limit]; of several the oldest. keys[i] names the
        first i pages of `tokens`, for as many pages as some prefix has."""
        for i in range(len(keys) - 1, -1, -1):
            start = i * self.page_tokens
            for length in sorted(self.tail_lengths[keys[i]], reverse=True):
                if start + length <= limit:
                    names = self.names_by_end.get((keys[i], tuple(tokens[start : start + length])))
                    if names is not None:
                        return next(iter(names))
        return None
