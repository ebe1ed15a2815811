"""Prefixes that can be reused: cached pages found by their keys, and prefixes that the operator registered.

The keys are those of quire.memory.page_keys. `key_tokens` divides the page tokens of every group, and a prefix ends
after a multiple of `prefix_granularity` tokens, where a page of every group ends. A registered prefix (PagedAttention
§4.4, Figure 10) is pinned: its pages stay, the last partial ones included; sequences share them until they write to
them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import add, sub
from typing import NamedTuple

from quire.memory.cache_log import CacheLog
from quire.memory.jenga.shared_pool import compact
from quire.memory.page_keys import KeyChain, PromptKeys
from quire.memory.page_pool import SCRATCH
from quire.memory.page_tables import PageTables
from quire.memory.policies import FAR, LayerPolicy
from quire.memory.seq_pages import SeqPages, Tables
from quire.protocol.sequence import Sequence, common_prefix_len
from quire.protocol.step_plan import PageCopy

MAX_PREFIXES = 1024


class PrefixHit(NamedTuple):
    """The first `tokens` tokens of a sequence, and the pages that hold them, one table for each group (0: not needed),
    which are empty for the groups of another model.

    `full_hit_tokens` is the hit of the groups that drop no pages alone."""

    tokens: int
    tables: Tables
    full_hit_tokens: int = 0


class RegisteredPrefix(NamedTuple):
    """A pinned prefix; keys[i] identifies its first i * `prefix_granularity` tokens."""

    tokens: list[int]
    tables: Tables
    keys: list[bytes]


class PrefixCache:
    """The prefixes that a memory with these tables can reuse.

    Of each group `pinned_capacity` pages are set aside for registered prefixes. Without `caching` only registered
    prefixes are found."""

    def __init__(self, page_tables: PageTables, model_id: str, pinned_capacity: Seq[int], caching: bool = True) -> None:
        self.page_tables, self.page_pool, self.policies = page_tables, page_tables.page_pool, page_tables.policies
        self.pinned_capacity, self.caching = pinned_capacity, caching
        self.bidirectional_prompt = page_tables.kv_config.both_ways
        self.has_dropping_policies = any(
            not policy.media and policy not in page_tables.retaining_policies for policy in page_tables.policies
        )
        keyed_groups = [(g, policy) for g, policy in enumerate(self.policies) if policy.unit]  # pages found by tokens
        self.model_groups = [(g, policy) for g, policy in keyed_groups if not policy.group.is_draft]
        self.draft_groups = [(g, policy) for g, policy in keyed_groups if policy.group.is_draft]
        units = [policy.unit for _, policy in keyed_groups]
        self.key_tokens, self.prefix_granularity = math.gcd(*units) or FAR, math.lcm(*units)
        root_key = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.key_chain = KeyChain(root_key, self.key_tokens, page_tables.kv_config.both_ways)
        self.cache_log: CacheLog | None = None
        self.registered_prefixes: dict[str, RegisteredPrefix] = {}
        self.registered_index = PrefixIndex(self.prefix_granularity)
        self.prefix_seq = Sequence(0, [])  # stands for any registered prefix: it has no images, and no drafts
        self.pin_counts: Counter[tuple[int, int]] = Counter()  # (group, page) -> registered prefixes that hold it
        self.pending_keys: Counter[bytes] = Counter()  # keys of whole prompt pages that are being computed
        self.deferred_by_key: dict[bytes, set[int]] = {}  # pending key -> ids of sequences that wait for it
        self.deferred_needs: dict[int, list[int]] = {}  # id of a waiting sequence -> pages of each group that it needs
        self.reserved_for_deferred = [0] * len(self.policies)  # the sums of these: not for sequences admitted meanwhile
        self.queries = self.hits = self.full_hits = 0  # tokens, see Sharing

    # Keys

    def page_keys(self, group: int, keys: Seq[bytes], first: int, last: int) -> Seq[bytes]:
        """Return the keys of a group's pages [first, last) of a sequence with these keys."""
        layers = self.policies[group].group
        return self.key_chain.of_pages(layers.run_tokens, layers.run_pages, keys, first, last)

    def routed_group(self) -> int | None:
        """Return the group whose pages a router learns of: one that keeps all pages, if there is one. None if no
        prefixes are cached."""
        if not self.caching or not self.model_groups:
            return None
        kept = (g for g, policy in self.model_groups if policy in self.page_tables.retaining_policies)
        return next(kept, self.model_groups[0][0])

    def prompt_keys(self) -> PromptKeys | None:
        """Return how the keys of the `routed_group` are made, or None."""
        if (group := self.routed_group()) is None:
            return None
        layers = self.policies[group].group
        return PromptKeys(self.key_chain, layers.run_tokens, layers.run_pages)

    def log(self, with_contents: bool = False) -> CacheLog | None:
        """Return a log of the cached pages of the `routed_group` from now on, or None. No page may be cached yet."""
        if (keys := self.prompt_keys()) is not None:
            self.continue_log(CacheLog(keys, with_contents))
        return self.cache_log

    def continue_log(self, log: CacheLog) -> None:
        """Continue the log of a former memory, whose pages are gone. No page may be cached yet."""
        group = self.routed_group()
        assert group is not None, "a former memory had one"
        assert not self.page_pool.index[group], "pages are cached already"
        self.cache_log, self.page_pool.index[group] = log, log.new_index()

    def publish(self, seq: Sequence, seq_pages: SeqPages, start: int, end: int, is_draft: bool) -> None:
        """Make the full pages of the computed tokens[start : end] findable; both are multiples of `key_tokens`. The
        pages are those of the model, or of its draft model."""
        self.key_chain.extend(seq, end)
        for g, policy in self.draft_groups if is_draft else self.model_groups:
            table = seq_pages.tables[g]
            i, stop = policy.group.num_full_pages(start), policy.group.num_full_pages(end)
            i, stop = max(i, seq_pages.first_page[g]), min(stop, len(table))
            for key in self.page_keys(g, seq.page_keys, i, stop):
                if policy.keeps(seq, i):
                    self.page_pool.publish(g, table[i], key)
                i += 1
        if self.cache_log is not None and not is_draft:
            self.cache_log.describe(seq, start, end)

    # Cached pages

    def find_cached(self, seq: Sequence, known: int = 0, longest: int = FAR, is_draft: bool = False) -> PrefixHit:
        """Return the longest prefix, of at most `longest` tokens, whose pages every group of the model, or of its draft
        model, can find (Jenga §5.3); one token is left to compute. For a sequence that drafts, the groups of the model
        include those of a speculation head.

        All pages of the first `known` tokens, a multiple of `prefix_granularity`, are known: they are neither looked up
        nor returned. Each page is looked up once. Groups that need all pages are searched from the left, up to the
        first missing page. Others are searched from the right, where the last missing page bounds the length of the
        prefix."""
        limit = min(seq.max_prefix_hit, len(seq.tokens) - 1, longest)
        limit = max(limit // self.prefix_granularity * self.prefix_granularity, known)
        self.key_chain.extend(seq, limit)
        ends = [policy.group.num_full_pages(limit) for policy in self.policies]
        keys = [self.page_keys(g, seq.page_keys, 0, end) if self.policies[g].unit else () for g, end in enumerate(ends)]
        first_found = list(ends)  # of each group: its pages from here to `hit` are present
        hit, is_final = limit, False
        searched = [
            (g, policy)
            for g, policy in enumerate(self.policies)
            if policy.group.is_draft == is_draft or (seq.uses_draft_model and policy.group.reads_hidden_states)
        ]
        for g, policy in searched:
            if policy in self.page_tables.retaining_policies:
                hit, first_found[g] = self._shorten_hit(g, seq, keys[g], range(known, hit), first_found[g])
        full_hit = hit
        while not is_final and hit > known:
            is_final = True
            for g, _ in searched:
                shorter, first_found[g] = self._shorten_hit(g, seq, keys[g], range(known, hit), first_found[g])
                if shorter < hit:
                    hit, is_final = shorter, False
        hit = self.usable_tokens(seq, hit)
        tables = self.no_hit().tables
        for g, policy in searched:
            need, begin = policy.required(seq, hit), 0 if policy.media else policy.group.num_full_pages(known)
            group_keys = keys[g][max(need.start, begin) : need.stop]
            pages = [page for page in map(self.page_pool.index[g].get, group_keys) if page is not None]
            tables[g] = [SCRATCH] * (need.start - begin) + pages
        return PrefixHit(hit, tables, full_hit)

    def _shorten_hit(
        self, group: int, seq: Sequence, page_keys: Seq[bytes], tokens: range, first_found: int
    ) -> tuple[int, int]:
        """Return the longest hit from tokens.start to tokens.stop that a group may have, and its `first_found`.

        The group's pages from `first_found` to tokens.stop are present."""
        policy, index, hit = self.policies[group], self.page_pool.index[group], tokens.stop
        need = policy.required(seq, hit)
        first, last = max(need.start, policy.group.num_full_pages(tokens.start)), min(first_found, need.stop)
        if first >= last:
            return hit, first_found
        if need.start == 0:
            there = next((i for i in range(first, last) if page_keys[i] not in index), last)
            return (hit if there == last else self._round_down(policy, there)), 0
        i = last - 1
        while i >= first and page_keys[i] in index:
            i -= 1
        if i < first:
            return hit, first
        border = policy.border or len(page_keys) + 1
        while i >= 0 and page_keys[i] not in index and (i + 1) % border:  # a prefix ends after a page that is present
            i -= 1
        return self._round_down(policy, i + 1), i if i >= 0 and page_keys[i] in index else i + 1

    def usable_tokens(self, seq: Sequence, tokens: int) -> int:
        """Return how many of the first `tokens` tokens, all present, a sequence can reuse.

        None of a part of a prompt with bidirectional attention, if layers have windows: within the prompt windows hide
        nothing."""
        return 0 if self.bidirectional_prompt and self.has_dropping_policies and tokens < seq.prompt_len else tokens

    def _round_down(self, policy: LayerPolicy, pages: int) -> int:
        return policy.group.tokens_in_pages(pages) // self.prefix_granularity * self.prefix_granularity

    def count_lookup(self, queries: int, hits: int, full_hits: int) -> None:
        """Count the tokens of an admitted sequence that were looked up and found, as in Sharing."""
        self.queries += queries
        self.hits += hits
        self.full_hits += max(hits, full_hits)

    # Pending pages: those that are being computed

    def defer_if_pending(self, seq: Sequence, tokens: int, needs: list[int]) -> bool:
        """Return True, and let `seq` wait, if the page after its first `tokens` tokens, its whole hit, is pending.

        The pages that it needs, needs[g] of each group g, are reserved for it meanwhile."""
        end = (tokens // self.prefix_granularity + 1) * self.prefix_granularity
        if end >= min(seq.max_prefix_hit + 1, len(seq.tokens)) or not self.usable_tokens(seq, end):
            return False
        key = seq.page_keys[end // self.key_tokens - 1]
        if key not in self.pending_keys:
            return False
        self.deferred_by_key.setdefault(key, set()).add(seq.id)
        self.deferred_needs[seq.id] = needs
        self.reserved_for_deferred = list(map(add, self.reserved_for_deferred, needs))
        return True

    def is_deferred(self, seq: Sequence) -> bool:
        """Return True if the sequence waits for a pending page: nothing is looked up again until it is resolved, even
        if earlier pages are evicted meanwhile."""
        return seq.id in self.deferred_needs

    def add_pending(self, seq: Sequence, start: int) -> tuple[int, int]:
        """Record that `seq` will compute its whole prompt pages from token `start` on; return their key range."""
        first = start // self.key_tokens
        end = max(first, len(seq.page_keys))
        self.pending_keys.update(seq.page_keys[first:end])
        return first, end

    def resolve_pending(self, seq: Sequence, start: int, end: int) -> None:
        """Record that the pages of keys [start, end) of `seq` are computed, or will not be: end the waits for them."""
        for key in seq.page_keys[start:end]:
            self.pending_keys[key] -= 1
            if not self.pending_keys[key]:
                del self.pending_keys[key]
            for waiting in self.deferred_by_key.pop(key, ()):
                self.reserved_for_deferred = list(
                    map(sub, self.reserved_for_deferred, self.deferred_needs.pop(waiting))
                )

    def clear_deferred(self) -> None:
        """End all waits, since different pages can be found now."""
        self.deferred_by_key, self.deferred_needs = {}, {}
        self.reserved_for_deferred = [0] * len(self.policies)

    def reset(self) -> int:
        """Forget every prefix and image but the registered prefixes, and return the number of emptied pages.

        Those are the pages that no sequence uses. Used pages are not found any more, nor are those that their sequences
        add."""
        self.clear_deferred()
        self.pending_keys.clear()
        for seq_pages in self.page_tables.all_seq_pages():
            seq_pages.is_stale, seq_pages.pending_key_range = True, (0, 0)
        emptied = self.page_pool.drop_cached()
        for g, index in enumerate(self.page_pool.index):
            for page in [page for page in index.values() if (g, page) not in self.pin_counts]:
                self.page_pool.unpublish(g, page)
        self.page_tables.encoder_cache.forget_keys()
        return emptied

    # Registered prefixes (§4.4)

    def can_pin(self, length: int) -> bool:
        """Return True if a prefix of `length` tokens can be registered now."""
        pinned = Counter(group for group, _ in self.pin_counts)
        needs = [pinned[g] + policy.reads(self.prefix_seq, 0, length).stop for g, policy in enumerate(self.policies)]
        return self.page_pool.fits_within(needs, self.pinned_capacity) and len(self.registered_prefixes) < MAX_PREFIXES

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register the computed tokens of a sequence in memory as the prefix `name`; they stay until `unpin`. False if
        they exceed the capacity for prefixes, or there are MAX_PREFIXES already. The sequence must not draft."""
        assert not seq.uses_draft_model, f"sequence {seq.id} is registered as a prefix, and drafts"
        if not self.can_pin(seq.computed):
            return False
        seq_pages = self.page_tables.seq_pages[seq.id]
        self.key_chain.extend(seq, seq.computed)
        ends = range(self.prefix_granularity, seq.computed + 1, self.prefix_granularity)
        keys = [
            self.key_chain.salted_root(seq.cache_salt),
            *(seq.page_keys[end // self.key_tokens - 1] for end in ends),
        ]
        tables = [
            table[: policy.required(seq, seq.computed).stop] for policy, table in zip(self.policies, seq_pages.tables)
        ]
        prefix = RegisteredPrefix(seq.tokens[: seq.computed], tables, keys)
        for group, page in _pinned_pages(prefix):
            self.page_pool.incref(group, page)
            self.pin_counts[group, page] += 1
        self.registered_prefixes[name] = prefix
        self.registered_index.add(name, self._prefix_ends(prefix))
        self.clear_deferred()
        seq_pages.needs_cow_check = True
        return True

    def unpin(self, name: str) -> bool:
        """Unregister a prefix; sequences that share its pages keep them. False if there is none of that name."""
        prefix = self.registered_prefixes.pop(name, None)
        if prefix is None:
            return False
        self.page_pool.decref_tables(prefix.tables)
        self.pin_counts -= Counter(_pinned_pages(prefix))
        self.registered_index.remove(name, self._prefix_ends(prefix))
        self.clear_deferred()
        return True

    def compact(self) -> None:
        """Move pages of registered prefixes to as few large pages as they fill, as `fits` assumes.

        Call it only when no sequence is in memory."""
        for g in range(len(self.policies)):
            moved = compact(self.page_pool, g, [page for group, page in self.pin_counts if group == g])
            self.page_tables.page_ops += [PageCopy(g, old, new) for old, new in moved.items()]
            for old, new in moved.items():
                self.pin_counts[g, new] = self.pin_counts.pop((g, old))
            for prefix in self.registered_prefixes.values() if moved else ():
                prefix.tables[g][:] = [moved.get(page, page) for page in prefix.tables[g]]

    def find_registered(self, seq: Sequence) -> PrefixHit:
        """Return the longest start of a registered prefix with which the sequence begins: the whole prefix, or a
        multiple of `prefix_granularity` tokens. It ends before the first image, and leaves a token to compute. The
        draft model has no pages of it."""
        if not self.registered_prefixes:
            return self.no_hit()
        limit = min(seq.max_prefix_hit, len(seq.tokens) - 1, *(image.start for image in seq.images[:1]))
        name = self.registered_index.find(self._registered_keys(seq, limit), seq.tokens, limit)
        if name is None:
            return self.no_hit()
        prefix = self.registered_prefixes[name]
        shared = common_prefix_len(seq.tokens, prefix.tokens, limit)
        if shared < len(prefix.tokens):
            shared = shared // self.prefix_granularity * self.prefix_granularity
        kept = self.slice_tables(prefix.tables, shared) if shared > 0 else None
        return PrefixHit(shared, kept) if kept is not None else self.no_hit()

    def _registered_keys(self, seq: Sequence, limit: int) -> list[bytes]:
        """Return the sequence's keys after 0, 1, 2... times `prefix_granularity` tokens, as long as a registered prefix
        has them. At most one more is hashed."""
        keys: list[bytes] = []
        key = self.key_chain.salted_root(seq.cache_salt)
        while key in self.registered_index:
            keys.append(key)
            end = len(keys) * self.prefix_granularity
            if end > limit:
                break
            self.key_chain.extend(seq, end)
            key = seq.page_keys[end // self.key_tokens - 1]
        return keys

    def slice_tables(self, tables: Tables, tokens: int) -> Tables | None:
        """Return the pages of the tables that are needed to continue after `tokens` tokens; None if one is missing."""
        kept = []
        for policy, table in zip(self.policies, tables):
            need = policy.required(self.prefix_seq, tokens)
            pages = table[need.start : need.stop]
            if len(pages) < len(need) or SCRATCH in pages:
                return None
            kept.append([SCRATCH] * need.start + pages)
        return kept

    def no_hit(self) -> PrefixHit:
        """Return a hit of no tokens."""
        return PrefixHit(0, [[] for _ in self.policies])

    def _prefix_ends(self, prefix: RegisteredPrefix) -> Iterator[PrefixEnd]:
        """Yield the places where a lookup of a prefix can end; see PrefixIndex."""
        first_pages = [next((i for i, page in enumerate(table) if page), len(table)) for table in prefix.tables]
        for i, key in enumerate(prefix.keys):
            # The dropped pages must not be needed. An empty prefix is of no use.
            needs = [policy.required(self.prefix_seq, i * self.prefix_granularity) for policy in self.policies]
            yield PrefixEnd(
                key, (), i > 0 and all(need.start >= min(first, need.stop) for need, first in zip(needs, first_pages))
            )
        if tail := prefix.tokens[(len(prefix.keys) - 1) * self.prefix_granularity :]:
            yield PrefixEnd(
                prefix.keys[-1], tuple(tail), self.slice_tables(prefix.tables, len(prefix.tokens)) is not None
            )

    def check(self) -> None:
        """Assert that pins and index agree with the registered prefixes, and that every wait is for a pending page."""
        pins = Counter(named for prefix in self.registered_prefixes.values() for named in _pinned_pages(prefix))
        assert pins == self.pin_counts, "the pins of registered prefixes differ from their tables"
        index = PrefixIndex(self.prefix_granularity)
        for name, prefix in self.registered_prefixes.items():
            index.add(name, self._prefix_ends(prefix))
        assert index.names_by_end == self.registered_index.names_by_end, (
            "the index names other prefixes than the registered ones"
        )
        assert index.tail_lengths == self.registered_index.tail_lengths, "the index has wrong tail lengths"
        assert all(key in self.pending_keys for key in self.deferred_by_key), "a sequence waits for no pending key"
        assert {seq for seqs in self.deferred_by_key.values() for seq in seqs} == set(self.deferred_needs), (
            "the waiting sequences differ from those with needs"
        )
        reserved = [sum(pages) for pages in zip(*self.deferred_needs.values())] or [0] * len(self.policies)
        assert reserved == self.reserved_for_deferred, "the reserved pages differ from the needs of waiting sequences"


def _pinned_pages(prefix: RegisteredPrefix) -> Iterable[tuple[int, int]]:
    return ((group, page) for group, table in enumerate(prefix.tables) for page in table if page != SCRATCH)


class PrefixEnd(NamedTuple):
    """A place in a prefix: after the whole pages that `key` identifies, and after `tail`, fewer tokens than a page.

    If pages before it were dropped it is not `is_usable`, and only leads to the ends after it."""

    key: bytes
    tail: tuple[int, ...]
    is_usable: bool


class PrefixIndex:
    """Names of prefixes by their ends. The cost of a lookup does not depend on the number of prefixes."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        # (key, tail) of the usable ends -> names, the oldest first
        self.names_by_end: dict[tuple[bytes, tuple[int, ...]], dict[str, None]] = {}
        self.tail_lengths: dict[bytes, Counter[int]] = {}  # key -> length of a tail after it -> number of ends

    def __contains__(self, key: bytes) -> bool:
        """Return True if some prefix has the whole pages that `key` identifies."""
        return key in self.tail_lengths

    def add(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Index a prefix by all of its ends."""
        for key, tail, usable in ends:
            self.tail_lengths.setdefault(key, Counter())[len(tail)] += 1
            if usable:
                self.names_by_end.setdefault((key, tail), {})[name] = None

    def remove(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Undo `add` with the same ends."""
        for key, tail, usable in ends:
            lengths = self.tail_lengths[key]
            lengths[len(tail)] -= 1
            if not lengths[len(tail)]:
                del lengths[len(tail)]
            if not lengths:
                del self.tail_lengths[key]
            if usable:
                names = self.names_by_end[key, tail]
                del names[name]
                if not names:
                    del self.names_by_end[key, tail]

    def find(self, keys: Seq[bytes], tokens: Seq[int], limit: int) -> str | None:
        """Return the prefix with the last usable end within tokens[:limit]; of several the oldest; or None. keys[i]
        identifies the first i pages of `tokens`, for as many pages as some prefix has."""
        for i in range(len(keys) - 1, -1, -1):
            start = i * self.page_tokens
            for length in sorted(self.tail_lengths[keys[i]], reverse=True):
                if start + length <= limit:
                    names = self.names_by_end.get((keys[i], tuple(tokens[start : start + length])))
                    if names is not None:
                        return next(iter(names))
        return None
