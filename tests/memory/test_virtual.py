"""What the ledger of virtual memory decides: which slot a sequence gets, which pages lie where, and what is mapped
before anybody waits for it (vAttention §5.2, §6.1)."""

from __future__ import annotations

import pytest
from memories import Build, contiguous

from quire.memory.virtual import virtual_memory
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOps, TableWrite

TOKENS = 4  # of a page


class Machine:
    """A memory, and what its journals map. `waited` are the pages that a step had to wait for, `ahead` the others."""

    def __init__(
        self, pages: int = 32, seqs: int = 4, windows: tuple[int | None, ...] = (None,), layout: str = "layer",
        page: int = 8 * TOKENS, chunk: int = 64, host: int = 0, **settings: bool,
    ) -> None:  # fmt: skip
        build = Build(pages * TOKENS, chunk, seqs, 64, host)
        self.memory = VirtualMemory(
            contiguous(build, windows, page, layout),
            max_step_tokens=chunk,
            **({"caching": False, "ahead": False} | settings),
        )
        self.lying: dict[tuple[int, int, int], int] = {}
        self.waited = self.ahead = 0
        self.born = 0

    def replay(self) -> None:
        """A step's journal."""
        now, ahead = self.memory.take_page_ops()
        self.waited += self._map(now)
        self.ahead += self._map(ahead)
        self.memory.check()

    def _map(self, journal: PageOps) -> int:
        before = dict(self.lying)
        for entry in journal:
            if isinstance(entry, TableWrite):
                places = (
                    (entry.slot, entry.group, at) for at in range(entry.first_page, entry.first_page + len(entry.pages))
                )
                self.lying |= {place: page for place, page in zip(places, entry.pages) if page}
        return sum(before.get(place) != page for place, page in self.lying.items())

    def places(self, slot: int) -> list[int]:
        """The pages that lie in a slot's first group."""
        return [page for (at, group, _), page in sorted(self.lying.items()) if (at, group) == (slot, 0)]

    def admit(self, length: int, start: int | None = None) -> tuple[Sequence, int]:
        """A new sequence, whose prompt is computed at once: it, and the pages that were waited for."""
        self.born += 1
        begin = 1000 * self.born if start is None else start
        seq, before = Sequence(self.born, [begin + i for i in range(length)]), self.waited
        admitted = self.memory.admit([seq], 64)
        assert isinstance(admitted, list)
        seq.computed = seq.planned = admitted[0].reused_tokens
        while seq.planned < length:
            assert self.step(seq, min(length - seq.planned, self.memory.max_step_tokens)) is not None
        return seq, self.waited - before

    def step(self, seq: Sequence, count: int = 1) -> int | None:
        """Compute and confirm so many tokens: the pages that were waited for. None: no room."""
        before = self.waited
        seq.tokens += range(seq.planned + count - len(seq.tokens))
        if not self.memory.grow(seq, seq.planned + count):
            return None
        self.replay()
        seq.planned += count
        seq.computed = seq.planned
        self.memory.commit(seq)
        return self.waited - before

    def leave(self, seq: Sequence) -> int:
        slot = self.memory.slot(seq)
        self.memory.free(seq)
        return slot


@pytest.mark.parametrize("old", [1, 4, 5, 20, 40])
@pytest.mark.parametrize("new", [1, 4, 5, 20, 40])
def test_reclamation_is_deferred(old: int, new: int) -> None:
    """R2 in R1's place needs as many maps as it has pages more (§6.1.2)."""
    walk = Machine()
    first, _ = walk.admit(old)
    walk.leave(first)
    _, waited = walk.admit(new)
    assert waited == max(-(-new // TOKENS) - -(-old // TOKENS), 0)


def test_the_free_slot_that_fits_best() -> None:
    """Where the least must be mapped; of those, where the fewest other pages lie."""
    walk = Machine(pages=64)
    seqs = {length: walk.admit(length)[0] for length in (40, 12, 20, 4)}
    slots = {length: walk.leave(seq) for length, seq in seqs.items()}
    for length, best in ((19, 20), (9, 12), (33, 40), (4, 4)):
        seq, waited = walk.admit(length)
        assert (walk.memory.slot(seq), waited) == (slots[best], 0)
    assert len(walk.memory.free_slots) == 0


def test_pages_lie_on_where_they_are_until_others_need_them() -> None:
    """Who needs more takes what came back first, and the last pages of it."""
    walk = Machine(pages=12, seqs=3)
    early, late = walk.admit(16)[0], walk.admit(16)[0]
    slots = walk.leave(early), walk.leave(late)
    there = [walk.places(slot) for slot in slots]
    other, waited = walk.admit(32)
    assert waited == 4
    assert walk.memory.slot(other) in slots
    rest = slots[0] if walk.memory.slot(other) == slots[1] else slots[1]
    assert walk.places(rest) == there[slots.index(rest)]
    assert walk.admit(16)[1] == 0


def test_the_next_slot_is_mapped_before_anybody_comes() -> None:
    """A prompt no longer than the mean waits for nothing (§6.1.3), in a slot that nobody had."""
    walk = Machine(pages=100, seqs=8, ahead=True)
    running, waited = walk.admit(16)
    assert waited == 4
    for length in (16, 9, 3):
        walk.step(running)  # while it computes
        _, waited = walk.admit(length)
        assert waited == 0
        walk.memory.free(walk.admit(16)[0])


def test_no_more_than_a_share_is_mapped_for_the_next() -> None:
    walk = Machine(pages=24, ahead=True)
    walk.admit(40)
    usage = walk.memory.account().usage
    assert (
        usage.reserved
        == (24 - 10) // virtual_memory.PREMAP_DIVISOR * walk.memory.groups[0].page_bytes
        + walk.memory.groups[0].page_bytes
    )


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (None, None, 6)])
@pytest.mark.parametrize("layout", ["layer", "sliced"])
def test_growth_is_mapped_while_the_step_before_computes(
    layout: str, windows: tuple[int | None, ...], caching: bool
) -> None:
    """Decoding never waits, also where only cached pages are left, or pages that lie in others' places."""
    walk = Machine(pages=64, windows=windows, layout=layout, ahead=True, caching=caching)
    for _ in range(12):
        walk.memory.free(walk.admit(40)[0])
    assert not caching or len(walk.memory.page_pool.size_classes[0].empty) < 10
    seqs = [walk.admit(5)[0] for _ in range(4)]
    waits = [walk.step(seq) for _ in range(50) for seq in seqs]
    assert waits == [0] * 200
    assert walk.ahead > 30


def test_a_chunk_is_mapped_ahead() -> None:
    walk = Machine(pages=64, chunk=8, ahead=True)
    seq = Sequence(1, list(range(64)))
    assert isinstance(walk.memory.admit([seq], 8), list)
    assert [walk.step(seq, 8) for _ in range(8)] == [2, 0, 0, 0, 0, 0, 0, 0]


def test_nothing_is_mapped_ahead_where_that_is_off() -> None:
    walk = Machine()
    seq, _ = walk.admit(5)
    assert sum(walk.step(seq) or 0 for _ in range(30)) == 7
    assert walk.ahead == walk.memory.account().usage.reserved == 0


def test_no_sequence_is_given_more_than_it_will_have() -> None:
    walk = Machine(ahead=True, seqs=1)
    seq = Sequence(1, list(range(6)))
    seq.max_total_len = 8
    assert isinstance(walk.memory.admit([seq], 64), list)
    assert [walk.step(seq, 6), walk.step(seq), walk.step(seq)] == [2, 0, 0]
    assert walk.ahead == 0


def test_a_free_slot_that_still_maps_the_prefix_is_preferred() -> None:
    walk = Machine(pages=64, caching=True)
    stem, _ = walk.admit(24, start=7)
    others = [walk.admit(24)[0] for _ in range(3)]
    slot = walk.leave(stem)
    for other in others:
        walk.memory.free(other)
    again = walk.admit(22, start=7)
    assert (walk.memory.slot(again[0]), again[1]) == (slot, 1)  # its tail: the page that lies there is cached too
    twin = walk.admit(22, start=7)
    assert walk.memory.slot(twin[0]) != slot
    assert twin[1] == 6  # the same pages, mapped a second time
    assert walk.memory.get_placement(again[0]).tables[0][:5] == walk.memory.get_placement(twin[0]).tables[0][:5]


def test_what_is_mapped_for_the_next_sequence_leaves_prefixes_where_they_lie() -> None:
    walk = Machine(pages=64, caching=True, ahead=True)
    stem, _ = walk.admit(24, start=7)
    slot = walk.leave(stem)
    assert walk.memory.free_slots[-1] == slot, "it would be given out next"
    for _ in range(3):
        walk.replay()
    again = walk.admit(22, start=7)
    assert (walk.memory.slot(again[0]), again[1]) == (slot, 1)  # its tail


def test_a_step_maps_a_bounded_number_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory, "MAX_MAPPED_AHEAD", 3)
    monkeypatch.setattr(virtual_memory, "MAX_PREMAPPED_NEXT", 2)
    walk = Machine(pages=64, ahead=True, chunk=32)
    seq = Sequence(1, list(range(64)))
    assert isinstance(walk.memory.admit([seq], 32), list)
    assert walk.step(seq, 32) == 8
    assert walk.ahead == 3 + 2
    assert walk.step(seq, 32) == 5
