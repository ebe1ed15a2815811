"""Paged memory: fixed-size pages anywhere, a page table a sequence and layer group (PagedAttention §4.2-4.4).

Here is how sequences come in, with what they can share of the prefixes that are there: full pages are published under
chained keys, so that a later sequence with the same prefix finds them. What that takes (arrivals.py), tables, prefixes,
pictures and swapping have files of their own.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import EngineConfig
from quire.memory.answers import DEFERRED, Account, Admission, Deferred, Placement, Sharing, TypeUsage, Usage
from quire.memory.encoder_cache import ImageNeeds
from quire.memory.jenga.retention import DEFAULT_SLACK, Retention
from quire.memory.jenga.shared_pool import PoolView
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.memory.page_pool import CachedHits
from quire.memory.page_tables import PageTables
from quire.memory.policies import (
    FAR,
    POLICIES,
    ImagePolicy,
    Policies,
    find_contradictions,
    max_pages_at_once,
    peak_pages,
    policies_for,
)
from quire.memory.prefix_cache import PrefixCache, PrefixHit
from quire.memory.prefix_waiters import PrefixWaiters
from quire.memory.seq_pages import SeqPages, Tables
from quire.memory.swap import Swap
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOps

if TYPE_CHECKING:
    pass


class PagedMemory(PageTables):
    """See KVMemory. `max_step_tokens` is the largest number of tokens computed in one step, `prefix_tokens` are kept
    for registered prefixes, `retention`, `slack` and `every_tokens` say what is kept behind windows (see Retention)."""

    def __init__(
        self,
        kv_config: KVCacheConfig,
        *,
        max_step_tokens: int,
        caching: bool = True,
        model_id: str = "",
        debug: bool = False,
        order: Iterable[int] | None = None,
        prefix_tokens: int = 0,
        policies: Policies = POLICIES,
        association: str = "bulk",
        retention: str = "paper",
        slack: int = DEFAULT_SLACK,
        every_tokens: int = 0,
        view: PoolView | None = None,
        **page_pool_options: Any,
    ) -> None:
        super().__init__(kv_config, policies, order, debug, association, view, **page_pool_options)
        self.max_step_tokens, self.caching = max_step_tokens, caching and not kv_config.budget
        # Where pages are dropped before a sequence's end it never holds all of them; or they change at a prompt's end.
        self.drops_pages = bool(kv_config.budget) or len(self.retaining_policies) < len(self.policies)
        self.retention = Retention(self.page_pool, self.policies, retention, slack, every_tokens)
        if self.caching:
            self.drop_delay = list(map(self.retention.drop_delay, self.policies))
        self.max_pages = [
            max_pages_at_once(policy, max_step_tokens, back) for policy, back in zip(self.policies, self.drop_delay)
        ]
        self.fragmentation_pages = [self.page_pool.fragmentation_pages(g) for g in range(len(self.groups))]
        kept = [0 if policy.media else policy.group.num_pages(prefix_tokens) for policy in self.policies]
        self.prefix_cache = PrefixCache(self, model_id, kept, self.caching)
        self.key_tokens = self.prefix_cache.key_tokens
        self.prefix_waiters = PrefixWaiters(self)
        self.swap = Swap(self, self.prefix_cache, max_step_tokens)
        self.encoder_cache.caching = self.caching
        self.admission = AdmissionPlanner(self)
        if view is not None:
            view.holder = self
        self.policies_checked = False  # once `check` found nothing that the policies contradict themselves in
        self.last_refused = (-1, -1)  # the last request that found no room: (its first sequence, releases at that time)

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "") -> PagedMemory:
        """A memory of `size` for `spec`'s layers, grouped as `config.table_scope` says."""
        return cls.from_kv_config(build_kv_config(config, spec, size), config, model_id)

    @classmethod
    def from_kv_config(
        cls, kv_config: KVCacheConfig, config: EngineConfig, model_id: str = "", view: PoolView | None = None
    ) -> PagedMemory:
        """A memory of this geometry; in `view` of a ledger that several models have in common."""
        assert config.max_num_batched_tokens is not None, "a memory is built for a known number of tokens in a step"
        return cls(
            kv_config,
            max_step_tokens=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            debug=config.debug,
            prefix_tokens=config.prefix_tokens,
            policies=policies_for(group.kind for group in kv_config.groups),
            association=config.association,
            view=view,
            retention=config.retention,
        )

    # Admission

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        seq = None
        if images:
            seq = Sequence(0, [])
            seq.images = tuple(images)
        needs = [
            sum(peak_pages(policy, length, most + edges, seq) for length in lengths) + kept
            for policy, most, edges, kept in zip(
                self.policies, self.max_pages, self.fragmentation_pages, self.prefix_cache.pinned_capacity
            )
        ]
        if seq is not None:
            for g in self.encoder_cache.image_policies:  # the same for all of the sequences
                needs[g] = self.encoder_cache.peak_pages(g, seq, 0)
                if len(lengths) == 1:
                    needs[g] = min(
                        needs[g],
                        self.encoder_cache.peak_pages(g, seq, 0, self.max_step_tokens) + self.fragmentation_pages[g],
                    )
        # What is common is shared, also when the sequences come back after a preemption, see `_common`.
        if not self.drops_pages:
            common = shared_prefix_len // self.prefix_cache.prefix_granularity * self.prefix_cache.prefix_granularity
            needs = [
                need - (len(lengths) - 1) * policy.required(None, common).stop
                for need, policy in zip(needs, self.policies)
            ]
        return (
            len(lengths) < self.kv_config.slots
            and all(
                policy.reads(seq, 0, length).stop <= policy.group.table_width
                for policy in self.policies
                for length in lengths
            )
            and self.page_pool.can_allocate(needs, margin=len(lengths) > 1, assume_empty=True)
        )

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admission] | Deferred | None:
        first = seqs[0]
        assert not any(seq.id in self.seq_pages for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.free_slots) < len(seqs) or self.last_refused == (first.id, self.page_pool.releases):
            return None
        if self.prefix_cache.is_deferred(first):
            return DEFERRED  # as below, and nothing new was heard
        coming = self.admission.plan(seqs, budget, self.caching)
        needs, resting, pictures = self.admission.count_needs(seqs, coming)
        if self.caching and self.prefix_cache.defer_if_pending(first, coming[0].hit_tokens, needs[-1]):
            return DEFERRED  # the same prompt is being computed: a step later its pages can be shared
        if not self._reserve(needs, resting):
            if not self.seq_pages:  # what is found, or registered, may lie in more large pages than it would fill
                self.prefix_cache.compact()
                self.encoder_cache.evict_images(seqs)
                coming = self.admission.plan(seqs, budget, use_cache=False)
                needs, resting, pictures = self.admission.count_needs(seqs, coming)
            if self.seq_pages or not self._reserve(needs, resting):
                self.last_refused = (first.id, self.page_pool.releases)
                return None
        self.encoder_cache.incref_pages(pictures)
        for one in coming:  # used from now on, so that they aren't evicted for a sequence's own tail
            for g, table in enumerate(one.hit_tables):
                for page in filter(None, table):
                    self.page_pool.incref(g, page)
        residents: list[SeqPages] = []
        for seq, one in zip(seqs, coming):
            residents.append(self._admit_seq(seq, one, residents))
        for seq, one in zip(seqs, coming):
            if one.waits_for_sibling:
                self.prefix_waiters.add(seq, seqs[one.sibling_index], one.shared_tokens)
        self._incref_shared(coming, residents)
        self.encoder_cache.decref_pages(pictures)
        return [
            Admission(one.hit_tokens, seqs[one.sibling_index] if one.ready_tokens < one.hit_tokens else None)
            for one in coming
        ]

    def _reserve(self, needs: list[list[int]], cached_hits: CachedHits) -> bool:
        """Whether there is room for each of these needs, the last of which are met next. A little stays free, unless
        one sequence is alone."""
        alone, promised = not self.seq_pages, self.prefix_cache.reserved_for_deferred
        return all(
            self.page_pool.reserve(list(map(add, need, promised)), cached_hits, margin=not alone or i > 0)
            for i, need in enumerate(needs)
        )

    def _admit_seq(self, seq: Sequence, plan: AdmissionPlan, admitted: list[SeqPages]) -> SeqPages:
        """Give it a slot and tables. References to pages that it has in common with others are not counted yet."""
        tables = plan.hit_tables
        if plan.shared_tokens and not plan.waits_for_sibling:
            owner = admitted[plan.sibling_index].tables
            stops = [policy.required(seq, plan.shared_tokens).stop for policy in self.policies]
            tables = [pages[:stop] + more for pages, stop, more in zip(owner, stops, tables)]
        if seq.images and not plan.waits_for_sibling:
            tables = self.encoder_cache.drop_image_tables(seq, tables, plan.hit_tokens)
        resident = self.attach(seq, tables, plan.target_len, admitted[0].owner if admitted else seq.id)
        resident.published_tokens = plan.ready_tokens // self.prefix_cache.key_tokens * self.prefix_cache.key_tokens
        resident.capacity = self.capacity_of(seq, resident)
        resident.needs_cow_check = plan.hit_tokens % self.prefix_cache.prefix_granularity > 0
        resident.prefix_ends = (plan.hit_tokens, plan.full_hit_tokens)
        self.prefix_cache.queries += len(seq.tokens)
        self.prefix_cache.hits += plan.hit_tokens
        self.prefix_cache.full_hits += max(plan.hit_tokens, plan.full_hit_tokens)
        if self.caching:
            resident.pending_key_range = self.prefix_cache.add_pending(seq, plan.hit_tokens)
        if not plan.waits_for_sibling:
            self._grow_tables(seq, resident, plan.target_len, plan.hit_tokens, reserved=True)
        return resident

    def _incref_shared(self, plans: list[AdmissionPlan], seq_pages_list: list[SeqPages]) -> None:
        """Count the references to what sequences have in common, each page once for all who name it."""
        followers: dict[int, list[int]] = {}
        for one in plans:
            if one.shared_tokens and not one.waits_for_sibling:
                followers.setdefault(one.sibling_index, []).append(one.shared_tokens)
        for owner, lengths in followers.items():
            for g, policy in enumerate(self.policies):
                first, stops = 0, sorted(policy.required(None, length).stop for length in lengths)
                for i, stop in enumerate(stops):
                    for page in seq_pages_list[owner].tables[g][first:stop]:
                        self.page_pool.incref(g, page, len(stops) - i)
                    first = stop

    # Life

    def commit(self, seq: Sequence) -> None:
        resident, computed, unit = self.seq_pages[seq.id], seq.computed, self.key_tokens
        if computed - resident.published_tokens >= unit:
            end = computed // unit * unit
            if self.caching and not resident.is_stale:
                self.prefix_cache.publish(seq, resident.published_tokens, end, resident.tables, resident.first_page)
                self._resolve_pending(seq, resident, end // unit)
            resident.published_tokens = end
        if seq.id in self.prefix_waiters.waiters:
            self.prefix_waiters.serve_waiters(seq, computed)
        if computed >= resident.drops_at:  # a window's border and a page's are passed at different tokens
            if resident.pending_encodings:
                self.encoder_cache.commit(seq, resident)
            self._drop_unneeded(seq, resident)
            if resident.pending_encodings:
                resident.drops_at = 0

    def free(self, seq: Sequence) -> None:
        if seq.id in self.swap.seq_pages:
            self.swap.free(seq)
            return
        resident = self.seq_pages[seq.id]
        self._resolve_pending(seq, resident, resident.pending_key_range[1])
        self.prefix_waiters.remove(seq)
        super().free(seq)

    def _grow_tables(self, seq: Sequence, seq_pages: SeqPages, length: int, start: int, reserved: bool = False) -> bool:
        if seq.id in self.prefix_waiters.leaders:
            needs = [
                max(policy.reads(seq, start, length).stop - policy.required(seq, start).stop, 0)
                for policy in self.policies
            ]
            if seq.images:
                firsts = [policy.required(seq, start).start for policy in self.policies]
                asked = self.encoder_cache.count_needs(seq, firsts, list(map(add, firsts, needs)), set())
                for g in self.encoder_cache.image_policies:
                    needs[g] = asked.new_pages[g] + sum(at == g for at, _ in asked.cached_pages)
            if not self.page_pool.can_allocate(needs):
                return False
            self.prefix_waiters.attach_prefix(seq)
        return super()._grow_tables(seq, seq_pages, length, start, reserved)

    def _tables_to_release(self, seq_pages: SeqPages) -> Tables:
        return self.retention.include_recent_drops(seq_pages)

    def _after_drop(self, seq: Sequence, seq_pages: SeqPages, group: int, pages: list[int]) -> None:
        if self.caching and self.retention.tracks_drops and self.policies[group].unit:
            first = seq_pages.first_page[group] - len(pages)
            self.prefix_cache.extend_keys(
                seq, seq.computed
            )  # behind a registered prefix that ends within a page more is named
            known = self.policies[group].group.num_full_pages(len(seq.page_keys) * self.key_tokens)
            names = self.prefix_cache.page_keys(group, seq.page_keys, first, min(first + len(pages), known))
            self.retention.after_drop(seq, seq_pages, group, first, pages, names)

    def _resolve_pending(self, seq: Sequence, seq_pages: SeqPages, full: int) -> None:
        start, end = seq_pages.pending_key_range
        if start < end:
            self.prefix_cache.resolve_pending(seq, start, min(full, end))
            seq_pages.pending_key_range = (min(full, end), end)

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        if any(seq.id in self.prefix_waiters.leaders for seq in seqs):
            return False  # there is nothing of it yet
        return self.swap.swap_out(seqs)

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        if self.last_refused == (seqs[0].id, self.page_pool.releases):
            return False
        back = self.swap.swap_in(seqs)
        if not back:
            self.last_refused = (seqs[0].id, self.page_pool.releases)
        return back

    def discard_contents(self) -> None:
        assert not any(self.all_seq_pages()), "sequences have pages"
        assert not self.prefix_cache.registered_prefixes, "registered prefixes have pages"
        self.prefix_cache.reset()
        self.take_page_ops()

    def all_seq_pages(self) -> Iterable[SeqPages]:
        return chain(self.seq_pages.values(), self.swap.seq_pages.values())

    # Facts

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        journal, self.page_ops = tuple(self.page_ops), []
        self.encoder_cache.mark_taken()
        return journal, ()

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        return self.encoder_cache.plan_encoding(seq, self.seq_pages[seq.id], length, max_parts)

    def undo_encoding(self) -> None:
        self.encoder_cache.undo_untaken()

    def get_placement(self, seq: Sequence) -> Placement:
        resident = self.seq_pages[seq.id]
        return Placement(resident.slot, tuple(tuple(table) for table in resident.tables))

    def account(self) -> Account:
        filled = count_filled_bytes(self)
        return Account(self._usage(filled), compute_sharing(self), compute_type_usage(self, filled))

    def _usage(self, filled: list[int]) -> Usage:
        return compute_usage(self, filled)

    def count_refs(self) -> list[dict[int, int]]:
        """How many tables of sequences and of registered prefixes name each page, a group."""
        counts = self.count_table_refs()
        for (g, page), count in self.prefix_cache.pin_counts.items():
            counts[g][page] = counts[g].get(page, 0) + count
        return counts

    def check(self) -> None:
        if not self.policies_checked:
            for g, policy in enumerate(self.policies):
                fault = next(find_contradictions(policy, self.max_step_tokens, self.max_pages[g]), None)
                assert fault is None, (
                    f"{type(policy).__name__}, of group {g} of the kind {policy.group.kind!r}, {fault}"
                )
            self.policies_checked = True
        self.prefix_cache.check()
        self.prefix_waiters.check()
        self.encoder_cache.check()
        self.page_pool.check(self.count_refs())
        self.swap.check()


def count_filled_bytes(memory: PagedMemory) -> list[int]:
    """Bytes of tokens in used pages, a group."""
    found = []
    for g, group in enumerate(memory.groups):
        policy = memory.policies[g]
        if isinstance(policy, ImagePolicy):
            found.append(_count_embed_bytes(memory, g, policy))
            continue
        full = group.payload_bytes
        holders = [(one.tables[g], one.requested_tokens - one.pruned_tokens[g]) for one in memory.seq_pages.values()]
        holders += [
            (prefix.tables[g], len(prefix.tokens)) for prefix in memory.prefix_cache.registered_prefixes.values()
        ]
        filled: dict[int, int] = {}  # bytes in pages that aren't full, as the fullest of their users has it
        for pages, tokens in holders:
            for i in range(group.num_full_pages(tokens), len(pages)):
                filled[pages[i]] = max(filled.get(pages[i], 0), group.payload_of_page(i, tokens))
        found.append(memory.page_pool.used[g] * full - sum(full - held for held in filled.values()))
    return found


def _count_embed_bytes(memory: PagedMemory, g: int, policy: ImagePolicy) -> int:
    """Bytes of rows in the used pages of pictures: of each one's last page perhaps a part."""
    group, empty = policy.group, dict[int, int]()
    for seq in memory.seq_pages.values():
        stop = 0
        for medium in seq.images:
            stop += group.num_pages(medium.num_embeds)
            if stop <= len(seq.tables[g]):
                empty[seq.tables[g][stop - 1]] = (
                    group.num_pages(medium.num_embeds) * group.run_tokens - medium.num_embeds
                )
    rows = memory.page_pool.used[g] * group.run_tokens - sum(count for page, count in empty.items() if page)
    return rows * group.token_bytes


def compute_usage(memory: PagedMemory, filled: list[int]) -> Usage:
    """By category; `filled` as above."""
    sizes = [group.page_bytes for group in memory.groups]
    taken = sum(used * size for used, size in zip(memory.page_pool.used, sizes))
    space = memory.page_pool.count_unused_bytes(sizes)
    return Usage(sum(filled), space.cached, 0, taken - sum(filled), space.external, space.free)


def compute_type_usage(memory: PagedMemory, filled: list[int]) -> tuple[TypeUsage, ...]:
    """By layer type. Groups of one type are added up."""
    found: dict[str, TypeUsage] = {}
    cached_pages = memory.page_pool.num_cached
    for g, (group, held) in enumerate(zip(memory.groups, filled)):
        name = group.kind if group.window is None else f"{group.kind}-{group.window}"
        _, used, internal, cached = found.get(name, (name, 0, 0, 0))
        internal += memory.page_pool.used[g] * group.page_bytes - held
        found[name] = TypeUsage(name, used + held, internal, cached + cached_pages[g] * group.page_bytes)
    return tuple(found.values())


def compute_sharing(memory: PagedMemory) -> Sharing:
    """How pages are shared, swapped and pinned."""
    tables = distinct = 0
    names, pins = memory.page_pool.ref_count, memory.prefix_cache.pin_counts
    for g, group in enumerate(memory.groups):
        named = sum(len(resident.tables[g]) - resident.first_page[g] for resident in memory.seq_pages.values())
        idle = sum(at == g and names(g, page) == count for (at, page), count in pins.items())  # no sequence's, now
        tables += named * group.page_bytes
        distinct += (memory.page_pool.used[g] - idle) * group.page_bytes
    registered, host = memory.prefix_cache.registered_prefixes.values(), memory.swap.host_pool
    return Sharing(
        tables, tables - distinct, memory.copies, memory.swap.out_bytes, memory.swap.in_bytes,
        host.total, sum(host.used),
        len(registered), sum(len(prefix.tokens) for prefix in registered),
        min(group.tokens_in_pages(kept) for group, kept in zip(memory.groups, memory.prefix_cache.pinned_capacity)),
        memory.prefix_cache.queries, memory.prefix_cache.hits, memory.prefix_cache.full_hits,
        memory.encoder_cache.runs, memory.encoder_cache.parts_encoded, memory.encoder_cache.hits,
    )  # fmt: skip


class AdmissionPlan(NamedTuple):
    """How a sequence would come in: with `hit_tokens` tokens that it needn't compute, and room for `target_len`.

    The first `shared_tokens` of them it has in common with an earlier sequence of its request, `sibling_index` by its
    place among them, and names the same pages; `hit_tables` is the pages of the others, a table a group. `ready_tokens`
    of them are computed. `full_hit_tokens` is as in Reuse. One that `waits_for_sibling` has no pages yet, see
    Followers.
    """

    hit_tokens: int
    hit_tables: Tables
    sibling_index: int
    shared_tokens: int
    ready_tokens: int
    target_len: int
    full_hit_tokens: int
    waits_for_sibling: bool = False


class AdmissionPlanner:
    """At the door of a memory."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory

    def plan(self, seqs: Seq[Sequence], budget: int, use_cache: bool) -> list[AdmissionPlan]:
        """One sequence alone gets room for its next chunk, several for all of their tokens: only then can they share
        what one of them computes. With `use_cache` cached pages are looked up."""
        coming: list[AdmissionPlan] = []
        owners: dict[bytes, int] = {}  # the first sequence that has the tokens which a key names
        for i, seq in enumerate(seqs):
            common, owner = self._find_shared_prefix(seq, i, owners) if len(seqs) > 1 else (0, i)
            if self.memory.drops_pages and common and coming[owner].hit_tokens >= common:
                common, owner = 0, i  # what it would need of that one may not be there
            ready = min(common, coming[owner].ready_tokens) if common else 0
            found = PrefixHit(common, self.memory.prefix_cache.no_hit().tables)
            if use_cache and ready == common:  # what is still to be computed isn't followed by what has been
                found = self.memory.prefix_cache.find_cached(seq, common)
            pinned = self.memory.prefix_cache.find_registered(seq)
            if pinned.tokens >= max(found.tokens, 1):
                common, ready, found = 0, 0, pinned
            room = budget if len(seqs) == 1 else len(seq.tokens)
            if self.memory.drops_pages:
                room = min(room, self.memory.max_step_tokens)  # pages that are dropped are never all held at once
            if self.memory.drops_pages and common:
                own = self.memory.prefix_cache.find_cached(seq) if use_cache else self.memory.prefix_cache.no_hit()
                if own.tokens >= common:
                    common, ready, found = 0, 0, own
                else:
                    room = 0  # until what is common is computed
            tokens, tables, junction = found
            ready = tokens if ready == common else ready
            end = min(len(seq.tokens), tokens + room)
            coming.append(
                AdmissionPlan(
                    tokens, tables, owner, common, ready, end, junction, self.memory.drops_pages and common > 0
                )
            )
        return coming

    def _find_shared_prefix(self, seq: Sequence, index: int, owners: dict[bytes, int]) -> tuple[int, int]:
        """The tokens that a sequence has in common with one before it, and which one that is. Whole strides only: a
        page that both would write to can't be copied before it is written. None where prompts shrink."""
        if self.memory.kv_config.budget:
            return 0, index
        prefixes = self.memory.prefix_cache
        end = (len(seq.tokens) - 1) // prefixes.prefix_granularity * prefixes.prefix_granularity
        prefixes.extend_keys(seq, end)
        step = prefixes.prefix_granularity // prefixes.key_tokens
        keys = seq.page_keys[step - 1 : end // prefixes.key_tokens : step]
        known = bisect(keys, False, key=lambda key: key not in owners)  # a key is known only if all before it are
        owners.update(dict.fromkeys(keys[known:], index))
        common = prefixes.usable_tokens(seq, known * prefixes.prefix_granularity)
        return common, owners[keys[known - 1]] if common else index

    def count_needs(
        self, seqs: Seq[Sequence], plans: list[AdmissionPlan]
    ) -> tuple[list[list[int]], CachedHits, list[tuple[int, int]]]:
        """Pages of each group that must be free for the first of them to come in, for the first two, and so on: with
        what the last one needs to go on, and pages of its branches to come. What is found and no sequence uses yet is
        about to be, so it isn't free; it is told too, and of that the pages of pictures."""
        asked = self._count_image_needs(seqs, plans) if seqs[0].images else []
        pictures = [page for one in asked for page in one.cached_pages]
        found = {(g, page) for one in plans for g, table in enumerate(one.hit_tables) for page in table if page}
        resting = self.memory.page_pool.find_cached_hits(found.union(pictures))
        taken, all_needs = list(resting.num_pages), []
        for i, (seq, one) in enumerate(zip(seqs, plans)):
            needs = []
            for g, (policy, most) in enumerate(zip(self.memory.policies, self.memory.max_pages)):
                if policy.media:
                    more = asked[i].new_pages[g] if asked else 0
                    peaks = (
                        self.memory.encoder_cache.peak_pages(g, seq, one.hit_tokens, self.memory.max_step_tokens)
                        if asked and len(seqs) == 1
                        else 0
                    )
                    needs.append(taken[g] + max(more, peaks - sum(at == g for at, _ in pictures)))
                    taken[g] += more
                    continue
                there = policy.required(seq, one.hit_tokens)
                held = (
                    0 if one.waits_for_sibling and policy not in self.memory.retaining_policies else len(there)
                )  # its window is its own
                more = policy.reads(seq, one.hit_tokens, one.target_len).stop - there.stop
                writes = policy.writes(seq, one.hit_tokens, one.target_len)
                copied = max(there.stop - writes.start, 0) if writes else 0
                whole = max(more, peak_pages(policy, len(seq.tokens), most) - held)
                needs.append(taken[g] + whole + copied + seq.num_forks)
                taken[g] += more + copied
            all_needs.append(needs)
        return all_needs, resting, pictures

    def _count_image_needs(self, seqs: Seq[Sequence], plans: list[AdmissionPlan]) -> list[ImageNeeds]:
        """What the pictures of these sequences take: of one alone those of its next chunk, of several all of them."""
        known: set[tuple[int, bytes]] = set()
        asked = []
        for seq, one in zip(seqs, plans):
            end = one.target_len if len(seqs) == 1 else FAR
            firsts = [policy.required(seq, one.hit_tokens).start for policy in self.memory.policies]
            stops = [policy.reads(seq, one.hit_tokens, end).stop for policy in self.memory.policies]
            asked.append(self.memory.encoder_cache.count_needs(seq, firsts, stops, known))
        return asked
