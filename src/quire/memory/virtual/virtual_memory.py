"""Virtual memory (vAttention §4-6): a sequence's tokens are contiguous in addresses, and pages are mapped under them on
demand. Page tables are what they are in PagedMemory, but the device's memory-management unit executes them: a
`TableWrite` entry says which page lies at which place of which slot (the paper's reqId), and the runner maps it there.

So sharing is naming the same page in two slots, and nothing is ever unmapped for want of memory: an empty page may
still lie where its last owner was. Every place remembers the page that lies there. A sequence gets the free slot where
the least must be mapped, and at each place the page that is there already, if it is empty (§6.2.1, deferred
reclamation: "R1's reqId" for R2). Empty pages are given out in the order in which they came back, the last tokens'
first, so what is remembered lasts. A place is mapped anew only when no step in flight names its slot, or behind the end
of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import islice
from operator import eq
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.answers import Usage
from quire.memory.page_layout import GroupAllocation, MemorySize, assign_pages
from quire.memory.page_pool import EmptyPageQueue, EmptyPages, PagePool, TablePosition
from quire.memory.paged import PagedMemory
from quire.memory.policies import policies_for
from quire.memory.seq_pages import SeqPages, Tables
from quire.memory.virtual.buffers import BufferLayout, plan_buffers
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOps, TableWrite

MAX_SLOTS_COMPARED = 32
"""Free slots that a sequence may get: those that came back last."""

MAX_MAPPED_AHEAD = 1024
"""Pages that are mapped ahead in one step: what a chunk of a prompt needs, and as many decodes as there are."""

MAX_PREMAPPED_NEXT = 64
"""Pages of a group that are kept mapped for the next sequence: looked at in every step."""

PREMAP_DIVISOR = 4
"""At most a fourth of the empty pages is mapped for the next sequence (§6.2.2), which nobody may need."""


class VirtualLayout(NamedTuple):
    """Which layers share a buffer (see `buffers_of`), and the KiB of a page of it."""

    layout: str
    page_kib: int


LAYOUT_CHOICES = ("layer", "sliced:4", "sliced")
PAGE_KIB_CHOICES, SMALL_PAGE_KIB_CHOICES = (64, 128, 256, 512, 1024, 2048), (32, 16, 8, 4)
"""What is tried on a CPU where nothing is said, in this order."""

MIN_PAGES = 32  # pages of a group, where there is a choice

MAX_MAPPINGS = 32_000
"""Of a process: half of what Linux allows where nobody changed it."""


class VirtualMemory(PagedMemory):
    """See KVMemory. With `maps_ahead` what the next step will need is mapped while this one computes (§6.1.1), and so
    is the beginning of the slot that the next sequence will get (§6.1.3)."""

    make_empty_pages: Callable[[Iterable[int]], EmptyPages] = EmptyPageQueue

    def __init__(self, kv_config: KVCacheConfig, *, ahead: bool = True, **settings: Any) -> None:
        super().__init__(kv_config, **settings)
        self.maps_ahead = ahead
        # The page that lies at each place of each slot, a table a group; 0: none.
        self.mapped_pages: list[list[list[int]]] = [[[] for _ in range(kv_config.slots)] for _ in self.groups]
        self.upcoming: dict[int, tuple[Sequence, SeqPages, int]] = {}  # who will need room, and for how many tokens
        self.empty_queues: list[
            EmptyPageQueue
        ] = []  # the empty pages of each group; those that are mapped ahead are promised
        assert isinstance(self.page_pool, PagePool), "pages that are mapped are of one level"
        self.size_classes = self.page_pool.size_classes
        for pool in self.page_pool.size_class_of:
            assert isinstance(pool.empty, EmptyPageQueue), "remembered pages are given out in a certain order"
            self.empty_queues.append(pool.empty)
        self.mean_admitted_pages = 0.0  # mean pages that sequences came in with

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "") -> VirtualMemory:
        """A memory of `size` for `spec`'s layers, in pages and buffers as the config says."""
        assert config.max_num_batched_tokens is not None, "a memory is built for a known number of tokens in a step"
        return cls(
            build_virtual_kv_config(config, spec, size),
            ahead=config.map_ahead != "off",
            max_step_tokens=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            debug=config.debug,
            prefix_tokens=config.prefix_tokens,
            policies=policies_for(layer.kind for layer in spec.layers),
            retention=config.retention,
        )

    # Which slot, and which page

    def allocate_slot(self, tables: Tables, length: int) -> int:
        best, least = len(self.free_slots) - 1, None
        for i in range(len(self.free_slots) - 1, max(len(self.free_slots) - 1 - MAX_SLOTS_COMPARED, -1), -1):
            price = self._mapping_cost(self.free_slots[i], tables, length)
            if least is None or price < least:
                best, least = i, price
        return self.free_slots.pop(best)

    def _mapping_cost(self, slot: int, tables: Tables, length: int) -> tuple[int, int]:
        """Pages to be mapped there for these tables and `length` tokens; and how many others lie there, for another
        sequence to find."""
        price = spare = 0
        for g, table in enumerate(tables):
            lying, named = self.mapped_pages[g][slot], len(table)
            count, first = max(named, self.groups[g].num_pages(length)), lying[:named]
            there = named if first == table else sum(map(eq, first, table))
            # What isn't there at the beginning isn't behind it: that is given away first.
            if named < len(lying) and (there == named or not named) and self._is_empty(g, lying[named]):
                there += sum(self._is_empty(g, page) for page in lying[named:count])
            price += count - there
            spare += max(len(lying) - count, 0)
        return price, spare

    def _is_empty(self, group: int, page: int) -> bool:
        """Whether the page that lies at a place can be had there."""
        return page > 0 and self.page_pool.is_empty(group, page)

    def choose_pages(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        pages = []
        for place in range(at, at + count):
            page = self._mapped_empty_page((group, slot, place))
            if page:
                self.empty_queues[group].put_first(page)
            pages.append(self.page_pool.allocate_one(group))
        return pages

    def _mapped_empty_page(self, position: TablePosition) -> int:
        """The page that lies at a place, if it is empty and not promised to another one; else 0."""
        group, slot, at = position
        lying = self.mapped_pages[group][slot]
        page = lying[at] if at < len(lying) else 0
        usable = (
            page
            and self.page_pool.is_empty(group, page)
            and self.empty_queues[group].premapped.get(page, position) == position
        )
        return page if usable else 0

    # Ahead of need

    def grow(self, seq: Sequence, length: int) -> bool:
        there = super().grow(seq, length)
        resident = self.seq_pages[seq.id]
        if self.maps_ahead and there and length >= resident.capacity and length < (seq.max_total_len or length + 1):
            left = len(seq.tokens) - length
            self.upcoming[seq.id] = seq, resident, length + (min(left, self.max_step_tokens) if left > 0 else 1)
        return there

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        journal, _ = super().take_page_ops()
        self._record_mapped(journal)
        if not self.maps_ahead:
            return journal, ()
        self._prune_premapped()
        needs = (entry for need in self.upcoming.values() for entry in self._map_ahead(*need))
        ahead = list(islice(needs, MAX_MAPPED_AHEAD))
        self.upcoming.clear()
        self._record_mapped(ahead)
        eager = self._premap_next_slot()
        self._record_mapped(eager)
        return journal, (*ahead, *eager)

    def _prune_premapped(self) -> None:
        """Of what is promised keep the next page of each sequence in memory. Who needs more says so in every step, and
        who left needs nothing."""
        tables = {resident.slot: resident.tables for resident in self.seq_pages.values()}
        for pool in self.size_classes:
            queue = self.empty_queues[pool.groups[0]]
            for page, (group, slot, at) in list(queue.premapped.items()):
                next_one = slot in tables and at == len(tables[slot][group])
                if not next_one or self.mapped_pages[group][slot][at] != page:
                    queue.clear_premapped(page)

    def _record_mapped(self, page_ops: Iterable[Any]) -> None:
        """Remember where pages will lie once these entries are replayed."""
        for entry in page_ops:
            if type(entry) is TableWrite:
                lying, end = self.mapped_pages[entry.group][entry.slot], entry.first_page + len(entry.pages)
                lying += [0] * (end - len(lying))
                for at, page in enumerate(entry.pages, entry.first_page):
                    if page:
                        lying[at] = page

    def forget_free_slots(self) -> list[int]:
        """Count on nothing that lies in free slots: these are they. For measurements of sequences that find nothing."""
        for lying in self.mapped_pages:
            for slot in self.free_slots:
                lying[slot].clear()
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
        """Entries for pages that it will need to have `end` tokens, unless it is gone."""
        if self.seq_pages.get(seq.id) is not seq_pages:
            return
        for g, (policy, table) in enumerate(zip(self.policies, seq_pages.tables)):
            stop = min(policy.reads(seq, seq.planned, end).stop, policy.group.table_width)
            for at in range(len(table), stop):
                if not self.empty_queues[g].free:
                    self.page_pool.make_room(g)
                yield from self._premap(g, seq_pages.slot, at, spare=0)

    def _premap_next_slot(self) -> list[TableWrite]:
        """Entries for the slot that would be given out next, as many as sequences came in with on average."""
        if not self.free_slots or not self.mean_admitted_pages:
            return []
        slot, entries = self.free_slots[-1], list[TableWrite]()
        for g, group in enumerate(self.groups):
            spare = len(self.empty_queues[g]) * (PREMAP_DIVISOR - 1) // PREMAP_DIVISOR
            lying = self.mapped_pages[g][slot]
            for at in range(min(round(self.mean_admitted_pages), group.table_width, MAX_PREMAPPED_NEXT)):
                if at >= len(lying) or not lying[at] or self.page_pool.is_empty(g, lying[at]):  # no prefix to be found
                    entries += self._premap(g, slot, at, spare)
        return entries

    def _premap(self, group: int, slot: int, at: int, spare: int) -> list[TableWrite]:
        """An entry that maps an empty page at a place, where there isn't one, unless no more than `spare` are left. It
        stays empty, and is the last to be given out elsewhere."""
        queue, place = self.empty_queues[group], (group, slot, at)
        page = self._mapped_empty_page(place)
        if page:
            queue.set_premapped(page, place)
            return []
        if len(queue.free) <= spare:
            return []
        page = next(iter(queue.free))
        queue.set_premapped(page, place)
        return [TableWrite(slot, group, at, (page,))]

    # Facts

    def _admit_seq(self, seq: Sequence, plan: Any, admitted: list[SeqPages]) -> SeqPages:
        resident = super()._admit_seq(seq, plan, admitted)
        pages = max(map(len, resident.tables))
        self.mean_admitted_pages += (pages - self.mean_admitted_pages) / 16 if self.mean_admitted_pages else pages
        return resident

    def _usage(self, filled: list[int]) -> Usage:
        usage = super()._usage(filled)
        first = [pool.groups[0] for pool in self.size_classes]
        ahead = sum(len(self.empty_queues[g].premapped) * self.groups[g].page_bytes for g in first)
        return usage._replace(reserved=ahead, free=usage.free - ahead)

    def check(self) -> None:
        super().check()
        for queue in self.empty_queues:
            assert not queue.free.keys() & queue.premapped.keys(), "a page is promised and not"
            for page, (group, slot, at) in queue.premapped.items():
                assert self.mapped_pages[group][slot][at] == page, (
                    f"page {page} was mapped ahead at a place that has another"
                )


def plan_group_buffers(
    spec: ModelSpec, itemsize: int, virtual_layout: VirtualLayout
) -> list[tuple[list[int], BufferLayout]]:
    """The layers of each group, and their buffers."""
    kept = {i: spec.layers[i].group_key for i in spec.kv_layers}
    found = []
    for kind in dict.fromkeys(kept.values()):
        layers = [i for i, other in kept.items() if other == kind]
        size = spec.layers[layers[0]].token_bytes(itemsize) // 2
        found.append((layers, plan_buffers(len(layers), size, virtual_layout.page_kib * 1024, virtual_layout.layout)))
    return found


def choose_virtual_layout(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> VirtualLayout:
    """How memory is cut. What the config doesn't say is chosen for a CPU: buffers of few layers, whose tokens lie close
    together, and small pages, as long as there may be mappings for all; smaller pages where there would be too few."""
    layouts = LAYOUT_CHOICES if config.virtual_layout is None else (config.virtual_layout,)
    pages = PAGE_KIB_CHOICES if config.virtual_page_kib is None else (config.virtual_page_kib,)
    tried = [VirtualLayout(layout, kib) for layout in layouts for kib in pages]
    small = [VirtualLayout(layout, kib) for kib in SMALL_PAGE_KIB_CHOICES if len(pages) > 1 for layout in layouts]
    for cuts, sequences, fewest in ((tried, 2, MIN_PAGES), (small, 1, MIN_PAGES // 2), (tried + small, 1, 1)):
        for cut in cuts:
            if _has_enough(config, spec, size, cut, sequences, fewest):
                return cut
    return min(tried + small, key=lambda cut: max_mappings(config, spec, size, cut))


def _has_enough(
    config: EngineConfig, spec: ModelSpec, size: MemorySize, virtual_layout: VirtualLayout, sequences: int, fewest: int
) -> bool:
    """Whether there are pages for so many of the longest sequences, `fewest` at least, and mappings for all."""
    groups = [buffers for _, buffers in plan_group_buffers(spec, size.itemsize, virtual_layout)]
    enough = all(_count_pages(one, size) >= max(sequences * one.num_pages(size.max_len), fewest) for one in groups)
    return enough and max_mappings(config, spec, size, virtual_layout) <= MAX_MAPPINGS


def max_mappings(config: EngineConfig, spec: ModelSpec, size: MemorySize, virtual_layout: VirtualLayout) -> int:
    """The most mappings of a process, if no two pages happen to lie behind one another, where each place of each slot
    has a page, and the gap behind the last."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    groups = plan_group_buffers(spec, size.itemsize, virtual_layout)
    return (config.max_num_seqs + 1) * sum(one.num_buffers * (one.num_pages(size.max_len) + 1) for _, one in groups)


def _count_pages(buffers: BufferLayout, size: MemorySize) -> int:
    """Pages in the bytes of `size.tokens` tokens; enough for one sequence where these are to be one."""
    least = buffers.num_pages(size.max_len) if size.tokens <= size.max_len else 0
    return max(size.tokens * buffers.token_bytes // buffers.page_bytes, least)


def build_virtual_kv_config(config: EngineConfig, spec: ModelSpec, size: MemorySize) -> KVCacheConfig:
    """The pages for `size.tokens` tokens in every layer, of each group a page in every one of its buffers. StartupError
    if one sequence of `size.max_len` tokens finds no room."""
    cut = choose_virtual_layout(config, spec, size)
    shares = [
        GroupAllocation(
            tuple(layers), one.page_bytes, one.token_bytes, _count_pages(one, size), one.num_pages(size.max_len),
            one.run_tokens,
            one.run_pages, one.num_buffers,
        )
        for layers, one in plan_group_buffers(spec, size.itemsize, cut)
    ]  # fmt: skip
    largest = max(range(len(shares)), key=lambda i: (shares[i].page_bytes, shares[i].num_pages))
    alike = [share for share in shares if share.page_bytes == shares[largest].page_bytes]
    if sum(share.num_pages for share in alike) > sum(share.table_width for share in alike):
        shares[largest] = shares[largest]._replace(
            num_pages=shares[largest].num_pages - 1
        )  # the scratch page is of it too
    needed = sum(share.table_width * share.page_bytes for share in shares)
    there = sum(share.num_pages * share.page_bytes for share in shares)
    some = {share.page_bytes for share in shares if share.num_pages}
    if there < needed or not all(share.page_bytes in some for share in shares):
        raise StartupError(
            f"--memory virtual has {there:,} bytes of pages, and a sequence of {size.max_len:,} tokens takes up to "
            f"{needed:,} of them in pages of {cut.page_kib} KiB in {sum(share.parts for share in shares)} buffers",
            "Use a smaller --max-model-len, --virtual-page-kib or --virtual-layout, or a larger --kv-gib",
        )
    return assign_pages(shares, config, spec, size, KVCacheLayout.CONTIGUOUS)


def virtual_capacity_tokens(kv_config: KVCacheConfig) -> int:
    """Tokens that its pages hold in every layer."""
    found = []
    for ids in {group.ids for group in kv_config.groups}:
        pages = sum(Fraction(group.run_pages, group.run_tokens) for group in kv_config.groups if group.ids == ids)
        found.append(int(len(ids) / pages))
    return min(found)
