"""The buddy allocator: blocks of 2^k units, halved on demand and merged again (Knuth, TAOCP 1, §2.5).

PagedAttention §6.1 assumes that Orca places its reservations with it. A unit here is one logical page.
"""

from __future__ import annotations

from collections.abc import Iterable


def block_units(units: int) -> int:
    """Return the size of the block that holds `units` units: the next power of two."""
    assert units > 0, f"a block of {units} units is requested"
    return 1 << (units - 1).bit_length()


class BuddyAllocator:
    """An allocator of units 0 .. total - 1.

    A block of 2^k units begins at a multiple of 2^k, and merges with its buddy, which begins at `base ^ 2^k`, when both
    are free. `total` need not be a power of two: its binary digits are the first blocks. Every call is O(log total),
    and the same calls give the same blocks."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.available = total  # free units
        self.allocated: dict[int, int] = {}  # base -> units of the block
        # Free blocks by order. The one released last is allocated first; a dict keeps the order and deletes in O(1).
        self.free_blocks: list[dict[int, None]] = [{} for _ in range(total.bit_length())]
        base = 0
        for order in reversed(range(len(self.free_blocks))):
            if total >> order & 1:
                self.free_blocks[order][base] = None
                base += 1 << order

    def can_hold(self, block_sizes: Iterable[int]) -> bool:
        """Return True if an empty pool holds blocks for all of these units at once, in any order.

        Free blocks that only ever were split have different sizes, so the rest contains a block that is large enough,
        or has fewer units than requested."""
        return sum(block_units(units) for units in block_sizes) <= self.total

    def count_allocatable(self, units: int) -> int:
        """Return how many blocks for `units` each can be allocated now."""
        order = (units - 1).bit_length()
        return sum(len(bases) << larger for larger, bases in enumerate(self.free_blocks[order:]))

    def count_unusable(self, units: int) -> int:
        """Return the free units in blocks smaller than `units`: wasted unless smaller blocks are requested."""
        return sum(len(bases) << order for order, bases in enumerate(self.free_blocks[: (units - 1).bit_length()]))

    def allocate(self, units: int) -> int | None:
        """Return the base of a block for `units`, split off the smallest free block that is large enough, or None."""
        order = (block_units(units) - 1).bit_length()
        found = next((k for k in range(order, len(self.free_blocks)) if self.free_blocks[k]), None)
        if found is None:
            return None
        base, _ = self.free_blocks[found].popitem()
        for half in reversed(range(order, found)):
            self.free_blocks[half][base + (1 << half)] = None  # the upper half stays free
        self.allocated[base] = 1 << order
        self.available -= 1 << order
        return base

    def free(self, base: int) -> None:
        """Release the block at `base`, and merge it while its buddy is free."""
        order = self.allocated.pop(base).bit_length() - 1
        self.available += 1 << order
        while order + 1 < len(self.free_blocks) and (buddy := base ^ 1 << order) in self.free_blocks[order]:
            del self.free_blocks[order][buddy]
            base = min(base, buddy)
            order += 1
        self.free_blocks[order][base] = None

    def check(self) -> None:
        """Assert that blocks tile the pool, that each is aligned, and that no two free buddies are apart."""
        free = {base: 1 << order for order, bases in enumerate(self.free_blocks) for base in bases}
        at = 0
        for base, size in sorted([*free.items(), *self.allocated.items()]):
            assert base == at, f"units {at} to {base} are lost or held twice"
            assert base % size == 0, f"a block of {size} units begins at {base}"
            at += size
        assert at == self.total, "units are lost"
        assert sum(free.values()) == self.available, "the count of free units is wrong"
        for base, size in free.items():
            assert free.get(base ^ size) != size, f"two free buddies of {size} units are apart"
