"""Sequences that are about to come in: what of them needn't be computed, and the pages that they take. Nothing changes
here; PagedMemory does what is found."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from quire.core.request import Sequence
from quire.memory.encoder_cache import ImageNeeds
from quire.memory.page_pool import CachedHits
from quire.memory.page_tables import Tables
from quire.memory.policies import FAR, peak_pages
from quire.memory.prefix_cache import PrefixHit

if TYPE_CHECKING:
    from quire.memory.paged import PagedMemory


class AdmissionPlan(NamedTuple):
    """How a sequence would come in: with `hit_tokens` tokens that it needn't compute, and room for `target_len`.

    The first `shared_tokens` of them it has in common with an earlier sequence of its request, `sibling_index` by its
    place among
    them, and names the same pages; `hit_tables` is the pages of the others, a table a group. `ready_tokens` of them
    are computed.
    `full_hit_tokens` is as in Reuse. One that `waits_for_sibling` has no pages yet, see Followers.
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
