"""What pictures cost a step: encoders that run, and layers that attend to what they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import ImageEncoding, StepPlan


class VisionShape(NamedTuple):
    """What a seeing model has beside its text. A step that encodes any picture reads the encoder's `weights`, of
    `itemsize` bytes, and a part takes `part_operations` operations. Layers that attend to pictures have
    `cross_attention_weights` weights, of `text_itemsize` bytes (fewer in FP8), which a step reads and applies to its
    tokens if any of them sees a picture; `projection_weights` ones, applied to the rows that a picture is encoded to;
    `row_bytes` of a row's keys and values; and `pair_operations` operations for a token to attend to a row."""

    weights: int
    part_operations: float
    itemsize: int
    text_itemsize: float
    cross_attention_weights: int = 0
    projection_weights: int = 0
    row_bytes: int = 0
    pair_operations: int = 0

    @classmethod
    def from_spec(cls, spec: ModelSpec, itemsize: int, saved: float = 0.0) -> VisionShape | None:
        """A seeing model's; `saved` bytes of each of the text's weights by FP8. Layers for pictures have a gated MLP,
        as a Llama's."""
        if spec.vision is None:
            return None
        layers = [layer for layer in spec.layers if layer.is_cross_attention]
        wide = [(layer.heads or spec.heads) * layer.head_dim for layer in layers]
        return cls(
            spec.vision.parameters, float(spec.vision.part_operations), itemsize, itemsize - saved,
            sum(spec.hidden * (2 * one + 3 * spec.intermediate) for one in wide),
            sum(2 * spec.hidden * layer.kv_heads * layer.head_dim for layer in layers),
            sum(layer.token_bytes(itemsize) for layer in layers), 4 * sum(wide),
        )  # fmt: skip


class VisionWork(NamedTuple):
    """What pictures add to a step: `weight_bytes` are bytes read for them alone, `encoded_parts` parts of pictures;
    others as of quire.sim.cost_model.Work."""

    operations: float
    kv_bytes: float
    attention: float
    weight_bytes: float
    encoded_parts: int


def attended_images(media: tuple[ImageItem, ...], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Of the tokens start .. end - 1: how many attend to a picture, and to how many rows: each to the latest picture
    that begins before it or with it."""
    for i, medium in enumerate(media):
        stop = media[i + 1].start if i + 1 < len(media) else end
        count = min(end, stop) - max(start, medium.start)
        if count > 0:
            yield count, medium.num_embeds


def vision_work(plan: StepPlan, sight: VisionShape, media: Mapping[int, tuple[ImageItem, ...]]) -> VisionWork:
    """Count it, of a plan for slots with these pictures."""
    encoded = projected = tokens = 0
    read = attention = 0.0
    for entry in plan.page_ops:
        if isinstance(entry, ImageEncoding):
            medium = media[entry.slot][entry.image_index]
            encoded += entry.num_parts
            projected += medium.num_embeds if entry.first_part + entry.num_parts == medium.num_parts else 0
    for row in plan.slices if sight.cross_attention_weights else ():
        for count, rows in attended_images(media.get(row.slot, ()), row.start, row.start + len(row.tokens)):
            tokens += count
            if len(row.tokens) == 1:
                read += sight.row_bytes * rows
            else:
                attention += float(sight.pair_operations) * count * rows
    crossed = sum(len(row.tokens) for row in plan.slices) if tokens else 0  # all of the step's go through them
    weights = sight.weights * sight.itemsize + sight.projection_weights * sight.text_itemsize if encoded else 0.0
    weights += sight.cross_attention_weights * sight.text_itemsize if crossed else 0.0
    operations = sight.part_operations * encoded + 2.0 * (
        sight.projection_weights * projected + sight.cross_attention_weights * crossed
    )
    return VisionWork(operations, read, attention, weights, encoded)
