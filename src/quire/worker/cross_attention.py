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

from quire.kernels.forward_batch import ForwardBatch, LayerCache, to_device
from quire.kernels.reference import write_pages
from quire.models.vision import encode_image
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.step_plan import ImageEncoding, SeqSlice, SlotInit
from quire.worker.image_inputs import ImageInputs
from quire.worker.inputs import FlatInputs
from quire.worker.store import Store

if TYPE_CHECKING:
    from quire.kernels.triton.decode import SplitScratch

GRID_FIELDS = len(TileGrid._fields)


class ImageVisibility(NamedTuple):
    """From its token at `start` on, and up to the next one, a sequence sees `num_embeds` rows of its "
    "`image_index`-th one."""

    start: int
    image_index: int
    num_embeds: int


class CrossSegment(NamedTuple):
    """Tokens of a step, `num_tokens` of them from its `first_token`-th one on, which see the same `num_embeds` of a "
    "medium of a slot."""

    first_token: int
    num_tokens: int
    slot: int
    image_index: int
    num_embeds: int


def tile_grids(pixels: ImagePixels) -> list[TileGrid]:
    """How each picture of a medium was cut."""
    return [TileGrid(*pixels.grid[at : at + GRID_FIELDS]) for at in range(0, len(pixels.grid), GRID_FIELDS)]


class CrossAttentionContext:
    """What the tokens of one step see. `image_mask` [T, 1] is 1 for those that see anything; of those `token_indices`,
    places among the step's (None: all), a backend attends as `make_plan` says, which is asked once for each kind of
    layers."""

    def __init__(
        self, caches: Mapping[int, LayerCache], backend: Any, make_plan: Callable[[LayerCache], Any],
        image_mask: Tensor,
        token_indices: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.caches, self.backend, self.make_plan, self.image_mask, self.token_indices = (
            caches,
            backend,
            make_plan,
            image_mask,
            token_indices,
        )
        self.plans: dict[Any, Any] = {}

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """As quire.models.forward_context says of `cross`."""
        cache = self.caches[layer]
        plan = self.plans.get(cache.plan_key)
        if plan is None:
            plan = self.plans[cache.plan_key] = self.make_plan(cache)
        asking = q if self.token_indices is None else q.index_select(0, self.token_indices)
        if self.backend.fuses_rope:
            found = self.backend.attend_cached(asking, cache, plan)
        else:
            found = self.backend.attend(asking, asking, asking, cache, plan)  # which writes nothing
        return found if self.token_indices is None else torch.zeros_like(q).index_copy_(0, self.token_indices, found)


class CrossAttentionImages(ImageInputs):
    """Pictures that `model` has eyes for, and layers that attend to their rows: the store's `cross`, for each of which
    it can `project_kv` rows to keys and values."""

    def __init__(self, model: Any, store: Store, embed_dim: int) -> None:
        super().__init__(model.vision_encoder, store, embed_dim)
        self.project_kv, self.caches = model.project_kv, store.cross_caches
        self.visibility: dict[int, list[ImageVisibility]] = {}  # by slot
        self.partial_encodings: dict[
            tuple[int, int, int], tuple[int, int]
        ] = {}  # of group, slot and medium: parts, and their rows
        self.cross_groups = {cache.group for cache in self.caches.values()}
        shapes = {
            (group.run_tokens, group.table_width)
            for group in map(store.kv_config.groups.__getitem__, self.cross_groups)
        }
        assert len(shapes) == 1, f"tables of pictures' pages are alike, not {shapes}"
        self.rows_per_page, self.table_width = next(iter(shapes))
        # Of each slot, on the device: the place of its last medium, and its rows; 0 and 0 without one. Graphs read it.
        self.last_images = np.zeros((2, store.kv_config.slots), dtype=np.int64)
        self.device_last_images = torch.from_numpy(self.last_images).to(store.device, copy=True)

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """See Pictures."""
        changed = [birth for birth in new_slots if birth.images or birth.slot in self.images]
        super().init_slots(new_slots)
        for birth in changed:
            self.partial_encodings = {
                place: rows for place, rows in self.partial_encodings.items() if place[1] != birth.slot
            }
            self.visibility.pop(birth.slot, None)
            self.last_images[:, birth.slot] = 0
            if birth.images:
                self.visibility[birth.slot] = [
                    view for i, medium in enumerate(birth.images) for view in self._visibility_of(i, medium)
                ]
                self.last_images[:, birth.slot] = (
                    self._table_offset(birth.slot, len(birth.images) - 1),
                    birth.images[-1].num_embeds,
                )
        if changed:
            slots = np.array(list(dict.fromkeys(birth.slot for birth in changed)))
            at, numbers = self.store.staging.upload_all([slots, self.last_images[:, slots]])
            self.device_last_images.index_copy_(1, at, numbers)

    def _visibility_of(self, image_index: int, image: ImageItem) -> Iterator[ImageVisibility]:
        if image.num_tokens == 1:
            yield ImageVisibility(image.start, image_index, image.num_embeds)
            return
        counts = [self.vision_encoder.tiling.num_embeds(grid) for grid in tile_grids(self.pixels_by_key[image.key])]
        assert (len(counts), sum(counts)) == (image.num_tokens, image.num_embeds), (
            f"pictures of {counts} rows are {image}"
        )
        for i, rows in enumerate(accumulate(counts)):
            yield ImageVisibility(image.start + i, image_index, rows)

    def _table_offset(self, slot: int, image_index: int) -> int:
        """Where the pages of a slot's `image_index`-th medium begin, counted from the first entry of all slots' "
        "tables."""
        return slot * self.table_width + sum(
            -(-medium.num_embeds // self.rows_per_page) for medium in self.images[slot][:image_index]
        )

    # Encoding

    def encode(self, encodings: Sequence[ImageEncoding]) -> None:
        """See Pictures. A picture is a part: its tiles see one another."""
        for group, slot, number, first, begun, parts, _ in encodings:
            medium, place = self.images[slot][number], (group, slot, number)
            done, written = self.partial_encodings.get(place, (0, 0)) if begun else (0, 0)
            assert done == begun, f"part {begun} of a picture isn't its next one"
            for rows in self._encode_images(self.pixels_by_key[medium.key], begun, begun + parts):
                self._write_kv(group, slot, first, written, rows)
                written += len(rows)
            self.partial_encodings[place] = begun + parts, written
            if begun + parts == medium.num_parts:
                del self.partial_encodings[place]

    def _encode_images(self, pixels: ImagePixels, first_image: int, stop_image: int) -> Iterator[Tensor]:
        """The rows of some pictures of a medium."""
        grids = tile_grids(pixels)
        ends = [0, *accumulate(grid.rows * grid.columns for grid in grids)]
        tiles = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
        for grid, (start, stop) in list(zip(grids, pairwise(ends)))[first_image:stop_image]:
            yield encode_image(self.vision_encoder, to_device(tiles[start:stop].copy(), self.store.device), grid, 1)

    def _write_kv(self, group: int, slot: int, first_page: int, begin: int, rows: Tensor) -> None:
        """Keys and values of all of the group's layers, from the `begin`-th row of the slot's page `first_page` on."""
        at = np.arange(begin, begin + len(rows))
        named = self.store.host_tables[group][slot, first_page + at // self.rows_per_page]
        pages, offsets = self.store.staging.upload_all([named, at % self.rows_per_page])
        for layer, cache in self.caches.items():
            if cache.group == group:
                write_pages(cache.keys, cache.values, *self.project_kv(layer, rows), pages, offsets)

    # Reading

    def overlaps_images(self, slices: Sequence[SeqSlice]) -> bool:
        """No token's embedding is a picture's."""
        return False

    def attends_to_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Whether some token of these rows sees a picture."""
        views = self.visibility
        return bool(views) and any(
            row.slot in views and views[row.slot][0].start < row.start + len(row.tokens) for row in slices
        )

    def cross_attention_context(self, flat_inputs: FlatInputs, backend: Any) -> CrossAttentionContext | None:
        """See Pictures."""
        segments = list(self._segments(flat_inputs))
        if not segments:
            return None
        total = flat_inputs.token_columns.shape[1]
        counts, rows = (np.array([segment[i] for segment in segments]) for i in (1, 4))
        offsets = np.cumsum(counts) - counts
        slots = own = np.arange(1, len(segments) + 1)
        at = np.concatenate(
            [np.arange(segment.first_token, segment.first_token + segment.num_tokens) for segment in segments]
        )
        places, token_slots, positions = self.store.staging.upload_all(
            [at, np.repeat(own, counts), np.repeat(rows - 1, counts)]
        )
        if backend.fuses_rope:
            slots = np.array([self._table_offset(segment.slot, segment.image_index) for segment in segments])
        tables = [
            table
            if g not in self.cross_groups
            else self.flat_table(g)
            if backend.fuses_rope
            else self._segment_tables(segments, g)
            for g, table in enumerate(self.store.tables)
        ]
        batch = ForwardBatch(
            token_slots, positions, token_slots, positions[:0], slots, rows - counts, counts, offsets, own[:0], tables,
            bidirectional=counts > 1,
        )  # fmt: skip
        sees = torch.zeros((total, 1), dtype=self.store.buffer.dtype, device=self.store.device)
        sees.index_fill_(0, places, 1)
        return CrossAttentionContext(
            self.caches, backend, partial(backend.plan, batch), sees, None if len(at) == total else places
        )

    def decode_cross_context(
        self, slots: Tensor, backend: Any, scratch: SplitScratch | None = None, splits: int | None = None
    ) -> CrossAttentionContext:
        """The same of a step of one token a row behind their prompts, all of it on the device: `slots` [R]. A graph may
        capture it."""
        places, rows = self.device_last_images.index_select(1, slots)
        step = backend.decode_batch(places, rows - 1)

        def plan(cache: LayerCache) -> Any:
            return backend.plan_decode(step, self.flat_table(cache.group), cache, scratch, splits)

        sees = (rows > 0)[:, None].to(self.store.buffer.dtype)
        return CrossAttentionContext(self.caches, backend, plan, sees)

    def _segments(self, flat_inputs: FlatInputs) -> Iterator[CrossSegment]:
        rows = zip(
            flat_inputs.slots.tolist(),
            flat_inputs.starts.tolist(),
            flat_inputs.lengths.tolist(),
            flat_inputs.offsets.tolist(),
        )
        for slot, start, length, offset in rows:
            views = self.visibility.get(slot, [])
            ends = [view.start for view in views[1:]] + [start + length]
            for view, end in zip(views, ends):
                first, stop = max(start, view.start), min(start + length, end)
                if first < stop:
                    yield CrossSegment(offset + first - start, stop - first, slot, view.image_index, view.num_embeds)

    def flat_table(self, group: int) -> Tensor:
        """All slots' tables as one of a column, whose "slots" are the places of media: what a kernel reads that is told
        how far to go."""
        return self.store.tables[group].view(-1, 1)

    def _segment_tables(self, segments: Sequence[CrossSegment], group: int) -> Tensor:
        """[1 + segments, pages]: of each the pages that it sees, from its own first one on."""
        pages = [-(-segment.num_embeds // self.rows_per_page) for segment in segments]
        named = np.zeros((1 + len(segments), max(pages)), dtype=np.int64)
        entries = self.store.host_tables[group].reshape(-1)
        for table, segment, count in zip(named[1:], segments, pages):
            first = self._table_offset(segment.slot, segment.image_index)
            table[:count] = entries[first : first + count]
        return to_device(named, self.store.device)
