"""Paged memory: fixed-size pages anywhere, a page table a sequence and layer group (PagedAttention §4.2-4.4).

Pages are reference-counted; a fork shares all of them and the first write to a shared one copies it. Full pages are
published under chained keys, so that a later sequence with the same prefix finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.config import EngineConfig
from quire.memory.pages import SCRATCH, Pages
from quire.memory.policies import FullPolicy, LayerPolicy, WindowPolicy
from quire.memory.prefix import MAX_PREFIXES, Prefixes, Reuse
from quire.memory.usage import Sharing, Usage
from quire.plan import Copy, Entry, In, Journal, Out, Poison, Table
from quire.request import Sequence
from quire.specs import Geometry, Group, Layout, ModelSpec


class Placement(NamedTuple):
    """Where a sequence's tokens are: for each group the page of each logical page; 0 where none is held."""

    slot: int
    tables: tuple[tuple[int, ...], ...]


class Resident:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = ("capacity", "coming", "committed", "first", "forked", "held", "slot", "tables")

    def __init__(self, slot: int, groups: int) -> None:
        self.slot = slot
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # the first logical page still held, a group
        self.committed = 0  # pages published or looked at by `commit`
        self.capacity = 0  # tokens that the tables have room for
        self.held = 0  # tokens that are or will be written, as far as asked for
        self.coming = (0, 0)  # prompt pages that others may wait for
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
        prefix_pages: int = 0,
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
        self.prefixes = Prefixes(self.pages, self.policies, self.page_tokens, model_id)
        self.slots = list(range(geometry.slots - 1, 0, -1))
        self.residents: dict[int, Resident] = {}
        self.entries: list[Entry] = []
        self.age = 0  # calls of take_journal
        self.releases = 0
        self.refused = (-1, -1)  # the last failed admission: (sequence, releases at that time)
        self.queries = self.hits = 0  # tokens looked up in the prefix cache, and found
        self.prefix_pages = prefix_pages  # kept for registered prefixes
        # Never more host pages than the device has (§4.5).
        assert geometry.host_pages < geometry.pages, "more host pages than pages"
        self.host_pages = list(range(geometry.host_pages, 0, -1))
        self.host_total = len(self.host_pages)
        self.host_keys: dict[int, tuple[int, bytes] | None] = {}
        self.swapped: dict[int, Resident] = {}  # with host pages in its tables
        self.swapped_out_pages = self.swapped_in_pages = 0
        self.copies = 0  # pages copied on write

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
            Layout.PAGED, pages, page_bytes, config.max_num_seqs + 1, -(-max_len // size), groups, itemsize,
            min(int(config.swap_gib * 2**30) // page_bytes, pages - 1),
        )  # fmt: skip
        return cls(
            geometry,
            chunk=config.max_num_batched_tokens,
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
        if self.windowed:
            budget = min(budget, self.chunk)  # pages that drop out of the window are never all held at once
        reuse = self._reuse(seq, sibling)
        if self.caching and sibling is None and self.prefixes.is_coming(seq, reuse):
            return None  # the same prompt is being computed: a step later its pages can be shared
        size, length = self.page_tokens, len(seq.tokens)
        held, logical = -(-reuse.tokens // size), -(-min(length, reuse.tokens + budget) // size)
        whole = sum(
            max(logical - held, policy.peak(length, self.chunk) - sum(page != SCRATCH for page in pages))
            for policy, pages in zip(self.policies, reuse.tables)
        )
        spare = seq.branches * len(self.policies) + (self.watermark if self.residents else 0)
        if reuse.tokens % size:
            spare += len(self.policies)  # the partial page is shared, and will be copied
        hits = [page for pages in reuse.tables for page in pages if page != SCRATCH]
        # Count before anything is taken: hits that no sequence uses yet are about to be, and aren't free.
        if whole + spare > self.pages.available - sum(self.pages.refs[page] == 0 for page in hits):
            self.refused = (seq.id, self.releases)
            return None
        for page in hits:  # pinned first, so that they aren't evicted for the sequence's own tail
            self.pages.share(page)
        self.queries += length
        self.hits += reuse.tokens
        resident = self._reside(seq, reuse.tables)
        # A sibling's pages may not be written yet; they are published by the sibling.
        resident.committed = reuse.tokens // size
        resident.capacity = held * size
        resident.forked = reuse.tokens % size > 0
        if self.caching:
            resident.coming = (resident.committed, self.prefixes.expect(seq, resident.committed))
        extended = self._extend(seq, resident, min(length, reuse.tokens + budget), reuse.tokens)
        assert extended, "pages counted for an admission were not there"
        return reuse.tokens

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

    def _reside(self, seq: Sequence, tables: list[list[int]]) -> Resident:
        """Give a slot and page tables; the pages' references are counted by the caller."""
        resident = Resident(self.slots.pop(), len(self.policies))
        self.residents[seq.id] = resident
        for g, pages in enumerate(tables):
            resident.tables[g] = pages
            if pages:
                if pages[0] == SCRATCH:
                    resident.first[g] = next((i for i, page in enumerate(pages) if page != SCRATCH), len(pages))
                self.entries.append(Table(resident.slot, g, 0, tuple(pages)))
        return resident

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
        at, copies = start // size, []
        if resident.forked and length > start:
            refs = self.pages.refs
            copies = [g for g, table in enumerate(resident.tables) if at < len(table) and refs[table[at]] > 1]
        if length > resident.capacity or copies:
            need = len(copies) + sum([max(logical - len(table), 0) for table in resident.tables])
            if need > self.pages.available:
                return False
            for g in copies:
                self._copy_on_write(seq, resident, g, at)
            for g, table in enumerate(resident.tables):
                if logical > len(table):
                    fresh = tuple([self._take(g, seq) for _ in range(logical - len(table))])
                    self.entries.append(Table(resident.slot, g, len(table), fresh))
                    table.extend(fresh)
            resident.capacity = max(resident.capacity, logical * size)
        if length > start:
            resident.forked = False
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
        self.copies += 1
        self.entries.append(Copy(group, old, new))
        self.entries.append(Table(resident.slot, group, at, (new,)))
        resident.tables[group][at] = new
        self.pages.refs[old] -= 1  # it is shared: others keep it

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

    def _arrived(self, seq: Sequence, resident: Resident, full: int) -> None:
        start, end = resident.coming
        if start < end:
            self.prefixes.arrived(seq, start, min(full, end))
            resident.coming = (min(full, end), end)

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
        count = -(-parent.computed // self.page_tokens)
        tables = [table[:count] for table in source.tables]
        for table in tables:
            self.pages.share_all(table)
        resident = self._reside(child, tables)
        resident.committed = min(source.committed, parent.computed // self.page_tokens)
        resident.capacity = count * self.page_tokens
        resident.held = parent.computed
        source.forked = resident.forked = True
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        resident = self.residents.pop(seq.id)
        self._arrived(seq, resident, resident.coming[1])
        for table in resident.tables:
            self._release(table)
        self.slots.append(resident.slot)
        self.releases += 1

    def _release(self, pages: Seq[int]) -> None:
        self.pages.release_all(pages)
        self.releases += 1

    # Swapping (§4.5)

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Copy every page of these sequences to host pages, a shared one once, and let go of pages and slots."""
        assert all(seq.quiet for seq in seqs), "a sequence is swapped out while in flight"
        residents = [self.residents[seq.id] for seq in seqs]
        groups = {page: g for resident in residents for g, table in enumerate(resident.tables) for page in table}
        groups.pop(SCRATCH, None)
        if len(groups) > len(self.host_pages):
            return False
        hosts = {SCRATCH: SCRATCH}
        for page, group in groups.items():
            hosts[page] = self.host_pages.pop()
            self.host_keys[hosts[page]] = self.pages.keys[page]
            self.entries.append(Out(group, page, hosts[page]))
        for seq, resident in zip(seqs, residents):
            away = [[hosts[page] for page in table] for table in resident.tables]
            self.free(seq)
            resident.tables = away
            self.swapped[seq.id] = resident
        if self.debug:
            self.entries += [Poison(g, page) for page, g in groups.items() if self.pages.is_empty(page)]
        self.swapped_out_pages += len(groups)
        return True

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring sequences that were swapped out together back into pages: copied, or shared with cached ones that are
        still there."""
        away = [self.swapped[seq.id] for seq in seqs]
        back: dict[int, int] = {SCRATCH: SCRATCH}  # host page -> page, 0 while it is to be taken
        groups: dict[int, int] = {}
        for resident in away:
            for g, table in enumerate(resident.tables):
                for host in table:
                    if host not in back:
                        key = self.host_keys[host]
                        back[host] = (self.pages.find(*key) if key is not None else None) or 0
                        groups[host] = g
        cached = [page for page in back.values() if page != SCRATCH]
        need = len(groups) - len(cached)
        if self.residents:
            need += len(seqs) * len(self.policies)  # a page more for each, to go on; alone they fit
        if len(seqs) > len(self.slots) or need > self.pages.available - sum(not self.pages.refs[p] for p in cached):
            return False
        for page in cached:
            self.pages.share(page)
        for host, g in groups.items():
            if back[host] == SCRATCH:
                back[host] = self._take(g, seqs[0])
                self.entries.append(In(g, host, back[host]))
                self.swapped_in_pages += 1
                if (key := self.host_keys[host]) is not None:
                    self.pages.publish(key[0], back[host], key[1])
        first = set(groups)
        for seq, old in zip(seqs, away):
            del self.swapped[seq.id]
            tables = [[back[host] for host in table] for table in old.tables]
            for table in old.tables:
                for host in table:
                    if host in first:
                        first.discard(host)  # counted when it was taken or shared above
                    elif host != SCRATCH:
                        self.pages.share(back[host])
            resident = self._reside(seq, tables)
            resident.first = old.first
            resident.committed, resident.capacity = old.committed, old.capacity
            resident.held, resident.forked = old.held, old.forked
        self.host_pages += groups
        return True

    def drop_swapped(self, seq: Sequence) -> None:
        """A swapped sequence ended: forget its host pages, but for those that a sibling still has."""
        resident = self.swapped.pop(seq.id)
        kept = {host for other in self.swapped.values() for table in other.tables for host in table}
        self.host_pages += {host for table in resident.tables for host in table} - kept - {SCRATCH}

    # Registered prefixes (§4.4)

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register the computed tokens of a resident sequence as the prefix `name`; they stay until `unpin`. False if
        they exceed the pages kept for prefixes, or if there are MAX_PREFIXES already."""
        count = -(-seq.computed // self.page_tokens)
        if not self.room_for_prefix(seq.computed):
            return False
        tables = [table[:count] for table in self.residents[seq.id].tables]
        self.prefixes.register(name, seq.tokens[: seq.computed], seq.salt, tables)
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
        return self.pages.drop_cached()

    # Facts

    def slot(self, seq: Sequence) -> int:
        return self.residents[seq.id].slot

    def held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        pages = [{page for seq in seqs for page in self.residents[seq.id].tables[g]} for g in range(len(self.policies))]
        count = sum(len(group - {SCRATCH}) for group in pages)
        return count * self.geometry.page_bytes, max(len(group) for group in pages) * self.page_tokens

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
        page_bytes, pins = self.geometry.page_bytes, self.prefixes.pins()
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
        for prefix in self.prefixes.registered.values():
            for table in prefix.tables:
                for page in table:
                    counts[page] += page != SCRATCH
        assert counts == self.pages.refs, "reference counts differ from the tables that name the pages"
        away = {host for resident in self.swapped.values() for table in resident.tables for host in table} - {SCRATCH}
        assert len(away) + len(self.host_pages) == self.host_total, "a host page is lost"
        assert not away & set(self.host_pages), "a host page is free and used"
