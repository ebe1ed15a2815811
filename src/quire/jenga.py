"""Jenga's interface for layer types (Figure 9a), with its names, and memory policies made from such types.

Pages hold any number of tokens; a layer type gives the pages that it touches and the valid prefixes in tokens. quire
asks a policy what is read, while the paper's engine lets a type stamp pages: what `update_last_access` touches for a
request with `len` tokens is what the last token reads, and is held until no later token touches it. On release a page
gets one time for all types, so the times themselves only matter to a reader of an Evictor. What `get_possible_prefix`
accepts must be found in the cache. `set_prefix_length` must rise with the position, since pages are evicted here from
the last to the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.errors import InputError
from quire.memory.policies import FullPolicy, LayerPolicy
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence as Branch


class Evictor:
    """The last access of each page, and the length of the prefix that it ends (§5.1)."""

    def __init__(self) -> None:
        self.last_access: dict[int, int] = {}
        self.prefix_length: dict[int, int] = {}

    def update_last_access(self, page: int, time: int) -> None:
        """Record a use of the page at `time`."""
        self.last_access[page] = time

    def set_prefix_length(self, page: int, length: int) -> None:
        """Set a page's prefix length: of pages used at the same time the longest is evicted first."""
        self.prefix_length[page] = length

    def order(self) -> list[int]:
        """Return the pages in the order of eviction."""
        return sorted(self.last_access, key=lambda p: (self.last_access[p], -self.prefix_length.get(p, 0)))


class Request:
    """A request for a layer type: `len` tokens; `page[i]` is the page of the i-th token, counted from 1."""

    def __init__(self, len: int, page: Sequence[int]) -> None:
        self.len, self.page = len, page


class LayerSupportsPrefixCache(Protocol):
    """A layer type by Figure 9a. `get_possible_prefix` takes, for each token, whether its keys and values are cached,
    and returns the lengths of all prefixes that are valid for the type."""

    evictor: Evictor

    def update_last_access(self, r: Request, time: int) -> None: ...
    def set_prefix_length(self, r: Request) -> None: ...
    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]: ...


def access(
    layers: Sequence[LayerSupportsPrefixCache], pages: Sequence[Sequence[int]], start: int, len: int, time: int
) -> None:
    """Record a step at `time` that extends a request from `start` tokens, computed or found before, to `len` tokens.

    pages[t] are the pages of type t, as in Request. One time for all types keeps eviction balanced, and one length for
    each token keeps it aligned (§5.1)."""
    for layer, page in zip(layers, pages):
        for tokens in range(max(start, 1), len + 1):
            layer.update_last_access(Request(tokens, page), time)
        layer.set_prefix_length(Request(len, page))


def longest_prefix(layers: Sequence[LayerSupportsPrefixCache], hits: Sequence[Sequence[bool]]) -> int:
    """Return the longest prefix valid for every type, or 0 (§5.2); hits[t] are the cached tokens of type t."""
    valid = [layer.get_possible_prefix(is_hit) for layer, is_hit in zip(layers, hits)]
    return max(set.intersection(*valid), default=0)


def policy_of(layer: LayerSupportsPrefixCache, horizon: int, period: int = 1) -> Callable[[KVCacheGroup], LayerPolicy]:
    """Return a function that makes the JengaPolicy of a group, for the `policies` of a memory."""
    return lambda group: JengaPolicy(group, layer, horizon, period)


class JengaPolicy(FullPolicy):
    """A policy of the memory for a layer type with the paper's interface.

    What the type touches must be a range that ends at the newest token. The type is called for requests of up to
    `horizon` tokens, which must be more than it looks back. For longer requests what it touches and needs moves with
    the request, by `period` tokens at a time. InputError names the method that contradicts this, or another method."""

    def __init__(self, group: KVCacheGroup, layer: LayerSupportsPrefixCache, horizon: int, period: int = 1) -> None:
        super().__init__(group)
        self.layer, self.horizon, self.period = layer, horizon, period
        self._first_touched: dict[int, int] = {}  # tokens -> the first token that the last one touches
        self._first_needed: dict[int, int] = {}  # tokens of a prefix -> the first token that must be cached
        self.check()

    def reads(self, seq: Branch | None, start: int, end: int) -> range:
        return range(
            self.group.num_full_pages(self._look_up_first(start + 1, self._first_touched)), self.group.num_pages(end)
        )

    def required(self, seq: Branch | None, hit: int) -> range:
        """Return the pages that must be cached and that the next token touches: Figure 9 requires one token more."""
        stop = self.group.num_pages(hit)
        first = max(self._look_up_first(hit, self._first_needed), self._look_up_first(hit + 1, self._first_touched))
        return range(min(self.group.num_full_pages(first), stop), stop)

    def _look_up_first(self, tokens: int, known: dict[int, int]) -> int:
        """Return the first touched or needed token for `tokens` tokens; beyond the horizon it moves with them."""
        near = tokens
        if tokens > self.horizon:
            near = self.horizon - (self.horizon - tokens) % self.period
        if near not in known:
            known[near] = (
                self._find_first_touched(near) if known is self._first_touched else self._find_first_needed(near)
            )
        return known[near] + (tokens - near if known[near] else 0)

    def _find_first_touched(self, tokens: int) -> int:
        self.layer.evictor = evictor = Evictor()
        self.layer.update_last_access(Request(tokens, range(tokens + 1)), 1)
        touched = [token for token in evictor.last_access if token > 0]
        first = min(touched, default=tokens + 1)
        if sorted(touched) != list(range(first, tokens + 1)) or first > tokens:
            raise InputError(f"update_last_access of {self._name} touches no range up to token {tokens}", "policies")
        return first - 1

    def _find_first_needed(self, tokens: int) -> int:
        """Return the first token that must be cached.

        Bisection works since a prefix that is valid with some tokens missing is valid with fewer of them missing."""
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            if tokens in self.layer.get_possible_prefix([False] * middle + [True] * (tokens - middle)):
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def _name(self) -> str:
        return type(self.layer).__name__

    def check(self) -> None:
        """Raise InputError if the methods of the layer type contradict each other for short requests."""
        touched = list(map(self._find_first_touched, range(1, min(self.horizon, 48) + 1)))
        if touched != sorted(touched):
            raise InputError(f"update_last_access of {self._name} touches again what it had left", "policies")
        for tokens, next_touched in enumerate(touched[1:], 1):
            if tokens not in self.layer.get_possible_prefix([True] * tokens):
                raise InputError(f"get_possible_prefix of {self._name} refuses {tokens} cached tokens", "policies")
            if self._find_first_needed(tokens) > next_touched:
                what = f"accepts {tokens} tokens without one that the next token touches"
                raise InputError(f"get_possible_prefix of {self._name} {what}", "policies")
        self.layer.evictor = evictor = Evictor()
        self.layer.set_prefix_length(Request(32, range(33)))
        lengths = [evictor.prefix_length.get(token, 0) for token in range(32)]
        if sorted(lengths) != lengths:
            raise InputError(f"set_prefix_length of {self._name} doesn't rise with the position", "policies")
