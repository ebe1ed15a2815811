"""Paged memory: pages at any place, and a page table for each sequence and layer group (PagedAttention §4.2-4.4).

This file has admission, with reuse of cached prefixes, the changes after each step, and accounting. Full pages are
published under chained keys, so that a later sequence with the same prefix finds them. Page tables, prefixes, images
and swapping have files of their own."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from operator import add
from typing import Any, NamedTuple, Self

from quire.config import EngineConfig
from quire.memory.answers import (
    DEFERRED,
    Account,
    Admission,
    Deferred,
    EvictionLimit,
    Placement,
    Sharing,
    TypeUsage,
    Usage,
)
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
from quire.memory.prefix_demand import PrefixDemand
from quire.memory.prefix_waiters import PrefixWaiters
from quire.memory.seq_pages import SeqPages, Tables
from quire.memory.swap import Swap
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.shared_host import SharedHostMemory
from quire.protocol.step_plan import PageOps


class AdmissionPlan(NamedTuple):
    """How to admit a sequence: its first `hit_tokens` tokens are not computed, and it gets room for `target_len`.

    It has the first `shared_tokens` of these in common with an earlier sequence of its request, at index
    `sibling_index`, and names the same pages. `hit_tables` has the pages of the other hit tokens, one table for each
    group. `ready_tokens` of the hit tokens are computed already. `full_hit_tokens` is as in PrefixHit. A sequence that
    `waits_for_sibling` has no pages yet, see PrefixWaiters. The draft model goes on after `drafted_tokens` of the hit
    tokens: it computes the other ones later, into pages that are not shared."""

    hit_tokens: int
    hit_tables: Tables
    sibling_index: int
    shared_tokens: int
    ready_tokens: int
    target_len: int
    full_hit_tokens: int
    drafted_tokens: int
    waits_for_sibling: bool

    def hit_of(self, group: KVCacheGroup) -> int:
        """Return the number of tokens that the layers of a group do not compute."""
        return self.drafted_tokens if group.is_draft else self.hit_tokens

    def shared_of(self, group: KVCacheGroup) -> int:
        """Return how many of them are in pages that the sibling names too."""
        return min(self.shared_tokens, self.hit_of(group))


class PagedMemory(PageTables):
    """Implement KVMemory with page tables, a prefix cache and swapping.

    `max_step_tokens` is the largest number of tokens computed in one step. Pages for `prefix_tokens` tokens are set
    aside for registered prefixes. `retention` and `slack` select the dropped pages that stay cached, see Retention.
    `shared_host` is as in Swap."""

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
        view: PoolView | None = None,
        shared_host: SharedHostMemory | None = None,
        **page_pool_options: Any,
    ) -> None:
        caching = caching and not kv_config.budget
        super().__init__(kv_config, policies, order, debug, association, view, keep_images=caching, **page_pool_options)
        self.max_step_tokens, self.caching = max_step_tokens, caching
        # If True a sequence never holds all of its pages, or they change at the end of its prompt.
        self.drops_pages = bool(kv_config.budget) or len(self.retaining_policies) < len(self.policies)
        self.retention = Retention(self.page_pool, self.policies, retention, slack)
        self.has_speculation_head = any(group.reads_hidden_states for group in self.groups)
        if self.caching:
            self.drop_delay = list(map(self.retention.drop_delay, self.policies))
        self.max_pages = [
            # A draft model may lag behind by any number of tokens, whose pages it still needs.
            FAR if policy.group.is_draft else max_pages_at_once(policy, max_step_tokens, back)
            for policy, back in zip(self.policies, self.drop_delay)
        ]
        self.fragmentation_pages = [self.page_pool.fragmentation_pages(g) for g in range(len(self.groups))]
        pinned_pages = [
            0 if policy.media or policy.group.is_draft else policy.group.num_pages(prefix_tokens)
            for policy in self.policies
        ]
        self.prefix_cache = PrefixCache(self, model_id, pinned_pages, self.caching)
        self.key_tokens = self.prefix_cache.key_tokens
        self.prefix_demand = PrefixDemand(self, self.prefix_cache) if self.caching else None
        self.prefix_waiters = PrefixWaiters(self)
        self.swap = Swap(self, self.prefix_cache, max_step_tokens, shared_host)
        if view is not None:
            view.bind(self)
        self.policies_checked = False  # set by `check`, which looks for contradictions once
        # The last request that was refused for lack of room: (id of its first sequence, `page_pool.releases` then)
        self.last_refused = (-1, -1)
        # The same of the last one that was refused by its limit, and the tokens that would be evicted
        self.last_limited = (-1, -1, 0.0)

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize, model_id: str = "", **more: Any) -> Self:
        """Make a memory of `size` for the layers of `spec`, grouped as `table_scope` says. `more`: as `__init__`."""
        return cls.from_kv_config(build_kv_config(config, spec, size), config, model_id, **more)

    @classmethod
    def from_kv_config(
        cls,
        kv_config: KVCacheConfig,
        config: EngineConfig,
        model_id: str = "",
        view: PoolView | None = None,
        **more: Any,
    ) -> Self:
        """Make a memory with this layout, in `view` of a pool if several models share one. `more`: as `__init__`."""
        assert config.max_num_batched_tokens is not None, "a memory is built for a known number of tokens in a step"
        return cls(
            kv_config,
            max_step_tokens=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            debug=config.debug,
            prefix_tokens=config.prefix_tokens,
            policies=policies_for(group.kind for group in kv_config.groups),
            association=config.experiment.association,
            view=view,
            retention=config.experiment.retention,
            **more,
        )

    # Admission

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        seq = None
        if images:
            seq = Sequence(0, [])
            seq.images, seq.uses_draft_model = tuple(images), True
        needs = [
            sum(peak_pages(policy, length, max_pages + fragmentation, seq) for length in lengths) + pinned_pages
            for policy, max_pages, fragmentation, pinned_pages in zip(
                self.policies, self.max_pages, self.fragmentation_pages, self.prefix_cache.pinned_capacity
            )
        ]
        if seq is not None:
            for g in self.encoder_cache.image_policies:  # the sequences share their images
                needs[g] = self.encoder_cache.peak_pages(g, seq, 0)
                if len(lengths) == 1:
                    needs[g] = min(
                        needs[g],
                        self.encoder_cache.peak_pages(g, seq, 0, self.max_step_tokens) + self.fragmentation_pages[g],
                    )
        # The common prefix is shared, also when the sequences return after a preemption, see `_find_shared_prefix`.
        if not self.drops_pages:
            shared = shared_prefix_len // self.prefix_cache.prefix_granularity * self.prefix_cache.prefix_granularity
            needs = [
                need - (len(lengths) - 1) * policy.required(None, shared).stop
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

    def admit(
        self, seqs: Seq[Sequence], budget: int, limit: EvictionLimit | None = None
    ) -> list[Admission] | Deferred | None:
        first = seqs[0]
        assert not any(seq.id in self.seq_pages for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.free_slots) < len(seqs) or self.last_refused == (first.id, self.page_pool.releases):
            return None
        *refused, lost = self.last_limited
        if (
            limit is not None
            and self.seq_pages
            and limit.tokens < lost
            and refused == [first.id, self.page_pool.releases]
        ):
            return None
        if self.prefix_cache.is_deferred(first):
            return DEFERRED  # as below, and its pending page is not resolved yet
        plans = self._plan_admission(seqs, budget, self.caching)
        needs, cached_hits, image_pages = self._count_admission_needs(seqs, plans)
        if self.caching and self.prefix_cache.defer_if_pending(first, plans[0].hit_tokens, needs[-1]):
            return DEFERRED  # the same prompt is being computed: after that step its pages can be shared
        if limit is not None and self.seq_pages:
            lost = self._count_lost_tokens(needs[-1], cached_hits, limit.growth)
            if lost > limit.tokens:
                self.last_limited = (first.id, self.page_pool.releases, lost)
                return None
        if not self._reserve(needs, cached_hits):
            if not self.seq_pages:  # cached or registered pages may be spread over more large pages than they fill
                self.prefix_cache.compact()
                self.encoder_cache.evict_images(seqs)
                plans = self._plan_admission(seqs, budget, use_cache=False)
                needs, cached_hits, image_pages = self._count_admission_needs(seqs, plans)
            if self.seq_pages or not self._reserve(needs, cached_hits):
                self.last_refused = (first.id, self.page_pool.releases)
                return None
        self.encoder_cache.incref_pages(image_pages)
        for plan in plans:  # reference them first, so that they are not evicted by the allocations below
            for g, table in enumerate(plan.hit_tables):
                for page in filter(None, table):
                    self.page_pool.incref(g, page)
        admitted: list[SeqPages] = []
        for seq, plan in zip(seqs, plans):
            admitted.append(self._admit_seq(seq, plan, admitted))
        for seq, plan in zip(seqs, plans):
            if plan.waits_for_sibling:
                self.prefix_waiters.add(seq, seqs[plan.sibling_index], plan.shared_tokens)
        self._incref_shared(plans, admitted)
        self.encoder_cache.decref_pages(image_pages)
        return [
            Admission(
                plan.hit_tokens,
                seqs[plan.sibling_index] if plan.ready_tokens < plan.hit_tokens else None,
                plan.drafted_tokens,
            )
            for plan in plans
        ]

    def _plan_admission(self, seqs: Seq[Sequence], budget: int, use_cache: bool) -> list[AdmissionPlan]:
        """Plan the admission of a request's sequences; with `use_cache` look up cached pages.

        One sequence alone gets room for its next chunk. Several get room for all of their tokens: only then can they
        share what one of them computes."""
        plans: list[AdmissionPlan] = []
        siblings: dict[bytes, int] = {}  # key -> index of the first sequence that has the prefix
        for i, seq in enumerate(seqs):
            shared, sibling = self._find_shared_prefix(seq, i, siblings) if len(seqs) > 1 else (0, i)
            if self.drops_pages and shared and plans[sibling].hit_tokens >= shared:
                shared, sibling = 0, i  # the sibling may not hold the pages that it needs
            ready = min(shared, plans[sibling].ready_tokens) if shared else 0
            hit = PrefixHit(shared, self.prefix_cache.no_hit().tables)
            if use_cache and ready == shared:  # cached pages are not used after pages that are still to be computed
                hit = self.prefix_cache.find_cached(seq, shared)
            pinned = self.prefix_cache.find_registered(seq)
            # Siblings would have draft pages of their own after a registered prefix, and `fits` counts them once. A
            # speculation head cannot draft after it.
            if pinned.tokens >= max(hit.tokens, 1) and not (
                seq.uses_draft_model and (len(seqs) > 1 or self.has_speculation_head)
            ):
                shared, ready, hit = 0, 0, pinned
            room = budget if len(seqs) == 1 else len(seq.tokens)
            if self.drops_pages:
                room = min(room, self.max_step_tokens)  # it never holds all of its pages at once
            if self.drops_pages and shared:
                own_hit = self.prefix_cache.find_cached(seq) if use_cache else self.prefix_cache.no_hit()
                if own_hit.tokens >= shared:
                    shared, ready, hit = 0, 0, own_hit
                else:
                    room = 0  # until the common prefix is computed
            tokens, tables, full_hit = hit
            ready = tokens if ready == shared else ready
            waits, drafted = self.drops_pages and shared > 0, 0
            if seq.uses_draft_model and self.has_speculation_head:
                drafted = tokens  # the hit is of its pages, too
            elif seq.uses_draft_model:
                drafted = shared
                if shared and not waits and plans[sibling].drafted_tokens < plans[sibling].hit_tokens:
                    drafted = min(shared, plans[sibling].drafted_tokens)  # its draft model lags behind
                elif use_cache:
                    drafted, draft_tables, _ = self.prefix_cache.find_cached(seq, shared, tokens, is_draft=True)
                    tables = list(map(add, tables, draft_tables))
            end = min(len(seq.tokens), tokens + room)
            plans.append(AdmissionPlan(tokens, tables, sibling, shared, ready, end, full_hit, drafted, waits))
        return plans

    def _find_shared_prefix(self, seq: Sequence, index: int, owners: dict[bytes, int]) -> tuple[int, int]:
        """Return the number of tokens that a sequence has in common with an earlier one, and the index of that one.

        The tokens are a multiple of the prefix granularity: a page that both would write cannot be copied before it is
        written. There are none where prompts are pruned."""
        if self.kv_config.budget:
            return 0, index
        prefixes = self.prefix_cache
        end = (len(seq.tokens) - 1) // prefixes.prefix_granularity * prefixes.prefix_granularity
        prefixes.key_chain.extend(seq, end)
        step = prefixes.prefix_granularity // prefixes.key_tokens
        keys = seq.page_keys[step - 1 : end // prefixes.key_tokens : step]
        known = bisect(keys, False, key=lambda key: key not in owners)  # if a key is known, all before it are
        owners.update(dict.fromkeys(keys[known:], index))
        shared = prefixes.usable_tokens(seq, known * prefixes.prefix_granularity)
        return shared, owners[keys[known - 1]] if shared else index

    def _count_admission_needs(
        self, seqs: Seq[Sequence], plans: list[AdmissionPlan]
    ) -> tuple[list[list[int]], CachedHits, list[tuple[int, int]]]:
        """Return the needs for the first sequence, the first two, and so on; the cached hits; the cached image pages.

        Needs are pages of each group that must be free. They include what the last sequence needs to continue, and the
        pages of its forks to come. Cached hits that no sequence uses are not free: they are about to be used."""
        image_needs = self._count_image_needs(seqs, plans) if seqs[0].images else []
        image_pages = [page for need in image_needs for page in need.cached_pages]
        hit_pages = {(g, page) for plan in plans for g, table in enumerate(plan.hit_tables) for page in table if page}
        cached_hits = self.page_pool.find_cached_hits(hit_pages.union(image_pages))
        taken, all_needs = list(cached_hits.num_pages), []
        for i, (seq, plan) in enumerate(zip(seqs, plans)):
            needs = []
            for g, (policy, max_pages) in enumerate(zip(self.policies, self.max_pages)):
                if policy.media:
                    peak = new_pages = image_needs[i].new_pages[g] if image_needs else 0
                    if image_needs and len(seqs) == 1:
                        peak = self.encoder_cache.peak_pages(g, seq, plan.hit_tokens, self.max_step_tokens)
                        peak -= sum(at == g for at, _ in image_pages)
                    needs.append(taken[g] + max(new_pages, peak))
                    taken[g] += new_pages
                    continue
                if policy.group.is_draft and not seq.uses_draft_model:
                    needs.append(taken[g])
                    continue
                start = plan.hit_of(policy.group)
                required = policy.required(seq, start)
                # A waiter's window is not shared.
                held = 0 if plan.waits_for_sibling and policy not in self.retaining_policies else len(required)
                new_pages = policy.reads(seq, start, plan.target_len).stop - required.stop
                writes = policy.writes(seq, start, plan.target_len)
                copied = max(required.stop - writes.start, 0) if writes else 0
                whole = max(new_pages, peak_pages(policy, len(seq.tokens), max_pages) - held)
                needs.append(taken[g] + whole + copied + seq.num_forks)
                taken[g] += new_pages + copied
            all_needs.append(needs)
        return all_needs, cached_hits, image_pages

    def _count_image_needs(self, seqs: Seq[Sequence], plans: list[AdmissionPlan]) -> list[ImageNeeds]:
        """Return what the images of these sequences need: of one sequence those of its next chunk, of several all."""
        known: set[tuple[int, bytes]] = set()
        image_needs = []
        for seq, plan in zip(seqs, plans):
            end = plan.target_len if len(seqs) == 1 else FAR
            firsts = [policy.required(seq, plan.hit_tokens).start for policy in self.policies]
            stops = [policy.reads(seq, plan.hit_tokens, end).stop for policy in self.policies]
            image_needs.append(self.encoder_cache.count_needs(seq, firsts, stops, known))
        return image_needs

    def _reserve(self, needs: list[list[int]], cached_hits: CachedHits) -> bool:
        """Reserve pages for each of these needs; the last ones are allocated next. Return False if there is no room.

        A margin stays free, unless a sequence is alone in memory."""
        alone, reserved = not self.seq_pages, self.prefix_cache.reserved_for_deferred
        return all(
            self.page_pool.reserve(list(map(add, need, reserved)), cached_hits, margin=not alone or i > 0)
            for i, need in enumerate(needs)
        )

    def _count_lost_tokens(self, needs: list[int], cached_hits: CachedHits, growth: int) -> float:
        """Return, about, what the evicted prefixes are worth (see PrefixDemand.value_of) once `needs` and `growth` more
        tokens of the sequences in memory are allocated."""
        sizes, count = [group.page_bytes for group in self.groups], len(self.seq_pages)
        spared = self.page_pool.count_spared_bytes(sizes)
        if self.prefix_demand is None or not spared:
            return 0.0
        grown = [
            need + max(min(growth // policy.group.run_tokens, count * most - used), 0) if policy.unit else need
            for need, policy, most, used in zip(needs, self.policies, self.max_pages, self.page_pool.used)
        ]
        lost = self.page_pool.count_lost_bytes(grown, cached_hits, sizes)
        return self.prefix_demand.value_of(lost / spared, count) if lost else 0.0

    def _admit_seq(self, seq: Sequence, plan: AdmissionPlan, admitted: list[SeqPages]) -> SeqPages:
        """Give a sequence its slot and tables. References to pages shared with siblings are not counted yet."""
        tables = plan.hit_tables
        if plan.shared_tokens and not plan.waits_for_sibling:
            sibling_tables = admitted[plan.sibling_index].tables
            stops = [policy.required(seq, plan.shared_of(policy.group)).stop for policy in self.policies]
            tables = [pages[:stop] + more for pages, stop, more in zip(sibling_tables, stops, tables)]
        if seq.images and not plan.waits_for_sibling:
            tables = self.encoder_cache.drop_image_tables(seq, tables, plan.hit_tokens)
        seq_pages = self.attach(seq, tables, plan.target_len, admitted[0].owner if admitted else seq.id)
        seq_pages.published_tokens = plan.ready_tokens // self.key_tokens * self.key_tokens
        seq_pages.published_drafts = min(plan.drafted_tokens, seq_pages.published_tokens)
        seq_pages.capacity = self.capacity_of(seq, seq_pages)
        seq_pages.needs_cow_check = plan.hit_tokens % self.prefix_cache.prefix_granularity > 0
        seq_pages.prefix_ends = (plan.hit_tokens, plan.full_hit_tokens)
        if not seq.was_admitted:  # a preempted one would find its own tokens
            self.prefix_cache.count_lookup(len(seq.tokens), plan.hit_tokens, plan.full_hit_tokens)
            seq.was_admitted = True
        if self.caching:
            seq_pages.pending_key_range = self.prefix_cache.add_pending(seq, plan.hit_tokens)
        if not plan.waits_for_sibling:
            self._grow_tables(seq, seq_pages, plan.target_len, plan.hit_tokens, reserved=True)
        return seq_pages

    def _incref_shared(self, plans: list[AdmissionPlan], seq_pages_list: list[SeqPages]) -> None:
        """Count the references to pages that siblings share, in one call for each page."""
        sharing_by_sibling: dict[int, list[AdmissionPlan]] = {}
        for plan in plans:
            if plan.shared_tokens and not plan.waits_for_sibling:
                sharing_by_sibling.setdefault(plan.sibling_index, []).append(plan)
        for sibling, sharing in sharing_by_sibling.items():
            for g, policy in enumerate(self.policies):
                first, stops = 0, sorted(policy.required(None, plan.shared_of(policy.group)).stop for plan in sharing)
                for i, stop in enumerate(stops):
                    for page in seq_pages_list[sibling].tables[g][first:stop]:
                        self.page_pool.incref(g, page, len(stops) - i)
                    first = stop

    # Changes after admission

    def commit(self, seq: Sequence) -> None:
        seq_pages, computed, unit = self.seq_pages[seq.id], seq.computed, self.key_tokens
        if computed - seq_pages.published_tokens >= unit:
            end = computed // unit * unit
            if self.caching and not seq_pages.is_stale:
                self.prefix_cache.publish(seq, seq_pages, seq_pages.published_tokens, end, is_draft=False)
                self._resolve_pending(seq, seq_pages, end // unit)  # none waits until a draft model catches up
            seq_pages.published_tokens = end
        if seq.id in self.prefix_waiters.waiters:
            self.prefix_waiters.serve_waiters(seq, computed)
        if computed >= seq_pages.drops_at:  # not only when a page is full: a window passes a page at any token
            if seq_pages.pending_encodings:
                self.encoder_cache.commit(seq, seq_pages)
            self._drop_unneeded(seq, seq_pages)
            if seq_pages.pending_encodings:
                seq_pages.drops_at = 0

    def commit_drafts(self, seq: Sequence) -> None:
        seq_pages, unit = self.seq_pages[seq.id], self.key_tokens
        seq_pages.requested_tokens = min(seq_pages.requested_tokens, seq.planned)
        if seq.drafted - seq_pages.published_drafts >= unit:
            end = seq.drafted // unit * unit
            if self.caching and not seq_pages.is_stale:
                self.prefix_cache.publish(seq, seq_pages, seq_pages.published_drafts, end, is_draft=True)
            seq_pages.published_drafts = end
        self.commit(seq)

    def free(self, seq: Sequence) -> None:
        if seq.id in self.swap.seq_pages:
            self.swap.free(seq)
            return
        seq_pages = self.seq_pages[seq.id]
        self._resolve_pending(seq, seq_pages, seq_pages.pending_key_range[1])
        self.prefix_waiters.remove(seq)
        super().free(seq)

    def _grow_tables(self, seq: Sequence, seq_pages: SeqPages, length: int, start: int, reserved: bool = False) -> bool:
        if seq.computed < seq.planned < len(seq.tokens) and self._must_wait_for_chunk(seq, seq_pages, length):
            return False
        if seq.id in self.prefix_waiters.leaders:
            needs = [
                max(policy.reads(seq, start, length).stop - policy.required(seq, start).stop, 0)
                for policy in self.policies
            ]
            if seq.images:
                firsts = [policy.required(seq, start).start for policy in self.policies]
                image_needs = self.encoder_cache.count_needs(seq, firsts, list(map(add, firsts, needs)), set())
                for g in self.encoder_cache.image_policies:
                    needs[g] = image_needs.new_pages[g] + sum(at == g for at, _ in image_needs.cached_pages)
            if not self.page_pool.can_allocate(needs):
                return False
            self.prefix_waiters.attach_prefix(seq)
        return super()._grow_tables(seq, seq_pages, length, start, reserved)

    def _must_wait_for_chunk(self, seq: Sequence, seq_pages: SeqPages, length: int) -> bool:
        """Return True if the next chunk of a prompt evicts a prefix that a waiting sequence will find, and the end of
        the chunk in flight frees pages that its windows have passed."""
        sizes, start = [group.page_bytes for group in self.groups], seq.planned
        if self.prefix_demand is None or not self.page_pool.count_spared_bytes(sizes):
            return False
        if not any(
            policy.reads(seq, start, start + 1).start > seq_pages.first_page[g] for g, policy in self.dropping_policies
        ):
            return False
        needs = [
            max(policy.reads(seq, start, length).stop - len(table), 0)
            for policy, table in zip(self.policies, seq_pages.tables)
        ]
        return self.page_pool.count_lost_bytes(needs, self.page_pool.find_cached_hits(()), sizes) > 0

    def _tables_to_release(self, seq_pages: SeqPages) -> Tables:
        return self.retention.include_recent_drops(seq_pages)

    def _after_drop(self, seq: Sequence, seq_pages: SeqPages, group: int, pages: list[int]) -> None:
        if self.caching and self.retention.tracks_drops and self.policies[group].unit:
            first = seq_pages.first_page[group] - len(pages)
            # Also after a registered prefix that ends within a page
            self.prefix_cache.key_chain.extend(seq, seq.computed)
            known = self.policies[group].group.num_full_pages(len(seq.page_keys) * self.key_tokens)
            keys = self.prefix_cache.page_keys(group, seq.page_keys, first, min(first + len(pages), known))
            self.retention.after_drop(seq, seq_pages, group, first, pages, keys)

    def _resolve_pending(self, seq: Sequence, seq_pages: SeqPages, full: int) -> None:
        start, end = seq_pages.pending_key_range
        if start < end:
            self.prefix_cache.resolve_pending(seq, start, min(full, end))
            seq_pages.pending_key_range = (min(full, end), end)

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        if any(seq.id in self.prefix_waiters.leaders for seq in seqs):
            return False  # it has no pages yet
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

    # Page operations and accounting

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        page_ops, self.page_ops = tuple(self.page_ops), []
        self.encoder_cache.mark_taken()
        return page_ops, ()

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        return self.encoder_cache.plan_encoding(seq, self.seq_pages[seq.id], length, max_parts)

    def undo_encoding(self) -> None:
        self.encoder_cache.undo_untaken()

    def get_placement(self, seq: Sequence) -> Placement:
        seq_pages = self.seq_pages[seq.id]
        return Placement(seq_pages.slot, tuple(tuple(table) for table in seq_pages.tables))

    def account(self) -> Account:
        filled = self._count_filled_bytes()
        return Account(self._usage(filled), self._sharing(), self._type_usage(filled))

    def _count_filled_bytes(self) -> list[int]:
        """Return for each group the bytes of tokens in used pages."""
        found = []
        for g, group in enumerate(self.groups):
            policy = self.policies[g]
            if isinstance(policy, ImagePolicy):
                found.append(self._count_embed_bytes(g, policy))
                continue
            full = group.payload_bytes
            holders = [(one.tables[g], one.requested_tokens - one.pruned_tokens[g]) for one in self.seq_pages.values()]
            holders += [
                (prefix.tables[g], len(prefix.tokens)) for prefix in self.prefix_cache.registered_prefixes.values()
            ]
            filled: dict[int, int] = {}  # partial page -> bytes, by the user with the most tokens in it
            for pages, tokens in holders:
                for i in range(group.num_full_pages(tokens), len(pages)):
                    filled[pages[i]] = max(filled.get(pages[i], 0), group.payload_of_page(i, tokens))
            found.append(self.page_pool.used[g] * full - sum(full - held for held in filled.values()))
        return found

    def _count_embed_bytes(self, g: int, policy: ImagePolicy) -> int:
        """Return the bytes of embeddings in used image pages: an image's last page may be partial."""
        group, empty = policy.group, dict[int, int]()
        for seq in self.seq_pages.values():
            stop = 0
            for image in seq.images:
                stop += group.num_pages(image.num_embeds)
                if stop <= len(seq.tables[g]):
                    empty[seq.tables[g][stop - 1]] = (
                        group.num_pages(image.num_embeds) * group.run_tokens - image.num_embeds
                    )
        rows = self.page_pool.used[g] * group.run_tokens - sum(count for page, count in empty.items() if page)
        return rows * group.token_bytes

    def _usage(self, filled: list[int]) -> Usage:
        """Return the bytes by category; `filled` has the bytes of tokens in used pages of each group."""
        sizes = [group.page_bytes for group in self.groups]
        taken = sum(used * size for used, size in zip(self.page_pool.used, sizes))
        space = self.page_pool.count_unused_bytes(sizes)
        return Usage(sum(filled), space.cached, 0, taken - sum(filled), space.external, space.free)

    def _type_usage(self, filled: list[int]) -> tuple[TypeUsage, ...]:
        """Return the bytes by layer type; groups of one type are added up."""
        found: dict[str, TypeUsage] = {}
        cached_pages = self.page_pool.num_cached
        for g, (group, held) in enumerate(zip(self.groups, filled)):
            name = group.kind if group.window is None else f"{group.kind}-{group.window}"
            _, used, internal, cached = found.get(name, (name, 0, 0, 0))
            internal += self.page_pool.used[g] * group.page_bytes - held
            found[name] = TypeUsage(name, used + held, internal, cached + cached_pages[g] * group.page_bytes)
        return tuple(found.values())

    def _sharing(self) -> Sharing:
        """Return how pages are shared, swapped and pinned."""
        tables = distinct = 0
        ref_count, pins = self.page_pool.ref_count, self.prefix_cache.pin_counts
        for g, group in enumerate(self.groups):
            named = sum(len(seq_pages.tables[g]) - seq_pages.first_page[g] for seq_pages in self.seq_pages.values())
            idle = sum(at == g and ref_count(g, page) == count for (at, page), count in pins.items())  # of no sequence
            tables += named * group.page_bytes
            distinct += (self.page_pool.used[g] - idle) * group.page_bytes
        registered, host = self.prefix_cache.registered_prefixes.values(), self.swap.host_pool
        return Sharing(
            tables, tables - distinct, self.copies, self.swap.out_bytes, self.swap.in_bytes,
            host.total, sum(host.used),
            len(registered), sum(len(prefix.tokens) for prefix in registered),
            min(
                group.tokens_in_pages(kept)
                for group, kept in zip(self.groups, self.prefix_cache.pinned_capacity)
                if not group.is_draft
            ),
            self.prefix_cache.queries, self.prefix_cache.hits, self.prefix_cache.full_hits,
            self.encoder_cache.runs, self.encoder_cache.parts_encoded, self.encoder_cache.hits,
        )  # fmt: skip

    def count_refs(self) -> list[dict[int, int]]:
        """Return for each group the number of tables, of sequences and registered prefixes, that name each page."""
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
        if self.prefix_demand is not None:
            self.prefix_demand.check()
        self.prefix_waiters.check()
        self.encoder_cache.check()
        self.page_pool.check(self.count_refs())
        self.swap.check()
