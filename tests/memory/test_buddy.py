"""The buddy allocator against a brute-force model: a list of units with the name of the block that holds each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.memory.baselines.buddy import BuddyAllocator, block_units


def aligned(total: int, size: int, held: list[int | None]) -> list[int]:
    """Where a block of `size` units could lie, by looking at every unit."""
    starts = range(0, total - size + 1, size)
    return [start for start in starts if all(unit is None for unit in held[start : start + size])]


class Blocks(RuleBasedStateMachine):
    """Blocks of any size, taken and given back in any order."""

    @initialize(total=st.integers(1, 200) | st.sampled_from([1, 2, 63, 64, 65, 128]))
    def build(self, total: int) -> None:
        self.buddy, self.total = BuddyAllocator(total), total
        self.held: list[int | None] = [None] * total
        self.blocks: dict[int, int] = {}  # base -> size

    @rule(units=st.integers(1, 8) | st.integers(1, 300))
    def take(self, units: int) -> None:
        size = block_units(units)
        places = aligned(self.total, size, self.held)
        assert self.buddy.count_allocatable(units) == len(places)
        base = self.buddy.allocate(units)
        assert (base is None) == (not places)
        if base is not None:
            assert base in places
            self.held[base : base + size] = [base] * size
            self.blocks[base] = size

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        base = data.draw(st.sampled_from(sorted(self.blocks)))
        size = self.blocks.pop(base)
        self.held[base : base + size] = [None] * size
        self.buddy.free(base)

    @rule(units=st.integers(1, 64))
    def waste(self, units: int) -> None:
        """What isn't in any place that a block of this size could have."""
        size = block_units(units)
        usable = size * len(aligned(self.total, size, self.held))
        assert self.buddy.count_unusable(units) == self.held.count(None) - usable

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "buddy"):
            self.buddy.check()
            assert self.buddy.available == self.held.count(None)

    def teardown(self) -> None:
        """All given back, the first blocks are there again."""
        if hasattr(self, "buddy"):
            for base in list(self.blocks):
                self.buddy.free(base)
            assert [set(bases) for bases in self.buddy.free_blocks] == [
                set(bases) for bases in BuddyAllocator(self.total).free_blocks
            ]


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize(("units", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)])
def test_a_block_is_the_next_power_of_two(units: int, size: int) -> None:
    assert block_units(units) == size
    buddy = BuddyAllocator(128)
    assert buddy.allocate(units) == 0
    assert buddy.available == 128 - size


@pytest.mark.parametrize("total", [1, 7, 16, 100])
def test_an_empty_pool_is_filled_in_any_order(total: int) -> None:
    """Without gives, blocks fit as long as their sizes sum up: this is what a memory's `fits` counts on."""
    for step in range(1, 12):
        buddy, taken = BuddyAllocator(total), list[int]()
        for i in range(60):
            units = 1 + i * step % 9
            fits = buddy.can_hold([*taken, units])
            assert (buddy.allocate(units) is not None) == fits == (block_units(units) <= total - sum(taken)), (step, i)
            taken += [block_units(units)] * fits
