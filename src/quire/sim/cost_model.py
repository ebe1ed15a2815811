"""What a step costs: its work, counted from the plan, times a device's coefficients, read from a calibration.

    matrices  = weights read once + operations of every token      PagedAttention §2.3: a batch shares the weights
                + those of an encoder and operations of every part of a picture that it encodes
    attention = keys and values read by rows that decode + operations of prompts + states read and written by all rows
    copies    = pages copied (copy on write) + pages moved to or from the host
    host      = planning: a step and a row; it overlaps the device's work where steps overlap

Reading and computing overlap in part: by how much is a calibration's `overlap`. A step with a prompt is launched kernel
by kernel, which takes the host at least `launch`. Coefficients belong to a device and its kernels, not to a model:
another shape's step is an extrapolation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.preemption_costs import PreemptionCosts
from quire.errors import StartupError
from quire.protocol.images import ImageItem
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import PageCopy, StepPlan, SwapIn, SwapOut
from quire.sim.vision_cost import VisionShape, vision_work

FOLDER = Path(__file__).parent / "calibrations"
MAX_FILE_BYTES = 2**24  # of a calibration file
MAX_COEFFICIENT = 1e6  # of a coefficient
MAX_MEMORY_BYTES = 2**50  # bytes
MAX_DEPTH = 8


class AttentionShape(NamedTuple):
    """Layers that see the same of a sequence: bytes that they read of a token (those of layers that share another's
    keys and values among them), and operations for one token to attend to one other (a product with its key and one
    with its value, for every query head). `window`, `chunk` and `budget` as in LayerSpec."""

    window: int | None
    token_bytes: int
    pair_operations: int
    chunk: int | None = None
    budget: int | None = None

    def visible_tokens(self, length: int) -> int:
        """Tokens that the last of `length` ones attends to when it decodes, itself included. What a layer with a budget
        keeps beyond it, of the tokens generated, isn't counted."""
        if self.chunk is not None:
            return (length - 1) % self.chunk + 1
        return min(length, self.window or length, self.budget or length)

    def attended_pairs(self, length: int) -> int:
        """Positions that the first `length` tokens of a prompt attend to, themselves included. Layers with a budget see
        all of a prompt."""
        if self.chunk is not None:
            whole, rest = divmod(length, self.chunk)
            return whole * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        short = length if self.window is None else min(length, self.window)
        return short * (short + 1) // 2 + (length - short) * short


class ModelShape(NamedTuple):
    """A model as its steps' costs see it. `body_weights` weights are applied to each token, `head_weights` ones to
    those that a token is drawn after; both are read once a step. The embedding table is looked up, not read. Of
    `expert_weights` weights, those of experts, a token takes the part `active_expert_share`. `state_bytes` are a
    sequence's running states. `vision` is a seeing model's, whose weights aren't among the others."""

    body_weights: int
    head_weights: int
    itemsize: int
    attention: tuple[AttentionShape, ...]
    expert_weights: int = 0
    active_expert_share: float = 0.0
    state_bytes: int = 0
    fp8_saved_bytes: int = 0  # bytes of the weights, by FP8
    vision: VisionShape | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights but the embedding table's and those for pictures."""
        return (self.body_weights + self.head_weights + self.expert_weights) * self.itemsize - self.fp8_saved_bytes

    @property
    def weights_per_token(self) -> float:
        """Weights that are applied to each token."""
        return self.body_weights + self.expert_weights * self.active_expert_share

    def bytes_read(self, tokens: int) -> float:
        """Bytes of weights read by a step of so many tokens: those of an expert, if any token takes it. Tokens choose
        theirs as if by lot."""
        chosen = 1 - (1 - self.active_expert_share) ** tokens if self.expert_weights else 0.0
        body = self.body_weights + self.expert_weights * chosen
        return (body + self.head_weights) * self.itemsize - self.fp8_saved_bytes * body / (
            self.body_weights + self.expert_weights
        )

    @classmethod
    def from_spec(cls, spec: ModelSpec, itemsize: int, tied: bool, saved: int = 0) -> ModelShape:
        """The shape of a model whose weights and KV have `itemsize` bytes; `tied`: the head is the embedding table;
        `fp8_saved_bytes`: so many bytes less are read, as weights are in FP8."""
        head = spec.vocab_size * spec.hidden
        parts = []
        attending = [layer for layer in spec.layers if not layer.state_tensors and not layer.is_cross_attention]
        for sees in dict.fromkeys((layer.window, layer.chunk, layer.budget) for layer in attending):
            layers = [layer for layer in attending if (layer.window, layer.chunk, layer.budget) == sees]
            pair = sum(4 * (layer.heads or spec.heads) * layer.head_dim for layer in layers)
            read = sum(replace(layer, kv_source_layer=None).token_bytes(itemsize) for layer in layers)
            window, chunk, budget = sees
            parts.append(AttentionShape(window, read, pair, chunk, budget))
        mixed, active = spec.expert_parameters, spec.active_experts / spec.experts if spec.experts else 0.0
        body = spec.parameters - (head if tied else 2 * head) - mixed
        sight = VisionShape.from_spec(spec, itemsize, saved / (body + mixed))
        if sight is not None:  # of what FP8 saves they have their part
            others = sight.cross_attention_weights + sight.projection_weights
            saved, body = round(saved * (1 - others / (body + mixed))), body - others
        return cls(body, head, itemsize, tuple(parts), mixed, active, spec.state_bytes, saved, sight)


class StepWork(NamedTuple):
    """What one step does. `operations` are those of matrix products; `kv_bytes` are read by rows of one token, and
    states read and written by all (what prompts leave at borders isn't counted); `attention` is operations of longer
    rows; `copied` and `swapped` are bytes of pages; `pictures` are bytes of weights that only pictures are read for,
    and `encoded` the parts of them."""

    rows: int
    tokens: int
    operations: float
    kv_bytes: float
    attention: float
    copied: int
    swapped: int
    pictures: float = 0.0
    encoded: int = 0


def step_work(
    plan: StepPlan,
    shape: ModelShape,
    page_bytes: tuple[int, ...],
    media: Mapping[int, tuple[ImageItem, ...]] | None = None,
) -> StepWork:
    """Count a plan's work. `page_bytes` has the size of a page of each group, `media` the pictures of each slot."""
    tokens = drawn = 0
    contexts: list[int] = []
    chunks: list[tuple[int, int]] = []
    for _, computed, start, sample, _, _ in plan.slices:
        count = len(computed)
        tokens += count
        drawn += sample > 0
        if count == 1:
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
    read += 2 * shape.state_bytes * len(plan.slices)
    operations = 2.0 * (shape.weights_per_token * tokens + shape.head_weights * drawn)
    work = StepWork(len(plan.slices), tokens, operations, read, attention, copied, swapped)
    if shape.vision is None or not media:
        return work
    seen = vision_work(plan, shape.vision, media)
    return work._replace(
        operations=operations + seen.operations, kv_bytes=read + seen.kv_bytes, attention=attention + seen.attention,
        pictures=seen.weight_bytes, encoded=seen.encoded_parts,
    )  # fmt: skip


def add_padding(work: StepWork, shape: ModelShape, prompt: int, rows: int) -> StepWork:
    """The same beside `prompt` tokens that pad prompts and `rows` of sequences that have ended, which a static batch
    computes for nothing: these read as much as the others do on average. The padding's attention isn't counted."""
    decoding = work.kv_bytes / work.rows if work.rows else 0.0
    return work._replace(
        rows=work.rows + rows,
        tokens=work.tokens + prompt + rows,
        operations=work.operations + 2.0 * (shape.weights_per_token * (prompt + rows) + shape.head_weights * rows),
        kv_bytes=work.kv_bytes + rows * decoding,
    )


class Coefficients(NamedTuple):
    """Seconds for one of each; none is negative. A `step` and a `row` are what no other coefficient explains.

    Matrices take (reading^overlap + computing^overlap)^(1/overlap): their sum where `overlap` is 1, nearly the longer
    of both where it is large. `launch` is the least time of a step with a row of several tokens. An operation of an
    encoder of pictures takes `encoder` times as long as another.
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


class CostModel(NamedTuple):
    """A model's shape on a device."""

    shape: ModelShape
    coefficients: Coefficients

    def device_seconds(self, work: StepWork) -> float:
        """Seconds that the device takes for a step."""
        c = self.coefficients
        copies = work.copied * c.copied_byte + work.swapped * c.swapped_byte
        if not work.tokens and not work.encoded:
            return copies
        weights = work.pictures + (self.shape.bytes_read(work.tokens) if work.tokens else 0.0)
        operations = work.operations
        if work.encoded and self.shape.vision is not None:
            operations += (c.encoder - 1) * self.shape.vision.part_operations * work.encoded
        reading, computing = weights * c.weight_byte, operations * c.operation
        matrices = reading + computing
        if c.overlap != 1:
            longer = max(reading, computing) or 1.0  # powers of shares don't overflow
            shares = (reading / longer) ** c.overlap + (computing / longer) ** c.overlap
            matrices = longer * shares ** (1 / c.overlap)
        attention = work.kv_bytes * c.kv_byte + work.attention * c.attention
        seconds = matrices + attention + c.step + work.rows * c.row
        is_prompt = work.attention or work.encoded or work.tokens > work.rows
        return copies + (max(seconds, c.launch) if is_prompt else seconds)

    def host_seconds(self, work: StepWork) -> float:
        """Seconds that the host takes to plan a step."""
        return self.coefficients.host_step + work.rows * self.coefficients.host_row

    def preemption_costs(self) -> PreemptionCosts:
        """The same as the scheduler's policy `auto` wants it."""
        c = self.coefficients
        pair = sum(part.pair_operations for part in self.shape.attention) * c.attention
        return PreemptionCosts(0.0, 2 * c.swapped_byte, 0.0, 2 * self.shape.weights_per_token * c.operation, pair)


class Calibration(NamedTuple):
    """A device's coefficients and where they are from. `kind` is "cuda" or "cpu"; `depth` steps are in flight;
    `memory_bytes` is all of the device's, `kv_bytes` what was left for KV with `model`, if that is known; `error` is
    that on steps that weren't fitted, None where no steps were measured. `encoders` has the coefficient `encoder` of
    models that see, by name, as `quire bench sights --against` measures it."""

    name: str
    device: str
    kind: str
    model: str
    dtype: str
    depth: int
    memory_bytes: int
    kv_bytes: int | None
    coefficients: Coefficients
    error: dict[str, Any] | None
    source: str
    encoders: Mapping[str, float] = {}

    def coefficients_for(self, model: str) -> Coefficients:
        """The coefficients for a model of that name."""
        return self.coefficients._replace(encoder=self.encoders.get(model, self.coefficients.encoder))


def calibration_names() -> list[str]:
    """The calibrations that come with quire."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_calibration(name: str) -> Calibration:
    """The calibration of that name, or of the file there. StartupError if it can't be used."""
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
    """A calibration from its JSON object. ValueError says what is wrong with it."""
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
    """Of models that see, where the file says any."""
    encoders = _field(content, "encoders", dict) if "encoders" in content else {}
    for model, times in encoders.items():
        if not _is_valid_number(times):
            raise ValueError(f"the encoder of {model[:40]!r} takes {str(times)[:40]} times as long")
    return {model: float(times) for model, times in encoders.items()}


def _error(content: dict[str, Any]) -> dict[str, Any] | None:
    """The errors, which documents repeat."""
    if content.get("error") is None:
        return None
    error: dict[str, Any] = _field(content, "error", dict)
    if "median" in error and not _is_valid_number(error["median"]):
        median = str(error["median"])[:40]
        raise ValueError(f'"error" has the median {median!r}, and it must be a number from 0 to {MAX_COEFFICIENT:,.0f}')
    try:
        json.dumps(error, allow_nan=False)
    except ValueError as found:
        raise ValueError(f'"error" has a number that is not finite: {found}') from found
    return error


def _is_valid_number(value: object) -> bool:
    """It is one, and neither negative nor absurd; integers may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COEFFICIENT


def _field(content: dict[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if type(value) is not kind:
        raise ValueError(f'"{key}" must be of the type {kind.__name__}, and is {str(value)[:40]!r}')
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f'"{key}" is {ascii(value)[:80]}, and must be Unicode text: half a character is in it')
    return value
