"""The costs of images in a step: vision encoders and cross-attention layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import ImageEncoding, StepPlan


class VisionShape(NamedTuple):
    """The shape of a vision model apart from its text model."""

    weights: int  # of the encoder; a step that encodes any image reads them
    part_operations: float  # of the encoder, for a part of an image
    itemsize: int  # bytes of an encoder weight
    text_itemsize: float  # bytes of a weight of cross-attention layers (fewer with FP8)
    cross_attention_weights: int = 0  # read and applied to a step's tokens if any of them attends to an image
    projection_weights: int = 0  # of cross-attention layers, applied to image embeddings
    row_bytes: int = 0  # keys and values of an embedding
    pair_operations: int = 0  # for a token to attend to an embedding

    @classmethod
    def from_spec(cls, spec: ModelSpec, itemsize: int, saved: float = 0.0) -> VisionShape | None:
        """Return the shape of a vision model, else None. FP8 saves `saved` bytes of each weight of the text model.
        Cross-attention layers have a gated MLP, as in Llama."""
        if spec.vision is None:
            return None
        layers = [layer for layer in spec.layers if layer.is_cross_attention]
        widths = [(layer.heads or spec.heads) * layer.head_dim for layer in layers]
        return cls(
            spec.vision.parameters, float(spec.vision.part_operations), itemsize, itemsize - saved,
            sum(spec.hidden * (2 * width + 3 * spec.intermediate) for width in widths),
            sum(2 * spec.hidden * layer.kv_heads * layer.head_dim for layer in layers),
            sum(layer.token_bytes(itemsize) for layer in layers), 4 * sum(widths),
        )  # fmt: skip


class VisionWork(NamedTuple):
    """The work of images in a step: `weight_bytes` are read only for images, `encoded_parts` are parts of images; see
    quire.sim.cost_model.StepWork for the others."""

    operations: float
    kv_bytes: float
    attention: float
    weight_bytes: float
    encoded_parts: int


def attended_images(media: tuple[ImageItem, ...], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens among start .. end - 1 that attend to an image, and its embeddings. Each token attends
    to the latest image that begins at or before it."""
    for i, image in enumerate(media):
        stop = media[i + 1].start if i + 1 < len(media) else end
        count = min(end, stop) - max(start, image.start)
        if count > 0:
            yield count, image.num_embeds


def vision_work(plan: StepPlan, sight: VisionShape, media: Mapping[int, tuple[ImageItem, ...]]) -> VisionWork:
    """Count the work of a plan. `media` are the images of each slot."""
    encoded = projected = tokens = 0
    read = attention = 0.0
    for entry in plan.page_ops:
        if isinstance(entry, ImageEncoding):
            image = media[entry.slot][entry.image_index]
            encoded += entry.num_parts
            projected += image.num_embeds if entry.first_part + entry.num_parts == image.num_parts else 0
    for row in plan.slices if sight.cross_attention_weights else ():
        for count, rows in attended_images(media.get(row.slot, ()), row.start, row.start + len(row.tokens)):
            tokens += count
            if len(row.tokens) == 1:
                read += sight.row_bytes * rows
            else:
                attention += float(sight.pair_operations) * count * rows
    crossed = sum(len(row.tokens) for row in plan.slices) if tokens else 0  # all, if any attends
    weights = sight.weights * sight.itemsize + sight.projection_weights * sight.text_itemsize if encoded else 0.0
    weights += sight.cross_attention_weights * sight.text_itemsize if crossed else 0.0
    operations = sight.part_operations * encoded + 2.0 * (
        sight.projection_weights * projected + sight.cross_attention_weights * crossed
    )
    return VisionWork(operations, read, attention, weights, encoded)
