"""Swapping: sequences whose pages were copied to host memory, to come back later (PagedAttention §4.5).

Host memory has the same ledger as the device; the tables of a swapped sequence name pages there. What a page holds is
said by its sequence's keys, so one that is still cached on the device is shared, not copied back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import groupby
from operator import add, itemgetter

from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import SCRATCH, PagePool
from quire.memory.page_tables import PageTables, build_page_pool
from quire.memory.prefix_cache import PrefixCache
from quire.memory.seq_pages import SeqPages, Tables
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import Poison, SwapIn, SwapOut

PageMoves = dict[tuple[int, int], int]
"""Pages, as (group, page), and where the content of each goes; SCRATCH while that isn't known."""


class Swap:
    """The host pages of a memory of these tables, whose sequences compute up to `max_step_tokens` tokens in a step."""

    def __init__(self, page_tables: PageTables, prefix_cache: PrefixCache, max_step_tokens: int) -> None:
        self.page_tables, self.prefix_cache, self.max_step_tokens = page_tables, prefix_cache, max_step_tokens
        host_ids = [group.host_ids for group in page_tables.groups]
        self.host_pool = build_page_pool(page_tables.kv_config, host_ids, page_tables.association)
        # The ledger of large pages has a scratch one too, and host memory none: its pages are numbered from 1 on.
        large = page_tables.kv_config.large_bytes
        self.host_id_offset = [large // group.page_bytes - 1 if large else 0 for group in page_tables.groups]
        self.seq_pages: dict[int, SeqPages] = {}  # with host pages in their tables
        self.out_bytes = self.in_bytes = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Copy every page of these sequences to host pages, a shared one once, and let go of pages and slots."""
        assert all(seq.not_in_flight for seq in seqs), "a sequence is swapped out while in flight"
        tables = self.page_tables
        residents = [tables.seq_pages[seq.id] for seq in seqs]
        moves = {move: to for move, to in _distinct_pages(residents).items() if not tables.policies[move[0]].media}
        if not self.host_pool.reserve(self._count_by_group(moves)):
            return False
        owner = residents[0].owner
        for g, run in groupby(list(moves), itemgetter(0)):
            pages = [page for _, page in run]
            for page, to in zip(pages, self.host_pool.allocate(g, len(pages), owner)):
                moves[g, page] = to
                tables.page_ops.append(SwapOut(g, page, to - self.host_id_offset[g]))
            self.out_bytes += len(pages) * tables.groups[g].page_bytes
        for seq, resident in zip(seqs, residents):
            tables.free(seq)
            resident.tables = _remap(tables.encoder_cache.drop_image_tables(seq, resident.tables, seq.computed), moves)
            self.seq_pages[seq.id] = resident
        _incref_tables(self.host_pool, residents)
        if tables.debug:
            tables.page_ops += [Poison(g, page) for g, page in moves if tables.page_pool.is_empty(g, page)]
        return True

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring sequences that were swapped out together back into pages: copied, or shared with cached ones that are
        still there."""
        tables, ledger = self.page_tables, self.page_tables.page_pool
        away = [self.seq_pages[seq.id] for seq in seqs]
        moves, names = _distinct_pages(away), self._page_keys(seqs, away)
        for (g, host), name in names.items():
            moves[g, host] = ledger.find(g, name) or SCRATCH
        if len(seqs) > len(tables.free_slots):
            return False
        if not self._reserve(moves, self._next_step_needs(seqs, away)):
            if tables.seq_pages:
                return False
            # What is found may lie in more large pages than it would fill: without it they fit, alone.
            self.prefix_cache.compact()
            moves = dict.fromkeys(moves, SCRATCH)
            if not self._reserve(moves, [0] * len(tables.groups)):
                return False
        for g, page in dict.fromkeys((g, page) for (g, _), page in moves.items() if page):
            ledger.incref(g, page)
        owner = away[0].owner
        for g, run in groupby([move for move, page in moves.items() if not page], itemgetter(0)):
            hosts = list(run)
            for (_, host), page in zip(hosts, tables.allocate_pages(g, len(hosts), owner)):
                moves[g, host] = page
                tables.page_ops.append(SwapIn(g, host - self.host_id_offset[g], page))
                if (g, host) in names:
                    ledger.publish(g, page, names[g, host])
            self.in_bytes += len(hosts) * tables.groups[g].page_bytes
        for seq, old in zip(seqs, away):
            self.free(seq)
            resident = tables.attach(seq, _remap(old.tables, moves), owner=owner)
            resident.capacity, resident.requested_tokens, resident.pruned_tokens = (
                old.capacity,
                old.requested_tokens,
                old.pruned_tokens,
            )
            resident.published_tokens, resident.needs_cow_check, resident.drops_at = (
                old.published_tokens,
                old.needs_cow_check,
                old.drops_at,
            )
            resident.prefix_ends, resident.is_stale = old.prefix_ends, old.is_stale
            if seq.images:  # its pictures are missing
                resident.needs_cow_check, resident.capacity = True, max(tables.capacity_of(seq, resident), seq.computed)
                resident.requested_tokens = min(resident.requested_tokens, resident.capacity)
        _incref_tables(ledger, [tables.seq_pages[seq.id] for seq in seqs])
        return True

    def _next_step_needs(self, seqs: Seq[Sequence], swapped: list[SeqPages]) -> list[int]:
        """Pages of each group: one more for each of them; alone, those of their next step."""
        tables = self.page_tables
        if tables.seq_pages:
            return [len(seqs)] * len(tables.groups)
        needs = [0] * len(tables.groups)
        known: set[tuple[int, bytes]] = set()
        for seq, resident in zip(seqs, swapped):
            end = max(min(len(seq.tokens), seq.computed + self.max_step_tokens), seq.computed + 1)
            firsts, stops = [len(table) for table in resident.tables], [0] * len(tables.groups)
            for g, (policy, table) in enumerate(zip(tables.policies, resident.tables)):
                if policy.media:
                    stops[g] = policy.reads(seq, seq.computed, end).stop
                else:
                    needs[g] += (
                        max(policy.reads(seq, seq.computed, end).stop - len(table), 0) + resident.needs_cow_check
                    )
            asked = tables.encoder_cache.count_needs(seq, firsts, stops, known)
            needs = list(map(add, needs, asked.new_pages))
            for g, _ in asked.cached_pages:
                needs[g] += 1
        return needs

    def _reserve(self, moves: PageMoves, spare: list[int]) -> bool:
        """Whether there are pages for all that has no page yet, `spare` more of each group, and those that are
        cached."""
        ledger = self.page_tables.page_pool
        # Of sequences that drew the same tokens several host pages may come back to one.
        resting = ledger.find_cached_hits(dict.fromkeys((g, page) for (g, _), page in moves.items() if page))
        missing = self._count_by_group(move for move, page in moves.items() if not page)
        return ledger.reserve([sum(counts) for counts in zip(missing, resting.num_pages, spare)], resting)

    def _page_keys(self, seqs: Seq[Sequence], swapped: list[SeqPages]) -> dict[tuple[int, int], bytes]:
        """What host pages hold, where it may be found on the device."""
        found: dict[tuple[int, int], bytes] = {}
        for seq, resident in zip(seqs, swapped) if self.prefix_cache.caching else ():
            if resident.is_stale:
                continue
            for g, policy in enumerate(self.page_tables.policies):
                table, first = resident.tables[g], resident.first_page[g]
                last = min(policy.group.num_full_pages(resident.published_tokens), len(table))
                if policy.unit:
                    names = self.prefix_cache.page_keys(g, seq.page_keys, first, last)
                    found |= {(g, page): name for page, name in zip(table[first:last], names)}
        return found

    def _count_by_group(self, pages: Iterable[tuple[int, int]]) -> list[int]:
        counts = [0] * len(self.page_tables.groups)
        for g, _ in pages:
            counts[g] += 1
        return counts

    def free(self, seq: Sequence) -> None:
        """A swapped sequence ended, or came back: let go of its host pages."""
        resident = self.seq_pages.pop(seq.id)
        self.host_pool.decref_tables(resident.tables)
        self.host_pool.remove_owner(resident.owner)

    def check(self) -> None:
        """Assert that every host page is free or named by a swapped sequence."""
        named: list[dict[int, int]] = [{} for _ in self.page_tables.groups]
        for resident in self.seq_pages.values():
            for g, table in enumerate(resident.tables):
                for page in filter(None, table):
                    named[g][page] = named[g].get(page, 0) + 1
        self.host_pool.check(named)


def _distinct_pages(seq_pages_list: list[SeqPages]) -> PageMoves:
    """All pages of these tables, each once."""
    named = ((g, page) for resident in seq_pages_list for g, table in enumerate(resident.tables) for page in table)
    return {move: SCRATCH for move in named if move[1]}


def _remap(tables: Tables, moves: PageMoves) -> Tables:
    return [[moves[g, page] if page else SCRATCH for page in table] for g, table in enumerate(tables)]


def _incref_tables(page_pool: PagePool | TwoLevelPagePool | PoolView, seq_pages_list: list[SeqPages]) -> None:
    """Count the references of these tables, of whose pages each was counted once."""
    counted: set[tuple[int, int]] = set()
    for resident in seq_pages_list:
        for g, table in enumerate(resident.tables):
            page_pool.incref_used(g, [page for page in table if (g, page) in counted])
            counted.update((g, page) for page in table if page)
