"""The buddy allocator: blocks of 2^k units, halved on demand and merged again (Knuth, TAOCP 1, §2.5).

PagedAttention §6.1 assumes that Orca places its reservations with it. A unit here is one logical page. Knows no
sequences and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable


def block_units(units: int) -> int:
    """The size of the block that holds `units`: the next power of two."""
    assert units > 0, f"a block of {units} units is asked for"
    return 1 << (units - 1).bit_length()


class BuddyAllocator:
    """Units 0 .. total - 1. A block of 2^k units begins at a multiple of 2^k, and merges with its buddy, which begins
    at `base ^ 2^k`, when both are free. `total` need not be a power of two: its binary digits are the first blocks.
    Every call is O(log total), and the same calls give the same blocks."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.available = total  # free units
        self.allocated: dict[int, int] = {}  # base -> units of the block
        # Free blocks by order. The latest one given back is the first to be taken: dicts keep order and forget in O(1).
        self.free_blocks: list[dict[int, None]] = [{} for _ in range(total.bit_length())]
        base = 0
        for order in reversed(range(len(self.free_blocks))):
            if total >> order & 1:
                self.free_blocks[order][base] = None
                base += 1 << order

    def can_hold(self, block_sizes: Iterable[int]) -> bool:
        """Could an empty pool hold blocks for all of these units at once? In any order: free blocks that only ever were
        split have different sizes, so what is left is one block large enough or less than asked for."""
        return sum(block_units(units) for units in block_sizes) <= self.total

    def count_allocatable(self, units: int) -> int:
        """How many blocks for `units` each could be taken now."""
        order = (units - 1).bit_length()
        return sum(len(bases) << larger for larger, bases in enumerate(self.free_blocks[order:]))

    def count_unusable(self, units: int) -> int:
        """Free units in blocks too small for `units`: waste, as long as nothing smaller is asked for."""
        return sum(len(bases) << order for order, bases in enumerate(self.free_blocks[: (units - 1).bit_length()]))

    def allocate(self, units: int) -> int | None:
        """The base of a block for `units`, split off the smallest free one that is large enough; None if there is
        none."""
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
        """Take back the block at `base`, and merge it as far as its buddies are free."""
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
