"""A runner's pictures: pixels by key, the pictures of the sequences in its slots, what some of their parts were encoded
to, and rows, which it writes where an Encode says and reads for the tokens that they stand for.

It decides nothing: the plan says what is encoded, in which step, and which pages have room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import to_device
from quire.data.kernels.limits import PARTS_AT_ONCE
from quire.data.models.vision import Encoder
from quire.data.runner.inputs import Flat
from quire.data.runner.store import Store
from quire.data.runner.views import picture_rows
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import Grid
from quire.vocabulary.plan import Birth, Encode, Row

Place = tuple[int, int]
"""A slot, and which of its sequence's pictures."""


class Coming(NamedTuple):
    """A picture of which parts are encoded: all of it `opened`, and the `features` of the first parts."""

    grid: Grid
    opened: Tensor
    features: list[Tensor]


class Span(NamedTuple):
    """Tokens of a step, from its `at`-th one on, that rows first .. stop - 1 of a picture stand for."""

    place: Place
    first: int
    stop: int
    at: int


class Pictures:
    """Encoded by `eyes`, kept in the pages of `store`. Pixels stay where whoever brought them has them; they are sent
    to the device when the first of their parts is encoded."""

    def __init__(self, eyes: Encoder, store: Store, width: int) -> None:
        self.eyes, self.store = eyes, store
        geometry = store.geometry
        self.sight, self.group = geometry.sight, -1
        if self.sight == "inside":
            self.group = geometry.host
        elif self.sight == "pages":
            self.group = [group.kind for group in geometry.groups].index("vision")
        if self.group >= 0:
            self.rows = picture_rows(store.buffer, geometry.groups[self.group], width)
        self.held: dict[bytes, Pixels] = {}
        self.media: dict[int, tuple[Medium, ...]] = {}  # by slot
        self.coming: dict[Place, Coming] = {}
        self.passing: dict[Place, Tensor] = {}  # rows of this step alone

    def see(self, pixels: Pixels) -> None:
        """Plans that are submitted from now on may encode it."""
        self.held[pixels.key] = pixels

    def forget(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes it. If some of its parts are, they are of no use to anybody."""
        self.held.pop(key, None)
        for slot, i in [place for place in self.coming if self.media[place[0]][place[1]].key == key]:
            del self.coming[slot, i]

    def born(self, births: Sequence[Birth]) -> None:
        """These sequences get their slots, and who had one before is gone."""
        for birth in births:
            if self.media.pop(birth.slot, None) is not None:
                self.coming = {place: one for place, one in self.coming.items() if place[0] != birth.slot}
            if birth.media:
                self.media[birth.slot] = birth.media

    # Encoding

    def encode(self, entries: Sequence[Encode]) -> None:
        """Enqueue what a journal says, in order: the parts of all entries together, as far as the encoder takes
        them."""
        if not entries:
            return
        if any(entry.first == 0 and entry.parts < self._medium(entry).parts for entry in entries):
            # One picture is in parts between steps: what nobody goes on with was given up, by a preemption, say.
            going_on = {(entry.slot, entry.medium) for entry in entries}
            self.coming = {place: one for place, one in self.coming.items() if place in going_on}
        jobs = [(entry, self._begun(entry)) for entry in entries]
        shares = [coming.opened[entry.first : entry.first + entry.parts] for entry, coming in jobs]
        if self.eyes.whole:
            found = [self.eyes.encode(share, coming.grid) for share, (_, coming) in zip(shares, jobs)]
        else:
            parts = torch.cat(shares) if len(shares) > 1 else shares[0]
            encoded = torch.cat([self.eyes.encode(some) for some in parts.split(PARTS_AT_ONCE)])
            found = list(encoded.split([len(share) for share in shares]))
        for (entry, coming), features in zip(jobs, found):
            assert sum(map(len, coming.features)) == entry.first, f"part {entry.first} of a picture isn't its next one"
            coming.features.append(features)
            if entry.first + entry.parts == self._medium(entry).parts:
                self.coming.pop((entry.slot, entry.medium), None)
                self._keep(entry, self.eyes.join(torch.cat(coming.features), coming.grid))

    def _medium(self, entry: Encode) -> Medium:
        return self.media[entry.slot][entry.medium]

    def _begun(self, entry: Encode) -> Coming:
        """The picture of an entry, opened at its first part."""
        place = entry.slot, entry.medium
        if entry.first == 0:
            pixels = self.held[self._medium(entry).key]
            grid = Grid(*pixels.grid)
            array = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
            self.coming[place] = Coming(grid, self.eyes.open(to_device(array.copy(), self.store.device), grid), [])
        return self.coming[place]

    def _keep(self, entry: Encode, rows: Tensor) -> None:
        """Write the rows of a picture to their pages."""
        medium = self._medium(entry)
        assert len(rows) == medium.rows, f"an encoder makes {len(rows)} rows of a picture that has {medium.rows}"
        if entry.group < 0:
            self.passing[entry.slot, entry.medium] = rows
            return
        assert self.store.geometry.groups[entry.group].kind != "cross", "no model's layers attend to pictures yet"
        pages, offsets = self._cells((entry.slot, entry.medium), entry.skip, medium.rows)
        self.rows[*self.store.staging.upload_all([pages, offsets])] = rows[entry.skip :]

    def _cells(self, place: Place, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where rows first .. stop - 1 of a picture are: pages, and which of a page's rows."""
        (slot, i), group = place, self.store.geometry.groups[self.group]
        media, size, behind = self.media[slot], group.run_tokens, self.sight == "inside"
        before = media[i].start if behind else sum(group.pages(medium.rows) for medium in media[:i]) * size
        at = np.arange(before + first, before + stop)
        return self.store.host_tables[self.group][slot, at // size + behind], at % size

    # Reading

    def touch(self, rows: Sequence[Row]) -> bool:
        """Whether some of these rows may have tokens that a picture's rows stand for."""
        media = self.media
        return bool(media) and any(row.slot in media and row.start < media[row.slot][-1].end for row in rows)

    def sees(self, rows: Sequence[Row]) -> bool:
        """Whether a token of these rows sees a picture by layers of their own."""
        return False

    def crossing(self, flat: Flat, backend: Any) -> Any:
        """What the tokens of a step see by such layers; None if they see nothing. See quire.data.runner.crossing."""
        return None

    def of(self, flat: Flat) -> Callable[[Tensor], Tensor] | None:
        """What puts rows in the places of embeddings of a step's tokens; None if there are none to put."""
        spans = list(self._spans(flat)) if self.sight else []
        if not spans:
            return None
        at = np.concatenate([np.arange(span.at, span.at + span.stop - span.first) for span in spans])
        if self.sight == "off":
            (to,) = self.store.staging.upload_all([at])
            rows = torch.cat([self.passing[span.place][span.first : span.stop] for span in spans])
            return lambda x: x.index_copy_(0, to, rows)
        cells = [self._cells(span.place, span.first, span.stop) for span in spans]
        to, pages, offsets = self.store.staging.upload_all([at, *map(np.concatenate, zip(*cells))])
        return lambda x: x.index_copy_(0, to, self.rows[pages, offsets])

    def _spans(self, flat: Flat) -> Iterator[Span]:
        rows = zip(flat.slots.tolist(), flat.starts.tolist(), flat.lengths.tolist(), flat.offsets.tolist())
        for slot, start, length, offset in rows:
            for i, medium in enumerate(self.media.get(slot, ())):
                first, stop = max(start, medium.start), min(start + length, medium.end)
                if first < stop:
                    yield Span((slot, i), first - medium.start, stop - medium.start, offset + first - start)

    def passed(self) -> None:
        """The step's rows are enqueued."""
        self.passing.clear()

    def rehearse(self) -> None:
        """Encode a few parts of nothing, so that kernels are compiled and loaded, and the memory is claimed."""
        tiling = self.eyes.tiling
        side = tiling.tile * PARTS_AT_ONCE
        for height, width in ((tiling.tile, tiling.tile), (side, side)):
            grid = tiling.grid(height, width)
            shape = tiling.tiles(grid), tiling.tile, tiling.tile, 3
            pixels = torch.zeros(shape, dtype=torch.uint8, device=self.store.device)
            opened = self.eyes.open(pixels, grid)[: tiling.parts(grid)]
            found = [self.eyes.encode(some, grid) for some in opened.split(PARTS_AT_ONCE)]
            self.eyes.join(torch.cat(found), grid)
