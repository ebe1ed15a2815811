"""The cost of a step: its work, counted from the plan, times a device's coefficients, read from a calibration.

    matrices  = weights read once + operations of every token      PagedAttention §2.3: a batch shares the weights
                + those of an encoder and operations of every part of an image that it encodes
    attention = keys and values read by decoding rows + operations of prompts + states read and written by all rows
    copies    = pages copied (copy on write) + pages swapped
    drafts    = a pass of the draft model over known tokens, and one for each later token that it proposes;
                of a speculation head over all tokens of the slices, and one for each but the first that it proposes
    host      = planning: a step and a row; it overlaps the device's work if steps overlap

Reading and computing overlap in part, by a calibration's `overlap`. A step with a prompt is launched kernel by kernel,
which takes the host at least `launch`. A sequence whose draft tokens are verified has a row for each of its positions,
which share one read of its keys and values, as in the Triton kernels. Coefficients belong to a device and its kernels,
not to a model: for a model of another shape, a draft model too, they are an extrapolation. Of ranks (`Division`) each
has a device; matrices, attention and copies are divided among those of a stage, which add up their results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.preemption_costs import PreemptionCosts, SpeculationCosts
from quire.errors import StartupError
from quire.models.head_config import HeadConfig
from quire.protocol.images import ImageItem
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import ParallelLayout
from quire.protocol.step_plan import LAST_SAMPLED, ImageEncoding, PageCopy, SeqSlice, StepPlan, SwapIn, SwapOut

FOLDER = Path(__file__).parent / "calibrations"
MAX_FILE_BYTES = 2**24  # of a calibration file
MAX_COEFFICIENT = 1e6
MAX_MEMORY_BYTES = 2**50
MAX_DEPTH = 8


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
    """The work of images in a step: `weight_bytes` are read only for images, `encoded_parts` are parts of images. See
    StepWork for the others."""

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


class AttentionShape(NamedTuple):
    """Layers that attend to the same tokens. `window`, `chunk` and `budget` are as in LayerSpec."""

    window: int | None
    token_bytes: int  # read of a token, including layers that share another's keys and values
    pair_operations: int  # for one token to attend to another: products with its key and value for every query head
    chunk: int | None = None
    budget: int | None = None

    def visible_tokens(self, length: int) -> int:
        """Return the number of tokens that the last of `length` attends to when it decodes, itself included. Generated
        tokens beyond a budget are not counted."""
        if self.chunk is not None:
            return (length - 1) % self.chunk + 1
        return min(length, self.window or length, self.budget or length)

    def attended_pairs(self, length: int) -> int:
        """Return the number of pairs of a token and one that it attends to, among the first `length` of a prompt.
        Layers with a budget attend to the whole prompt."""
        if self.chunk is not None:
            chunks, rest = divmod(length, self.chunk)
            return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        short = length if self.window is None else min(length, self.window)
        return short * (short + 1) // 2 + (length - short) * short


class ModelShape(NamedTuple):
    """The numbers of a model that define the costs of its steps. The embedding table is not counted: only single rows
    of it are read."""

    body_weights: int  # applied to each token; read once a step
    head_weights: int  # applied to tokens whose logits are computed; read once a step
    itemsize: int
    attention: tuple[AttentionShape, ...]
    expert_weights: int = 0  # of mixture-of-experts layers
    active_expert_share: float = 0.0  # of them that is applied to a token
    state_bytes: int = 0  # running states of a sequence
    fp8_saved_bytes: int = 0  # of all weights
    vision: VisionShape | None = None  # its weights are not among the others
    reads_hidden_states: bool = False  # of a speculation head

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights without the embedding table and `vision`."""
        return (self.body_weights + self.head_weights + self.expert_weights) * self.itemsize - self.fp8_saved_bytes

    @property
    def weights_per_token(self) -> float:
        """The number of weights applied to each token."""
        return self.body_weights + self.expert_weights * self.active_expert_share

    def bytes_read(self, tokens: int) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads. An expert is read if any token uses it;
        tokens choose experts at random."""
        read_share = 1 - (1 - self.active_expert_share) ** tokens if self.expert_weights else 0.0
        body = self.body_weights + self.expert_weights * read_share
        return (body + self.head_weights) * self.itemsize - self.fp8_saved_bytes * body / (
            self.body_weights + self.expert_weights
        )

    @classmethod
    def from_spec(cls, spec: ModelSpec, itemsize: int, tied: bool, saved: int = 0) -> ModelShape:
        """Return the shape of a model whose weights and KV have `itemsize` bytes. With `tied`, the head is the
        embedding table. FP8 weights save `saved` bytes."""
        head = spec.vocab_size * spec.hidden
        parts = []
        attending = [layer for layer in spec.layers if not layer.state_tensors and not layer.is_cross_attention]
        for kind in dict.fromkeys((layer.window, layer.chunk, layer.budget) for layer in attending):
            layers = [layer for layer in attending if (layer.window, layer.chunk, layer.budget) == kind]
            pair = sum(4 * (layer.heads or spec.heads) * layer.head_dim for layer in layers)
            read = sum(replace(layer, kv_source_layer=None).token_bytes(itemsize) for layer in layers)
            window, chunk, budget = kind
            parts.append(AttentionShape(window, read, pair, chunk, budget))
        mixed, active = spec.expert_parameters, spec.active_experts / spec.experts if spec.experts else 0.0
        body = spec.parameters - (head if tied else 2 * head) - mixed
        vision = VisionShape.from_spec(spec, itemsize, saved / (body + mixed))
        if vision is not None:  # cross-attention layers have their share of the bytes that FP8 saves
            others = vision.cross_attention_weights + vision.projection_weights
            saved, body = round(saved * (1 - others / (body + mixed))), body - others
        return cls(body, head, itemsize, tuple(parts), mixed, active, spec.state_bytes, saved, vision)

    @classmethod
    def from_head(cls, head: HeadConfig, itemsize: int) -> ModelShape:
        """Return the shape of a speculation head, whose LM head may be the target's."""
        body = head.parameters - head.hidden * (
            head.has_embedding * head.vocab_size + head.has_lm_head * head.draft_vocab
        )
        shape = cls.from_spec(head.spec(), itemsize, tied=True)
        return shape._replace(body_weights=body, head_weights=head.hidden * head.draft_vocab, reads_hidden_states=True)


class StepWork(NamedTuple):
    """The work of one step. `drafts` of the `rows` verify a draft token: the host plans them with their sequence."""

    rows: int
    tokens: int
    operations: float  # of matrix products
    kv_bytes: float  # keys and values read by rows of one token, and states read and written by all rows
    attention: float  # operations of rows of several tokens
    copied: int  # bytes of pages
    swapped: int  # bytes of pages
    pictures: float = 0.0  # bytes of weights that are read only for images
    encoded: int = 0  # parts of images
    drafts: int = 0


def step_work(
    plan: StepPlan,
    shape: ModelShape,
    page_bytes: tuple[int, ...],
    media: Mapping[int, tuple[ImageItem, ...]] | None = None,
) -> StepWork:
    """Count a plan's work, without its draft slices. `page_bytes` are the bytes of a page by group, `media` the images
    of each slot."""
    tokens = num_sampled = drafts = 0
    contexts: list[int] = []
    chunks: list[tuple[int, int]] = []
    for _, computed, start, sample, _, draft_tokens in plan.slices:
        count = len(computed)
        tokens += count
        num_sampled += sample > 0
        if draft_tokens:
            drafts += len(draft_tokens)
            contexts.append(start + count + len(draft_tokens))
        elif count == 1:
            contexts.append(start + 1)
        else:
            chunks.append((start, start + count))
    read = attention = 0.0
    for part in shape.attention:
        full = part.window is None and part.chunk is None and part.budget is None
        read += part.token_bytes * (sum(contexts) if full else sum(map(part.visible_tokens, contexts)))
        attention += part.pair_operations * sum(
            part.attended_pairs(end) - part.attended_pairs(start) for start, end in chunks
        )
    copied = swapped = 0
    for entry in (*plan.page_ops, *plan.overlapped_page_ops):
        if isinstance(entry, PageCopy):
            copied += page_bytes[entry.group]
        elif isinstance(entry, SwapIn | SwapOut):
            swapped += page_bytes[entry.group]
    rows, tokens, num_sampled = len(plan.slices) + drafts, tokens + drafts, num_sampled + drafts
    read += 2 * shape.state_bytes * rows
    operations = 2.0 * (shape.weights_per_token * tokens + shape.head_weights * num_sampled)
    work = StepWork(rows, tokens, operations, read, attention, copied, swapped, drafts=drafts)
    if shape.vision is None or not media:
        return work
    images = vision_work(plan, shape.vision, media)
    return work._replace(
        operations=operations + images.operations, kv_bytes=read + images.kv_bytes,
        attention=attention + images.attention, pictures=images.weight_bytes, encoded=images.encoded_parts,
    )  # fmt: skip


def draft_passes(plan: StepPlan, shape: ModelShape) -> list[StepWork]:
    """Count the work of each pass of a draft model of `shape`: over the known tokens of the draft slices; over the
    tokens that the step may have appended, those of rejected draft tokens too, as a GPU does; then over the last
    proposal of each slot that another one follows. The first pass of a speculation head is over the slices."""
    proposing = [row for row in plan.draft_slices if row.num_samples]
    counts = {row.slot: len(row.draft_tokens) for row in plan.slices}
    if shape.reads_hidden_states:
        slots = {row.slot for row in plan.draft_slices}
        first = [row if proposing else row._replace(num_samples=0) for row in plan.slices if row.slot in slots]
        later = [
            [SeqSlice(row.slot, (LAST_SAMPLED,), row.start + counts[row.slot] + i, 1)
             for row in proposing if row.num_samples > i + 1]
            for i in range(max((row.num_samples for row in proposing), default=1) - 1)
        ]  # fmt: skip
        return [step_work(StepPlan((), (), rows), shape, ()) for rows in (first, *later) if rows]
    passes = [[row._replace(num_samples=0) for row in plan.draft_slices if row.tokens]]
    passes.append([
        SeqSlice(row.slot, (LAST_SAMPLED,), row.start + len(row.tokens) + i, 1)
        for row in proposing for i in range(1 + counts[row.slot])
    ])  # fmt: skip
    for i in range(1, max((row.num_samples for row in proposing), default=0)):
        passes.append([
            SeqSlice(row.slot, (LAST_SAMPLED,), row.start + len(row.tokens) + counts[row.slot] + i, 1)
            for row in proposing if row.num_samples > i
        ])  # fmt: skip
    return [step_work(StepPlan((), (), rows), shape, ()) for rows in passes if rows]


def add_padding(work: StepWork, shape: ModelShape, prompt: int, rows: int) -> StepWork:
    """Add the padding of a static batch: `prompt` tokens that pad prompts, and `rows` of finished sequences, which read
    as much as the average of the others. The attention of padding tokens is not counted."""
    kv_bytes_per_row = work.kv_bytes / work.rows if work.rows else 0.0
    return work._replace(
        rows=work.rows + rows,
        tokens=work.tokens + prompt + rows,
        operations=work.operations + 2.0 * (shape.weights_per_token * (prompt + rows) + shape.head_weights * rows),
        kv_bytes=work.kv_bytes + rows * kv_bytes_per_row,
    )


class Coefficients(NamedTuple):
    """Seconds for one of each; none is negative. `step` and `row` are the times that no other coefficient explains.

    Matrices take (reading^overlap + computing^overlap)^(1/overlap): their sum if `overlap` is 1, nearly the maximum if
    it is large. `launch` is the least time of a step with a row of several tokens. An operation of a vision encoder
    takes `encoder` times as long as another.
    """

    weight_byte: float
    operation: float
    kv_byte: float
    attention: float
    copied_byte: float
    swapped_byte: float
    step: float
    row: float
    host_step: float
    host_row: float
    overlap: float = 1.0
    launch: float = 0.0
    encoder: float = 1.0


class Links(NamedTuple):
    """Times that a division among ranks adds, measured on two H200s with NVLink.

    A sum over the ranks of a stage, beyond the norm that is fused with it, takes one shot (each rank reads all others)
    or two (each rank sums a part); of the longest sums a share is hidden beside matrix products
    (h200x2_exchange.json). `layer` is the part of a layer's time that ranks don't divide, `stage` what a step takes
    longer in each stage than without stages (fitted to h200x2_8b.json and h200x2_pp2_8b.json). `stage_byte` is of a
    copy to the next stage."""

    one_shot: float = 2.8e-6  # seconds of a sum
    one_shot_byte: float = 3.2e-12  # seconds of a byte of another rank
    two_shots: float = 6.1e-6
    two_shots_byte: float = 3.4e-12
    hidden_from: int = 16 << 20  # bytes
    hidden_share: float = 0.6
    layer: float = 3.1e-5
    stage: float = 4e-4
    stage_byte: float = 1 / 386e9

    def sum_seconds(self, ranks: int, nbytes: int) -> float:
        """Return the seconds of a sum over `ranks` ranks of `nbytes` each."""
        if ranks == 1:
            return 0.0
        seconds = min(
            self.one_shot + self.one_shot_byte * nbytes * (ranks - 1),
            self.two_shots + self.two_shots_byte * nbytes * 2 * (ranks - 1) / ranks,
        )
        return seconds * (1 - self.hidden_share) if nbytes > self.hidden_from else seconds


class Division(NamedTuple):
    """A model of that many layers divided among ranks, each with a device. Each layer has two sums, and the embedding
    one, of tokens' rows of `row_bytes`; a stage sends two tensors of such rows to the next one."""

    layout: ParallelLayout
    layers: int
    row_bytes: int
    links: Links = Links()

    def extra_seconds(self, tokens: int) -> float:
        """Return what a step of that many tokens takes more in all stages than its divided work."""
        tp, pp, links = self.layout.tp, self.layout.pp, self.links
        sums = (2 * self.layers + 1) * links.sum_seconds(tp, tokens * self.row_bytes)
        return sums + self.layers * links.layer * (1 - 1 / tp) + (pp * links.stage if pp > 1 else 0.0)

    def transfer_seconds(self, tokens: int) -> float:
        """Return the seconds that a step of that many tokens takes from a stage to the next one."""
        return 2 * tokens * self.row_bytes * self.links.stage_byte


class CostModel(NamedTuple):
    """The costs of a model's shape on a device, or on one for each rank of a `division`."""

    shape: ModelShape
    coefficients: Coefficients
    draft: ModelShape | None = None  # of the draft model
    division: Division | None = None

    def device_seconds(self, work: StepWork) -> float:
        """Return the seconds that the device takes for a step, with a division all stages together."""
        c, tp = self.coefficients, 1 if self.division is None else self.division.layout.tp
        copies = (work.copied * c.copied_byte + work.swapped * c.swapped_byte) / tp
        if not work.tokens and not work.encoded:
            return copies
        weights = work.pictures + (self.shape.bytes_read(work.tokens) if work.tokens else 0.0)
        operations = work.operations
        if work.encoded and self.shape.vision is not None:
            operations += (c.encoder - 1) * self.shape.vision.part_operations * work.encoded
        reading, computing = weights * c.weight_byte, operations * c.operation
        matrices = reading + computing
        if c.overlap != 1:
            longer = max(reading, computing) or 1.0  # powers of ratios don't overflow
            shares = (reading / longer) ** c.overlap + (computing / longer) ** c.overlap
            matrices = longer * shares ** (1 / c.overlap)
        attention = work.kv_bytes * c.kv_byte + work.attention * c.attention
        seconds = (matrices + attention) / tp + c.step + work.rows * c.row
        if self.division is not None:
            seconds += self.division.extra_seconds(work.tokens)
        is_prompt = work.attention or work.encoded or work.tokens > work.rows
        return copies + (max(seconds, c.launch) if is_prompt else seconds)

    def draft_seconds(self, plan: StepPlan) -> float:
        """Return the seconds that the draft model takes after a step's own work."""
        if self.draft is None:
            return 0.0
        alone = CostModel(self.draft, self.coefficients, division=self.division)
        return sum(map(alone.device_seconds, draft_passes(plan, self.draft)))

    def host_seconds(self, work: StepWork) -> float:
        """Return the seconds that the host takes to plan a step."""
        return self.coefficients.host_step + (work.rows - work.drafts) * self.coefficients.host_row

    def speculation_costs(self) -> SpeculationCosts:
        """Return the costs by which the scheduler chooses draft tokens, of steps that decode."""
        c = self.coefficients
        model, draft = (
            PreemptionCosts(
                0.0, 0.0,
                compute_fixed=shape.bytes_read(1) * c.weight_byte + c.step,
                compute_token=2 * (shape.weights_per_token + shape.head_weights) * c.operation + c.row,
                compute_pair=sum(part.token_bytes for part in shape.attention) * c.kv_byte,
            )
            for shape in (self.shape, self.draft or self.shape)
        )  # fmt: skip
        return SpeculationCosts(model, draft, c.host_step, c.host_row)

    def preemption_costs(self) -> PreemptionCosts:
        """Return the costs that the preemption policy `auto` needs."""
        c, shapes = self.coefficients, [self.shape, *([self.draft] if self.draft else [])]
        pair = sum(part.pair_operations for shape in shapes for part in shape.attention) * c.attention
        token = 2 * sum(shape.weights_per_token for shape in shapes) * c.operation
        return PreemptionCosts(0.0, 2 * c.swapped_byte, 0.0, token, pair)


class Calibration(NamedTuple):
    """A device's coefficients and their source."""

    name: str
    device: str
    kind: str  # "cuda" or "cpu"
    model: str
    dtype: str
    depth: int  # steps in flight
    memory_bytes: int  # of the device
    kv_bytes: int | None  # available for KV with `model`, if known
    coefficients: Coefficients
    error: dict[str, Any] | None  # on steps that were not fitted; None if no steps were measured
    source: str
    encoders: Mapping[str, float] = {}  # `encoder` of vision models by name, from `quire bench sights --against`

    def coefficients_for(self, model: str) -> Coefficients:
        """Return the coefficients for a model of that name."""
        return self.coefficients._replace(encoder=self.encoders.get(model, self.coefficients.encoder))


def calibration_names() -> list[str]:
    """Return the names of the calibrations that come with quire."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_calibration(name: str) -> Calibration:
    """Load the calibration of that name or file. Raise StartupError if it cannot be used."""
    known = calibration_names()
    path = FOLDER / f"{name}.json" if name in known else Path(name)
    remedy = f"Known: {', '.join(known)}; or a file that `quire bench calibrate --out FILE` wrote"
    if name not in known and not path.is_file():
        raise StartupError(f"there is no calibration {name[:80]!r}", remedy)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
        return parse_calibration(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"the calibration {name[:200]} can't be used: {error}", remedy) from error


def parse_calibration(name: str, content: object) -> Calibration:
    """Parse a calibration from its JSON object. Raise ValueError with the cause if it is invalid."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    numbers = content.get("coefficients")
    if not isinstance(numbers, dict) or set(numbers) | set(Coefficients._field_defaults) != set(Coefficients._fields):
        raise ValueError(f'"coefficients" must have exactly {", ".join(Coefficients._fields)}')
    for key, value in numbers.items():
        if not _is_valid_number(value):
            raise ValueError(
                f"the coefficient {key} is {str(value)[:40]}, and must be from 0 to {MAX_COEFFICIENT:,.0f}"
            )
    device, kind = _field(content, "device", str), _field(content, "kind", str)
    if kind not in ("cpu", "cuda"):
        raise ValueError(f'"kind" is {kind[:40]!r}, and must be "cpu" or "cuda"')
    depth, memory = _field(content, "depth", int), _field(content, "memory_bytes", int)
    kv = None if content.get("kv_bytes") is None else _field(content, "kv_bytes", int)
    for key, size, most in (("depth", depth, MAX_DEPTH), ("memory_bytes", memory, MAX_MEMORY_BYTES),
                            ("kv_bytes", 1 if kv is None else kv, MAX_MEMORY_BYTES)):  # fmt: skip
        if not 1 <= size <= most:
            raise ValueError(f'"{key}" is {str(size)[:40]}, and must be from 1 to {most:,}')
    if not 1 <= numbers.get("overlap", 1) <= 16:
        raise ValueError(f"the coefficient overlap is {numbers['overlap']}, and must be between 1 and 16")
    if not any(numbers[key] for key in numbers if not key.startswith(("copied", "swapped", "overlap", "encoder"))):
        raise ValueError("every step would take no time")
    return Calibration(
        name, device, kind, _field(content, "model", str), _field(content, "dtype", str), depth, memory, kv,
        Coefficients(**{key: float(value) for key, value in numbers.items()}), _error(content),
        _field(content, "source", str), _encoders(content),
    )  # fmt: skip


def _encoders(content: dict[str, Any]) -> dict[str, float]:
    """Return the encoder coefficients of vision models, if the file has any."""
    encoders = _field(content, "encoders", dict) if "encoders" in content else {}
    for model, times in encoders.items():
        if not _is_valid_number(times):
            raise ValueError(f"the encoder of {model[:40]!r} takes {str(times)[:40]} times as long")
    return {model: float(times) for model, times in encoders.items()}


def _error(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the errors, which documents show."""
    if content.get("error") is None:
        return None
    error: dict[str, Any] = _field(content, "error", dict)
    if "median" in error and not _is_valid_number(error["median"]):
        median = str(error["median"])[:40]
        raise ValueError(f'"error" has the median {median!r}, and it must be a number from 0 to {MAX_COEFFICIENT:,.0f}')
    try:
        json.dumps(error, allow_nan=False)
    except ValueError as cause:
        raise ValueError(f'"error" has a number that is not finite: {cause}') from cause
    return error


def _is_valid_number(value: object) -> bool:
    """Return True if a value is a number from 0 to MAX_COEFFICIENT. Integers may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COEFFICIENT


def _field(content: dict[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if type(value) is not kind:
        raise ValueError(f'"{key}" must be of the type {kind.__name__}, and is {str(value)[:40]!r}')
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f'"{key}" is {ascii(value)[:80]}, and must be Unicode text: half a character is in it')
    return value
