"""Page tables: which pages hold the tokens of each resident sequence (PagedAttention §4.2-4.4), a table a layer group.

Pages are reference-counted; a fork shares all of them and the first write to a shared one copies it. Every change is
written to a journal, which the runner replays.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from quire.memory.encoder_cache import EncoderCache
from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import ALIGNED_PAGES, SCRATCH, EmptyPages, PagePool
from quire.memory.policies import (
    FAR,
    POLICIES,
    ImagePolicy,
    InlineImagePolicy,
    LayerPolicy,
    Policies,
    drops_pages,
    grows_with_length,
)
from quire.memory.seq_pages import SeqPages, Tables
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, PageOp, Poison, TableWrite


class PageTables:
    """The slots and page tables of resident sequences. See KVMemory for the methods that it has too; `order`,
    `balanced` and `aligned_pages` as in Ledger, `association` as in LargePages. With `debug` pages are poisoned when
    they are given out. `view` is that of the model in a ledger which it has in common with others."""

    make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list

    def __init__(
        self, kv_config: KVCacheConfig, policies: Policies = POLICIES, order: Iterable[int] | None = None,
        debug: bool = False, association: str = "bulk", view: PoolView | None = None, *,
        aligned_pages: int = ALIGNED_PAGES,
        balanced: bool = True,
    ) -> None:  # fmt: skip
        self.kv_config, self.debug, self.association = kv_config, debug, association
        self.groups = kv_config.groups
        self.policies: list[LayerPolicy] = [policies[group.kind](group) for group in kv_config.groups]
        if kv_config.sight == "inside":
            self.policies[kv_config.image_embed_group] = InlineImagePolicy(
                kv_config.groups[kv_config.image_embed_group]
            )
        self.retaining_policies = {
            policy for policy in self.policies if not drops_pages(policy)
        }  # that need all pages to the end
        self.dropping_policies = [
            (g, p) for g, p in enumerate(self.policies) if p.media or p not in self.retaining_policies
        ]  # the others
        self.drop_delay = [0] * len(self.policies)  # tokens that pages are held longer than they are read, a group
        self.grows_with_length = [grows_with_length(policy) for policy in self.policies]
        self.prunes_prompt = any(policy.shrinks for policy in self.policies)
        ids = [group.ids for group in kv_config.groups]
        self.page_pool: PagePool | TwoLevelPagePool | PoolView
        if view is None:
            self.page_pool = build_page_pool(
                kv_config,
                ids,
                association,
                order,
                self.make_empty_pages,
                balanced=balanced,
                aligned_pages=aligned_pages,
            )
        else:
            self.page_pool = view
        self.free_slots = list(range(kv_config.slots - 1, 0, -1))
        self.seq_pages: dict[int, SeqPages] = {}
        self.page_ops: list[PageOp] = []
        self.encoder_cache = EncoderCache(self)
        self.copies = 0  # pages copied on write

    def attach(self, seq: Sequence, tables: Tables, length: int = 0, owner: int | None = None) -> SeqPages:
        """Give a slot and page tables; the pages' references are counted by the caller. It will have `length` tokens
        soon. `owner` as in Resident, where it isn't the sequence itself."""
        resident = SeqPages(self.allocate_slot(tables, length), tables, seq.id if owner is None else owner)
        resident.images = seq.images
        self.seq_pages[seq.id] = resident
        for g, pages in enumerate(tables):
            if pages:
                self.page_ops.append(TableWrite(resident.slot, g, 0, tuple(pages)))
        return resident

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.seq_pages[seq.id]
        if length <= resident.capacity and not resident.needs_cow_check:
            if length > resident.requested_tokens:
                resident.requested_tokens = length
            return True
        return self._grow_tables(seq, resident, length, seq.planned)

    def _grow_tables(self, seq: Sequence, seq_pages: SeqPages, length: int, start: int, reserved: bool = False) -> bool:
        """What computing tokens [start, length) reads or writes is there, and what it writes is private; or no change
        at all. `reserved`: pages for this and more were reserved before."""
        tables = seq_pages.tables
        if length > start:
            copies = self._find_shared_writes(seq, seq_pages, start, length) if seq_pages.needs_cow_check else []
            more = [policy.reads(seq, start, length).stop - len(table) for policy, table in zip(self.policies, tables)]
            if copies or max(more) > 0:
                needs = [count if count > 0 else 0 for count in more]
                for g, _ in copies:
                    needs[g] += 1
                held = None
                if not reserved and seq.images:
                    held = self.encoder_cache.reserve(seq, tables, needs)
                    if held is None:
                        return False
                elif not reserved and not self.page_pool.reserve(needs):
                    return False
                for g, at in copies:
                    self._copy_on_write(seq_pages, g, at)
                for g, count in enumerate(more):
                    if count > 0 and self.policies[g].media:
                        self.encoder_cache.extend_table(seq, seq_pages, g, len(tables[g]) + count)
                    elif count > 0:
                        at, slot = len(tables[g]), seq_pages.slot
                        fresh = tuple(self.allocate_pages(g, count, seq_pages.owner, slot, at))
                        self.page_ops.append(TableWrite(slot, g, at, fresh))
                        tables[g].extend(fresh)
                if held:
                    self.encoder_cache.decref_pages(held)
                seq_pages.capacity = self.capacity_of(seq, seq_pages)
            seq_pages.needs_cow_check = False
        seq_pages.capacity, seq_pages.requested_tokens = (
            max(seq_pages.capacity, length),
            max(seq_pages.requested_tokens, length),
        )
        return True

    def _find_shared_writes(self, seq: Sequence, seq_pages: SeqPages, start: int, length: int) -> list[tuple[int, int]]:
        """The pages, as (group, logical page), that will be written and that others name too."""
        found = []
        for g, (policy, table) in enumerate(zip(self.policies, seq_pages.tables)):
            writes = policy.writes(seq, start, length)
            there = range(writes.start, min(writes.stop, len(table)))
            found += [(g, i) for i in there if self.page_pool.is_shared(g, table[i])]
        return found

    def capacity_of(self, seq: Sequence, seq_pages: SeqPages) -> int:
        """Tokens that can be computed in these pages."""
        room = FAR
        for policy, table, gone, growing in zip(
            self.policies, seq_pages.tables, seq_pages.pruned_tokens, self.grows_with_length
        ):
            if growing or len(table) < policy.reads(seq, FAR, FAR + 1).stop:
                room = min(room, policy.room(seq, len(table)) + gone)
        return room

    def allocate_slot(self, tables: Tables, length: int) -> int:
        """A free slot, for a sequence with these tables that will have `length` tokens soon."""
        return self.free_slots.pop()

    def allocate_pages(self, group: int, count: int, owner: int, slot: int = 0, at: int = 0) -> list[int]:
        """Pages of its own for logical pages `at`, `at` + 1, ... of a slot (0: of one that isn't known yet)."""
        pages = self.choose_pages(group, count, owner, slot, at)
        if self.encoder_cache.image_policies:
            self.encoder_cache.drop_incomplete()
        if self.debug:
            self.page_ops += [Poison(group, page) for page in pages]
        return pages

    def choose_pages(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        """Which pages these are. The caller has reserved them."""
        return self.page_pool.allocate(group, count, owner)

    def _copy_on_write(self, seq_pages: SeqPages, group: int, at: int) -> None:
        """Replace the shared page at logical page `at` by a private copy (§4.4, Figure 8)."""
        old = seq_pages.tables[group][at]
        [new] = self.allocate_pages(group, 1, seq_pages.owner, seq_pages.slot, at)
        self.copies += 1
        self.page_ops.append(PageCopy(group, old, new))
        self.page_ops.append(TableWrite(seq_pages.slot, group, at, (new,)))
        seq_pages.tables[group][at] = new
        self.page_pool.decref(group, (old,))  # others keep it

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        assert parent.not_in_flight, f"sequence {parent.id} is forked while in flight"
        if not self.free_slots:
            return False
        source, computed = self.seq_pages[parent.id], parent.computed
        tables = []
        for g, (policy, table) in enumerate(zip(self.policies, source.tables)):
            pages = table[: policy.reads(parent, computed, computed).stop]
            self.page_pool.incref_used(g, pages)
            tables.append(pages)
        resident = self.attach(child, tables, owner=source.owner)
        resident.published_tokens, resident.requested_tokens, resident.drops_at = (
            source.published_tokens,
            computed,
            source.drops_at,
        )
        resident.prefix_ends, resident.pruned_tokens, resident.is_stale = (
            source.prefix_ends,
            list(source.pruned_tokens),
            source.is_stale,
        )
        if source.pending_encodings:
            self.encoder_cache.copy_waits(resident, source)
        resident.capacity = min(source.capacity, self.capacity_of(child, resident))
        source.needs_cow_check = resident.needs_cow_check = True
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.not_in_flight, f"sequence {seq.id} is freed while in flight"
        self._detach(self.seq_pages.pop(seq.id))

    def _detach(self, seq_pages: SeqPages) -> None:
        tables = self._tables_to_release(seq_pages)
        if seq_pages.images:
            self.encoder_cache.detach(seq_pages)
            tables = self.encoder_cache.decref_images(tables, seq_pages.images)
        self.page_pool.decref_tables(tables)
        self.page_pool.remove_owner(seq_pages.owner)
        self.free_slots.append(seq_pages.slot)
        self.page_pool.releases += 1

    def _tables_to_release(self, seq_pages: SeqPages) -> Tables:
        """The pages that a sequence in memory has a part in as it leaves."""
        return seq_pages.tables

    def _drop_unneeded(self, seq: Sequence, seq_pages: SeqPages) -> None:
        """Release the pages that no token to come can see, nor any of the last few (`drop_delay`)."""
        seq_pages.drops_at = FAR
        for g, policy in self.dropping_policies:
            table, held = seq_pages.tables[g], seq_pages.first_page[g]
            start = max(seq.computed - self.drop_delay[g], 0)
            first = min(policy.reads(seq, start, start + 1).start, len(table))
            if first > held:
                gone = table[held:first]
                table[held:first] = [SCRATCH] * len(gone)
                self.page_ops.append(TableWrite(seq_pages.slot, g, held, (SCRATCH,) * len(gone)))
                seq_pages.first_page[g] = first
                self.page_pool.decref(g, gone)
                self._after_drop(seq, seq_pages, g, gone)
            if policy.shrinks and seq.computed >= seq.prompt_len:
                seq_pages.pruned_tokens[g] = policy.gone(seq)
                stop = policy.reads(seq, seq.prompt_len, seq_pages.requested_tokens).stop
                self.page_pool.decref(g, table[stop:])
                del table[stop:]
            seq_pages.drops_at = min(seq_pages.drops_at, self._next_drop(g, seq, first))
        if self.prunes_prompt:
            seq_pages.capacity = max(
                self.capacity_of(seq, seq_pages), seq_pages.requested_tokens
            )  # steps in flight may be behind a prompt

    def _after_drop(self, seq: Sequence, seq_pages: SeqPages, group: int, pages: list[int]) -> None:
        """These pages, the last before the first one held, were dropped."""

    def _next_drop(self, group: int, seq: Sequence, first: int) -> int:
        """Computed tokens from which on a group needs page `first` no more; no later than that is a page full."""
        policy, back = self.policies[group], self.drop_delay[group]
        if policy.shrinks and seq.computed < seq.prompt_len:
            return seq.prompt_len
        if isinstance(policy, ImagePolicy):
            return policy.next_drop(seq)
        if policy.shrinks:
            return FAR
        start = max(seq.computed + 1 - back, 0)
        ends = range(start, start + policy.group.run_tokens)
        if policy.reads(seq, ends.stop - 2, ends.stop - 1).start <= first:  # so it is where pages are left one by one
            return ends.stop - 1 + back
        return start + bisect(ends, False, key=lambda end: policy.reads(seq, end, end + 1).start > first) + back

    def slot(self, seq: Sequence) -> int:
        return self.seq_pages[seq.id].slot

    def all_seq_pages(self) -> Iterable[SeqPages]:
        """Of sequences in memory, and of those that were swapped out."""
        return self.seq_pages.values()

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        size = tokens = 0
        for g, (group, policy) in enumerate(zip(self.groups, self.policies)):
            if policy.media:
                continue
            pages = {page for seq in seqs for page in self.seq_pages[seq.id].tables[g]} - {SCRATCH}
            size += len(pages) * group.page_bytes
            tokens = max(tokens, group.tokens_in_pages(len(pages)))
        return size, tokens

    def count_table_refs(self) -> list[dict[int, int]]:
        """How many tables of resident sequences name each page, a group. Asserts what must hold of the tables."""
        counts: list[dict[int, int]] = [{} for _ in self.groups]
        slots = set(self.free_slots)
        for resident in self.seq_pages.values():
            assert resident.slot not in slots, f"slot {resident.slot} is used twice"
            slots.add(resident.slot)
            assert resident.capacity >= resident.requested_tokens, "the tables are shorter than their sequence"
            for g, table in enumerate(resident.tables):
                first = resident.first_page[g]
                assert not any(table[:first]), "a dropped page is still held"
                assert all(table[first:]), "a live page is missing"
                assert len(table) <= self.groups[g].table_width, "a table is wider than the runner's"
                for page in table[first:]:
                    counts[g][page] = counts[g].get(page, 0) + 1
        assert slots == set(range(1, self.kv_config.slots)), "a slot is lost"
        return counts


def build_page_pool(
    kv_config: KVCacheConfig, ids: Seq[range], association: str = "bulk", order: Iterable[int] | None = None,
    make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list, *, balanced: bool = True,
    aligned_pages: int = ALIGNED_PAGES,
) -> PagePool | TwoLevelPagePool:  # fmt: skip
    """The ledger of a memory's pages, whose ids are those, a range a group; of two levels where there are large pages.
    `order`, `make_empty_pages`, `balanced` and `aligned_pages` as in Ledger."""
    spans = [group.run_tokens // group.run_pages or 1 for group in kv_config.groups]
    if not kv_config.large_bytes:
        return PagePool(ids, order, make_empty_pages, spans, balanced=balanced, aligned_pages=aligned_pages)
    assert (balanced, aligned_pages > 0) == (True, True), "of two levels the pages of all groups have one order"
    ratios = [kv_config.large_bytes // group.page_bytes for group in kv_config.groups]
    return TwoLevelPagePool(ratios, len(ids[0]) // ratios[0], association, spans)
