"""The pages of registered prefixes are counted as prefixes come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from memories import MEMORIES, Build, admit_one

from quire.control.memory.paged import PagedMemory
from quire.control.request import Sequence


def registered(memory: PagedMemory, name: str, tokens: list[int]) -> None:
    seq = Sequence(1, [*tokens, 1])
    reused = admit_one(memory, seq, 64)
    assert isinstance(reused, int)
    assert memory.grow(seq, len(seq.tokens))
    seq.planned = seq.computed = len(tokens)
    memory.commit(seq)
    assert memory.prefixes.pin(name, seq)
    memory.free(seq)
    memory.check()


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_counts_its_pins(name: str) -> None:
    memory = MEMORIES[name](Build(prefix_tokens=64))
    for i in range(3):
        registered(memory, str(i), [5] * (3 + 5 * i))
    for i in (1, 0, 2):
        assert memory.prefixes.unpin(str(i))
        memory.check()
    assert memory.prefixes.pins == Counter()
    assert not memory.prefixes.registered
    assert sum(memory.pages.used) == 0


def test_the_check_sees_a_lost_pin_and_a_lost_name() -> None:
    memory = MEMORIES["paged-4"](Build(prefix_tokens=40))
    registered(memory, "a", list(range(10)))
    prefixes = memory.prefixes
    page = next(iter(prefixes.pins))
    prefixes.pins[page] += 1
    with pytest.raises(AssertionError, match="pins"):
        memory.check()
    prefixes.pins[page] -= 1
    memory.check()
    stop = next(iter(prefixes.index.names))
    names = prefixes.index.names.pop(stop)
    with pytest.raises(AssertionError, match="index"):
        memory.check()
    prefixes.index.names[stop] = names
    key = next(iter(prefixes.index.tails))
    del prefixes.index.tails[key]
    with pytest.raises(AssertionError, match="lost its way"):
        memory.check()
