"""A runner's pictures where layers of their own attend to them: keys and values of an encoder's rows in the pages that
an Encode names, and which of them each token of a step sees.

Pictures that stand one behind another in a prompt are one medium: what follows them sees them all, and each token in
whose place one stands sees those up to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache, to_device
from quire.data.kernels.reference import write_pages
from quire.data.models.vision import rows_of
from quire.data.runner.inputs import Flat
from quire.data.runner.pictures import Pictures
from quire.data.runner.store import Store
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import Grid
from quire.vocabulary.plan import Birth, Encode, Row

if TYPE_CHECKING:
    from quire.data.kernels.triton.attention import SplitScratch

NUMBERS = len(Grid._fields)


class View(NamedTuple):
    """From its token at `start` on, and up to the next one, a sequence sees `rows` rows of its `medium`-th one."""

    start: int
    medium: int
    rows: int


class Segment(NamedTuple):
    """Tokens of a step, `count` of them from its `at`-th one on, which see the same `rows` of a medium of a slot."""

    at: int
    count: int
    slot: int
    medium: int
    rows: int


def grids_of(pixels: Pixels) -> list[Grid]:
    """How each picture of a medium was cut."""
    return [Grid(*pixels.grid[at : at + NUMBERS]) for at in range(0, len(pixels.grid), NUMBERS)]


class Crossing:
    """What the tokens of one step see. `sees` [T, 1] is 1 for those that see anything; of those `at`, places among the
    step's (None: all), a backend attends as `plan` says, which is asked once for each kind of layers."""

    def __init__(
        self, caches: Mapping[int, LayerCache], backend: Any, plan: Callable[[LayerCache], Any], sees: Tensor,
        at: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.caches, self.backend, self.plan, self.sees, self.at = caches, backend, plan, sees, at
        self.plans: dict[Any, Any] = {}

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """As quire.data.models.attending says of `cross`."""
        cache = self.caches[layer]
        plan = self.plans.get(cache.kind)
        if plan is None:
            plan = self.plans[cache.kind] = self.plan(cache)
        asking = q if self.at is None else q.index_select(0, self.at)
        if self.backend.rotates:
            found = self.backend.read(asking, cache, plan)
        else:
            found = self.backend.attend(asking, asking, asking, cache, plan)  # which writes nothing
        return found if self.at is None else torch.zeros_like(q).index_copy_(0, self.at, found)


class CrossPictures(Pictures):
    """Pictures that `model` has eyes for, and layers that attend to their rows: the store's `cross`, for each of which
    it can `project` rows to keys and values."""

    def __init__(self, model: Any, store: Store, width: int) -> None:
        super().__init__(model.eyes, store, width)
        self.project, self.caches = model.project, store.cross
        self.views: dict[int, list[View]] = {}  # by slot
        self.made: dict[tuple[int, int, int], tuple[int, int]] = {}  # of group, slot and medium: parts, and their rows
        self.groups = {cache.group for cache in self.caches.values()}
        shapes = {
            (group.run_tokens, group.table_width) for group in map(store.geometry.groups.__getitem__, self.groups)
        }
        assert len(shapes) == 1, f"tables of pictures' pages are alike, not {shapes}"
        self.size, self.width = next(iter(shapes))
        # Of each slot, on the device: the place of its last medium, and its rows; 0 and 0 without one. Graphs read it.
        self.latest = np.zeros((2, store.geometry.slots), dtype=np.int64)
        self.device_latest = torch.from_numpy(self.latest).to(store.device, copy=True)

    def born(self, births: Sequence[Birth]) -> None:
        """See Pictures."""
        changed = [birth for birth in births if birth.media or birth.slot in self.media]
        super().born(births)
        for birth in changed:
            self.made = {place: rows for place, rows in self.made.items() if place[1] != birth.slot}
            self.views.pop(birth.slot, None)
            self.latest[:, birth.slot] = 0
            if birth.media:
                self.views[birth.slot] = [
                    view for i, medium in enumerate(birth.media) for view in self._views(i, medium)
                ]
                self.latest[:, birth.slot] = self._place(birth.slot, len(birth.media) - 1), birth.media[-1].rows
        if changed:
            slots = np.array(list(dict.fromkeys(birth.slot for birth in changed)))
            at, numbers = self.store.staging.upload_all([slots, self.latest[:, slots]])
            self.device_latest.index_copy_(1, at, numbers)

    def _views(self, number: int, medium: Medium) -> Iterator[View]:
        if medium.tokens == 1:
            yield View(medium.start, number, medium.rows)
            return
        counts = [self.eyes.tiling.rows(grid) for grid in grids_of(self.held[medium.key])]
        assert (len(counts), sum(counts)) == (medium.tokens, medium.rows), f"pictures of {counts} rows are {medium}"
        for i, rows in enumerate(accumulate(counts)):
            yield View(medium.start + i, number, rows)

    def _place(self, slot: int, number: int) -> int:
        """Where the pages of a slot's `number`-th medium begin, counted from the first entry of all slots' tables."""
        return slot * self.width + sum(-(-medium.rows // self.size) for medium in self.media[slot][:number])

    # Encoding

    def encode(self, entries: Sequence[Encode]) -> None:
        """See Pictures. A picture is a part: its tiles see one another."""
        for group, slot, number, first, begun, parts, _ in entries:
            medium, place = self.media[slot][number], (group, slot, number)
            done, written = self.made.get(place, (0, 0)) if begun else (0, 0)
            assert done == begun, f"part {begun} of a picture isn't its next one"
            for rows in self._encoded(self.held[medium.key], begun, begun + parts):
                self._write(group, slot, first, written, rows)
                written += len(rows)
            self.made[place] = begun + parts, written
            if begun + parts == medium.parts:
                del self.made[place]

    def _encoded(self, pixels: Pixels, begin: int, end: int) -> Iterator[Tensor]:
        """The rows of some pictures of a medium."""
        grids = grids_of(pixels)
        ends = [0, *accumulate(grid.rows * grid.columns for grid in grids)]
        tiles = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
        for grid, (start, stop) in list(zip(grids, pairwise(ends)))[begin:end]:
            yield rows_of(self.eyes, to_device(tiles[start:stop].copy(), self.store.device), grid, 1)

    def _write(self, group: int, slot: int, first: int, begin: int, rows: Tensor) -> None:
        """Keys and values of all of the group's layers, from the `begin`-th row of the slot's page `first` on."""
        at = np.arange(begin, begin + len(rows))
        named = self.store.host_tables[group][slot, first + at // self.size]
        pages, offsets = self.store.staging.upload_all([named, at % self.size])
        for layer, cache in self.caches.items():
            if cache.group == group:
                write_pages(cache.keys, cache.values, *self.project(layer, rows), pages, offsets)

    # Reading

    def touch(self, rows: Sequence[Row]) -> bool:
        """No token's embedding is a picture's."""
        return False

    def sees(self, rows: Sequence[Row]) -> bool:
        """Whether some token of these rows sees a picture."""
        views = self.views
        return bool(views) and any(
            row.slot in views and views[row.slot][0].start < row.start + len(row.tokens) for row in rows
        )

    def crossing(self, flat: Flat, backend: Any) -> Crossing | None:
        """See Pictures."""
        segments = list(self._segments(flat))
        if not segments:
            return None
        total = flat.inputs.shape[1]
        counts, rows = (np.array([segment[i] for segment in segments]) for i in (1, 4))
        offsets = np.cumsum(counts) - counts
        slots = own = np.arange(1, len(segments) + 1)
        at = np.concatenate([np.arange(segment.at, segment.at + segment.count) for segment in segments])
        places, token_slots, positions = self.store.staging.upload_all(
            [at, np.repeat(own, counts), np.repeat(rows - 1, counts)]
        )
        if backend.rotates:
            slots = np.array([self._place(segment.slot, segment.medium) for segment in segments])
        tables = [
            table if g not in self.groups else self.entries(g) if backend.rotates else self._tables(segments, g)
            for g, table in enumerate(self.store.tables)
        ]
        batch = Batch(
            token_slots, positions, token_slots, positions[:0], slots, rows - counts, counts, offsets, own[:0], tables,
            whole=counts > 1,
        )  # fmt: skip
        sees = torch.zeros((total, 1), dtype=self.store.buffer.dtype, device=self.store.device)
        sees.index_fill_(0, places, 1)
        return Crossing(self.caches, backend, partial(backend.plan, batch), sees, None if len(at) == total else places)

    def single(
        self, slots: Tensor, backend: Any, scratch: SplitScratch | None = None, splits: int | None = None
    ) -> Crossing:
        """The same of a step of one token a row behind their prompts, all of it on the device: `slots` [R]. A graph may
        capture it."""
        places, rows = self.device_latest.index_select(1, slots)
        step = backend.singles(places, rows - 1)

        def plan(cache: LayerCache) -> Any:
            return backend.plan_singles(step, self.entries(cache.group), cache, scratch, splits)

        sees = (rows > 0)[:, None].to(self.store.buffer.dtype)
        return Crossing(self.caches, backend, plan, sees)

    def _segments(self, flat: Flat) -> Iterator[Segment]:
        rows = zip(flat.slots.tolist(), flat.starts.tolist(), flat.lengths.tolist(), flat.offsets.tolist())
        for slot, start, length, offset in rows:
            views = self.views.get(slot, [])
            ends = [view.start for view in views[1:]] + [start + length]
            for view, end in zip(views, ends):
                first, stop = max(start, view.start), min(start + length, end)
                if first < stop:
                    yield Segment(offset + first - start, stop - first, slot, view.medium, view.rows)

    def entries(self, group: int) -> Tensor:
        """All slots' tables as one of a column, whose "slots" are the places of media: what a kernel reads that is told
        how far to go."""
        return self.store.tables[group].view(-1, 1)

    def _tables(self, segments: Sequence[Segment], group: int) -> Tensor:
        """[1 + segments, pages]: of each the pages that it sees, from its own first one on."""
        pages = [-(-segment.rows // self.size) for segment in segments]
        named = np.zeros((1 + len(segments), max(pages)), dtype=np.int64)
        entries = self.store.host_tables[group].reshape(-1)
        for table, segment, count in zip(named[1:], segments, pages):
            first = self._place(segment.slot, segment.medium)
            table[:count] = entries[first : first + count]
        return to_device(named, self.store.device)
