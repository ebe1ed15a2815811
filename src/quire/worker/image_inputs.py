"""A runner's images: pixels by key, the images of the sequences in its slots, features of partially encoded images, and
embeddings, which are written to the pages of an ImageEncoding and read for the tokens that stand for them.

The plan decides what is encoded, in which step, and to which pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import to_device
from quire.kernels.limits import MAX_IMAGE_PARTS
from quire.models.vision.encoder import VisionEncoder
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.step_plan import ImageEncoding, SeqSlice, SlotInit
from quire.worker.cache_views import image_embed_pages
from quire.worker.inputs import FlatInputs
from quire.worker.store import Store

ImageRef = tuple[int, int]
"""A slot, and the index of an image of its sequence."""


class PartialImage(NamedTuple):
    """A partially encoded image: all of it `preprocessed`, and the `features` of the first parts."""

    grid: TileGrid
    preprocessed: Tensor
    features: list[Tensor]


class EmbedSpan(NamedTuple):
    """Embeddings first_embed .. stop_embed - 1 of an image, in the step's tokens from `first_token` on."""

    image: ImageRef
    first_embed: int
    stop_embed: int
    first_token: int


class EmbeddingMerger(NamedTuple):
    """A function that writes image embeddings into a step's token embeddings x [T, embed_dim], and returns x. `tokens`
    [N], on the device, are the indices of the tokens that are replaced; `read` returns their embeddings [N,
    embed_dim]."""

    tokens: Tensor
    read: Callable[[], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return x.index_copy_(0, self.tokens, self.read())


class ImageInputs:
    """Images, encoded by `vision_encoder`, and their embeddings in the pages of `store`. Pixels are not copied; they
    are uploaded when their first part is encoded."""

    def __init__(self, vision_encoder: VisionEncoder, store: Store, embed_dim: int) -> None:
        self.vision_encoder, self.store = vision_encoder, store
        kv_config = store.kv_config
        self.embed_location, self.embed_group = kv_config.sight, -1
        if self.embed_location == "inside":
            self.embed_group = kv_config.image_embed_group
        elif self.embed_location == "pages":
            self.embed_group = [group.kind for group in kv_config.groups].index("vision")
        if self.embed_group >= 0:
            self.embed_pages = image_embed_pages(store.buffer, kv_config.groups[self.embed_group], embed_dim)
        self.pixels_by_key: dict[bytes, ImagePixels] = {}
        self.images: dict[int, tuple[ImageItem, ...]] = {}  # by slot
        self.partial_images: dict[ImageRef, PartialImage] = {}
        self.step_embeds: dict[ImageRef, Tensor] = {}  # of this step only

    def add_image(self, pixels: ImagePixels) -> None:
        """Add an image that plans submitted from now on may encode."""
        self.pixels_by_key[pixels.key] = pixels

    def remove_image(self, key: bytes) -> None:
        """Remove an image that no later plan encodes, and its partial encodings."""
        self.pixels_by_key.pop(key, None)
        for slot, i in [ref for ref in self.partial_images if self.images[ref[0]][ref[1]].key == key]:
            del self.partial_images[slot, i]

    def init_slots(self, new_slots: Sequence[SlotInit]) -> None:
        """Assign slots to new sequences and remove the images of their previous ones."""
        for init in new_slots:
            if self.images.pop(init.slot, None) is not None:
                self.partial_images = {
                    ref: partial for ref, partial in self.partial_images.items() if ref[0] != init.slot
                }
            if init.images:
                self.images[init.slot] = init.images

    # Encoding

    def encode(self, encodings: Sequence[ImageEncoding]) -> None:
        """Enqueue these encodings. The parts of all of them are encoded together, up to MAX_IMAGE_PARTS at once, unless
        the encoder takes whole images."""
        if not encodings:
            return
        if any(op.first_part == 0 and op.num_parts < self._image_of(op).num_parts for op in encodings):
            # Only one image is partial between steps: others were abandoned, for example by a preemption.
            continued = {(op.slot, op.image_index) for op in encodings}
            self.partial_images = {ref: partial for ref, partial in self.partial_images.items() if ref in continued}
        jobs = [(op, self._start_image(op)) for op in encodings]
        inputs = [image.preprocessed[op.first_part : op.first_part + op.num_parts] for op, image in jobs]
        if self.vision_encoder.encodes_whole_image:
            outputs = [self.vision_encoder.encode(parts, image.grid) for parts, (_, image) in zip(inputs, jobs)]
        else:
            all_parts = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
            encoded = torch.cat([self.vision_encoder.encode(parts) for parts in all_parts.split(MAX_IMAGE_PARTS)])
            outputs = list(encoded.split([len(parts) for parts in inputs]))
        for (op, image), features in zip(jobs, outputs):
            num_encoded = sum(map(len, image.features))
            assert num_encoded == op.first_part, f"part {op.first_part} of an image isn't its next one"
            image.features.append(features)
            if op.first_part + op.num_parts == self._image_of(op).num_parts:
                self.partial_images.pop((op.slot, op.image_index), None)
                self._write_embeds(op, self.vision_encoder.assemble(torch.cat(image.features), image.grid))

    def _image_of(self, encoding: ImageEncoding) -> ImageItem:
        return self.images[encoding.slot][encoding.image_index]

    def _start_image(self, encoding: ImageEncoding) -> PartialImage:
        """Return the image of an encoding; preprocess it before its first part."""
        ref = encoding.slot, encoding.image_index
        if encoding.first_part == 0:
            pixels = self.pixels_by_key[self._image_of(encoding).key]
            grid = TileGrid(*pixels.grid)
            array = np.frombuffer(pixels.data, dtype=np.uint8).reshape(pixels.shape)
            preprocessed = self.vision_encoder.preprocess(to_device(array.copy(), self.store.device), grid)
            self.partial_images[ref] = PartialImage(grid, preprocessed, [])
        return self.partial_images[ref]

    def _write_embeds(self, encoding: ImageEncoding, embeds: Tensor) -> None:
        """Write the embeddings of an image to their pages."""
        image = self._image_of(encoding)
        assert len(embeds) == image.num_embeds, (
            f"an encoder returned {len(embeds)} embeddings of an image that has {image.num_embeds}"
        )
        if encoding.group < 0:
            self.step_embeds[encoding.slot, encoding.image_index] = embeds
            return
        kind = self.store.kv_config.groups[encoding.group].kind
        assert kind != "cross", "cross-attention groups belong to CrossAttentionImages"
        pages, offsets = self._embed_positions(
            (encoding.slot, encoding.image_index), encoding.skip_embeds, image.num_embeds
        )
        self.embed_pages[*self.store.staging.upload_all([pages, offsets])] = embeds[encoding.skip_embeds :]

    def _embed_positions(self, image: ImageRef, first_embed: int, stop_embed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages of embeddings first_embed .. stop_embed - 1 of an image, and the offsets in them."""
        (slot, i), group = image, self.store.kv_config.groups[self.embed_group]
        images, size, is_inside = self.images[slot], group.run_tokens, self.embed_location == "inside"
        before = images[i].start if is_inside else sum(group.num_pages(x.num_embeds) for x in images[:i]) * size
        at = np.arange(before + first_embed, before + stop_embed)
        return self.store.host_tables[self.embed_group][slot, at // size + is_inside], at % size

    # Reading

    def overlaps_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Return True if some of these slices may have tokens that stand for an image."""
        images = self.images
        return bool(images) and any(row.slot in images and row.start < images[row.slot][-1].end for row in slices)

    def attends_to_images(self, slices: Sequence[SeqSlice]) -> bool:
        """Return True if a token of these slices attends to an image by cross-attention layers: here False."""
        return False

    def cross_attention_context(self, flat_inputs: FlatInputs, backend: Any) -> Any:
        """Return a step's cross-attention, None if no token attends to an image. See quire.worker.cross_attention."""
        return None

    def embedding_merger(self, flat_inputs: FlatInputs) -> EmbeddingMerger | None:
        """Return the function that writes image embeddings over those of a step's tokens, or None if there are none."""
        spans = list(self._spans(flat_inputs)) if self.embed_location else []
        if not spans:
            return None
        tokens = np.concatenate(
            [np.arange(span.first_token, span.first_token + span.stop_embed - span.first_embed) for span in spans]
        )
        if self.embed_location == "off":
            (index,) = self.store.staging.upload_all([tokens])
            embeds = torch.cat([self.step_embeds[span.image][span.first_embed : span.stop_embed] for span in spans])
            return EmbeddingMerger(index, lambda: embeds)
        positions = [self._embed_positions(span.image, span.first_embed, span.stop_embed) for span in spans]
        index, pages, offsets = self.store.staging.upload_all([tokens, *map(np.concatenate, zip(*positions))])
        return EmbeddingMerger(index, lambda: self.embed_pages[pages, offsets])

    def _spans(self, flat_inputs: FlatInputs) -> Iterator[EmbedSpan]:
        for slot, start, length, offset in flat_inputs.rows():
            for i, image in enumerate(self.images.get(slot, ())):
                first, stop = max(start, image.start), min(start + length, image.end)
                if first < stop:
                    yield EmbedSpan((slot, i), first - image.start, stop - image.start, offset + first - start)

    def end_step(self) -> None:
        """Drop the embeddings of a step whose slices are enqueued."""
        self.step_embeds.clear()

    def warmup(self) -> None:
        """Encode a small and a large black image, so that kernels are compiled and loaded and memory is allocated."""
        tiling = self.vision_encoder.tiling
        side = tiling.tile_size * MAX_IMAGE_PARTS
        for height, width in ((tiling.tile_size, tiling.tile_size), (side, side)):
            grid = tiling.choose_grid(height, width)
            shape = tiling.num_tiles(grid), tiling.tile_size, tiling.tile_size, 3
            pixels = torch.zeros(shape, dtype=torch.uint8, device=self.store.device)
            preprocessed = self.vision_encoder.preprocess(pixels, grid)[: tiling.num_parts(grid)]
            features = [self.vision_encoder.encode(parts, grid) for parts in preprocessed.split(MAX_IMAGE_PARTS)]
            self.vision_encoder.assemble(torch.cat(features), grid)
