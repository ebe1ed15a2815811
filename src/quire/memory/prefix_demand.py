"""The prefixes that waiting sequences will find in the cache.

A memory that knows them evicts their pages last, and a sequence that has passed them with its window leaves them
cached. A prefix is of use only as a whole, with the pages of every layer type: when some of its pages must be evicted,
all of them are no longer spared. Admission asks how many tokens of prefixes one more sequence would cost (see
KVMemory.admit)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from quire.memory.page_tables import PageTables
from quire.memory.prefix_cache import PrefixCache
from quire.protocol.sequence import Sequence

MAX_EXPECTED = 256  # sequences


class ExpectedPrefix:
    """A prefix of `tokens` tokens, for which `waiting` sequences wait. Its pages, by (group, key), are spared if it
    `is_spared`."""

    __slots__ = ("is_spared", "pages", "tokens", "waiting")

    def __init__(self, tokens: int, pages: list[tuple[int, bytes]]) -> None:
        self.tokens, self.pages, self.waiting, self.is_spared = tokens, pages, 0, False


class WaitingSequence(NamedTuple):
    """The keys of all whole prefixes of a sequence, and that of the prefix that it will find (b"": none)."""

    keys: list[bytes]
    found: bytes


class PrefixDemand:
    """The prefixes that up to MAX_EXPECTED waiting sequences will find: those that are cached or computed now, and
    those that one of the waiting sequences computes before."""

    def __init__(self, page_tables: PageTables, prefix_cache: PrefixCache) -> None:
        self.page_pool, self.prefix_cache = page_tables.page_pool, prefix_cache
        self.sequences: dict[int, WaitingSequence] = {}  # by id, in the order of arrival
        self.num_waiting = Counter[bytes]()  # sequences by the key of a prefix
        self.prefixes: dict[bytes, ExpectedPrefix] = {}
        self.page_pool.add_demand(self)

    @property
    def has_room(self) -> bool:
        """Return True if `expect` takes another sequence."""
        return len(self.sequences) < MAX_EXPECTED

    def expect(self, seq: Sequence) -> None:
        """Expect that a waiting sequence will look up its prefix."""
        prefixes = self.prefix_cache
        granularity, key_tokens = prefixes.prefix_granularity, prefixes.key_tokens
        limit = min(seq.max_prefix_hit, len(seq.tokens) - 1) // granularity * granularity
        prefixes.key_chain.extend(seq, limit)
        step = granularity // key_tokens
        keys = list(seq.page_keys[step - 1 : limit // key_tokens : step])
        common = next((i for i, key in enumerate(keys) if not self._will_be_computed(key)), len(keys))
        cached = min(prefixes.find_cached(seq).tokens, limit)
        tokens = max(prefixes.usable_tokens(seq, common * granularity), cached)
        found = b""
        if tokens:
            found = keys[tokens // granularity - 1]
            if found not in self.prefixes:
                self.prefixes[found] = ExpectedPrefix(tokens, self._pages_of(seq, tokens))
            self.prefixes[found].waiting += 1
            self._spare(self.prefixes[found])
        self.num_waiting.update(keys)
        self.sequences[seq.id] = WaitingSequence(keys, found)

    def _will_be_computed(self, key: bytes) -> bool:
        return key in self.num_waiting or key in self.prefix_cache.pending_keys

    def _pages_of(self, seq: Sequence, tokens: int) -> list[tuple[int, bytes]]:
        """Return the (group, key) of all pages that a hit of this length needs, the deepest first: that is the order in
        which they are evicted."""
        prefixes, pages = self.prefix_cache, list[tuple[int, int, bytes]]()
        for g, policy in prefixes.model_groups + (prefixes.draft_groups if seq.uses_draft_model else []):
            need = policy.required(seq, tokens)
            keys = prefixes.page_keys(g, seq.page_keys, need.start, need.stop)
            pages += [(policy.group.tokens_in_pages(i), g, key) for i, key in zip(need, keys)]
        pages.sort(key=itemgetter(0), reverse=True)
        return [(g, key) for _, g, key in pages]

    def _spare(self, prefix: ExpectedPrefix) -> None:
        if not prefix.is_spared:
            self.page_pool.expect(prefix.pages)
            prefix.is_spared = True

    def _give_up(self, prefix: ExpectedPrefix) -> None:
        if prefix.is_spared:
            self.page_pool.forget(prefix.pages)
            prefix.is_spared = False

    def forget(self, seq: Sequence, admitted: bool) -> None:
        """Expect no more of a sequence. If it is `admitted`, it computes prefixes that were given up, and they are
        spared again."""
        known = self.sequences.pop(seq.id, None)
        if known is None:
            return
        if known.found:
            prefix = self.prefixes[known.found]
            prefix.waiting -= 1
            if not prefix.waiting:
                self._give_up(prefix)
                del self.prefixes[known.found]
        num_waiting, prefixes = self.num_waiting, self.prefixes
        for key in known.keys:
            left = num_waiting.pop(key) - 1
            if left:
                num_waiting[key] = left
                if admitted and key in prefixes:
                    self._spare(prefixes[key])

    def _spared_by_use(self, batch: int = 1) -> Iterator[tuple[float, ExpectedPrefix]]:
        """Yield how often each spared prefix is used in the time of `batch` admissions, at most. That with the last
        first use comes first."""
        uses = dict[bytes, list[int]]()
        for i, (_, found) in enumerate(self.sequences.values(), 1):
            uses.setdefault(found, []).append(i)
        for found, places in reversed(uses.items()):
            if found and self.prefixes[found].is_spared:
                rate = max(count / place for count, place in enumerate(places, 1))
                yield rate * batch, self.prefixes[found]

    def give_up_one(self) -> bool:
        """Spare no more the prefix that is used last. Return False if none is spared."""
        for _, prefix in self._spared_by_use():
            self._give_up(prefix)
            return True
        return False

    def value_of(self, share: float, batch: int) -> float:
        """Return how many tokens it saves to keep the last `share` of the spared prefixes for `batch` admissions."""
        spared = list(self._spared_by_use(batch))
        left, value = share * sum(prefix.tokens for _, prefix in spared), 0.0
        for uses, prefix in spared:
            if left <= 0:
                break
            value += min(prefix.tokens, left) * uses
            left -= prefix.tokens
        return value

    def check(self) -> None:
        """Assert that the counts agree with the waiting sequences."""
        waiting = list(self.sequences.values())
        assert self.num_waiting == Counter(key for keys, _ in waiting for key in keys), "keys are miscounted"
        found = Counter(found for _, found in waiting if found)
        assert {key: prefix.waiting for key, prefix in self.prefixes.items()} == found, "prefixes are miscounted"
