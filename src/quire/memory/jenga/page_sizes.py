"""Page sizes, from what a model keeps alone: which size is compatible with the pages of all its layer types (Jenga
§4.1, §4.4). Plain numbers: a type is a name and the bytes of one page of it, be that of tokens, images or a state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

PAGE_ALIGNMENT = 16
"""Bytes that every page begins at a multiple of: what one access of a kernel takes."""
MAX_PADDING = Fraction(3, 100)
"""Of a type's page, where the least common multiple would be too large without."""
MAX_LARGE_BYTES = 16 * 2**20
LARGE_PAGE_POOL_DIVISOR = 512
"""A large page has at most MOST_LARGE bytes, or one of so many parts of the pool where that is more."""


class LayerType(NamedTuple):
    """Layers that keep their state alike: the bytes of one page of it. A padded one is a multiple of "
    "`page_multiple` bytes."""

    name: str
    page_bytes: int
    page_multiple: int = PAGE_ALIGNMENT

    @property
    def aligned_bytes(self) -> int:
        """Bytes of its smallest page that begins where a page may."""
        grain = math.lcm(self.page_multiple, PAGE_ALIGNMENT)
        return -(-self.page_bytes // grain) * grain


class PagePlan(NamedTuple):
    """Large pages of `large_bytes`, which hold a whole number of small pages of each type, `sizes` bytes each."""

    types: tuple[LayerType, ...]
    sizes: tuple[int, ...]
    large_bytes: int

    @property
    def small_pages_per_large(self) -> tuple[int, ...]:
        """Small pages of a large one, a type."""
        return tuple(self.large_bytes // size for size in self.sizes)

    @property
    def padding(self) -> tuple[int, ...]:
        """Bytes of a small page that hold nothing, a type."""
        return tuple(size - kind.page_bytes for size, kind in zip(self.sizes, self.types))


def max_large_bytes(pool_bytes: int) -> int:
    """The largest large page of a pool of so many bytes."""
    return max(MAX_LARGE_BYTES, pool_bytes // LARGE_PAGE_POOL_DIVISOR)


def plan_pages(types: Iterable[LayerType], limit: int | None = MAX_LARGE_BYTES) -> PagePlan:
    """The least common multiple of the types' pages (Jenga §4.1). Where that is above `limit` pages are padded, by at
    most MOST_PADDING each, so that it gets as small as it can, and of equals the one with the least padding; the result
    may still be above `limit`."""
    types = tuple(types)
    exact = {kind: kind.aligned_bytes for kind in types}
    sizes = exact
    if limit is not None and math.lcm(*exact.values()) > limit:
        options = [_paddings(kind, exact.values()) for kind in exact]
        best = min(product(*options), key=lambda found: (math.lcm(*found), sum(found)))
        sizes = dict(zip(exact, best))
    return PagePlan(types, tuple(sizes[kind] for kind in types), math.lcm(*sizes.values()))


def _paddings(kind: LayerType, others: Iterable[int]) -> list[int]:
    """The sizes that a type's page may be padded to: multiples of another one's, or of a power of two."""
    grain = math.lcm(kind.page_multiple, PAGE_ALIGNMENT)
    steps = {math.lcm(step, grain) for step in (*others, *(1 << k for k in range(kind.aligned_bytes.bit_length() + 1)))}
    sizes = {-(-kind.page_bytes // step) * step for step in steps}
    return sorted(
        {kind.aligned_bytes} | {size for size in sizes if size - kind.page_bytes <= MAX_PADDING * kind.page_bytes}
    )


def max_page(types: Iterable[LayerType]) -> int:
    """One size for the pages of all types: the largest one's, a multiple of every type's row (§4.4, "MAX page")."""
    types = tuple(types)
    row = math.lcm(*(kind.page_multiple for kind in types))
    return -(-max(kind.page_bytes for kind in types) // row) * row


def gcd_page(types: Iterable[LayerType]) -> int:
    """The greatest common divisor of the types' pages, of which a page of each takes several (§4.4, "GCD page")."""
    return math.gcd(*(kind.page_bytes for kind in types))


def split_into_equal_sets(layers: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """For types of so many layers of so many bytes each, (layers, bytes): how many layers of each make sets of equal
    bytes, as large as can be; a type's layers are a whole number of its sets. None if there are no such sets."""
    found = [{count * size for count in range(1, many + 1) if many % count == 0} for many, size in layers]
    common = set.intersection(*found)
    return tuple(max(common) // size for _, size in layers) if common else None


def wasted_fraction(units: int, kept: Iterable[tuple[int, int]]) -> Fraction:
    """The share of memory that holds nothing of use where every layer keeps all of `units` tokens or image tokens, and
    of `kept`, (layers, units), so many layers need so many each (§3.2, Figure 3)."""
    kept = tuple(kept)
    return 1 - Fraction(sum(layers * needed for layers, needed in kept), units * sum(layers for layers, _ in kept))
