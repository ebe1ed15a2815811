"""Swapping: copy the pages of preempted sequences to host memory and back (PagedAttention §4.5).

Host memory has a page pool like the device's; the tables of a swapped sequence name host pages. A page's content is
identified by its sequence's keys, so a page that is still cached on the device is shared, not copied back.

If engines share host memory, cached pages are handed over in the same way: one engine copies them out, and another one
copies them in, under the same keys."""

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
from quire.protocol.shared_host import SharedHostMemory, SharedPage
from quire.protocol.step_plan import Poison, SwapIn, SwapOut

PageMoves = dict[tuple[int, int], int]
"""(group, page) -> the page to which its content is copied; SCRATCH while it is not known."""
IMPORTER = 0  # stands for the request to which imported pages are allocated; no sequence has this id


class Swap:
    """The host pages of a memory with these tables. A sequence computes up to `max_step_tokens` tokens in a step. With
    `shared_host` the host pages are in this engine's part of memory that several engines share."""

    def __init__(
        self, page_tables: PageTables, prefix_cache: PrefixCache, max_step_tokens: int,
        shared_host: SharedHostMemory | None = None,
    ) -> None:  # fmt: skip
        self.page_tables, self.prefix_cache, self.max_step_tokens = page_tables, prefix_cache, max_step_tokens
        host_ids = [group.host_ids for group in page_tables.groups]
        self.host_pool = build_page_pool(page_tables.kv_config, host_ids, page_tables.association)
        # A two-level pool has a scratch large page, and host memory has none: its pages are numbered from 1.
        large = page_tables.kv_config.large_bytes
        self.host_id_offset = [large // group.page_bytes - 1 if large else 0 for group in page_tables.groups]
        self.shared_host = shared_host
        sizes = [group.page_bytes for group in page_tables.groups]
        start = 0 if shared_host is None else shared_host.part_start(sizes)
        self.first_address = [start // size - offset for size, offset in zip(sizes, self.host_id_offset)]
        self.seq_pages: dict[int, SeqPages] = {}  # with host pages in their tables
        self.exported_pages: list[dict[int, None]] = [{} for _ in sizes]  # of each group, host pages for other engines
        self.out_bytes = self.in_bytes = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Copy every page of these sequences to host pages, a shared page once, and release pages and slots."""
        assert all(seq.not_in_flight for seq in seqs), "a sequence is swapped out while in flight"
        tables = self.page_tables
        leaving = [tables.seq_pages[seq.id] for seq in seqs]
        moves = {move: to for move, to in _distinct_pages(leaving).items() if not tables.policies[move[0]].media}
        if not self.host_pool.reserve(self._count_by_group(moves)):
            return False
        owner = leaving[0].owner
        for g, run in groupby(list(moves), itemgetter(0)):
            pages = [page for _, page in run]
            for page, to in zip(pages, self.host_pool.allocate(g, len(pages), owner)):
                moves[g, page] = to
                tables.page_ops.append(SwapOut(g, page, to + self.first_address[g]))
            self.out_bytes += len(pages) * tables.groups[g].page_bytes
        for seq, seq_pages in zip(seqs, leaving):
            tables.free(seq)
            seq_pages.tables = _remap(
                tables.encoder_cache.drop_image_tables(seq, seq_pages.tables, seq.computed), moves
            )
            self.seq_pages[seq.id] = seq_pages
        _incref_tables(self.host_pool, leaving)
        if tables.debug:
            tables.page_ops += [Poison(g, page) for g, page in moves if tables.page_pool.is_empty(g, page)]
        return True

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Move sequences that were swapped out together back: their pages are copied, or shared with cached ones."""
        tables, pool = self.page_tables, self.page_tables.page_pool
        swapped = [self.seq_pages[seq.id] for seq in seqs]
        moves, keys = _distinct_pages(swapped), self._page_keys(seqs, swapped)
        for (g, host), key in keys.items():
            moves[g, host] = pool.find(g, key) or SCRATCH
        if len(seqs) > len(tables.free_slots):
            return False
        if not self._reserve(moves, self._next_step_needs(seqs, swapped)):
            if tables.seq_pages:
                return False
            # Cached pages may be spread over more large pages than they fill. Without them the sequences fit alone.
            self.prefix_cache.compact()
            moves = dict.fromkeys(moves, SCRATCH)
            if not self._reserve(moves, [0] * len(tables.groups)):
                return False
        for g, page in dict.fromkeys((g, page) for (g, _), page in moves.items() if page):
            pool.incref(g, page)
        owner = swapped[0].owner
        for g, run in groupby([move for move, page in moves.items() if not page], itemgetter(0)):
            hosts = list(run)
            for (_, host), page in zip(hosts, tables.allocate_pages(g, len(hosts), owner)):
                moves[g, host] = page
                tables.page_ops.append(SwapIn(g, host + self.first_address[g], page))
                if (g, host) in keys:
                    pool.publish(g, page, keys[g, host])
            self.in_bytes += len(hosts) * tables.groups[g].page_bytes
        for seq, old in zip(seqs, swapped):
            self.free(seq)
            seq_pages = tables.attach(seq, _remap(old.tables, moves), owner=owner)
            seq_pages.copy_progress(old)
            seq_pages.capacity, seq_pages.requested_tokens = old.capacity, old.requested_tokens
            seq_pages.needs_cow_check = old.needs_cow_check
            if self.prefix_cache.cache_log is not None:
                self.prefix_cache.cache_log.describe(seq, 0, old.published_tokens)
            if seq.images:  # their pages are missing
                seq_pages.needs_cow_check = True
                seq_pages.capacity = max(tables.capacity_of(seq, seq_pages), seq.computed)
                seq_pages.requested_tokens = min(seq_pages.requested_tokens, seq_pages.capacity)
        _incref_tables(pool, [tables.seq_pages[seq.id] for seq in seqs])
        return True

    def _next_step_needs(self, seqs: Seq[Sequence], swapped: list[SeqPages]) -> list[int]:
        """Return the pages of each group needed besides the swapped ones: one for each sequence, or, if no other
        sequence is in memory, those of their next step."""
        tables = self.page_tables
        if tables.seq_pages:
            return [len(seqs)] * len(tables.groups)
        needs = [0] * len(tables.groups)
        known: set[tuple[int, bytes]] = set()
        for seq, seq_pages in zip(seqs, swapped):
            end = max(min(len(seq.tokens), seq.computed + self.max_step_tokens), seq.computed + 1)
            firsts, stops = [len(table) for table in seq_pages.tables], [0] * len(tables.groups)
            for g, (policy, table) in enumerate(zip(tables.policies, seq_pages.tables)):
                if policy.media:
                    stops[g] = policy.reads(seq, seq.computed, end).stop
                else:
                    needs[g] += (
                        max(policy.reads(seq, seq.computed, end).stop - len(table), 0) + seq_pages.needs_cow_check
                    )
            image_needs = tables.encoder_cache.count_needs(seq, firsts, stops, known)
            needs = list(map(add, needs, image_needs.new_pages))
            for g, _ in image_needs.cached_pages:
                needs[g] += 1
        return needs

    def _reserve(self, moves: PageMoves, spare: list[int]) -> bool:
        """Reserve pages for all moves without a page, `spare` more of each group, and the reused cached pages."""
        pool = self.page_tables.page_pool
        # Several host pages may map to one device page, if sequences sampled the same tokens.
        cached_hits = pool.find_cached_hits(dict.fromkeys((g, page) for (g, _), page in moves.items() if page))
        missing = self._count_by_group(move for move, page in moves.items() if not page)
        return pool.reserve([sum(counts) for counts in zip(missing, cached_hits.num_pages, spare)], cached_hits)

    def _page_keys(self, seqs: Seq[Sequence], swapped: list[SeqPages]) -> dict[tuple[int, int], bytes]:
        """Return the keys of the host pages whose content may be cached on the device."""
        keys: dict[tuple[int, int], bytes] = {}
        for seq, seq_pages in zip(seqs, swapped) if self.prefix_cache.caching else ():
            if seq_pages.is_stale:
                continue
            for g, policy in enumerate(self.page_tables.policies):
                table, first = seq_pages.tables[g], seq_pages.first_page[g]
                published = seq_pages.published_drafts if policy.group.is_draft else seq_pages.published_tokens
                last = min(policy.group.num_full_pages(published), len(table))
                if policy.unit:
                    names = self.prefix_cache.page_keys(g, seq.page_keys, first, last)
                    keys |= {(g, page): key for page, key in zip(table[first:last], names)}
        return keys

    def _count_by_group(self, pages: Iterable[tuple[int, int]]) -> list[int]:
        counts = [0] * len(self.page_tables.groups)
        for g, _ in pages:
            counts[g] += 1
        return counts

    def free(self, seq: Sequence) -> None:
        """Release the host pages of a swapped sequence that has ended or was swapped in."""
        seq_pages = self.seq_pages.pop(seq.id)
        self.host_pool.decref_tables(seq_pages.tables)
        self.host_pool.remove_owner(seq_pages.owner)

    # Pages for other engines

    def export_prefix(self, seq: Sequence) -> list[SharedPage]:
        """Copy the cached pages of the longest prefix of `seq` that a request can reuse to host pages, where another
        engine reads them, until `release_exported`. Return none if nothing is cached, or without free host pages."""
        tables, exported = self.page_tables, list[SharedPage]()
        if self.shared_host is None or not self.prefix_cache.caching:
            return exported
        hit = self.prefix_cache.find_cached(seq)
        if not self.host_pool.reserve([sum(map(bool, table)) for table in hit.tables]):
            return exported
        for g, table in enumerate(hit.tables):
            keys = self.prefix_cache.page_keys(g, seq.page_keys, 0, len(table)) if table else ()
            found = [(page, key) for page, key in zip(table, keys) if page]
            for (page, key), host in zip(found, self.host_pool.allocate(g, len(found))):
                self.exported_pages[g][host] = None
                exported.append(SharedPage(g, host + self.first_address[g], key))
                tables.page_ops.append(SwapOut(g, page, exported[-1].host_page))
        return exported

    def is_address(self, page: SharedPage) -> bool:
        """Return True if a page of that group can be in the shared host memory."""
        groups, shared = self.page_tables.groups, self.shared_host
        if shared is None or page.group >= len(groups):
            return False
        total = shared.num_parts * shared.part_bytes(group.page_bytes for group in groups)
        return 0 < page.host_page <= total // groups[page.group].page_bytes

    def release_exported(self, pages: Iterable[SharedPage]) -> None:
        """Release the host pages of `export_prefix`."""
        for g, host_page, _ in pages:
            del self.exported_pages[g][host_page - self.first_address[g]]
            self.host_pool.decref(g, [host_page - self.first_address[g]])

    def import_pages(self, pages: Seq[SharedPage]) -> bool:
        """Copy pages of another engine into the prefix cache, where the next admission finds them. Return False, and
        change nothing, if there is no room for all of them."""
        tables, pool = self.page_tables, self.page_tables.page_pool
        distinct = {(g, key): host for g, host, key in pages}
        known = {(g, key): page for g, key in distinct if (page := pool.find(g, key)) is not None}
        missing = {at: host for at, host in distinct.items() if at not in known}
        cached_hits = pool.find_cached_hits((g, page) for (g, _), page in known.items())
        needs = self._count_by_group((g, 0) for g, _ in missing)
        if not pool.reserve(list(map(add, needs, cached_hits.num_pages)), cached_hits, margin=bool(tables.seq_pages)):
            return False
        held: Tables = [[] for _ in tables.groups]
        for (g, _), page in known.items():
            pool.incref(g, page)
            held[g].append(page)
        for g, count in enumerate(needs):
            arrivals = [(key, host) for (group, key), host in missing.items() if group == g]
            for (key, host), page in zip(arrivals, tables.allocate_pages(g, count, IMPORTER) if count else ()):
                tables.page_ops.append(SwapIn(g, host, page))
                pool.publish(g, page, key)
                held[g].append(page)
        pool.decref_tables(held)
        pool.remove_owner(IMPORTER)
        return True

    def check(self) -> None:
        """Assert that every host page is free, exported, or named by a swapped sequence."""
        named = [dict.fromkeys(pages, 1) for pages in self.exported_pages]
        for seq_pages in self.seq_pages.values():
            for g, table in enumerate(seq_pages.tables):
                for page in filter(None, table):
                    named[g][page] = named[g].get(page, 0) + 1
        self.host_pool.check(named)


def _distinct_pages(seq_pages_list: list[SeqPages]) -> PageMoves:
    """Return all pages of these tables, each once, without targets."""
    named = ((g, page) for seq_pages in seq_pages_list for g, table in enumerate(seq_pages.tables) for page in table)
    return {move: SCRATCH for move in named if move[1]}


def _remap(tables: Tables, moves: PageMoves) -> Tables:
    return [[moves[g, page] if page else SCRATCH for page in table] for g, table in enumerate(tables)]


def _incref_tables(page_pool: PagePool | TwoLevelPagePool | PoolView, seq_pages_list: list[SeqPages]) -> None:
    """Count the references of these tables. One reference of each page is counted already."""
    counted: set[tuple[int, int]] = set()
    for seq_pages in seq_pages_list:
        for g, table in enumerate(seq_pages.tables):
            page_pool.incref_used(g, [page for page in table if (g, page) in counted])
            counted.update((g, page) for page in table if page)
