"""Log which pages a memory caches and drops, for routers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import NamedTuple

from quire.memory.page_keys import PromptKeys
from quire.protocol.sequence import Sequence


class PageContent(NamedTuple):
    """The tokens of a page, and the key of the page before it; None: it is the first."""

    parent: bytes | None
    tokens: Seq[int]


class CacheChanges(NamedTuple):
    """The keys of pages that were dropped and of those that were stored since the last time, and the contents of the
    latter, as far as the log keeps them."""

    dropped: list[bytes]
    stored: list[bytes]
    contents: dict[bytes, PageContent]


class LoggedIndex(dict[bytes, int]):
    """An index of a page pool, from keys to pages, that logs its changes."""

    def __init__(self, log: CacheLog) -> None:
        super().__init__()
        self.log = log

    def __setitem__(self, key: bytes, page: int) -> None:
        super().__setitem__(key, page)
        self.log.store(key)

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        self.log.drop(key)


class CacheLog:
    """Logs which pages with keys `keys` are cached. `with_contents` keeps their tokens too."""

    def __init__(self, keys: PromptKeys, with_contents: bool = False) -> None:
        self.keys, self.with_contents = keys, with_contents
        self._index = LoggedIndex(self)
        self._dropped, self._stored = dict[bytes, None](), dict[bytes, None]()
        self._contents = dict[bytes, PageContent]()

    def new_index(self) -> LoggedIndex:
        """Return the empty index of a new memory. All pages of the former one are dropped."""
        for key in self._index:
            self.drop(key)
        self._index = LoggedIndex(self)
        return self._index

    def store(self, key: bytes) -> None:
        """Log that a page was stored."""
        if key in self._dropped:
            del self._dropped[key]
        else:
            self._stored[key] = None

    def drop(self, key: bytes) -> None:
        """Log that a page was dropped."""
        if key in self._stored:
            del self._stored[key]
            self._contents.pop(key, None)
        else:
            self._dropped[key] = None

    def describe(self, seq: Sequence, start: int, end: int) -> None:
        """Keep the contents of those pages of tokens[start : end], all computed, that were stored."""
        if not self.with_contents:
            return
        keys = self.keys
        first, last = keys.num_full_pages(start), keys.num_full_pages(end)
        named: Seq[bytes | None] = [None] * (not first) + [*keys.of_pages(seq, max(first - 1, 0), last)]
        for i, (parent, key) in enumerate(pairwise(named), first):
            if key in self._stored and key not in self._contents:
                page = slice(keys.tokens_in_pages(i), keys.tokens_in_pages(i + 1))
                self._contents[key] = PageContent(parent, seq.tokens[page])

    def take(self) -> CacheChanges:
        """Return the changes since the last call. A page that was stored and dropped meanwhile is not among them."""
        changes = CacheChanges(list(self._dropped), list(self._stored), self._contents)
        self._dropped, self._stored, self._contents = {}, {}, {}
        return changes
