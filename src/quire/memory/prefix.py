"""Prefixes that can be reused: cached pages found by their keys, and prefixes that the operator registered.

Keys are chained: key i is a digest of key i - 1 and the tokens of page i, from a root of model, dtype and salt, so a
key names the whole prefix. A registered prefix (PagedAttention §4.4, Figure 10) is pinned: its pages stay, the last
partial one included, which sequences share until they write to it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from typing import NamedTuple

from quire.memory.pages import SCRATCH, Pages
from quire.memory.policies import LayerPolicy
from quire.request import Sequence, common_prefix

MAX_PREFIXES = 1024


class Reuse(NamedTuple):
    """The first `tokens` tokens of a sequence, and the pages that hold them, a table a group (0: not needed)."""

    tokens: int
    tables: list[list[int]]


class Registered(NamedTuple):
    """A pinned prefix."""

    tokens: list[int]
    salt: str
    tables: list[list[int]]


class Prefixes:
    """What a memory of these pages and policies can reuse."""

    def __init__(self, pages: Pages, policies: list[LayerPolicy], page_tokens: int, model_id: str) -> None:
        self.pages, self.policies, self.page_tokens = pages, policies, page_tokens
        self.root = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.registered: dict[str, Registered] = {}
        self.coming: Counter[bytes] = Counter()  # keys of whole prompt pages that residents are computing

    def chain(self, seq: Sequence, count: int) -> None:
        """Fill seq.keys up to `count` keys."""
        size = self.page_tokens
        while len(seq.keys) < count:
            i = len(seq.keys)
            parent = seq.keys[-1] if i else hashlib.sha256(self.root + seq.salt.encode()).digest()
            page = array("q", seq.tokens[i * size : (i + 1) * size]).tobytes()
            seq.keys.append(hashlib.sha256(parent + page).digest())

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

    def is_coming(self, seq: Sequence, reuse: Reuse) -> bool:
        """The page that follows what can be reused is being computed for another sequence: worth waiting for."""
        page = reuse.tokens // self.page_tokens
        return (page + 1) * self.page_tokens < min(seq.reusable + 1, len(seq.tokens)) and seq.keys[page] in self.coming

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

    def pinned(self, seq: Sequence) -> Reuse:
        """The longest part of a registered prefix that the sequence begins with: all of it, or whole pages."""
        best = Reuse(0, [[] for _ in self.policies])
        limit = min(seq.reusable, len(seq.tokens) - 1)
        for prefix in self.registered.values():
            if prefix.salt != seq.salt:
                continue  # another adapter's keys and values, or another tenant's
            best = max(best, self.of(seq, prefix.tokens, prefix.tables, limit, len(prefix.tokens)), key=lambda r: r[0])
        return best

    def of(self, seq: Sequence, tokens: list[int], tables: list[list[int]], limit: int, written: int) -> Reuse:
        """What `seq` can reuse of pages that hold the first `written` of `tokens`: at most `limit` tokens."""
        size = self.page_tokens
        shared = common_prefix(seq.tokens, tokens, min(limit, written))
        if shared < written:
            shared = shared // size * size
        if shared == 0:
            return Reuse(0, [[] for _ in self.policies])
        kept = []
        for g, policy in enumerate(self.policies):
            span = policy.live(shared, shared + 1)
            first, count = min(span.start, shared // size), -(-shared // size)
            part = tables[g][first:count]
            if len(part) < count - first or SCRATCH in part:
                return Reuse(0, [[] for _ in self.policies])  # a window dropped what this length would need
            kept.append([SCRATCH] * first + part)
        return Reuse(shared, kept)

    def register(self, name: str, tokens: list[int], salt: str, tables: list[list[int]]) -> None:
        """Pin the pages that hold `tokens`."""
        for table in tables:
            for page in table:
                if page != SCRATCH:
                    self.pages.share(page)
        self.registered[name] = Registered(tokens, salt, tables)

    def release(self, name: str) -> bool:
        """Unpin a prefix; sequences that share its pages keep them. False if there is none of that name."""
        prefix = self.registered.pop(name, None)
        if prefix is None:
            return False
        for table in prefix.tables:
            for page in reversed(table):
                if page != SCRATCH:
                    self.pages.release(page)
        return True

    def pins(self) -> Counter[int]:
        """The pages that registered prefixes hold, and how many of them hold each."""
        pages = Counter(p for prefix in self.registered.values() for table in prefix.tables for p in table)
        del pages[SCRATCH]
        return pages

    @property
    def pinned_pages(self) -> int:
        """Pages that registered prefixes hold, a page shared by several counted once."""
        return len(self.pins())
