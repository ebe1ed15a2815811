"""Paged memory: fixed-size pages anywhere, a page table a sequence and layer group (PagedAttention §4.2-4.4).

Here is how sequences come in, with what they can share of the prefixes that are there: full pages are published under
chained keys, so that a later sequence with the same prefix finds them. Tables and swapping have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.config import EngineConfig
from quire.control.memory.pages import SCRATCH
from quire.control.memory.prefix import MAX_PREFIXES, NOBODY, Prefixes, Reuse
from quire.control.memory.swap import SwappedTables
from quire.control.memory.tables import Resident
from quire.control.memory.usage import Sharing, Usage
from quire.control.request import Sequence
from quire.vocabulary.plan import Journal
from quire.vocabulary.specs import Geometry, Group, Layout, ModelSpec


class Placement(NamedTuple):
    """Where a sequence's tokens are: for each group the page of each logical page; 0 where none is held."""

    slot: int
    tables: tuple[tuple[int, ...], ...]


def page_layout(config: EngineConfig, spec: ModelSpec, itemsize: int) -> tuple[list[tuple[int, ...]], int]:
    """The layers of each group, and the bytes of a page. Pages are of one size for all groups: smaller ones are padded,
    to a whole number of every group's head rows. A token takes a place in a page of each group."""
    sets: list[tuple[int, ...]]
    if config.table_scope == "layer":
        sets = [(i,) for i in range(len(spec.layers))]
    else:
        kept = [layer.kept for layer in spec.layers]
        sets = [tuple(i for i, other in enumerate(kept) if other == kind) for kind in dict.fromkeys(kept)]
    row = math.lcm(*(spec.layers[layers[0]].head_dim * config.page_size * itemsize for layers in sets))
    largest = max(sum(spec.layers[i].token_bytes(itemsize) for i in layers) for layers in sets) * config.page_size
    return sets, -(-largest // row) * row


class PagedMemory(SwappedTables):
    """See KVMemory. `chunk` is the largest number of tokens computed in one step; `watermark` pages stay free when a
    sequence joins others, so that these can grow a little before the newest is preempted again."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        chunk: int,
        caching: bool = True,
        model_id: str = "",
        watermark: int = 0,
        debug: bool = False,
        order: Iterable[int] | None = None,
        prefix_pages: int = 0,
    ) -> None:
        super().__init__(geometry, order, debug)
        self.chunk, self.caching, self.watermark = chunk, caching, watermark
        self.prefixes = Prefixes(self.pages, self.policies, self.page_tokens, model_id)
        self.age = 0  # calls of take_journal
        self.refused = (-1, -1)  # the last admission that failed for shortage: (sequence, releases at that time)
        self.queries = self.hits = 0  # tokens looked up in the prefix cache, and found
        self.prefix_pages = prefix_pages  # kept for registered prefixes

    @classmethod
    def build(
        cls, config: EngineConfig, spec: ModelSpec, tokens: int, max_len: int, itemsize: int, model_id: str = ""
    ) -> PagedMemory:
        """A memory for `tokens` tokens of `spec`'s layers, grouped as `config.table_scope` says."""
        size, seqs, chunk = config.page_size, config.max_num_seqs, config.max_num_batched_tokens
        assert seqs is not None, "a memory is built for a known number of sequences"
        assert chunk is not None, "a memory is built for a known number of tokens in a step"
        sets, page_bytes = page_layout(config, spec, itemsize)
        pages = -(-tokens // size) * len(sets) + 1
        host = min(int(config.swap_gib * 2**30) // page_bytes, pages - 1)
        groups = tuple(
            Group(
                layers, page_bytes, sum(spec.layers[i].token_bytes(itemsize) for i in layers), -(-max_len // size),
                range(1, pages), range(1, host + 1), size, window=spec.layers[layers[0]].window,
            )
            for layers in sets
        )  # fmt: skip
        geometry = Geometry(Layout.PAGED, pages * page_bytes, seqs + 1, groups, itemsize, host * page_bytes)
        return cls(
            geometry,
            chunk=chunk,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            watermark=(pages - 1) // 100,
            debug=config.debug,
            prefix_pages=-(-config.prefix_tokens // size) * len(sets),
        )

    # Admission

    def fits(self, lengths: Seq[int], shared: int = 0) -> bool:
        need = sum(policy.peak(length, self.chunk) for policy in self.policies for length in lengths)
        # Whole pages of a common prefix are shared, also when the sequences come back after a preemption; but not under
        # a window, see `_reuse`.
        if not self.windowed:
            need -= (len(lengths) - 1) * len(self.policies) * (shared // self.page_tokens)
        if len(lengths) > 1:
            need += self.watermark  # asked of all but the first
        return (
            need <= self.pages.total - self.prefix_pages
            and len(lengths) < self.geometry.slots
            and all(-(-length // self.page_tokens) <= self.geometry.table_width for length in lengths)
        )

    def admit(self, seq: Sequence, budget: int, sibling: Sequence | None = None) -> int | None:
        assert seq.id not in self.residents, f"sequence {seq.id} is admitted twice"
        if not self.slots or self.refused == (seq.id, self.releases):
            return None
        if sibling is None and self.prefixes.waits(seq):
            return None  # as below, and nothing new was heard
        if self.windowed:
            budget = min(budget, self.chunk)  # pages that drop out of the window are never all held at once
        reuse = self._reuse(seq, sibling)
        if self.caching and sibling is None and self.prefixes.is_coming(seq, reuse):
            return None  # the same prompt is being computed: a step later its pages can be shared
        size, length = self.page_tokens, min(len(seq.tokens), reuse.tokens + budget)
        hits = [page for pages in reuse.tables for page in pages if page != SCRATCH]
        # Count before anything is taken: hits that no sequence uses yet are about to be, and aren't free.
        if self._need(seq, reuse, length) > self.pages.available - sum(self.pages.refs[page] == 0 for page in hits):
            self.refused = (seq.id, self.releases)
            return None
        for page in hits:  # pinned first, so that they aren't evicted for the sequence's own tail
            self.pages.share(page)
        self.queries += len(seq.tokens)
        self.hits += reuse.tokens
        resident = self._reside(seq, reuse.tables)
        # A sibling's pages may not be written yet; they are published by the sibling.
        resident.committed = reuse.tokens // size
        resident.capacity = -(-reuse.tokens // size) * size
        resident.forked = reuse.tokens % size > 0
        if self.caching:
            resident.coming = (resident.committed, self.prefixes.expect(seq, resident.committed))
        extended = self._extend(seq, resident, length, reuse.tokens)
        assert extended, "pages counted for an admission were not there"
        return reuse.tokens

    def _need(self, seq: Sequence, reuse: Reuse, length: int) -> int:
        """Pages that must be free for the sequence to be admitted with room for `length` tokens: its own, those of
        branches to come, and what should stay free."""
        size = self.page_tokens
        held, logical = -(-reuse.tokens // size), -(-length // size)
        whole = sum(
            max(logical - held, policy.peak(len(seq.tokens), self.chunk) - sum(page != SCRATCH for page in pages))
            for policy, pages in zip(self.policies, reuse.tables)
        )
        spare = seq.branches * len(self.policies) + (self.watermark if self.residents else 0)
        if reuse.tokens % size:
            spare += len(self.policies)  # the partial page is shared, and will be copied
        return whole + spare

    def _reuse(self, seq: Sequence, sibling: Sequence | None) -> Reuse:
        """The longest prefix that is there already: cached, registered, or being computed by a sibling."""
        found = self.prefixes.pinned(seq)
        if self.caching:
            found = max(found, self.prefixes.cached(seq), key=lambda reuse: reuse.tokens)
        # Under a window a sibling gives out its pages as it computes: what would be shared isn't held all at once.
        if sibling is not None and not self.windowed:
            # Whole pages only: a page that both would write to can't be copied before it is written.
            whole = min(len(seq.tokens), len(sibling.tokens)) - 1
            tables = self.residents[sibling.id].tables
            limit = whole // self.page_tokens * self.page_tokens
            limit = min(limit, self.residents[sibling.id].capacity)
            shared = self.prefixes.of(seq, sibling.tokens, tables, limit, len(sibling.tokens))
            found = max(found, shared, key=lambda reuse: reuse.tokens)
        return found

    # Life

    def commit(self, seq: Sequence) -> None:
        resident = self.residents[seq.id]
        full = seq.computed // self.page_tokens
        if full > resident.committed:
            if self.caching:
                self.prefixes.chain(seq, full)
                self._arrived(seq, resident, full)
                for g, table in enumerate(resident.tables):
                    for i in range(max(resident.committed, resident.first[g]), full):
                        self.pages.publish(g, table[i], seq.keys[i])
            resident.committed = full
        if self.windowed:  # a window's border and a page's are passed at different tokens
            self._drop(seq, resident)

    def free(self, seq: Sequence) -> None:
        resident = self.residents[seq.id]
        self._arrived(seq, resident, resident.coming[1])
        super().free(seq)

    def _arrived(self, seq: Sequence, resident: Resident, full: int) -> None:
        start, end = resident.coming
        if start < end:
            self.prefixes.arrived(seq, start, min(full, end))
            resident.coming = (min(full, end), end)

    # Registered prefixes (§4.4)

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register the computed tokens of a resident sequence as the prefix `name`; they stay until `unpin`. False if
        they exceed the pages kept for prefixes, or if there are MAX_PREFIXES already."""
        count = -(-seq.computed // self.page_tokens)
        if not self.room_for_prefix(seq.computed):
            return False
        tables = [table[:count] for table in self.residents[seq.id].tables]
        self.prefixes.register(name, seq, tables)
        self.residents[seq.id].forked = True
        return True

    def room_for_prefix(self, length: int) -> bool:
        """Could a prefix of `length` tokens be registered now?"""
        need = -(-length // self.page_tokens) * len(self.policies)
        held = self.prefixes.pinned_pages
        return held + need <= self.prefix_pages and len(self.prefixes.registered) < MAX_PREFIXES

    def unpin(self, name: str) -> bool:
        """Let go of a registered prefix. False if there is none of that name."""
        self.releases += 1
        return self.prefixes.release(name)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no sequence uses. Returns the number of pages emptied."""
        self.prefixes.awaited = NOBODY
        return self.pages.drop_cached()

    # Facts

    def take_journal(self) -> tuple[Journal, Journal]:
        journal, self.entries = tuple(self.entries), []
        self.age += 1
        return journal, ()

    def place(self, seq: Sequence) -> Placement:
        resident = self.residents[seq.id]
        return Placement(resident.slot, tuple(tuple(table) for table in resident.tables))

    def usage(self) -> Usage:
        size, page_bytes = self.page_tokens, self.geometry.page_bytes
        filled: dict[int, int] = {}  # pages that aren't full: the tokens in them, as the fullest of their users has it
        for resident in self.residents.values():
            for table in resident.tables:
                for i in range(resident.held // size, len(table)):
                    filled[table[i]] = max(filled.get(table[i], 0), min(max(resident.held - i * size, 0), size))
        for prefix in self.prefixes.registered.values():
            if rest := len(prefix.tokens) % size:
                for table in prefix.tables:
                    filled[table[-1]] = max(filled.get(table[-1], 0), rest)
        referenced = self.pages.total - self.pages.available
        internal = sum(size - tokens for tokens in filled.values()) * page_bytes // size
        cached, free = len(self.pages.cached) * page_bytes, len(self.pages.empty) * page_bytes
        return Usage(referenced * page_bytes - internal, cached, 0, internal, 0, free)

    def sharing(self) -> Sharing:
        page_bytes, pins = self.geometry.page_bytes, self.prefixes.pins
        tables = sum(
            len(table) - first
            for resident in self.residents.values()
            for table, first in zip(resident.tables, resident.first)
        )
        idle = sum(self.pages.refs[page] == count for page, count in pins.items())  # no sequence shares them now
        distinct = self.pages.total - self.pages.available - idle
        return Sharing(
            tables * page_bytes,
            (tables - distinct) * page_bytes,
            self.copies,
            self.swapped_out_pages * page_bytes,
            self.swapped_in_pages * page_bytes,
            self.host_total,
            self.host_total - len(self.host_pages),
            len(self.prefixes.registered),
            sum(len(prefix.tokens) for prefix in self.prefixes.registered.values()),
            self.prefix_pages // len(self.policies) * self.page_tokens,
        )

    def check(self) -> None:
        self.pages.check()
        self.prefixes.check()
        counts = self.references()
        for page, count in self.prefixes.pins.items():
            counts[page] += count
        assert counts == self.pages.refs, "reference counts differ from the tables that name the pages"
        self.check_host_pages()
