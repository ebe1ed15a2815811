"""Virtual memory (vAttention §4-6): a sequence's tokens are contiguous in addresses, and pages are mapped under them on
demand. Page tables are what they are in PagedMemory, but the device's memory-management unit executes them: a `Table`
entry says which page lies at which place of which slot (the paper's reqId), and the runner maps it there.

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
from quire.control.memory.answers import Usage
from quire.control.memory.buffers import Buffers, buffers_of
from quire.control.memory.layout import Share, Size, shared_out
from quire.control.memory.paged import PagedMemory
from quire.control.memory.pages import Empty, Ledger, Place, Queue
from quire.control.memory.policies import policies_for
from quire.control.memory.tables import Resident, Tables
from quire.control.request import Sequence
from quire.errors import StartupError
from quire.vocabulary.plan import Journal, Table
from quire.vocabulary.specs import Geometry, Layout, ModelSpec

LOOKED_AT = 32
"""Free slots that a sequence may get: those that came back last."""

MOST_AHEAD = 1024
"""Pages that are mapped ahead in one step: what a chunk of a prompt needs, and as many decodes as there are."""

MOST_NEXT = 64
"""Pages of a group that are kept mapped for the next sequence: looked at in every step."""

SHARE_AHEAD = 4
"""At most a fourth of the empty pages is mapped for the next sequence (§6.2.2), which nobody may need."""


class Cut(NamedTuple):
    """Which layers share a buffer (see `buffers_of`), and the KiB of a page of it."""

    layout: str
    kib: int


LAYOUTS = ("layer", "sliced:4", "sliced")
LARGER, SMALLER = (64, 128, 256, 512, 1024, 2048), (32, 16, 8, 4)
"""What is tried on a CPU where nothing is said, in this order."""

FEWEST = 32  # pages of a group, where there is a choice

MOST_MAPPINGS = 32_000
"""Of a process: half of what Linux allows where nobody changed it."""


class VirtualMemory(PagedMemory):
    """See KVMemory. With `ahead` what the next step will need is mapped while this one computes (§6.1.1), and so is the
    beginning of the slot that the next sequence will get (§6.1.3)."""

    stack: Callable[[Iterable[int]], Empty] = Queue

    def __init__(self, geometry: Geometry, *, ahead: bool = True, **settings: Any) -> None:
        super().__init__(geometry, **settings)
        self.ahead = ahead
        # The page that lies at each place of each slot, a table a group; 0: none.
        self.lying: list[list[list[int]]] = [[[] for _ in range(geometry.slots)] for _ in self.groups]
        self.soon: dict[int, tuple[Sequence, Resident, int]] = {}  # who will need room, and for how many tokens
        self.queues: list[Queue] = []  # the empty pages of each group; those that are mapped ahead are promised
        assert isinstance(self.pages, Ledger), "pages that are mapped are of one level"
        self.pools = self.pages.pools
        for pool in self.pages.of:
            assert isinstance(pool.empty, Queue), "remembered pages are given out in a certain order"
            self.queues.append(pool.empty)
        self.prompts = 0.0  # mean pages that sequences came in with

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: Size, model_id: str = "") -> VirtualMemory:
        """A memory of `size` for `spec`'s layers, in pages and buffers as the config says."""
        assert config.max_num_batched_tokens is not None, "a memory is built for a known number of tokens in a step"
        return cls(
            virtual_geometry(config, spec, size),
            ahead=config.map_ahead != "off",
            chunk=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            debug=config.debug,
            prefix_tokens=config.prefix_tokens,
            policies=policies_for(layer.kind for layer in spec.layers),
            retention=config.retention,
        )

    # Which slot, and which page

    def take_slot(self, tables: Tables, length: int) -> int:
        best, least = len(self.slots) - 1, None
        for i in range(len(self.slots) - 1, max(len(self.slots) - 1 - LOOKED_AT, -1), -1):
            price = self._price(self.slots[i], tables, length)
            if least is None or price < least:
                best, least = i, price
        return self.slots.pop(best)

    def _price(self, slot: int, tables: Tables, length: int) -> tuple[int, int]:
        """Pages to be mapped there for these tables and `length` tokens; and how many others lie there, for another
        sequence to find."""
        price = spare = 0
        for g, table in enumerate(tables):
            lying, named = self.lying[g][slot], len(table)
            count, first = max(named, self.groups[g].pages(length)), lying[:named]
            there = named if first == table else sum(map(eq, first, table))
            # What isn't there at the beginning isn't behind it: that is given away first.
            if named < len(lying) and (there == named or not named) and self._is_empty(g, lying[named]):
                there += sum(self._is_empty(g, page) for page in lying[named:count])
            price += count - there
            spare += max(len(lying) - count, 0)
        return price, spare

    def _is_empty(self, group: int, page: int) -> bool:
        """Whether the page that lies at a place can be had there."""
        return page > 0 and self.pages.is_empty(group, page)

    def pick(self, group: int, count: int, owner: int, slot: int, at: int) -> list[int]:
        pages = []
        for place in range(at, at + count):
            page = self._there((group, slot, place))
            if page:
                self.queues[group].put_first(page)
            pages.append(self.pages.take(group))
        return pages

    def _there(self, place: Place) -> int:
        """The page that lies at a place, if it is empty and not promised to another one; else 0."""
        group, slot, at = place
        lying = self.lying[group][slot]
        page = lying[at] if at < len(lying) else 0
        usable = page and self.pages.is_empty(group, page) and self.queues[group].promised.get(page, place) == place
        return page if usable else 0

    # Ahead of need

    def grow(self, seq: Sequence, length: int) -> bool:
        there = super().grow(seq, length)
        resident = self.residents[seq.id]
        if self.ahead and there and length >= resident.room and length < (seq.final or length + 1):
            left = len(seq.tokens) - length
            self.soon[seq.id] = seq, resident, length + (min(left, self.chunk) if left > 0 else 1)
        return there

    def take_journal(self) -> tuple[Journal, Journal]:
        journal, _ = super().take_journal()
        self._lies(journal)
        if not self.ahead:
            return journal, ()
        self._renew()
        needs = (entry for need in self.soon.values() for entry in self._map_ahead(*need))
        ahead = list(islice(needs, MOST_AHEAD))
        self.soon.clear()
        self._lies(ahead)
        eager = self._map_next()
        self._lies(eager)
        return journal, (*ahead, *eager)

    def _renew(self) -> None:
        """Of what is promised keep the next page of each sequence in memory. Who needs more says so in every step, and
        who left needs nothing."""
        tables = {resident.slot: resident.tables for resident in self.residents.values()}
        for pool in self.pools:
            queue = self.queues[pool.groups[0]]
            for page, (group, slot, at) in list(queue.promised.items()):
                next_one = slot in tables and at == len(tables[slot][group])
                if not next_one or self.lying[group][slot][at] != page:
                    queue.release(page)

    def _lies(self, entries: Iterable[Any]) -> None:
        """Remember where pages will lie once these entries are replayed."""
        for entry in entries:
            if type(entry) is Table:
                lying, end = self.lying[entry.group][entry.slot], entry.at + len(entry.pages)
                lying += [0] * (end - len(lying))
                for at, page in enumerate(entry.pages, entry.at):
                    if page:
                        lying[at] = page

    def forget(self) -> list[int]:
        """Count on nothing that lies in free slots: these are they. For measurements of sequences that find nothing."""
        for lying in self.lying:
            for slot in self.slots:
                lying[slot].clear()
        free = set(self.slots)
        for queue in self.queues:
            for page, (_, slot, _) in list(queue.promised.items()):
                if slot in free:
                    queue.release(page)
        return list(self.slots)

    def renew(self) -> None:
        super().renew()
        self.forget()

    def _map_ahead(self, seq: Sequence, resident: Resident, end: int) -> Iterable[Table]:
        """Entries for pages that it will need to have `end` tokens, unless it is gone."""
        if self.residents.get(seq.id) is not resident:
            return
        for g, (policy, table) in enumerate(zip(self.policies, resident.tables)):
            stop = min(policy.reads(seq, seq.planned, end).stop, policy.group.table_width)
            for at in range(len(table), stop):
                if not self.queues[g].free:
                    self.pages.make_room(g)
                yield from self._promise(g, resident.slot, at, spare=0)

    def _map_next(self) -> list[Table]:
        """Entries for the slot that would be given out next, as many as sequences came in with on average."""
        if not self.slots or not self.prompts:
            return []
        slot, entries = self.slots[-1], list[Table]()
        for g, group in enumerate(self.groups):
            spare = len(self.queues[g]) * (SHARE_AHEAD - 1) // SHARE_AHEAD
            lying = self.lying[g][slot]
            for at in range(min(round(self.prompts), group.table_width, MOST_NEXT)):
                if at >= len(lying) or not lying[at] or self.pages.is_empty(g, lying[at]):  # no prefix to be found
                    entries += self._promise(g, slot, at, spare)
        return entries

    def _promise(self, group: int, slot: int, at: int, spare: int) -> list[Table]:
        """An entry that maps an empty page at a place, where there isn't one, unless no more than `spare` are left. It
        stays empty, and is the last to be given out elsewhere."""
        queue, place = self.queues[group], (group, slot, at)
        page = self._there(place)
        if page:
            queue.promise(page, place)
            return []
        if len(queue.free) <= spare:
            return []
        page = next(iter(queue.free))
        queue.promise(page, place)
        return [Table(slot, group, at, (page,))]

    # Facts

    def _come(self, seq: Sequence, one: Any, before: list[Resident]) -> Resident:
        resident = super()._come(seq, one, before)
        pages = max(map(len, resident.tables))
        self.prompts += (pages - self.prompts) / 16 if self.prompts else pages
        return resident

    def _usage(self, filled: list[int]) -> Usage:
        usage = super()._usage(filled)
        first = [pool.groups[0] for pool in self.pools]
        ahead = sum(len(self.queues[g].promised) * self.groups[g].page_bytes for g in first)
        return usage._replace(reserved=ahead, free=usage.free - ahead)

    def check(self) -> None:
        super().check()
        for queue in self.queues:
            assert not queue.free.keys() & queue.promised.keys(), "a page is promised and not"
            for page, (group, slot, at) in queue.promised.items():
                assert self.lying[group][slot][at] == page, f"page {page} was mapped ahead at a place that has another"


def buffers_for(spec: ModelSpec, itemsize: int, cut: Cut) -> list[tuple[list[int], Buffers]]:
    """The layers of each group, and their buffers."""
    kept = {i: spec.layers[i].kept for i in spec.owners}
    found = []
    for kind in dict.fromkeys(kept.values()):
        layers = [i for i, other in kept.items() if other == kind]
        size = spec.layers[layers[0]].token_bytes(itemsize) // 2
        found.append((layers, buffers_of(len(layers), size, cut.kib * 1024, cut.layout)))
    return found


def cut_of(config: EngineConfig, spec: ModelSpec, size: Size) -> Cut:
    """How memory is cut. What the config doesn't say is chosen for a CPU: buffers of few layers, whose tokens lie close
    together, and small pages, as long as there may be mappings for all; smaller pages where there would be too few."""
    layouts = LAYOUTS if config.virtual_layout is None else (config.virtual_layout,)
    pages = LARGER if config.virtual_page_kib is None else (config.virtual_page_kib,)
    tried = [Cut(layout, kib) for layout in layouts for kib in pages]
    small = [Cut(layout, kib) for kib in SMALLER if len(pages) > 1 for layout in layouts]
    for cuts, sequences, fewest in ((tried, 2, FEWEST), (small, 1, FEWEST // 2), (tried + small, 1, 1)):
        for cut in cuts:
            if _suits(config, spec, size, cut, sequences, fewest):
                return cut
    return min(tried + small, key=lambda cut: mappings(config, spec, size, cut))


def _suits(config: EngineConfig, spec: ModelSpec, size: Size, cut: Cut, sequences: int, fewest: int) -> bool:
    """Whether there are pages for so many of the longest sequences, `fewest` at least, and mappings for all."""
    groups = [buffers for _, buffers in buffers_for(spec, size.itemsize, cut)]
    enough = all(_count(one, size) >= max(sequences * one.pages(size.max_len), fewest) for one in groups)
    return enough and mappings(config, spec, size, cut) <= MOST_MAPPINGS


def mappings(config: EngineConfig, spec: ModelSpec, size: Size, cut: Cut) -> int:
    """The most mappings of a process, if no two pages happen to lie behind one another, where each place of each slot
    has a page, and the gap behind the last."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    groups = buffers_for(spec, size.itemsize, cut)
    return (config.max_num_seqs + 1) * sum(one.parts * (one.pages(size.max_len) + 1) for _, one in groups)


def _count(buffers: Buffers, size: Size) -> int:
    """Pages in the bytes of `size.tokens` tokens; enough for one sequence where these are to be one."""
    least = buffers.pages(size.max_len) if size.tokens <= size.max_len else 0
    return max(size.tokens * buffers.token_bytes // buffers.page_bytes, least)


def virtual_geometry(config: EngineConfig, spec: ModelSpec, size: Size) -> Geometry:
    """The pages for `size.tokens` tokens in every layer, of each group a page in every one of its buffers. StartupError
    if one sequence of `size.max_len` tokens finds no room."""
    cut = cut_of(config, spec, size)
    shares = [
        Share(
            tuple(layers), one.page_bytes, one.token_bytes, _count(one, size), one.pages(size.max_len), one.run_tokens,
            one.run_pages, one.parts,
        )
        for layers, one in buffers_for(spec, size.itemsize, cut)
    ]  # fmt: skip
    largest = max(range(len(shares)), key=lambda i: (shares[i].page_bytes, shares[i].many))
    alike = [share for share in shares if share.page_bytes == shares[largest].page_bytes]
    if sum(share.many for share in alike) > sum(share.table_width for share in alike):
        shares[largest] = shares[largest]._replace(many=shares[largest].many - 1)  # the scratch page is of it too
    needed = sum(share.table_width * share.page_bytes for share in shares)
    there = sum(share.many * share.page_bytes for share in shares)
    some = {share.page_bytes for share in shares if share.many}
    if there < needed or not all(share.page_bytes in some for share in shares):
        raise StartupError(
            f"--memory virtual has {there:,} bytes of pages, and a sequence of {size.max_len:,} tokens takes up to "
            f"{needed:,} of them in pages of {cut.kib} KiB in {sum(share.parts for share in shares)} buffers",
            "Use a smaller --max-model-len, --virtual-page-kib or --virtual-layout, or a larger --kv-gib",
        )
    return shared_out(shares, config, spec, size, Layout.CONTIGUOUS)


def capacity(geometry: Geometry) -> int:
    """Tokens that its pages hold in every layer."""
    found = []
    for ids in {group.ids for group in geometry.groups}:
        pages = sum(Fraction(group.run_pages, group.run_tokens) for group in geometry.groups if group.ids == ids)
        found.append(int(len(ids) / pages))
    return min(found)
