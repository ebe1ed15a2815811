"""Virtual memory (vAttention §4-6): tokens have contiguous addresses, and pages are mapped there on demand.

Page tables are as in PagedMemory, but the device's memory-management unit applies them: a TableWrite names the page at
each position of each slot (the paper's reqId), and the runner maps it there. So sharing is mapping the same page in two
slots.

Pages are never unmapped to make room: an empty page may stay mapped where it was last used, and `mapped_pages` has the
page mapped at each position. A sequence gets the free slot that needs the fewest new mappings, and at each position the
page that is mapped there, if it is empty (§6.2.2, deferred reclamation: "R1's reqId" for R2). Empty pages are allocated
in the order of their release, a sequence's last tokens first, so that mappings last. A position is mapped anew only if
no step in flight uses its slot, or after the end of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import islice
from operator import eq
from typing import Any, NamedTuple, Self

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.answers import Usage
from quire.memory.page_layout import GroupAllocation, MemorySize, assign_pages
from quire.memory.page_pool import EmptyPageQueue, EmptyPages, PagePool, TablePosition
from quire.memory.paged import AdmissionPlan, PagedMemory
from quire.memory.seq_pages import SeqPages, Tables
from quire.memory.virtual.buffers import BufferLayout, plan_buffers
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOp, PageOps, TableWrite

MAX_SLOTS_COMPARED = 32
"""Free slots that are compared for a sequence: those that were released last."""

MAX_MAPPED_AHEAD = 1024
"""Pages that are mapped ahead in one step: enough for a chunk of a prompt, and for all decodes."""

MAX_PREMAPPED_NEXT = 64
"""Pages of a group that are kept mapped for the next sequence; each step checks them."""

PREMAP_DIVISOR = 4
"""At most 1 / PREMAP_DIVISOR of the empty pages is mapped for the next sequence (§6.2.2), which may not come."""


class VirtualLayout(NamedTuple):
    """The layers that share a buffer (see `plan_buffers`), and the KiB of a buffer's page."""

    layout: str
    page_kib: int


LAYOUT_CHOICES = ("layer", "sliced:4", "sliced")
PAGE_KIB_CHOICES, SMALL_PAGE_KIB_CHOICES = (64, 128, 256, 512, 1024, 2048), (32, 16, 8, 4)
"""The choices on a CPU where the config has none, in the order of preference."""

MIN_PAGES = 32  # pages of a group, if the choices allow it

MAX_MAPPINGS = 32_000
"""The most mappings of a process: half of Linux's default limit."""


class VirtualMemory(PagedMemory):
    """Implement KVMemory with virtual addresses.

    With `ahead` the pages that the next step needs are mapped while this one computes (§6.2.1), and so is the beginning
    of the slot that the next sequence will get (§6.2.2)."""

    make_empty_pages: Callable[[Iterable[int]], EmptyPages] = EmptyPageQueue
    page_pool: PagePool

    def __init__(self, kv_config: KVCacheConfig, *, ahead: bool = True, **settings: Any) -> None:
        super().__init__(kv_config, **settings)
        self.maps_ahead = ahead
        # By group, slot and position: the page that is mapped there; 0: none.
        self.mapped_pages: list[list[list[int]]] = [[[] for _ in range(kv_config.slots)] for _ in self.groups]
        # By id: the sequences that need pages in the next step, and the tokens that they will have then
        self.upcoming: dict[int, tuple[Sequence, SeqPages, int]] = {}
        self.empty_queues: list[EmptyPageQueue] = []  # of each group; pages that are mapped ahead are premapped
        assert isinstance(self.page_pool, PagePool), "virtual memory has a pool of one level"
        self.size_classes = self.page_pool.size_classes
        for pool in self.page_pool.size_class_of:
            assert isinstance(pool.empty, EmptyPageQueue), "virtual memory needs empty pages in the order of release"
            self.empty_queues.append(pool.empty)
        self.mean_admitted_pages = 0.0  # mean pages of a sequence at its admission

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "", **more: Any) -> Self:
        """Make a memory of `size` for the layers of `spec`, with pages and buffers by the config."""
        kv_config = build_virtual_kv_config(config, spec, size)
        return cls.from_kv_config(kv_config, config, model_id, ahead=config.experiment.map_ahead != "off", **more)

    # Choice of slots and pages

    def allocate_slot(self, tables: Tables, length: int) -> int:
        best, least = len(self.free_slots) - 1, None
        for i in range(len(self.free_slots) - 1, max(len(self.free_slots) - 1 - MAX_SLOTS_COMPARED, -1), -1):
            cost = self._mapping_cost(self.free_slots[i], tables, length)
            if least is None or cost < least:
                best, least = i, cost
        return self.free_slots.pop(best)

    def _mapping_cost(self, slot: int, tables: Tables, length: int) -> tuple[int, int]:
        """Return the pages to map in a slot for these tables and `length` tokens, and the number of other pages that
        are mapped there, for another sequence to use."""
        cost = spare = 0
        for g, table in enumerate(tables):
            mapped, named = self.mapped_pages[g][slot], len(table)
            count, first = max(named, self.groups[g].num_pages(length)), mapped[:named]
            mapped_count = named if first == table else sum(map(eq, first, table))
            # If an early page is not mapped any more, later ones are not either: those are allocated first.
            if named < len(mapped) and (mapped_count == named or not named) and self._is_empty(g, mapped[named]):
                mapped_count += sum(self._is_empty(g, page) for page in mapped[named:count])
            cost += count - mapped_count
            spare += max(len(mapped) - count, 0)
        return cost, spare

    def _is_empty(self, group: int, page: int) -> bool:
        """Return True if `page` is a page (not 0) and empty."""
        return page > 0 and self.page_pool.is_empty(group, page)

    def choose_pages(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        pages = []
        for position in range(at, at + count):
            page = self._mapped_empty_page((group, slot, position))
            if page:
                self.empty_queues[group].put_first(page)
            pages.append(self.page_pool.allocate_one(group))
        return pages

    def _mapped_empty_page(self, position: TablePosition) -> int:
        """Return the page that is mapped at a position, if it is empty and not premapped elsewhere; else 0."""
        group, slot, at = position
        mapped = self.mapped_pages[group][slot]
        page = mapped[at] if at < len(mapped) else 0
        usable = (
            page
            and self.page_pool.is_empty(group, page)
            and self.empty_queues[group].premapped.get(page, position) == position
        )
        return page if usable else 0

    # Mapping ahead

    def grow(self, seq: Sequence, length: int) -> bool:
        has_room = super().grow(seq, length)
        seq_pages = self.seq_pages[seq.id]
        if self.maps_ahead and has_room and length >= seq_pages.capacity and length < (seq.max_total_len or length + 1):
            left = len(seq.tokens) - length
            self.upcoming[seq.id] = seq, seq_pages, length + (min(left, self.max_step_tokens) if left > 0 else 1)
        return has_room

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        page_ops, _ = super().take_page_ops()
        self._record_mapped(page_ops)
        if not self.maps_ahead:
            return page_ops, ()
        self._prune_premapped()
        needs = (op for need in self.upcoming.values() for op in self._map_ahead(*need))
        ahead = list(islice(needs, MAX_MAPPED_AHEAD))
        self.upcoming.clear()
        self._record_mapped(ahead)
        eager = self._premap_next_slot()
        self._record_mapped(eager)
        return page_ops, (*ahead, *eager)

    def _prune_premapped(self) -> None:
        """Cancel the premapped pages but the next one of each sequence: every step asks anew for more."""
        tables = {seq_pages.slot: seq_pages.tables for seq_pages in self.seq_pages.values()}
        for pool in self.size_classes:
            queue = self.empty_queues[pool.groups[0]]
            for page, (group, slot, at) in list(queue.premapped.items()):
                next_one = slot in tables and at == len(tables[slot][group])
                if not next_one or self.mapped_pages[group][slot][at] != page:
                    queue.clear_premapped(page)

    def _record_mapped(self, page_ops: Iterable[PageOp]) -> None:
        """Record where pages are mapped after these page operations are replayed."""
        for op in page_ops:
            if type(op) is TableWrite:
                mapped, end = self.mapped_pages[op.group][op.slot], op.first_page + len(op.pages)
                mapped += [0] * (end - len(mapped))
                for at, page in enumerate(op.pages, op.first_page):
                    if page:
                        mapped[at] = page

    def forget_free_slots(self) -> list[int]:
        """Forget the pages that are mapped in free slots, and return these slots. For measurements without reuse."""
        for mapped in self.mapped_pages:
            for slot in self.free_slots:
                mapped[slot].clear()
        free = set(self.free_slots)
        for queue in self.empty_queues:
            for page, (_, slot, _) in list(queue.premapped.items()):
                if slot in free:
                    queue.clear_premapped(page)
        return list(self.free_slots)

    def discard_contents(self) -> None:
        super().discard_contents()
        self.forget_free_slots()

    def _map_ahead(self, seq: Sequence, seq_pages: SeqPages, end: int) -> Iterable[TableWrite]:
        """Yield the table writes for the pages that a sequence needs for `end` tokens, if it is still in memory."""
        if self.seq_pages.get(seq.id) is not seq_pages:
            return
        for g, (policy, table) in enumerate(zip(self.policies, seq_pages.tables)):
            stop = min(policy.reads(seq, seq.planned, end).stop, policy.group.table_width)
            for at in range(len(table), stop):
                if not self.empty_queues[g].free:
                    self.page_pool.make_room(g)
                yield from self._premap(g, seq_pages.slot, at, spare=0)

    def _premap_next_slot(self) -> list[TableWrite]:
        """Return the table writes for the first pages of the next slot, as many as the mean admitted sequence has."""
        if not self.free_slots or not self.mean_admitted_pages:
            return []
        slot, entries = self.free_slots[-1], list[TableWrite]()
        for g, group in enumerate(self.groups):
            spare = len(self.empty_queues[g]) * (PREMAP_DIVISOR - 1) // PREMAP_DIVISOR
            mapped = self.mapped_pages[g][slot]
            for at in range(min(round(self.mean_admitted_pages), group.table_width, MAX_PREMAPPED_NEXT)):
                # A page that is used or cached stays mapped: a sequence may reuse it as its prefix.
                if at >= len(mapped) or not mapped[at] or self.page_pool.is_empty(g, mapped[at]):
                    entries += self._premap(g, slot, at, spare)
        return entries

    def _premap(self, group: int, slot: int, at: int, spare: int) -> list[TableWrite]:
        """Return the table write, if needed, that maps an empty page at a position, unless only `spare` are left.

        The page stays empty, and is the last to be allocated elsewhere."""
        queue, position = self.empty_queues[group], (group, slot, at)
        page = self._mapped_empty_page(position)
        if page:
            queue.set_premapped(page, position)
            return []
        if len(queue.free) <= spare:
            return []
        page = next(iter(queue.free))
        queue.set_premapped(page, position)
        return [TableWrite(slot, group, at, (page,))]

    # Accounting

    def _admit_seq(self, seq: Sequence, plan: AdmissionPlan, admitted: list[SeqPages]) -> SeqPages:
        seq_pages = super()._admit_seq(seq, plan, admitted)
        pages = max(map(len, seq_pages.tables))
        self.mean_admitted_pages += (pages - self.mean_admitted_pages) / 16 if self.mean_admitted_pages else pages
        return seq_pages

    def _usage(self, filled: list[int]) -> Usage:
        usage = super()._usage(filled)
        first = [pool.groups[0] for pool in self.size_classes]
        ahead = sum(len(self.empty_queues[g].premapped) * self.groups[g].page_bytes for g in first)
        return usage._replace(reserved=ahead, free=usage.free - ahead)

    def check(self) -> None:
        super().check()
        for queue in self.empty_queues:
            assert not queue.free.keys() & queue.premapped.keys(), "a page is premapped and free"
            for page, (group, slot, at) in queue.premapped.items():
                assert self.mapped_pages[group][slot][at] == page, (
                    f"page {page} is premapped at a position that has another page"
                )


def plan_group_buffers(
    spec: ModelSpec, itemsize: int, virtual_layout: VirtualLayout
) -> list[tuple[list[int], BufferLayout]]:
    """Return the layers of each group, and their buffers."""
    group_keys = {i: spec.layers[i].group_key for i in spec.kv_layers}
    found = []
    for kind in dict.fromkeys(group_keys.values()):
        layers = [i for i, other in group_keys.items() if other == kind]
        size = spec.layers[layers[0]].token_bytes(itemsize) // 2
        found.append((layers, plan_buffers(len(layers), size, virtual_layout.page_kib * 1024, virtual_layout.layout)))
    return found


def choose_virtual_layout(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> VirtualLayout:
    """Return the layout of virtual memory; what the config leaves open is chosen for a CPU.

    The choice prefers buffers of few layers, whose tokens are close together, and small pages, as long as the mappings
    suffice; and smaller pages if there would be too few."""
    given = config.experiment
    layouts = LAYOUT_CHOICES if given.virtual_layout is None else (given.virtual_layout,)
    pages = PAGE_KIB_CHOICES if given.virtual_page_kib is None else (given.virtual_page_kib,)
    tried = [VirtualLayout(layout, kib) for layout in layouts for kib in pages]
    small = [VirtualLayout(layout, kib) for kib in SMALL_PAGE_KIB_CHOICES if len(pages) > 1 for layout in layouts]
    for cuts, sequences, fewest in ((tried, 2, MIN_PAGES), (small, 1, MIN_PAGES // 2), (tried + small, 1, 1)):
        for virtual_layout in cuts:
            if _has_enough(config, spec, size, virtual_layout, sequences, fewest):
                return virtual_layout
    return min(tried + small, key=lambda virtual_layout: max_mappings(config, spec, size, virtual_layout))


def _has_enough(
    config: EngineConfig, spec: ModelSpec, size: MemorySize, virtual_layout: VirtualLayout, sequences: int, fewest: int
) -> bool:
    """Return True if there are `fewest` pages, enough for `sequences` longest sequences, and mappings."""
    groups = [buffers for _, buffers in plan_group_buffers(spec, size.itemsize, virtual_layout)]
    enough = all(_count_pages(one, size) >= max(sequences * one.num_pages(size.max_len), fewest) for one in groups)
    return enough and max_mappings(config, spec, size, virtual_layout) <= MAX_MAPPINGS


def max_mappings(config: EngineConfig, spec: ModelSpec, size: MemorySize, virtual_layout: VirtualLayout) -> int:
    """Return the most mappings of a process: one for each position of each slot, as if no two neighbouring pages could
    be merged, and one for the gap after the last."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    groups = plan_group_buffers(spec, size.itemsize, virtual_layout)
    return (config.max_num_seqs + 1) * sum(one.num_buffers * (one.num_pages(size.max_len) + 1) for _, one in groups)


def _count_pages(buffers: BufferLayout, size: MemorySize) -> int:
    """Return the pages in the bytes of `size.tokens` tokens; at least those of one sequence of that length."""
    least = buffers.num_pages(size.max_len) if size.tokens <= size.max_len else 0
    return max(size.tokens * buffers.token_bytes // buffers.page_bytes, least)


def build_virtual_kv_config(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> KVCacheConfig:
    """Return the layout with pages for `size.tokens` tokens in every layer; a page of a group is in each of its
    buffers. StartupError if a sequence of `size.max_len` tokens does not fit."""
    virtual_layout = choose_virtual_layout(config, spec, size)
    allocations = [
        GroupAllocation(
            tuple(layers), one.page_bytes, one.token_bytes, _count_pages(one, size), one.num_pages(size.max_len),
            one.run_tokens,
            one.run_pages, one.num_buffers,
        )
        for layers, one in plan_group_buffers(spec, size.itemsize, virtual_layout)
    ]  # fmt: skip
    largest = max(range(len(allocations)), key=lambda i: (allocations[i].page_bytes, allocations[i].num_pages))
    same_size = [allocation for allocation in allocations if allocation.page_bytes == allocations[largest].page_bytes]
    if sum(allocation.num_pages for allocation in same_size) > sum(allocation.table_width for allocation in same_size):
        # The scratch page is one of the largest too.
        allocations[largest] = allocations[largest]._replace(num_pages=allocations[largest].num_pages - 1)
    needed = sum(allocation.table_width * allocation.page_bytes for allocation in allocations)
    available = sum(allocation.num_pages * allocation.page_bytes for allocation in allocations)
    existing_sizes = {allocation.page_bytes for allocation in allocations if allocation.num_pages}
    if available < needed or not all(allocation.page_bytes in existing_sizes for allocation in allocations):
        buffers = sum(allocation.parts for allocation in allocations)
        raise StartupError(
            f"--memory virtual has {available:,} bytes of pages, and a sequence of {size.max_len:,} tokens takes up to "
            f"{needed:,} of them in pages of {virtual_layout.page_kib} KiB in {buffers} buffers",
            "Use a smaller --max-model-len, --virtual-page-kib or --virtual-layout, or a larger --kv-gib",
        )
    return assign_pages(allocations, config, spec, size, KVCacheLayout.CONTIGUOUS)


def virtual_capacity_tokens(kv_config: KVCacheConfig) -> int:
    """Return the tokens that the pages of a layout hold in every layer."""
    found = []
    for ids in {group.ids for group in kv_config.groups}:
        pages = sum(Fraction(group.run_pages, group.run_tokens) for group in kv_config.groups if group.ids == ids)
        found.append(int(len(ids) / pages))
    return min(found)
