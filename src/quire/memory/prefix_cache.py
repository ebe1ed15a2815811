"""Prefixes that can be reused: cached pages found by their keys, and prefixes that the operator registered.

Keys are chained: key i is a digest of key i - 1 and the i-th run of `unit` tokens, from a root of model, dtype and
salt, so a key names the whole prefix. A group's page is named by the key of the run in which its last token lies.
`unit` divides what the pages of every group hold, and a prefix ends after a multiple of `stride` tokens, where a page
of every group does. A registered prefix (PagedAttention §4.4, Figure 10) is pinned: its pages stay, the last partial
ones included, which sequences share until they write to them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import add, sub
from typing import NamedTuple

from quire.memory.jenga.compaction import compact
from quire.memory.page_pool import SCRATCH
from quire.memory.page_tables import PageTables
from quire.memory.policies import FAR, LayerPolicy
from quire.memory.seq_pages import Tables
from quire.protocol.sequence import Sequence, common_prefix_len
from quire.protocol.step_plan import PageCopy

MAX_PREFIXES = 1024


class PrefixHit(NamedTuple):
    """The first `tokens` tokens of a sequence, and the pages that hold them, a table a group (0: not needed). Of
    `full_hit_tokens` tokens there is all that groups have which drop nothing."""

    tokens: int
    tables: Tables
    full_hit_tokens: int = 0


class RegisteredPrefix(NamedTuple):
    """A pinned prefix; keys[i] names its first i strides."""

    tokens: list[int]
    tables: Tables
    keys: list[bytes]


class PrefixCache:
    """What a memory of these tables can reuse. `pinned_capacity` pages a group are kept for registered ones. Without
    `caching` only those are found."""

    def __init__(self, page_tables: PageTables, model_id: str, pinned_capacity: Seq[int], caching: bool = True) -> None:
        self.page_tables, self.page_pool, self.policies = page_tables, page_tables.page_pool, page_tables.policies
        self.pinned_capacity, self.caching = pinned_capacity, caching
        self.bidirectional_prompt = page_tables.kv_config.both_ways
        self.has_dropping_policies = any(
            not policy.media and policy not in page_tables.retaining_policies for policy in page_tables.policies
        )
        self.keyed_groups = [(g, p) for g, p in enumerate(self.policies) if p.unit]  # whose pages are found by tokens
        units = [policy.unit for _, policy in self.keyed_groups]
        self.key_tokens, self.prefix_granularity = math.gcd(*units) or FAR, math.lcm(*units)
        self.root_key = hashlib.sha256(b"quire:" + model_id.encode()).digest()
        self.registered_prefixes: dict[str, RegisteredPrefix] = {}
        self.registered_index = PrefixIndex(self.prefix_granularity)  # of the registered ones
        self.pin_counts: Counter[tuple[int, int]] = Counter()  # (group, page) -> registered prefixes that hold it
        self.pending_keys: Counter[bytes] = Counter()  # keys of whole prompt pages that residents are computing
        self.deferred_by_key: dict[
            bytes, set[int]
        ] = {}  # keys in `coming`, and the sequences that were told to wait for them
        self.deferred_needs: dict[
            int, list[int]
        ] = {}  # these sequences, and the pages of each group that they will need
        self.reserved_for_deferred = [0] * len(self.policies)  # all of these pages: who comes in meanwhile leaves them
        self.queries = self.hits = self.full_hits = 0  # tokens looked up in the cache, and found: see Sharing

    # Keys

    def extend_keys(self, seq: Sequence, tokens: int) -> None:
        """Fill seq.keys up to those of the first `tokens` tokens, whole runs only."""
        keys, size = seq.page_keys, 8 * self.key_tokens
        first, last = len(keys), tokens // self.key_tokens
        if last <= first:
            return
        data = array("q", seq.tokens[first * self.key_tokens : last * self.key_tokens]).tobytes()
        key = keys[-1] if keys else self._salted_root_key(seq.cache_salt)
        beside = seq.images or self.bidirectional_prompt
        for i, at in enumerate(range(0, len(data), size), first):
            run = data[at : at + size]
            key = hashlib.sha256(key + (run + self._extra_key(seq, i) if beside else run)).digest()
            keys.append(key)

    def _extra_key(self, seq: Sequence, run: int) -> bytes:
        """What the keys and values of a run depend on beside its tokens: the pictures that it touches, and where they
        begin; where tokens attend both ways, all of the prompt. Nothing, so that what stands before a picture has the
        keys that it has without one."""
        begin, end = run * self.key_tokens, (run + 1) * self.key_tokens
        more = [m.key + m.start.to_bytes(8) for m in seq.images if m.start < end and m.end > begin]
        if self.bidirectional_prompt and not run:
            prompt = [m.key + m.start.to_bytes(8) for m in seq.images]
            more = [array("q", seq.tokens[: seq.prompt_len]).tobytes(), *prompt]
        return hashlib.sha256(b"".join(more)).digest() if more else b""

    def _salted_root_key(self, salt: str) -> bytes:
        """The key of no pages: another adapter's keys and values, or another tenant's, begin elsewhere."""
        return hashlib.sha256(self.root_key + salt.encode()).digest()

    def page_keys(self, group: int, keys: Seq[bytes], first: int, last: int) -> Seq[bytes]:
        """The names of the content of a group's pages first .. last of a sequence with these keys."""
        policy = self.policies[group]
        tokens, pages = policy.group.run_tokens, policy.group.run_pages
        if pages == 1:
            step = tokens // self.key_tokens
            return keys[(first + 1) * step - 1 : last * step : step]
        ends = [-(-(i + 1) * tokens // (pages * self.key_tokens)) for i in range(first, last)]
        return [keys[end - 1] + (i % pages).to_bytes(2) for i, end in zip(range(first, last), ends)]

    def publish(self, seq: Sequence, start: int, end: int, tables: Tables, first: Seq[int]) -> None:
        """tokens[start : end] of the sequence are computed, both multiples of `key_tokens`: their full pages can be "
        "found."""
        self.extend_keys(seq, end)
        for g, policy in self.keyed_groups:
            table = tables[g]
            i, stop = (
                max(policy.group.num_full_pages(start), first[g]),
                min(policy.group.num_full_pages(end), len(table)),
            )
            for name in self.page_keys(g, seq.page_keys, i, stop):
                if policy.keeps(seq, i):
                    self.page_pool.publish(g, table[i], name)
                i += 1

    # Cached pages

    def find_cached(self, seq: Sequence, known: int = 0) -> PrefixHit:
        """The longest prefix whose pages every group can find (Jenga §5.3); one token is left to compute. Of the first
        `known` tokens, a multiple of `prefix_granularity`, all pages are known, and not looked up nor returned.

        Each page is looked up once: of groups that need all of them from the left, until one is missing; of others
        from the right, where the last missing one says how long the prefix can be at most."""
        limit = max(
            min(seq.max_prefix_hit, len(seq.tokens) - 1) // self.prefix_granularity * self.prefix_granularity, known
        )
        self.extend_keys(seq, limit)
        ends = [policy.group.num_full_pages(limit) for policy in self.policies]
        named = [
            self.page_keys(g, seq.page_keys, 0, end) if self.policies[g].unit else () for g, end in enumerate(ends)
        ]
        found = list(ends)  # a group's pages from here on, before `hit`, are there
        hit, settled = limit, False
        for g, policy in enumerate(self.policies):
            if policy in self.page_tables.retaining_policies:
                hit, found[g] = self._shorten_hit(g, seq, named[g], range(known, hit), found[g])
        junction = hit
        while not settled and hit > known:
            settled = True
            for g, names in enumerate(named):
                shorter, found[g] = self._shorten_hit(g, seq, names, range(known, hit), found[g])
                if shorter < hit:
                    hit, settled = shorter, False
        hit = self.usable_tokens(seq, hit)
        tables = []
        for g, policy in enumerate(self.policies):
            need, begin = policy.required(seq, hit), 0 if policy.media else policy.group.num_full_pages(known)
            names = named[g][max(need.start, begin) : need.stop]
            pages = [page for page in map(self.page_pool.index[g].get, names) if page is not None]
            tables.append([SCRATCH] * (need.start - begin) + pages)
        return PrefixHit(hit, tables, junction)

    def _shorten_hit(
        self, group: int, seq: Sequence, page_keys: Seq[bytes], tokens: range, first_found: int
    ) -> tuple[int, int]:
        """The longest prefix, of up to tokens.stop tokens and beyond tokens.start, whose pages may be there, as far as
        one group's are: its pages from `first_found` on are, and where they are is told again."""
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
        while i >= 0 and page_keys[i] not in index and (i + 1) % border:  # it ends behind a page that is there
            i -= 1
        return self._round_down(policy, i + 1), i if i >= 0 and page_keys[i] in index else i + 1

    def usable_tokens(self, seq: Sequence, tokens: int) -> int:
        """How many of its first `tokens` tokens, all of which are there, a sequence can go on behind: none of a part of
        a prompt whose tokens attend both ways, where layers have windows. Within the prompt these hide nothing."""
        return 0 if self.bidirectional_prompt and self.has_dropping_policies and tokens < seq.prompt_len else tokens

    def _round_down(self, policy: LayerPolicy, pages: int) -> int:
        return policy.group.tokens_in_pages(pages) // self.prefix_granularity * self.prefix_granularity

    # Pages that are being computed

    def defer_if_pending(self, seq: Sequence, tokens: int, needs: list[int]) -> bool:
        """What follows the first `tokens` tokens, all that can be reused, is being computed for another sequence: worth
        waiting for. The pages that it needs, `needs` of each group, are promised to it meanwhile."""
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
        """The sequence was told that a page is coming, and that page hasn't arrived yet: nothing is looked up again. If
        pages before it were evicted meanwhile, that is seen when it arrives, or when its owner leaves."""
        return seq.id in self.deferred_needs

    def add_pending(self, seq: Sequence, start: int) -> tuple[int, int]:
        """`seq` will compute the whole pages of its prompt from token `start` on. Returns which of its keys that is."""
        first = start // self.key_tokens
        end = max(first, len(seq.page_keys))
        self.pending_keys.update(seq.page_keys[first:end])
        return first, end

    def resolve_pending(self, seq: Sequence, start: int, end: int) -> None:
        """What keys [start, end) of `seq` name is computed, or won't be."""
        for key in seq.page_keys[start:end]:
            self.pending_keys[key] -= 1
            if not self.pending_keys[key]:
                del self.pending_keys[key]
            for waiting in self.deferred_by_key.pop(key, ()):
                self.reserved_for_deferred = list(
                    map(sub, self.reserved_for_deferred, self.deferred_needs.pop(waiting))
                )

    def clear_deferred(self) -> None:
        """What can be found has changed: nobody waits for what was said to be coming."""
        self.deferred_by_key, self.deferred_needs = {}, {}
        self.reserved_for_deferred = [0] * len(self.policies)

    def reset(self) -> int:
        """Forget every prefix and picture but the registered ones. Returns the number of pages emptied: those that no
        sequence uses. Those that are used aren't found any more, nor what their sequences add to them."""
        self.clear_deferred()
        self.pending_keys.clear()
        for resident in self.page_tables.all_seq_pages():
            resident.is_stale, resident.pending_key_range = True, (0, 0)
        emptied = self.page_pool.drop_cached()
        for g, index in enumerate(self.page_pool.index):
            for page in [page for page in index.values() if (g, page) not in self.pin_counts]:
                self.page_pool.unpublish(g, page)
        self.page_tables.encoder_cache.forget_keys()
        return emptied

    # Registered prefixes (§4.4)

    def can_pin(self, length: int) -> bool:
        """Could a prefix of `length` tokens be registered now?"""
        held = Counter(group for group, _ in self.pin_counts)
        need = [held[g] + policy.reads(None, 0, length).stop for g, policy in enumerate(self.policies)]
        return self.page_pool.fits_within(need, self.pinned_capacity) and len(self.registered_prefixes) < MAX_PREFIXES

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register the computed tokens of a resident sequence as the prefix `name`; they stay until `unpin`. False if
        they exceed what is kept for prefixes, or if there are MAX_PREFIXES already."""
        if not self.can_pin(seq.computed):
            return False
        resident = self.page_tables.seq_pages[seq.id]
        self.extend_keys(seq, seq.computed)
        ends = range(self.prefix_granularity, seq.computed + 1, self.prefix_granularity)
        keys = [self._salted_root_key(seq.cache_salt), *(seq.page_keys[end // self.key_tokens - 1] for end in ends)]
        tables = [
            table[: policy.required(seq, seq.computed).stop] for policy, table in zip(self.policies, resident.tables)
        ]
        prefix = RegisteredPrefix(seq.tokens[: seq.computed], tables, keys)
        for group, page in _pinned_pages(prefix):
            self.page_pool.incref(group, page)
            self.pin_counts[group, page] += 1
        self.registered_prefixes[name] = prefix
        self.registered_index.add(name, self._prefix_ends(prefix))
        self.clear_deferred()
        resident.needs_cow_check = True
        return True

    def unpin(self, name: str) -> bool:
        """Let go of a prefix; sequences that share its pages keep them. False if there is none of that name."""
        prefix = self.registered_prefixes.pop(name, None)
        if prefix is None:
            return False
        self.page_pool.decref_tables(prefix.tables)
        self.pin_counts -= Counter(_pinned_pages(prefix))
        self.registered_index.remove(name, self._prefix_ends(prefix))
        self.clear_deferred()
        return True

    def compact(self) -> None:
        """No sequence is in memory: what registered prefixes hold lies in as few large pages as it fills, as `fits` has
        counted it."""
        for g in range(len(self.policies)):
            moved = compact(self.page_pool, g, [page for group, page in self.pin_counts if group == g])
            self.page_tables.page_ops += [PageCopy(g, old, new) for old, new in moved.items()]
            for old, new in moved.items():
                self.pin_counts[g, new] = self.pin_counts.pop((g, old))
            for prefix in self.registered_prefixes.values() if moved else ():
                prefix.tables[g][:] = [moved.get(page, page) for page in prefix.tables[g]]

    def find_registered(self, seq: Sequence) -> PrefixHit:
        """The longest part of a registered prefix that the sequence begins with: all of it, or whole strides."""
        limit = min(seq.max_prefix_hit, len(seq.tokens) - 1, *(medium.start for medium in seq.images[:1]))
        name = (
            self.registered_index.find(self._registered_keys(seq, limit), seq.tokens, limit)
            if self.registered_prefixes
            else None
        )
        if name is None:
            return self.no_hit()
        prefix = self.registered_prefixes[name]
        shared = common_prefix_len(seq.tokens, prefix.tokens, limit)
        if shared < len(prefix.tokens):
            shared = shared // self.prefix_granularity * self.prefix_granularity
        kept = self.slice_tables(prefix.tables, shared) if shared > 0 else None
        return PrefixHit(shared, kept) if kept is not None else self.no_hit()

    def _registered_keys(self, seq: Sequence, limit: int) -> list[bytes]:
        """The keys of 0, 1, 2... strides of the sequence, as long as a registered prefix has them too. No more are
        hashed than one beyond those."""
        keys: list[bytes] = []
        key = self._salted_root_key(seq.cache_salt)
        while key in self.registered_index:
            keys.append(key)
            end = len(keys) * self.prefix_granularity
            if end > limit:
                break
            self.extend_keys(seq, end)
            key = seq.page_keys[end // self.key_tokens - 1]
        return keys

    def slice_tables(self, tables: Tables, tokens: int) -> Tables | None:
        """What a sequence needs of the tables to go on after `tokens` tokens; None if some of it isn't there."""
        kept = []
        for policy, table in zip(self.policies, tables):
            need = policy.required(None, tokens)
            pages = table[need.start : need.stop]
            if len(pages) < len(need) or SCRATCH in pages:
                return None
            kept.append([SCRATCH] * need.start + pages)
        return kept

    def no_hit(self) -> PrefixHit:
        """No tokens."""
        return PrefixHit(0, [[] for _ in self.policies])

    def _prefix_ends(self, prefix: RegisteredPrefix) -> Iterator[PrefixEnd]:
        """Where a lookup of a prefix can end; see PrefixIndex."""
        gone = [next((i for i, page in enumerate(table) if page), len(table)) for table in prefix.tables]
        for i, key in enumerate(prefix.keys):
            # The pages that were dropped must not be needed. After no page at all there is nothing to use.
            needs = [policy.required(None, i * self.prefix_granularity) for policy in self.policies]
            yield PrefixEnd(
                key, (), i > 0 and all(need.start >= min(first, need.stop) for need, first in zip(needs, gone))
            )
        if tail := prefix.tokens[(len(prefix.keys) - 1) * self.prefix_granularity :]:
            yield PrefixEnd(
                prefix.keys[-1], tuple(tail), self.slice_tables(prefix.tables, len(prefix.tokens)) is not None
            )

    def check(self) -> None:
        """Assert that what is kept about registered prefixes is what their list says, and who waits waits for a page
        that is coming."""
        pins = Counter(named for prefix in self.registered_prefixes.values() for named in _pinned_pages(prefix))
        assert pins == self.pin_counts, "the pins of registered prefixes differ from their tables"
        index = PrefixIndex(self.prefix_granularity)
        for name, prefix in self.registered_prefixes.items():
            index.add(name, self._prefix_ends(prefix))
        assert index.names_by_end == self.registered_index.names_by_end, (
            "the index names other prefixes than the registered ones"
        )
        assert index.tail_lengths == self.registered_index.tail_lengths, "the index has lost its way to a prefix"
        assert all(key in self.pending_keys for key in self.deferred_by_key), "a sequence waits for nothing"
        assert {seq for seqs in self.deferred_by_key.values() for seq in seqs} == set(self.deferred_needs), (
            "who waits is told twice"
        )
        promised = [sum(pages) for pages in zip(*self.deferred_needs.values())] or [0] * len(self.policies)
        assert promised == self.reserved_for_deferred, "pages are promised to nobody"


def _pinned_pages(prefix: RegisteredPrefix) -> Iterable[tuple[int, int]]:
    return ((group, page) for group, table in enumerate(prefix.tables) for page in table if page != SCRATCH)


class PrefixEnd(NamedTuple):
    """A place in a prefix: after the whole pages that `key` names, and after `tail`, fewer tokens than a page. Not
    `is_usable` if pages before it are gone; then it only leads to the stops behind it."""

    key: bytes
    tail: tuple[int, ...]
    is_usable: bool


class PrefixIndex:
    """Names of prefixes by their stops. The cost of a lookup depends on the prefix found, not on how many there are."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.names_by_end: dict[
            tuple[bytes, tuple[int, ...]], dict[str, None]
        ] = {}  # usable stops; the oldest name first
        self.tail_lengths: dict[bytes, Counter[int]] = {}  # lengths of the tails behind a key, how many stops each

    def __contains__(self, key: bytes) -> bool:
        """Some prefix has the whole pages that `key` names."""
        return key in self.tail_lengths

    def add(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Index a prefix by all of its stops."""
        for key, tail, usable in ends:
            self.tail_lengths.setdefault(key, Counter())[len(tail)] += 1
            if usable:
                self.names_by_end.setdefault((key, tail), {})[name] = None

    def remove(self, name: str, ends: Iterable[PrefixEnd]) -> None:
        """Undo `add` of the same stops."""
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
        """The prefix with the furthest usable stop within tokens[:limit]; of several the oldest. keys[i] names the
        first i pages of `tokens`, for as many pages as some prefix has."""
        for i in range(len(keys) - 1, -1, -1):
            start = i * self.page_tokens
            for length in sorted(self.tail_lengths[keys[i]], reverse=True):
                if start + length <= limit:
                    names = self.names_by_end.get((keys[i], tuple(tokens[start : start + length])))
                    if names is not None:
                        return next(iter(names))
        return None
