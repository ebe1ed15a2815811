"""Any sequence of calls of a memory whose sequences have pictures, against a reference: what a token sees of them is
there when it is computed, wherever rows lie, however they were encoded, and whoever else needed them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import test_planted_pictures as planted
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from memories import VOCAB
from pictured import PICTURED
from test_planted import Shown, found_by
from test_stateful import MEDIA, Calls, Content, Device, machine

from quire.control.request import Sequence
from quire.sim.sights import rows_of
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Encode
from quire.vocabulary.specs import Geometry, Group

NAMES = [name for name in PICTURED if "both-ways" not in name]  # whose prompts are computed in one step
SIZES = (3, 1), (8, 3), (5, 2), (11, 1), (8, 4)  # rows and parts of pictures
LONGEST = 44
# Drawing depends on the modules that are loaded, derandomized or not: the slowest bug takes 500 examples on average.
SURE = settings(max_examples=10_000, derandomize=True, database=None, phases=[Phase.generate])
SEES = r"position \d+ sees .* for row \d+ of picture \d+"
BUGS = {
    "pages of another picture": Shown(
        planted.pages_of_another_picture_of_the_same_size, f"{planted.LOST}|{SEES}", "cross-4"
    ),
    "freed early": Shown(planted.embedding_freed_before_its_last_chunk, f"{planted.UNTABLED}|{SEES}", "vision-4"),
    "over keys": Shown(planted.embeddings_over_keys_that_are_there, r"position \d+ of group \d+ is wrong", "inside-4"),
    "torn": Shown(planted.picture_half_evicted_that_counts_as_there, planted.LOST, "large-cross-1"),
}


class Eyes(Device):
    """A device that encodes: rows are there until they are overwritten, or the step is over."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.media: dict[int, tuple[Medium, ...]] = {}  # by slot
        self.parts: dict[tuple[int, int], int] = {}
        self.passing: set[tuple[int, int]] = set()

    def replay(self, journal: tuple[Any, ...], groups: tuple[Group, ...]) -> None:
        for entry in journal:
            if isinstance(entry, Encode):
                self.encode(entry, groups)
            else:
                super().replay((entry,), groups)

    def encode(self, entry: Encode, groups: tuple[Group, ...]) -> None:
        place, medium = (entry.slot, entry.medium), self.media[entry.slot][entry.medium]
        done = self.parts.get(place, 0) if entry.first else 0
        assert done == entry.first, f"{done} parts of a picture are encoded, not {entry.first}"
        self.parts[place] = done + entry.parts
        if self.parts[place] < medium.parts:
            return
        del self.parts[place]
        if entry.group < 0:
            self.passing.add(place)
            return
        group, inside = groups[entry.group], self.geometry.sight == "inside"
        for row in range(entry.skip, medium.rows):
            at = medium.start + row if inside else entry.at * group.run_tokens + row
            page, place_in = divmod(at, group.run_tokens)
            address = self.tables[entry.slot, entry.group, page + inside] * group.page_bytes
            assert address, "a row has no page"
            if inside:
                self._forget(address, place_in * self.geometry.row_bytes, self.geometry.row_bytes, group.token_bytes, 0)
                self.cells[address, f"row {place_in}"] = (medium.key, row)
            else:
                self.cells[address, place_in] = (medium.key, row)

    def _forget(self, address: int, first: int, count: int, size: int, rows: bool) -> None:
        """What is overwritten from a byte of a page on: tokens, or `rows`, of `size` bytes each."""
        for i in range(first // size, -(-(first + count) // size)):
            self.cells.pop((address, f"row {i}" if rows else i), None)

    def write(self, g: int, group: Group, page: int, offset: int, content: Content) -> None:
        super().write(g, group, page, offset, content)
        if self.geometry.sight == "inside" and g == self.geometry.host:
            size = group.token_bytes
            self._forget(page * group.page_bytes, offset * size, size, self.geometry.row_bytes, rows=True)


class Pictured(Calls):
    """The same calls, where admissions have pictures, and steps encode some parts of them, or do so in vain."""

    memories = PICTURED

    def made(self) -> Device:
        return Eyes(self.memory.geometry)

    def given(self, id: int, tokens: list[int], salt: str, data: st.DataObject) -> Sequence:
        media: list[Medium] = []
        for number in data.draw(st.lists(st.sampled_from(range(len(SIZES))), max_size=2)):
            rows, parts = SIZES[number]
            count = rows if self.memory.geometry.sight else 1
            at = min((media[-1].end if media else 0) + data.draw(st.sampled_from((0, 1, 2, 4))), len(tokens))
            if len(tokens) + count > LONGEST:
                break
            tokens[at:at] = [VOCAB - 1] * count
            key = hashlib.sha256(f"{number} {salt}".encode()).digest()
            media.append(Medium(key, at, count, rows, parts))
        seq = Sequence(id, tokens, salt=salt)
        seq.media = tuple(media)
        return seq

    def content(self, seq: Sequence, position: int) -> Content:
        seen = tuple((medium.key, medium.start) for medium in seq.media if medium.start <= position)
        return (*super().content(seq, position), seen)

    def planned(self, seq: Sequence, end: int, data: st.DataObject) -> int:
        eyes, memory = self.device, self.memory
        assert isinstance(eyes, Eyes)
        eyes.media[memory.slot(seq)] = seq.media
        eyes.passing.clear()
        most = data.draw(st.integers(1, 6))
        reach, parts = memory.encode(seq, end, most)
        assert seq.planned <= reach <= end
        if parts > most:
            assert memory.geometry.sight == "off"
            assert parts in {medium.parts for medium in seq.media}, "more than one picture that is too large"
        if seq.media and data.draw(st.integers(0, 9)) == 0:  # the step comes to nothing
            memory.unencode()
            return seq.planned
        return reach

    def forks(self, seq: Sequence) -> bool:
        """Behind its prompt, as whatever is sampled is."""
        return seq.computed >= max([1, *(medium.end for medium in seq.media)])

    def computes(self, seq: Sequence, position: int) -> None:
        geometry, slot, eyes = self.memory.geometry, self.memory.slot(seq), self.device
        assert isinstance(eyes, Eyes)
        kinds = [group.kind for group in geometry.groups]
        found = rows_of(seq.media, position, "cross" in kinds)
        if found is None:
            return
        i, rows = found
        medium = seq.media[i]
        if geometry.sight == "off":
            assert (slot, i) in eyes.passing, "a picture that a token reads isn't encoded in its step"
            return
        inside = geometry.sight == "inside"
        g = geometry.host if inside else next(g for g, kind in enumerate(kinds) if kind in MEDIA)
        group = geometry.groups[g]
        first = medium.start if inside else sum(group.pages(m.rows) for m in seq.media[:i]) * group.run_tokens
        for row in rows:
            page, place = divmod(first + row, group.run_tokens)
            address = eyes.tables[slot, g, page + inside] * group.page_bytes
            cell = eyes.cells.get((address, f"row {place}" if inside else place))
            assert cell == (medium.key, row), f"position {position} sees {cell} for row {row} of picture {i}"


@pytest.mark.share(8)
@pytest.mark.parametrize("name", NAMES)
def test_any_calls(name: str) -> None:
    run_state_machine_as_test(machine(Pictured, name), settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.soak if bug == "over keys" else ()) for bug in BUGS]
)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message, name = BUGS[bug]
    steps = 60 if bug == "torn" else 30  # many use up the pages and evict pictures, few make the runs short
    plant(monkeypatch)
    with found_by(message):
        run_state_machine_as_test(machine(Pictured, name), settings=settings(SURE, stateful_step_count=steps))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_any_calls_at_length(name: str) -> None:
    run_state_machine_as_test(machine(Pictured, name), settings=settings(max_examples=500, stateful_step_count=60))
