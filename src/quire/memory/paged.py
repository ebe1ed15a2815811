"""Paged memory: fixed-size pages anywhere, a page table a sequence and layer group (PagedAttention §4.2-4.4).

Pages are reference-counted; a fork shares all of them and the first write to a shared one copies it. Full pages are
published under chained keys, so that a later sequence with the same prefix finds them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.config import EngineConfig
from quire.memory.pages import SCRATCH, Pages
from quire.memory.policies import FullPolicy, LayerPolicy, WindowPolicy
from quire.memory.usage import Usage
from quire.plan import Copy, Entry, Journal, Poison, Table
from quire.request import Sequence
from quire.specs import Geometry, Group, Layout, ModelSpec


class Placement(NamedTuple):
    """Where a sequence's tokens are: for each group the page of each logical page; 0 where none is held."""

    slot: int
    tables: tuple[tuple[int, ...], ...]


class Resident:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = ("capacity", "committed", "first", "forked", "held", "slot", "tables")

    def __init__(self, slot: int, groups: int) -> None:
        self.slot = slot
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # the first logical page still held, a group
        self.committed = 0  # pages published or looked at by `commit`
        self.capacity = 0  # tokens that the tables have room for
        self.held = 0  # tokens that are or will be written, as far as asked for
        self.forked = False  # the page under `planned` may be shared


class PagedMemory:
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
    ) -> None:
        self.geometry = geometry
        self.page_tokens = geometry.groups[0].page_tokens
        self.policies: list[LayerPolicy] = [
            FullPolicy(g.page_tokens) if g.window is None else WindowPolicy(g.page_tokens, g.window)
            for g in geometry.groups
        ]
        self.windowed = any(g.window is not None for g in geometry.groups)
        self.pages = Pages(geometry.pages - 1, len(geometry.groups), order)
        self.chunk, self.caching, self.watermark, self.debug = chunk, caching, watermark, debug
        self.root = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.slots = list(range(geometry.slots - 1, 0, -1))
        self.residents: dict[int, Resident] = {}
        self.entries: list[Entry] = []
        self.age = 0  # calls of take_journal
        self.releases = 0
        self.refused = (-1, -1)  # the last failed admission: (sequence, releases at that time)
        self.queries = self.hits = 0  # tokens looked up in the prefix cache, and found

    @classmethod
    def build(
        cls, config: EngineConfig, spec: ModelSpec, tokens: int, max_len: int, itemsize: int, model_id: str = ""
    ) -> PagedMemory:
        """A memory for `tokens` tokens of `spec`'s layers, grouped as `config.table_scope` says."""
        size = config.page_size
        sets: list[tuple[int, ...]]
        if config.table_scope == "layer":
            sets = [(i,) for i in range(len(spec.layers))]
        else:
            sets = [
                tuple(i for i, other in enumerate(spec.layers) if other == kind) for kind in dict.fromkeys(spec.layers)
            ]
        # Pages of one size for all groups: smaller ones are padded, to a whole number of every group's head rows.
        row = math.lcm(*(spec.layers[layers[0]].head_dim * size * itemsize for layers in sets))
        largest = max(sum(spec.layers[i].token_bytes(itemsize) for i in layers) * size for layers in sets)
        page_bytes = -(-largest // row) * row
        groups = tuple(Group(layers, size, page_bytes, spec.layers[layers[0]].window) for layers in sets)
        pages = -(-tokens // size) * len(sets) + 1
        geometry = Geometry(
            Layout.PAGED, pages, page_bytes, config.max_num_seqs + 1, -(-max_len // size), groups, itemsize
        )
        return cls(
            geometry,
            chunk=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            watermark=(pages - 1) // 100,
            debug=config.debug,
        )

    # Admission

    def fits(self, lengths: Seq[int]) -> bool:
        need = sum(policy.peak(length, self.chunk) for policy in self.policies for length in lengths)
        if len(lengths) > 1:
            need += self.watermark  # asked of all but the first
        return (
            need <= self.pages.total
            and len(lengths) < self.geometry.slots
            and all(-(-length // self.page_tokens) <= self.geometry.table_width for length in lengths)
        )

    def admit(self, seq: Sequence, budget: int) -> int | None:
        assert seq.id not in self.residents, f"sequence {seq.id} is admitted twice"
        if not self.slots or self.refused == (seq.id, self.releases):
            return None
        hit = self._longest_hit(seq) if self.caching else 0
        found = [self._hit_pages(g, seq, hit) for g in range(len(self.policies))]
        hits = [page for pages in found for page in pages if page != SCRATCH]
        reused = hit * self.page_tokens
        length = len(seq.tokens)
        logical = -(-min(length, reused + budget) // self.page_tokens)
        whole = sum(
            max(logical - hit, policy.peak(length, self.chunk) - sum(page != SCRATCH for page in pages))
            for policy, pages in zip(self.policies, found)
        )
        spare = seq.branches * len(self.policies) + (self.watermark if self.residents else 0)
        # Count before anything is taken: hits that no sequence uses yet are about to be, and aren't free.
        if whole + spare > self.pages.available - sum(self.pages.refs[page] == 0 for page in hits):
            self.refused = (seq.id, self.releases)
            return None
        for page in hits:  # pinned first, so that they aren't evicted for the sequence's own tail
            self.pages.share(page)
        if self.caching:
            self.queries += length
            self.hits += reused
        resident = Resident(self.slots.pop(), len(self.policies))
        self.residents[seq.id] = resident
        resident.committed = hit
        for g, pages in enumerate(found):
            resident.tables[g] = pages
            resident.first[g] = next((i for i, page in enumerate(pages) if page != SCRATCH), len(pages))
            if pages:
                self.entries.append(Table(resident.slot, g, 0, tuple(pages)))
        resident.capacity = reused
        extended = self._extend(seq, resident, min(length, reused + budget), reused)
        assert extended, "pages counted for an admission were not there"
        return reused

    def _longest_hit(self, seq: Sequence) -> int:
        """Pages of the longest prefix that every group can reuse (Jenga §5.3); one token is left to compute."""
        limit = min(seq.reusable, len(seq.tokens) - 1) // self.page_tokens
        self._chain(seq, limit)
        hit, settled = limit, False
        while not settled:
            settled = True
            for g, policy in enumerate(self.policies):
                span = policy.live(hit * self.page_tokens, hit * self.page_tokens + 1)
                first = min(span.start, hit)
                # Full attention: the first miss bounds the prefix. A window: the last miss within it does.
                order = range(first, hit) if first == 0 else range(hit - 1, first - 1, -1)
                miss = next((i for i in order if self.pages.find(g, seq.keys[i]) is None), None)
                if miss is not None:
                    hit, settled = miss, False
        return hit

    def _hit_pages(self, group: int, seq: Sequence, hit: int) -> list[int]:
        first = self.policies[group].live(hit * self.page_tokens, hit * self.page_tokens + 1).start
        pages = [SCRATCH] * min(first, hit)
        for i in range(len(pages), hit):
            page = self.pages.find(group, seq.keys[i])
            assert page is not None, "a page found for a prefix is gone"
            pages.append(page)
        return pages

    def _chain(self, seq: Sequence, count: int) -> None:
        """Fill seq.keys up to `count`: key i is a digest of key i - 1 and the tokens of page i."""
        size = self.page_tokens
        while len(seq.keys) < count:
            i = len(seq.keys)
            parent = seq.keys[-1] if i else hashlib.sha256(self.root + seq.salt.encode()).digest()
            seq.keys.append(
                hashlib.sha256(parent + array("q", seq.tokens[i * size : (i + 1) * size]).tobytes()).digest()
            )

    # Life

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.residents[seq.id]
        if length <= resident.capacity and not resident.forked:
            if length > resident.held:
                resident.held = length
            return True
        return self._extend(seq, resident, length, seq.planned)

    def _extend(self, seq: Sequence, resident: Resident, length: int, start: int) -> bool:
        """Room for tokens [start, length) in every group, or no change at all."""
        size = self.page_tokens
        logical = -(-length // size)
        copies = []
        if resident.forked and length > start:
            for g, table in enumerate(resident.tables):
                if start // size < len(table) and self.pages.refs[table[start // size]] > 1:
                    copies.append(g)
        need = len(copies) + sum(max(logical - len(table), 0) for table in resident.tables)
        if need > self.pages.available:
            return False
        for g in copies:
            self._copy_on_write(seq, resident, g, start // size)
        if length > start:
            resident.forked = False
        for g, table in enumerate(resident.tables):
            if logical > len(table):
                fresh = tuple(self._take(g, seq) for _ in range(logical - len(table)))
                self.entries.append(Table(resident.slot, g, len(table), fresh))
                table.extend(fresh)
        resident.capacity = max(resident.capacity, logical * size)
        resident.held = max(resident.held, length)
        return True

    def _take(self, group: int, seq: Sequence) -> int:
        page = self.pages.take(group, seq.id)
        if self.debug:
            self.entries.append(Poison(group, page))
        return page

    def _copy_on_write(self, seq: Sequence, resident: Resident, group: int, at: int) -> None:
        """Replace the shared page at logical page `at` by a private copy (§4.4, Figure 8)."""
        old = resident.tables[group][at]
        new = self._take(group, seq)
        self.entries.append(Copy(group, old, new))
        self.entries.append(Table(resident.slot, group, at, (new,)))
        resident.tables[group][at] = new
        self._release((old,))

    def commit(self, seq: Sequence) -> None:
        resident = self.residents[seq.id]
        full = seq.computed // self.page_tokens
        if full > resident.committed:
            if self.caching:
                self._chain(seq, full)
                for g, table in enumerate(resident.tables):
                    for i in range(max(resident.committed, resident.first[g]), full):
                        self.pages.publish(g, table[i], seq.keys[i])
            resident.committed = full
        if self.windowed:  # a window's border and a page's are passed at different tokens
            self._drop(seq, resident)

    def _drop(self, seq: Sequence, resident: Resident) -> None:
        """Release the pages that no token to come can see."""
        for g, policy in enumerate(self.policies):
            first = min(policy.live(seq.computed, seq.computed + 1).start, len(resident.tables[g]))
            if first > resident.first[g]:
                gone = resident.tables[g][resident.first[g] : first]
                resident.tables[g][resident.first[g] : first] = [SCRATCH] * len(gone)
                self.entries.append(Table(resident.slot, g, resident.first[g], (SCRATCH,) * len(gone)))
                resident.first[g] = first
                self._release(gone)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        assert parent.quiet, f"sequence {parent.id} is forked while in flight"
        if not self.slots:
            return False
        source = self.residents[parent.id]
        resident = Resident(self.slots.pop(), len(self.policies))
        self.residents[child.id] = resident
        count = -(-parent.computed // self.page_tokens)
        for g, table in enumerate(source.tables):
            pages = table[:count]
            for page in pages:
                if page != SCRATCH:
                    self.pages.share(page)
            resident.tables[g] = pages
            self.entries.append(Table(resident.slot, g, 0, tuple(pages)))
        resident.first = list(source.first)
        resident.committed = min(source.committed, parent.computed // self.page_tokens)
        resident.capacity = count * self.page_tokens
        resident.held = parent.computed
        source.forked = resident.forked = True
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        resident = self.residents.pop(seq.id)
        for table in resident.tables:
            self._release(table)
        self.slots.append(resident.slot)
        self.releases += 1

    def _release(self, pages: Seq[int]) -> None:
        # From the last to the first: of pages that were used equally long ago, the deeper ones are evicted first.
        for page in reversed(pages):
            if page != SCRATCH:
                self.pages.release(page)
        self.releases += 1

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no sequence uses. Returns the number of pages emptied."""
        return self.pages.drop_cached()

    # Facts

    def slot(self, seq: Sequence) -> int:
        return self.residents[seq.id].slot

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
        referenced = self.pages.total - self.pages.available
        internal = sum(size - tokens for tokens in filled.values()) * page_bytes // size
        cached, free = len(self.pages.cached) * page_bytes, len(self.pages.empty) * page_bytes
        return Usage(referenced * page_bytes - internal, cached, 0, internal, 0, free)

    def check(self) -> None:
        self.pages.check()
        counts = [0] * (self.pages.total + 1)
        slots = set(self.slots)
        for resident in self.residents.values():
            assert resident.slot not in slots, f"slot {resident.slot} is used twice"
            slots.add(resident.slot)
            for g, table in enumerate(resident.tables):
                assert all(page == SCRATCH for page in table[: resident.first[g]]), "a dropped page is still held"
                assert all(page != SCRATCH for page in table[resident.first[g] :]), "a live page is missing"
                assert len(table) * self.page_tokens >= resident.held, "a table is shorter than its sequence"
                for page in table:
                    counts[page] += page != SCRATCH
        assert slots == set(range(1, self.geometry.slots)), "a slot is lost"
        assert counts == self.pages.refs, "reference counts differ from the tables that name the pages"
