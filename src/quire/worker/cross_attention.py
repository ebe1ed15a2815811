"""A runner's images for cross-attention layers: keys and values of image embeddings in the pages of an ImageEncoding,
and which of them each token of a step attends to.

Adjacent images of a prompt are one ImageItem: later tokens attend to all of them, and each image token to those up to
its own.
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
    """From position `start` up to the next entry, tokens of a sequence attend to the first `num_embeds` embeddings of
    its item `image_index`."""

    start: int
    image_index: int
    num_embeds: int


class CrossSegment(NamedTuple):
    """A step's tokens from `first_token` on that attend to the same embeddings of a slot's image item."""

    first_token: int
    num_tokens: int
    slot: int
    image_index: int
    num_embeds: int


def tile_grids(pixels: ImagePixels) -> list[TileGrid]:
    """Return the grid of each image of an item."""
    return [TileGrid(*pixels.grid[at : at + GRID_FIELDS]) for at in range(0, len(pixels.grid), GRID_FIELDS)]


class CrossAttentionContext:
    """The cross-attention of one step. `image_mask` [T, 1] is 1 for tokens that attend to an image; `token_indices` are
    these tokens (None: all). `make_plan` is called once for each kind of layer."""

    def __init__(
        self, caches: Mapping[int, LayerCache], backend: Any, make_plan: Callable[[LayerCache], Any],
        image_mask: Tensor, token_indices: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.caches, self.backend, self.make_plan = caches, backend, make_plan
        self.image_mask, self.token_indices = image_mask, token_indices
        self.plans: dict[Any, Any] = {}

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See quire.models.forward_context.ForwardContext.cross_attend."""
        cache = self.caches[layer]
        plan = self.plans.get(cache.plan_key)
        if plan is None:
            plan = self.plans[cache.plan_key] = self.make_plan(cache)
        queries = q if self.token_indices is None else q.index_select(0, self.token_indices)
        out: Tensor
        if self.backend.fuses_rope:
            out = self.backend.attend_cached(queries, cache, plan)
        else:
            out = self.backend.attend(queries, queries, queries, cache, plan)  # the cache is read-only: no writes
        return out if self.token_indices is None else torch.zeros_like(q).index_copy_(0, self.token_indices, out)


class CrossAttentionImages(ImageInputs):
    """Images of a `model` whose cross-attention layers attend to their embeddings. `model.project_kv` computes keys and
    values of embeddings for a layer, which are stored in the store's `cross_caches`."""

    def __init__(self, model: Any, store: Store, embed_dim: int) -> None:
        super().__init__(model.vision_encoder, store, embed_dim)
        self.project_kv, self.caches = model.project_kv, store.cross_caches
        self.visibility: dict[int, list[ImageVisibility]] = {}  # by slot
        # By group, slot and item: encoded parts, and their embeddings.
        self.partial_encodings: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.cross_groups = {cache.group for cache in self.caches.values()}
        shapes = {
            (group.run_tokens, group.table_width)
            for group in map(store.kv_config.groups.__getitem__, self.cross_groups)
        }
        assert len(shapes) == 1, f"tables of cross-attention groups have different shapes: {shapes}"
        self.rows_per_page, self.table_width = next(iter(shapes))
        # By slot: the table offset of its last item and its embeddings, or zeros. Graphs read the copy on the device.
        self.last_images = np.zeros((2, store.kv_config.slots), dtype=np.int64)
        self.device_last_images = torch.from_numpy(self.last_images).to(store.device, copy=True)

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        changed = [init for init in new_slots if init.images or init.slot in self.images]
        super().init_slots(new_slots)
        for init in changed:
            self.partial_encodings = {
                key: counts for key, counts in self.partial_encodings.items() if key[1] != init.slot
            }
            self.visibility.pop(init.slot, None)
            self.last_images[:, init.slot] = 0
            if init.images:
                self.visibility[init.slot] = [
                    view for i, image in enumerate(init.images) for view in self._visibility_of(i, image)
                ]
                offset = self._table_offset(init.slot, len(init.images) - 1)
                self.last_images[:, init.slot] = offset, init.images[-1].num_embeds
        if changed:
            slots = np.array(list(dict.fromkeys(init.slot for init in changed)))
            device_slots, values = self.store.staging.upload_all([slots, self.last_images[:, slots]])
            self.device_last_images.index_copy_(1, device_slots, values)

    def _visibility_of(self, image_index: int, image: ImageItem) -> Iterator[ImageVisibility]:
        if image.num_tokens == 1:
            yield ImageVisibility(image.start, image_index, image.num_embeds)
            return
        counts = [self.vision_encoder.tiling.num_embeds(grid) for grid in tile_grids(self.pixels_by_key[image.key])]
        assert (len(counts), sum(counts)) == (image.num_tokens, image.num_embeds), (
            f"images of {counts} embeddings don't match {image}"
        )
        for i, rows in enumerate(accumulate(counts)):
            yield ImageVisibility(image.start + i, image_index, rows)

    def _table_offset(self, slot: int, image_index: int) -> int:
        """Return the index of the first page of a slot's item `image_index` in the flat table of all slots."""
        return slot * self.table_width + sum(
            -(-image.num_embeds // self.rows_per_page) for image in self.images[slot][:image_index]
        )

    # Encoding

    def encode(self, encodings: Sequence[ImageEncoding]) -> None:
        """See ImageInputs. A part is a whole image, since its tiles attend to one another."""
        for group, slot, image_index, first_page, first_part, num_parts, _ in encodings:
            image, key = self.images[slot][image_index], (group, slot, image_index)
            done, written = self.partial_encodings.get(key, (0, 0)) if first_part else (0, 0)
            assert done == first_part, f"part {first_part} of an image isn't its next one"
            for embeds in self._encode_images(self.pixels_by_key[image.key], first_part, first_part + num_parts):
                self._write_kv(group, slot, first_page, written, embeds)
                written += len(embeds)
            self.partial_encodings[key] = first_part + num_parts, written
            if first_part + num_parts == image.num_parts:
                del self.partial_encodings[key]

    def _encode_images(self, pixels: ImagePixels, first_image: int, stop_image: int) -> Iterator[Tensor]:
        """Yield the embeddings of images first_image .. stop_image - 1 of an item."""
        grids = tile_grids(pixels)
        ends = [0, *accumulate(grid.rows * grid.columns for grid in grids)]
        tiles = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
        for grid, (start, stop) in list(zip(grids, pairwise(ends)))[first_image:stop_image]:
            yield encode_image(self.vision_encoder, to_device(tiles[start:stop].copy(), self.store.device), grid, 1)

    def _write_kv(self, group: int, slot: int, first_page: int, begin: int, rows: Tensor) -> None:
        """Write keys and values of embeddings `rows` for all of the group's layers, from index `begin` in the slot's
        pages from `first_page` on."""
        at = np.arange(begin, begin + len(rows))
        page_ids = self.store.host_tables[group][slot, first_page + at // self.rows_per_page]
        pages, offsets = self.store.staging.upload_all([page_ids, at % self.rows_per_page])
        for layer, cache in self.caches.items():
            if cache.group == group:
                keys, values = self.project_kv(layer, rows)
                write_pages(cache.keys, cache.values, keys, values, pages, offsets)

    # Reading

    def overlaps_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Return False: no token's embedding is replaced."""
        return False

    def attends_to_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Return True if some token of these slices attends to an image."""
        views = self.visibility
        return bool(views) and any(
            row.slot in views and views[row.slot][0].start < row.start + len(row.tokens) for row in slices
        )

    def cross_attention_context(self, flat_inputs: FlatInputs, backend: Any) -> CrossAttentionContext | None:
        segments = list(self._segments(flat_inputs))
        if not segments:
            return None
        total = flat_inputs.token_columns.shape[1]
        counts = np.array([segment.num_tokens for segment in segments])
        rows = np.array([segment.num_embeds for segment in segments])
        offsets = np.cumsum(counts) - counts
        slots = indices = np.arange(1, len(segments) + 1)  # in `_segment_tables`
        tokens = np.concatenate(
            [np.arange(segment.first_token, segment.first_token + segment.num_tokens) for segment in segments]
        )
        places, token_slots, positions = self.store.staging.upload_all(
            [tokens, np.repeat(indices, counts), np.repeat(rows - 1, counts)]
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
            token_slots, positions, token_slots, positions[:0], slots, rows - counts, counts, offsets, indices[:0],
            tables, bidirectional=counts > 1,
        )  # fmt: skip
        image_mask = torch.zeros((total, 1), dtype=self.store.buffer.dtype, device=self.store.device)
        image_mask.index_fill_(0, places, 1)
        return CrossAttentionContext(
            self.caches, backend, partial(backend.plan, batch), image_mask, None if len(tokens) == total else places
        )

    def decode_cross_context(
        self, slots: Tensor, backend: Any, scratch: SplitScratch | None = None
    ) -> CrossAttentionContext:
        """Return the cross-attention of a decode step of `slots` [R], from tensors on the device only, for graphs."""
        places, rows = self.device_last_images.index_select(1, slots)
        batch = backend.decode_batch(places, rows - 1)

        def plan(cache: LayerCache) -> Any:
            return backend.plan_captured(batch, self.flat_table(cache.group), cache, scratch)

        image_mask = (rows > 0)[:, None].to(self.store.buffer.dtype)
        return CrossAttentionContext(self.caches, backend, plan, image_mask)

    def _segments(self, flat_inputs: FlatInputs) -> Iterator[CrossSegment]:
        for slot, start, length, offset in flat_inputs.rows():
            views = self.visibility.get(slot, [])
            ends = [view.start for view in views[1:]] + [start + length]
            for view, end in zip(views, ends):
                first, stop = max(start, view.start), min(start + length, end)
                if first < stop:
                    yield CrossSegment(offset + first - start, stop - first, slot, view.image_index, view.num_embeds)

    def flat_table(self, group: int) -> Tensor:
        """Return all slots' tables as one of one column, for kernels that take a table offset as the slot."""
        return self.store.tables[group].view(-1, 1)

    def _segment_tables(self, segments: Sequence[CrossSegment], group: int) -> Tensor:
        """Return a table [1 + segments, pages] with the pages that each segment attends to."""
        counts = [-(-segment.num_embeds // self.rows_per_page) for segment in segments]
        tables = np.zeros((1 + len(segments), max(counts)), dtype=np.int64)
        entries = self.store.host_tables[group].reshape(-1)
        for table, segment, count in zip(tables[1:], segments, counts):
            first = self._table_offset(segment.slot, segment.image_index)
            table[:count] = entries[first : first + count]
        return to_device(tables, self.store.device)
