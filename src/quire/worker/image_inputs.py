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

from quire.kernels.forward_batch import to_device
from quire.kernels.limits import MAX_IMAGE_PARTS
from quire.models.vision import Encoder
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.step_plan import ImageEncoding, SeqSlice, SlotInit
from quire.worker.cache_views import image_embed_pages
from quire.worker.inputs import FlatInputs
from quire.worker.store import Store

ImageRef = tuple[int, int]
"""A slot, and which of its sequence's pictures."""


class PartialImage(NamedTuple):
    """A picture of which parts are encoded: all of it `preprocessed`, and the `features` of the first parts."""

    grid: TileGrid
    preprocessed: Tensor
    features: list[Tensor]


class EmbedSpan(NamedTuple):
    """Tokens of a step, from its `first_token`-th one on, that rows first .. stop - 1 of a picture stand for."""

    image: ImageRef
    first_embed: int
    stop_embed: int
    first_token: int


class ImageInputs:
    """Encoded by `vision_encoder`, kept in the pages of `store`. Pixels stay where whoever brought them has them; they
    are sent to the device when the first of their parts is encoded."""

    def __init__(self, vision_encoder: Encoder, store: Store, embed_dim: int) -> None:
        self.vision_encoder, self.store = vision_encoder, store
        geometry = store.kv_config
        self.embed_location, self.embed_group = geometry.sight, -1
        if self.embed_location == "inside":
            self.embed_group = geometry.image_embed_group
        elif self.embed_location == "pages":
            self.embed_group = [group.kind for group in geometry.groups].index("vision")
        if self.embed_group >= 0:
            self.embed_pages = image_embed_pages(store.buffer, geometry.groups[self.embed_group], embed_dim)
        self.pixels_by_key: dict[bytes, ImagePixels] = {}
        self.images: dict[int, tuple[ImageItem, ...]] = {}  # by slot
        self.partial_images: dict[ImageRef, PartialImage] = {}
        self.step_embeds: dict[ImageRef, Tensor] = {}  # rows of this step alone

    def add_image(self, pixels: ImagePixels) -> None:
        """Plans that are submitted from now on may encode it."""
        self.pixels_by_key[pixels.key] = pixels

    def remove_image(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes it. If some of its parts are, they are of no use to anybody."""
        self.pixels_by_key.pop(key, None)
        for slot, i in [place for place in self.partial_images if self.images[place[0]][place[1]].key == key]:
            del self.partial_images[slot, i]

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """These sequences get their slots, and who had one before is gone."""
        for birth in new_slots:
            if self.images.pop(birth.slot, None) is not None:
                self.partial_images = {
                    place: one for place, one in self.partial_images.items() if place[0] != birth.slot
                }
            if birth.images:
                self.images[birth.slot] = birth.images

    # Encoding

    def encode(self, encodings: Sequence[ImageEncoding]) -> None:
        """Enqueue what a journal says, in order: the parts of all entries together, as far as the encoder takes
        them."""
        if not encodings:
            return
        if any(entry.first_part == 0 and entry.num_parts < self._image_of(entry).num_parts for entry in encodings):
            # One picture is in parts between steps: what nobody goes on with was given up, by a preemption, say.
            going_on = {(entry.slot, entry.image_index) for entry in encodings}
            self.partial_images = {place: one for place, one in self.partial_images.items() if place in going_on}
        jobs = [(entry, self._start_image(entry)) for entry in encodings]
        shares = [coming.preprocessed[entry.first_part : entry.first_part + entry.num_parts] for entry, coming in jobs]
        if self.vision_encoder.encodes_whole_image:
            found = [self.vision_encoder.encode(share, coming.grid) for share, (_, coming) in zip(shares, jobs)]
        else:
            parts = torch.cat(shares) if len(shares) > 1 else shares[0]
            encoded = torch.cat([self.vision_encoder.encode(some) for some in parts.split(MAX_IMAGE_PARTS)])
            found = list(encoded.split([len(share) for share in shares]))
        for (entry, coming), features in zip(jobs, found):
            assert sum(map(len, coming.features)) == entry.first_part, (
                f"part {entry.first_part} of a picture isn't its next one"
            )
            coming.features.append(features)
            if entry.first_part + entry.num_parts == self._image_of(entry).num_parts:
                self.partial_images.pop((entry.slot, entry.image_index), None)
                self._write_embeds(entry, self.vision_encoder.assemble(torch.cat(coming.features), coming.grid))

    def _image_of(self, encoding: ImageEncoding) -> ImageItem:
        return self.images[encoding.slot][encoding.image_index]

    def _start_image(self, encoding: ImageEncoding) -> PartialImage:
        """The picture of an entry, opened at its first part."""
        place = encoding.slot, encoding.image_index
        if encoding.first_part == 0:
            pixels = self.pixels_by_key[self._image_of(encoding).key]
            grid = TileGrid(*pixels.grid)
            array = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
            self.partial_images[place] = PartialImage(
                grid, self.vision_encoder.preprocess(to_device(array.copy(), self.store.device), grid), []
            )
        return self.partial_images[place]

    def _write_embeds(self, encoding: ImageEncoding, embeds: Tensor) -> None:
        """Write the rows of a picture to their pages."""
        medium = self._image_of(encoding)
        assert len(embeds) == medium.num_embeds, (
            f"an encoder makes {len(embeds)} rows of a picture that has {medium.num_embeds}"
        )
        if encoding.group < 0:
            self.step_embeds[encoding.slot, encoding.image_index] = embeds
            return
        assert self.store.kv_config.groups[encoding.group].kind != "cross", "no model's layers attend to pictures yet"
        pages, offsets = self._embed_positions(
            (encoding.slot, encoding.image_index), encoding.skip_embeds, medium.num_embeds
        )
        self.embed_pages[*self.store.staging.upload_all([pages, offsets])] = embeds[encoding.skip_embeds :]

    def _embed_positions(self, image: ImageRef, first_embed: int, stop_embed: int) -> tuple[np.ndarray, np.ndarray]:
        """Where rows first .. stop - 1 of a picture are: pages, and which of a page's rows."""
        (slot, i), group = image, self.store.kv_config.groups[self.embed_group]
        media, size, behind = self.images[slot], group.run_tokens, self.embed_location == "inside"
        before = media[i].start if behind else sum(group.num_pages(medium.num_embeds) for medium in media[:i]) * size
        at = np.arange(before + first_embed, before + stop_embed)
        return self.store.host_tables[self.embed_group][slot, at // size + behind], at % size

    # Reading

    def overlaps_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Whether some of these rows may have tokens that a picture's rows stand for."""
        media = self.images
        return bool(media) and any(row.slot in media and row.start < media[row.slot][-1].end for row in slices)

    def attends_to_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Whether a token of these rows sees a picture by layers of their own."""
        return False

    def cross_attention_context(self, flat_inputs: FlatInputs, backend: Any) -> Any:
        """What the tokens of a step see by such layers; None if they see nothing. See quire.worker.cross_attention."""
        return None

    def embedding_merger(self, flat_inputs: FlatInputs) -> Callable[[Tensor], Tensor] | None:
        """What puts rows in the places of embeddings of a step's tokens; None if there are none to put."""
        spans = list(self._spans(flat_inputs)) if self.embed_location else []
        if not spans:
            return None
        at = np.concatenate(
            [np.arange(span.first_token, span.first_token + span.stop_embed - span.first_embed) for span in spans]
        )
        if self.embed_location == "off":
            (to,) = self.store.staging.upload_all([at])
            rows = torch.cat([self.step_embeds[span.image][span.first_embed : span.stop_embed] for span in spans])
            return lambda x: x.index_copy_(0, to, rows)
        cells = [self._embed_positions(span.image, span.first_embed, span.stop_embed) for span in spans]
        to, pages, offsets = self.store.staging.upload_all([at, *map(np.concatenate, zip(*cells))])
        return lambda x: x.index_copy_(0, to, self.embed_pages[pages, offsets])

    def _spans(self, flat_inputs: FlatInputs) -> Iterator[EmbedSpan]:
        rows = zip(
            flat_inputs.slots.tolist(),
            flat_inputs.starts.tolist(),
            flat_inputs.lengths.tolist(),
            flat_inputs.offsets.tolist(),
        )
        for slot, start, length, offset in rows:
            for i, medium in enumerate(self.images.get(slot, ())):
                first, stop = max(start, medium.start), min(start + length, medium.end)
                if first < stop:
                    yield EmbedSpan((slot, i), first - medium.start, stop - medium.start, offset + first - start)

    def end_step(self) -> None:
        """The step's rows are enqueued."""
        self.step_embeds.clear()

    def warmup(self) -> None:
        """Encode a few parts of nothing, so that kernels are compiled and loaded, and the memory is claimed."""
        tiling = self.vision_encoder.tiling
        side = tiling.tile_size * MAX_IMAGE_PARTS
        for height, width in ((tiling.tile_size, tiling.tile_size), (side, side)):
            grid = tiling.choose_grid(height, width)
            shape = tiling.num_tiles(grid), tiling.tile_size, tiling.tile_size, 3
            pixels = torch.zeros(shape, dtype=torch.uint8, device=self.store.device)
            opened = self.vision_encoder.preprocess(pixels, grid)[: tiling.num_parts(grid)]
            found = [self.vision_encoder.encode(some, grid) for some in opened.split(MAX_IMAGE_PARTS)]
            self.vision_encoder.assemble(torch.cat(found), grid)
