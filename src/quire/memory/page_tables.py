"""Page tables: which pages hold the tokens of each sequence in memory (PagedAttention §4.2-4.4).

A sequence has a table for each layer group. Pages are reference-counted: a fork shares all of them, and the first write
to a shared page copies it. A page that no later token reads is freed before the sequence ends, in
`PageTables._drop_unneeded`. Every change is recorded as a page operation, which the runner replays."""

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
    make_policy,
)
from quire.memory.seq_pages import SeqPages, Tables
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, PageOp, Poison, TableWrite


class PageTables:
    """The slots and page tables of the sequences in memory. It implements a part of KVMemory.

    `order`, `balanced` and `aligned_pages` are as in PagePool, `association` as in TwoLevelPagePool. With `debug` new
    pages are poisoned. `view` is the model's view of a pool that several models share. With `keep_images` encoded
    images stay cached for other sequences."""

    make_empty_pages: Callable[[Iterable[int]], EmptyPages] = list

    def __init__(
        self, kv_config: KVCacheConfig, policies: Policies = POLICIES, order: Iterable[int] | None = None,
        debug: bool = False, association: str = "bulk", view: PoolView | None = None, *,
        aligned_pages: int = ALIGNED_PAGES,
        balanced: bool = True, keep_images: bool = True,
    ) -> None:  # fmt: skip
        self.kv_config, self.debug, self.association = kv_config, debug, association
        self.groups = kv_config.groups
        self.policies: list[LayerPolicy] = [make_policy(policies, group) for group in kv_config.groups]
        if kv_config.sight == "inside":
            self.policies[kv_config.image_embed_group] = InlineImagePolicy(
                kv_config.groups[kv_config.image_embed_group]
            )
        # A policy either retains all pages to the sequence's end, or drops some before.
        self.retaining_policies = {policy for policy in self.policies if not drops_pages(policy)}
        self.dropping_policies = [
            (g, p) for g, p in enumerate(self.policies) if p.media or p not in self.retaining_policies
        ]
        self.drop_delay = [0] * len(self.policies)  # of each group: see Retention.drop_delay
        self.grows_with_length = [grows_with_length(policy) for policy in self.policies]
        self.prunes_prompt = any(policy.shrinks for policy in self.policies)
        ids = [group.ids for group in kv_config.groups]
        self.page_pool: PagePool | TwoLevelPagePool | PoolView
        if view is None:
            self.page_pool = build_page_pool(
                kv_config, ids, association, order, self.make_empty_pages, balanced=balanced,
                aligned_pages=aligned_pages,
            )  # fmt: skip
        else:
            self.page_pool = view
        self.free_slots = list(range(kv_config.slots - 1, 0, -1))
        self.seq_pages: dict[int, SeqPages] = {}
        self.page_ops: list[PageOp] = []
        self.encoder_cache = EncoderCache(self, caching=keep_images)
        self.copies = 0  # pages copied on write

    def attach(self, seq: Sequence, tables: Tables, length: int = 0, owner: int | None = None) -> SeqPages:
        """Give a sequence, which will soon have `length` tokens, a slot and page tables.

        The caller counts the pages' references. `owner` is as in SeqPages; the default is the sequence itself."""
        slot = self.allocate_slot(tables, length)
        seq_pages = SeqPages(slot, tables, seq.id if owner is None else owner, seq.images)
        self.seq_pages[seq.id] = seq_pages
        for g, pages in enumerate(tables):
            if pages:
                self.page_ops.append(TableWrite(seq_pages.slot, g, 0, tuple(pages)))
        return seq_pages

    def grow(self, seq: Sequence, length: int) -> bool:
        seq_pages = self.seq_pages[seq.id]
        if length <= seq_pages.capacity and not seq_pages.needs_cow_check:
            if length > seq_pages.requested_tokens:
                seq_pages.requested_tokens = length
            return True
        return self._grow_tables(seq, seq_pages, length, seq.planned)

    def _grow_tables(self, seq: Sequence, seq_pages: SeqPages, length: int, start: int, reserved: bool = False) -> bool:
        """Allocate the pages that computing tokens [start, length) needs, and copy the shared pages that it writes.

        Return False, without any change, if there is no room. `reserved`: the caller has reserved at least these
        pages."""
        tables = seq_pages.tables
        if length > start:
            copies = self._find_shared_writes(seq, seq_pages, start, length) if seq_pages.needs_cow_check else []
            new_counts = [
                policy.reads(seq, start, length).stop - len(table) for policy, table in zip(self.policies, tables)
            ]
            if copies or max(new_counts) > 0:
                needs = [count if count > 0 else 0 for count in new_counts]
                for g, _ in copies:
                    needs[g] += 1
                found_pages = None
                if not reserved and seq.images:
                    found_pages = self.encoder_cache.reserve(seq, tables, needs)
                    if found_pages is None:
                        return False
                elif not reserved and not self.page_pool.reserve(needs):
                    return False
                for g, at in copies:
                    self._copy_on_write(seq_pages, g, at)
                for g, count in enumerate(new_counts):
                    if count > 0 and self.policies[g].media:
                        self.encoder_cache.extend_table(seq, seq_pages, g, len(tables[g]) + count)
                    elif count > 0:
                        at, slot = len(tables[g]), seq_pages.slot
                        new_pages = tuple(self.allocate_pages(g, count, seq_pages.owner, slot, at))
                        self.page_ops.append(TableWrite(slot, g, at, new_pages))
                        tables[g].extend(new_pages)
                if found_pages:
                    self.encoder_cache.decref_pages(found_pages)
                seq_pages.capacity = self.capacity_of(seq, seq_pages)
            seq_pages.needs_cow_check = False
        seq_pages.capacity = max(seq_pages.capacity, length)
        seq_pages.requested_tokens = max(seq_pages.requested_tokens, length)
        return True

    def _find_shared_writes(self, seq: Sequence, seq_pages: SeqPages, start: int, length: int) -> list[tuple[int, int]]:
        """Return the shared pages, as (group, logical page), that will be written."""
        shared = []
        for g, (policy, table) in enumerate(zip(self.policies, seq_pages.tables)):
            writes = policy.writes(seq, min(start, seq.drafted) if policy.group.is_draft else start, length)
            existing = range(writes.start, min(writes.stop, len(table)))
            shared += [(g, i) for i in existing if self.page_pool.ref_count(g, table[i]) > 1]
        return shared

    def _computed(self, group: int, seq: Sequence) -> int:
        """Return the number of tokens that the layers of a group have computed: a draft model may lag behind."""
        return seq.drafted if self.groups[group].is_draft and seq.uses_draft_model else seq.computed

    def capacity_of(self, seq: Sequence, seq_pages: SeqPages) -> int:
        """Return the number of tokens that can be computed in these pages."""
        room = FAR
        for policy, table, pruned, grows in zip(
            self.policies, seq_pages.tables, seq_pages.pruned_tokens, self.grows_with_length
        ):
            if grows or len(table) < policy.reads(seq, FAR, FAR + 1).stop:
                room = min(room, policy.room(seq, len(table)) + pruned)
        return room

    def allocate_slot(self, tables: Tables, length: int) -> int:
        """Return a free slot for a sequence with these tables, which will soon have `length` tokens."""
        return self.free_slots.pop()

    def allocate_pages(self, group: int, count: int, owner: int, slot: int = 0, at: int = 0) -> list[int]:
        """Return private pages for logical pages `at`, `at` + 1, ... of a slot; 0: the slot is not known yet."""
        pages = self.choose_pages(group, count, owner, slot, at)
        if self.encoder_cache.image_policies:
            self.encoder_cache.drop_incomplete()
        if self.debug:
            self.page_ops += [Poison(group, page) for page in pages]
        return pages

    def choose_pages(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        """Return the pages for `allocate_pages`, which the caller has reserved."""
        return self.page_pool.allocate(group, count, owner)

    def _copy_on_write(self, seq_pages: SeqPages, group: int, at: int) -> None:
        """Replace the shared page at logical page `at` by a private copy (§4.4, Figure 8)."""
        old = seq_pages.tables[group][at]
        [new] = self.allocate_pages(group, 1, seq_pages.owner, seq_pages.slot, at)
        self.copies += 1
        self.page_ops.append(PageCopy(group, old, new))
        self.page_ops.append(TableWrite(seq_pages.slot, group, at, (new,)))
        seq_pages.tables[group][at] = new
        self.page_pool.decref(group, (old,))

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
        seq_pages = self.attach(child, tables, owner=source.owner)
        seq_pages.copy_progress(source)
        seq_pages.requested_tokens = computed
        if source.pending_encodings:
            self.encoder_cache.copy_waits(seq_pages, source)
        seq_pages.capacity = max(min(source.capacity, self.capacity_of(child, seq_pages)), computed)
        source.needs_cow_check = seq_pages.needs_cow_check = True
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

    def _tables_to_release(self, seq_pages: SeqPages) -> Tables:
        """Return the tables to release when a sequence leaves memory."""
        return seq_pages.tables

    def _drop_unneeded(self, seq: Sequence, seq_pages: SeqPages) -> None:
        """Release the pages that a window passed `drop_delay` tokens ago: no later token reads them.

        Release also the pages that are free after a prompt was pruned, and those of images that were read."""
        seq_pages.drops_at = FAR
        for g, policy in self.dropping_policies:
            table, old_first, computed = seq_pages.tables[g], seq_pages.first_page[g], self._computed(g, seq)
            start = max(computed - self.drop_delay[g], 0)
            first = min(policy.reads(seq, start, start + 1).start, len(table))
            if first > old_first:
                dropped = table[old_first:first]
                table[old_first:first] = [SCRATCH] * len(dropped)
                self.page_ops.append(TableWrite(seq_pages.slot, g, old_first, (SCRATCH,) * len(dropped)))
                seq_pages.first_page[g] = first
                self.page_pool.decref(g, dropped)
                self._after_drop(seq, seq_pages, g, dropped)
            if policy.shrinks and computed >= seq.prompt_len:
                seq_pages.pruned_tokens[g] = policy.gone(seq)
                stop = policy.reads(seq, seq.prompt_len, seq_pages.requested_tokens).stop
                self.page_pool.decref(g, table[stop:])
                del table[stop:]
            seq_pages.drops_at = min(seq_pages.drops_at, self._next_drop(g, seq, first))
        if self.prunes_prompt:
            # A step in flight may already follow the prompt.
            seq_pages.capacity = max(self.capacity_of(seq, seq_pages), seq_pages.requested_tokens)

    def _after_drop(self, seq: Sequence, seq_pages: SeqPages, group: int, pages: list[int]) -> None:
        """Handle the drop of these pages, the last ones before the first page still held."""

    def _next_drop(self, group: int, seq: Sequence, first: int) -> int:
        """Return the number of computed tokens at which a group stops needing page `first`, or an earlier number."""
        policy, back, computed = self.policies[group], self.drop_delay[group], self._computed(group, seq)
        if policy.shrinks and computed < seq.prompt_len:
            return seq.prompt_len
        if isinstance(policy, ImagePolicy):
            return policy.next_drop(seq)
        if policy.shrinks:
            return FAR
        start = max(computed + 1 - back, 0)
        ends = range(start, start + policy.group.run_tokens)
        if policy.reads(seq, ends.stop - 2, ends.stop - 1).start <= first:  # the usual case: one page at a time
            return ends.stop - 1 + back
        return start + bisect(ends, False, key=lambda end: policy.reads(seq, end, end + 1).start > first) + back

    def slot(self, seq: Sequence) -> int:
        return self.seq_pages[seq.id].slot

    def all_seq_pages(self) -> Iterable[SeqPages]:
        """Return the pages of all sequences, those that are swapped out included."""
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

    def decoding_bytes(self, length: int) -> int:
        """Return the bytes of the pages that a sequence with a prompt of `length` tokens, without images, holds when
        all of them are computed and the steps of the prompt are over, if it shares none of its pages."""
        seq, size = Sequence(0, [0] * length), 0
        seq.uses_draft_model = True
        for group, policy, delay in zip(self.groups, self.policies, self.drop_delay):
            start = max(length - delay, 0)
            first, stop = policy.reads(seq, start, start + 1).start, policy.reads(seq, length, length).stop
            size += len(range(first, stop)) * group.page_bytes
        return size

    def count_table_refs(self) -> list[dict[int, int]]:
        """Return for each group the number of tables that name each page. Assert the invariants of the tables."""
        counts: list[dict[int, int]] = [{} for _ in self.groups]
        slots = set(self.free_slots)
        for seq_pages in self.seq_pages.values():
            assert seq_pages.slot not in slots, f"slot {seq_pages.slot} is used twice"
            slots.add(seq_pages.slot)
            assert seq_pages.capacity >= seq_pages.requested_tokens, "the tables are shorter than their sequence"
            for g, table in enumerate(seq_pages.tables):
                first = seq_pages.first_page[g]
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
    """Make the pool of pages with these ids, one range for each group; a two-level pool if there are large pages.

    `order`, `make_empty_pages`, `balanced` and `aligned_pages` are as in PagePool."""
    page_tokens = [group.run_tokens // group.run_pages or 1 for group in kv_config.groups]
    if not kv_config.large_bytes:
        return PagePool(ids, order, make_empty_pages, page_tokens, balanced=balanced, aligned_pages=aligned_pages)
    assert (balanced, aligned_pages > 0) == (True, True), "a two-level pool evicts in one order for all groups"
    ratios = [kv_config.large_bytes // group.page_bytes for group in kv_config.groups]
    return TwoLevelPagePool(ratios, len(ids[0]) // ratios[0], association, page_tokens)
