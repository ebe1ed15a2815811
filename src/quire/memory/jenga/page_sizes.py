"""Page sizes that are compatible with all layer types of a model (Jenga §4.1, §4.4).

Plain numbers: a type is a name and the bytes of one of its pages, whether of tokens, images or a state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

PAGE_ALIGNMENT = 16
"""Every page begins at a multiple of these bytes: one access of a kernel."""
MAX_PADDING = Fraction(3, 100)
"""The most padding, as a fraction of a type's page, where the least common multiple would be too large without."""
MAX_LARGE_BYTES = 16 * 2**20
LARGE_PAGE_POOL_DIVISOR = 512
"""A large page has at most MAX_LARGE_BYTES bytes, or this fraction of the pool if that is more."""


class LayerType(NamedTuple):
    """A type of layers, with the bytes of one of its pages. A padded page is a multiple of `page_multiple` bytes. Its
    padding is at most `max_padding` times `page_bytes`."""

    name: str
    page_bytes: int
    page_multiple: int = PAGE_ALIGNMENT
    max_padding: Fraction = MAX_PADDING

    @property
    def grain(self) -> int:
        """The bytes of which the size of an aligned page is a multiple."""
        return math.lcm(self.page_multiple, PAGE_ALIGNMENT)

    @property
    def aligned_bytes(self) -> int:
        """The bytes of its smallest aligned page."""
        return -(-self.page_bytes // self.grain) * self.grain

    @property
    def max_padded_bytes(self) -> int:
        """The bytes of its largest page: padded by `max_padding`, or by its alignment if that is more."""
        return max(self.aligned_bytes, int(self.page_bytes * (1 + self.max_padding)))


class PagePlan(NamedTuple):
    """Large pages of `large_bytes` bytes, and for each type the `sizes` of its small pages, which divide that."""

    types: tuple[LayerType, ...]
    sizes: tuple[int, ...]
    large_bytes: int

    @property
    def small_pages_per_large(self) -> tuple[int, ...]:
        """For each type the number of small pages in a large page."""
        return tuple(self.large_bytes // size for size in self.sizes)

    @property
    def padding(self) -> tuple[int, ...]:
        """For each type the bytes of a small page that hold nothing."""
        return tuple(size - kind.page_bytes for size, kind in zip(self.sizes, self.types))


def max_large_bytes(pool_bytes: int) -> int:
    """Return the most bytes of a large page in a pool of `pool_bytes` bytes."""
    return max(MAX_LARGE_BYTES, pool_bytes // LARGE_PAGE_POOL_DIVISOR)


def plan_pages(types: Iterable[LayerType], limit: int | None = MAX_LARGE_BYTES) -> PagePlan:
    """Return pages by the least common multiple of the types' pages (Jenga §4.1).

    If that is above `limit`, pages are padded by at most their `max_padding` to make it as small as possible, and of
    equal results the one with the least padding is taken. Pages become multiples or fractions of each other's sizes,
    or, if that is not enough, fractions of a large page. The result may still be above `limit`."""
    types = tuple(types)
    exact = {kind: kind.aligned_bytes for kind in types}
    plans = [exact]
    if limit is not None and math.lcm(*exact.values()) > limit:
        options = [_paddings(kind, exact.values()) for kind in exact]
        best = min(product(*options), key=lambda found: (math.lcm(*found), sum(found)))
        plans = [dict(zip(exact, best))]
        if math.lcm(*best) > limit:
            plans += _fractions(exact)
    sizes = min(plans, key=lambda plan: (math.lcm(*plan.values()), sum(plan.values())))
    return PagePlan(types, tuple(sizes[kind] for kind in types), math.lcm(*sizes.values()))


def _paddings(kind: LayerType, others: Iterable[int]) -> list[int]:
    """Return the sizes to which a type's page may be padded: multiples of another type's page, or of a power of two,
    and fractions of another type's page."""
    powers = (1 << k for k in range(kind.aligned_bytes.bit_length() + 1))
    steps = {math.lcm(step, kind.grain) for step in (*others, *powers)}
    sizes = {-(-kind.page_bytes // step) * step for step in steps}
    for other in others:
        counts = range(-(-other // kind.max_padded_bytes), other // kind.page_bytes + 1)
        sizes |= {other // count for count in counts if other % (count * kind.grain) == 0}
    return sorted(size for size in sizes if size <= kind.max_padded_bytes)


def _fractions(types: Iterable[LayerType]) -> Iterator[dict[LayerType, int]]:
    """Yield sizes of pages of which a whole number fills a large page of about 1, 2, ... pages of the largest type.

    Of a type with smaller pages as many are taken as fit. The padding of a page is then less than a page divided by
    their number, besides the alignment, so no more than 1 / MAX_PADDING pages of the largest type have to be tried."""
    types = tuple(types)
    largest = max(kind.aligned_bytes for kind in types)
    for n in range(1, math.ceil(1 / MAX_PADDING) + 1):
        counts = {kind: n * largest // kind.aligned_bytes for kind in types}
        step = math.lcm(*(kind.grain * count for kind, count in counts.items()))
        large = -(-n * largest // step) * step
        sizes = {kind: large // count for kind, count in counts.items()}
        if all(size <= kind.max_padded_bytes for kind, size in sizes.items()):
            yield sizes


def max_page(types: Iterable[LayerType]) -> int:
    """Return the largest type's page size, rounded up to a multiple of every `page_multiple` (§4.4, "MAX page")."""
    types = tuple(types)
    row = math.lcm(*(kind.page_multiple for kind in types))
    return -(-max(kind.page_bytes for kind in types) // row) * row


def split_into_equal_sets(layers: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return for types, (layers, bytes of a layer) each, how many layers of each form sets of equal bytes.

    The sets are as large as possible, and a type's layers are a whole number of them. None if there are no such
    sets."""
    found = [{count * size for count in range(1, many + 1) if many % count == 0} for many, size in layers]
    common = set.intersection(*found)
    return tuple(max(common) // size for _, size in layers) if common else None
