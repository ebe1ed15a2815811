"""Prefixes that can be reused: cached pages found by their keys, and prefixes that the operator registered.

Keys are chained: key i is a digest of key i - 1 and the tokens of page i, from a root of model, dtype and salt, so a
key names the whole prefix. A registered prefix (PagedAttention §4.4, Figure 10) is pinned: its pages stay, the last
partial one included, which sequences share until they write to it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from quire.control.memory.index import PrefixIndex, Stop
from quire.control.memory.pages import SCRATCH, Pages
from quire.control.memory.policies import LayerPolicy
from quire.control.request import Sequence, common_prefix

MAX_PREFIXES = 1024
NOBODY = (-1, b"")


class Reuse(NamedTuple):
    """The first `tokens` tokens of a sequence, and the pages that hold them, a table a group (0: not needed)."""

    tokens: int
    tables: list[list[int]]


class Registered(NamedTuple):
    """A pinned prefix; keys[i] names its first i pages."""

    tokens: list[int]
    salt: str
    tables: list[list[int]]
    keys: list[bytes]


class Prefixes:
    """What a memory of these pages and policies can reuse."""

    def __init__(self, pages: Pages, policies: list[LayerPolicy], page_tokens: int, model_id: str) -> None:
        self.pages, self.policies, self.page_tokens = pages, policies, page_tokens
        self.root = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.registered: dict[str, Registered] = {}
        self.index = PrefixIndex(page_tokens)  # of the registered ones
        self.pins: Counter[int] = Counter()  # pages that registered prefixes hold, and how many of them hold each
        self.coming: Counter[bytes] = Counter()  # keys of whole prompt pages that residents are computing
        self.awaited = NOBODY  # the sequence last told to wait, and the key in `coming` that it waits for

    # Keys

    def chain(self, seq: Sequence, count: int) -> None:
        """Fill seq.keys up to `count` keys."""
        size = self.page_tokens
        while len(seq.keys) < count:
            i = len(seq.keys)
            parent = seq.keys[-1] if i else self._origin(seq.salt)
            page = array("q", seq.tokens[i * size : (i + 1) * size]).tobytes()
            seq.keys.append(hashlib.sha256(parent + page).digest())

    def _origin(self, salt: str) -> bytes:
        """The key of no pages: another adapter's keys and values, or another tenant's, begin elsewhere."""
        return hashlib.sha256(self.root + salt.encode()).digest()

    # Cached pages

    def cached(self, seq: Sequence) -> Reuse:
        """The longest prefix whose pages every group can find (Jenga §5.3); one token is left to compute."""
        limit = min(seq.reusable, len(seq.tokens) - 1) // self.page_tokens
        self.chain(seq, limit)
        hit, settled = limit, False
        while not settled:
            settled = True
            for g in range(len(self.policies)):
                first = self._first(g, hit)
                # Full attention: the first miss bounds the prefix. A window: the last miss within it does.
                order = range(first, hit) if first == 0 else range(hit - 1, first - 1, -1)
                miss = next((i for i in order if self.pages.find(g, seq.keys[i]) is None), None)
                if miss is not None:
                    hit, settled = miss, False
        tables = []
        for g in range(len(self.policies)):
            first = self._first(g, hit)
            found = [self.pages.find(g, key) for key in seq.keys[first:hit]]
            tables.append([SCRATCH] * first + [page for page in found if page is not None])
        return Reuse(hit * self.page_tokens, tables)

    def _first(self, group: int, hit: int) -> int:
        """The first page that group needs of a prefix of `hit` pages."""
        return min(self.policies[group].live(hit * self.page_tokens, hit * self.page_tokens + 1).start, hit)

    # Pages that are being computed

    def is_coming(self, seq: Sequence, reuse: Reuse) -> bool:
        """The page that follows what can be reused is being computed for another sequence: worth waiting for."""
        page = reuse.tokens // self.page_tokens
        if (page + 1) * self.page_tokens >= min(seq.reusable + 1, len(seq.tokens)) or seq.keys[page] not in self.coming:
            return False
        self.awaited = (seq.id, seq.keys[page])
        return True

    def waits(self, seq: Sequence) -> bool:
        """The sequence was told that a page is coming, and that page hasn't arrived yet: nothing is looked up again. If
        pages before it were evicted meanwhile, that is seen when it arrives, or when its owner leaves."""
        return self.awaited[0] == seq.id

    def expect(self, seq: Sequence, start: int) -> int:
        """`seq` will compute its whole prompt pages from `start` on. Returns where they end."""
        end = max(start, len(seq.keys))
        self.coming.update(seq.keys[start:end])
        return end

    def arrived(self, seq: Sequence, start: int, end: int) -> None:
        """Pages [start, end) of `seq` are computed, or won't be."""
        for key in seq.keys[start:end]:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]
            if key == self.awaited[1]:
                self.awaited = NOBODY

    # Registered prefixes

    def pinned(self, seq: Sequence) -> Reuse:
        """The longest part of a registered prefix that the sequence begins with: all of it, or whole pages."""
        limit = min(seq.reusable, len(seq.tokens) - 1)
        name = self.index.find(self._known(seq, limit), seq.tokens, limit) if self.registered else None
        if name is None:
            return self._nothing()
        prefix = self.registered[name]
        return self.of(seq, prefix.tokens, prefix.tables, limit, len(prefix.tokens))

    def _known(self, seq: Sequence, limit: int) -> list[bytes]:
        """The keys of 0, 1, 2... pages of the sequence, as long as a registered prefix has them too. No more are hashed
        than one beyond those."""
        keys: list[bytes] = []
        key = self._origin(seq.salt)
        while key in self.index:
            keys.append(key)
            if len(keys) > limit // self.page_tokens:
                break
            self.chain(seq, len(keys))
            key = seq.keys[len(keys) - 1]
        return keys

    def of(self, seq: Sequence, tokens: list[int], tables: list[list[int]], limit: int, written: int) -> Reuse:
        """What `seq` can reuse of pages that hold the first `written` of `tokens`: at most `limit` tokens."""
        size = self.page_tokens
        shared = common_prefix(seq.tokens, tokens, min(limit, written))
        if shared < written:
            shared = shared // size * size
        kept = self._kept(tables, shared) if shared > 0 else None
        return Reuse(shared, kept) if kept is not None else self._nothing()

    def _kept(self, tables: list[list[int]], shared: int) -> list[list[int]] | None:
        """What a sequence needs of the tables to go on after `shared` tokens; None if a window dropped some of it."""
        kept = []
        for policy, table in zip(self.policies, tables):
            first, count = min(policy.live(shared, shared + 1).start, shared // self.page_tokens), self._count(shared)
            part = table[first:count]
            if len(part) < count - first or SCRATCH in part:
                return None
            kept.append([SCRATCH] * first + part)
        return kept

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _nothing(self) -> Reuse:
        return Reuse(0, [[] for _ in self.policies])

    def register(self, name: str, seq: Sequence, tables: list[list[int]]) -> None:
        """Pin the pages that hold what the sequence has computed."""
        whole = seq.computed // self.page_tokens
        self.chain(seq, whole)
        prefix = Registered(seq.tokens[: seq.computed], seq.salt, tables, [self._origin(seq.salt), *seq.keys[:whole]])
        for page in _pages(prefix):
            self.pages.share(page)
            self.pins[page] += 1
        self.registered[name] = prefix
        self.index.add(name, self._stops(prefix))
        self.awaited = NOBODY

    def release(self, name: str) -> bool:
        """Unpin a prefix; sequences that share its pages keep them. False if there is none of that name."""
        prefix = self.registered.pop(name, None)
        if prefix is None:
            return False
        for table in prefix.tables:
            for page in reversed(table):
                if page != SCRATCH:
                    self.pages.release(page)
                    self.pins[page] -= 1
                    if not self.pins[page]:
                        del self.pins[page]
        self.index.remove(name, self._stops(prefix))
        self.awaited = NOBODY
        return True

    def _stops(self, prefix: Registered) -> Iterator[Stop]:
        """Where a lookup of a prefix can end; see PrefixIndex."""
        gone = [next((i for i, page in enumerate(table) if page), len(table)) for table in prefix.tables]
        for i, key in enumerate(prefix.keys):
            # The pages that a window dropped must not be needed. After no page at all there is nothing to use.
            usable = i > 0 and all(self._first(g, i) >= min(dropped, i) for g, dropped in enumerate(gone))
            yield Stop(key, (), usable)
        if tail := prefix.tokens[(len(prefix.keys) - 1) * self.page_tokens :]:
            yield Stop(prefix.keys[-1], tuple(tail), self._kept(prefix.tables, len(prefix.tokens)) is not None)

    @property
    def pinned_pages(self) -> int:
        """Pages that registered prefixes hold, a page shared by several counted once."""
        return len(self.pins)

    def check(self) -> None:
        """Assert that what is kept about registered prefixes is what their list says, and who waits waits for a page
        that is coming."""
        pins = Counter(page for prefix in self.registered.values() for page in _pages(prefix))
        assert pins == self.pins, "the pins of registered prefixes differ from their tables"
        index = PrefixIndex(self.page_tokens)
        for name, prefix in self.registered.items():
            index.add(name, self._stops(prefix))
        assert index.names == self.index.names, "the index names other prefixes than the registered ones"
        assert index.tails == self.index.tails, "the index has lost its way to a prefix"
        assert self.awaited == NOBODY or self.awaited[1] in self.coming, "a sequence waits for nothing"


def _pages(prefix: Registered) -> Iterator[int]:
    return (page for table in prefix.tables for page in table if page != SCRATCH)
