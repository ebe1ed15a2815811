"""What a model needs of a memory, and what a memory needs of a runner: the vocabulary that both sides share.

A LayerSpec says what one layer keeps; a ModelSpec lists them; a Geometry, derived by a memory, says which tensors the
runner must allocate. Integers only: no tensors, no policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

STATE_ALIGNMENT = 16
"""Bytes of one access: where tensors of a state begin."""
SCALE_BYTES = 4
"""What numbers of 8 bits are multiplied by, in fp32."""


class StateTensor(NamedTuple):
    """A tensor of a layer's running state: of `shape`, of numbers of `itemsize` bytes."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def padded_bytes(self) -> int:
        """Bytes of it, in a place that begins where any of them may."""
        return -(-math.prod(self.shape) * self.itemsize // STATE_ALIGNMENT) * STATE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps of each token: keys and values of `kv_heads` heads of `head_dim` numbers; and how
    it attends to them.

    `window` is None for full attention; otherwise the token at position p attends to positions > p - window; or, with
    `chunk`, to positions >= p - p % chunk. Products of queries and keys are multiplied by `scale` (None: head_dim **
    -0.5); then `softcap`, if any, bounds them: x becomes softcap * tanh(x / softcap). `heads` are the query heads
    (None: the model's). A layer that `kv_source_layer` keeps nothing: it reads the keys and values of that earlier
    layer. `budget` is how many tokens of a prompt the layer keeps (PyramidKV); None: all. `policy` names a layer type
    that isn't quire's own (see quire.memory.policies).

    With `has_int8_kv` keys and values are in 8 bits, and behind each head's is what they are multiplied by: such a cell
    is written once, and is as good wherever it lies. A layer with a `state_tensors` (Mamba) keeps these tensors of a
    sequence, whatever its length, and nothing of a token. A layer that is `is_cross_attention` keeps keys and values of
    the rows that pictures are encoded to, and none of tokens.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    heads: int | None = None
    scale: float | None = None
    softcap: float | None = None
    chunk: int | None = None
    kv_source_layer: int | None = None
    budget: int | None = None
    policy: str | None = None
    state_tensors: tuple[StateTensor, ...] = ()
    is_cross_attention: bool = False
    has_int8_kv: bool = False

    def cell_bytes(self, itemsize: int) -> int:
        """Bytes of one head's keys of a token, or of its values."""
        return self.head_dim + SCALE_BYTES if self.has_int8_kv else self.head_dim * itemsize

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values that this layer keeps; of one row of a picture's, if it is "
        "`is_cross_attention`."""
        return (
            0
            if self.kv_source_layer is not None or self.state_tensors
            else 2 * self.kv_heads * self.cell_bytes(itemsize)
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return sum(part.padded_bytes for part in self.state_tensors)

    @property
    def kind(self) -> str:
        """The name of the policy that says what is kept, as a Group has it."""
        if self.policy is not None:
            return self.policy
        if self.state_tensors or self.is_cross_attention:
            return "state" if self.state_tensors else "cross"
        kinds = {"budget": self.budget, "chunked": self.chunk, "window": self.window}
        return next((kind for kind, length in kinds.items() if length is not None), "full")

    @property
    def group_key(self) -> tuple[str | int | tuple[StateTensor, ...] | None, ...]:
        """What decides how its tokens are kept, and for how long: layers that agree in it share page tables."""
        return self.kind, self.kv_heads, self.head_dim, self.window, self.chunk, self.budget, self.state_tensors


@dataclass(frozen=True, slots=True)
class SnapKVSelection:
    """How layers with a budget choose what they keep of a prompt (SnapKV §4, PyramidKV §4.2): its last
    `observation_window` tokens, and of those before them what these attend to most, once attention is averaged over
    `pooling_kernel` neighbours."""

    observation_window: int = 32
    pooling_kernel: int = 5


def max_parts_per_step(budget: int, part_tokens: int, part_embeds: int, max_embeds: int) -> int:
    """How many parts of pictures a step of `budget` tokens encodes at most: as many as take as long as these, but no
    more than its tokens are rows of, and a picture beyond, of which not all rows are among them. See VisionSpec."""
    most = max(budget // max(part_tokens, 1), 1)
    return min(most, -(-(budget + max_embeds) // part_embeds)) if part_embeds else most


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A model's eyes: the rows that stand for a picture have `embed_dim` numbers and are `max_embeds` at most;
    `parameters` of tower and connector; where numbers have 2 bytes, `activations`, bytes that encoding takes, however
    many parts a step has, `part_bytes` of each of these beside, and `partial_image_bytes` of a picture that a step
    leaves in parts, where it has ended another one; `part_operations` of a part's products; `part_tokens`, how many
    tokens of a prompt take about as long as a part, and `part_embeds`, the places of how many of them a part's rows
    take at least (0: of none). With `bidirectional_prompt` the tokens of a prompt attend to one another both ways, so
    that all of it is computed in one step (PaliGemma)."""

    embed_dim: int
    max_embeds: int
    parameters: int
    activations: int = 0
    bidirectional_prompt: bool = False
    part_tokens: int = 256
    part_bytes: int = 0
    partial_image_bytes: int = 0
    part_embeds: int = 0
    part_operations: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the control plane and the memory plan see it. `parameters` counts weights, tied ones once;
    `num_rope_tables` are its rotary embeddings, each a table for all positions. Of `parameters`, `expert_parameters`
    are those of all experts of all layers that have `experts` of them each, of which a token takes `active_experts`;
    and `fp32_parameters` are in float32 whatever the others are in."""

    family: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_len: int
    hidden: int
    heads: int
    intermediate: int
    parameters: int
    eos_ids: tuple[int, ...] = ()
    num_rope_tables: int = 1
    selection: SnapKVSelection = SnapKVSelection()
    vision: VisionSpec | None = None
    experts: int = 0
    active_experts: int = 0
    expert_parameters: int = 0
    fp32_parameters: int = 0

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights, eyes included, where numbers have `itemsize` bytes."""
        eyes = self.vision.parameters if self.vision is not None else 0
        return (self.parameters + eyes) * itemsize + self.fp32_parameters * (4 - itemsize)

    @property
    def min_budget(self) -> int:
        """The least of its layers' budgets; 0 if none has one."""
        return min((layer.budget for layer in self.layers if layer.budget is not None), default=0)

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values over all layers (OPT-13B in fp16: 819,200)."""
        return sum(layer.token_bytes(itemsize) for layer in self.layers)

    def with_state_itemsize(self, itemsize: int, ssm_itemsize: int) -> ModelSpec:
        """The same where numbers of states have `itemsize` bytes, as all others have, and those of `ssm_itemsize`, in
        which what was rounded adds up, `ssm_itemsize`."""
        layers = tuple(
            replace(layer, state_tensors=tuple(part._replace(itemsize=ssm_itemsize if part.name == "ssm" else itemsize)
                                       for part in layer.state_tensors))
            for layer in self.layers
        )  # fmt: skip
        return replace(self, layers=layers) if self.state_layers else self

    def with_int8_kv(self) -> ModelSpec:
        """The same where keys and values are in 8 bits."""
        return replace(self, layers=tuple(replace(layer, has_int8_kv=True) for layer in self.layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's running state over all layers, however long it is (Jamba 52B in bf16: 8,716,288)."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def state_layers(self) -> list[int]:
        """The layers that keep a running state."""
        return [i for i, layer in enumerate(self.layers) if layer.state_tensors]

    @property
    def images_replace_tokens(self) -> bool:
        """It sees pictures, by rows that take the places of tokens; else, if it sees any, by cross attention."""
        return self.vision is not None and not any(layer.is_cross_attention for layer in self.layers)

    @property
    def kv_layers(self) -> list[int]:
        """The layers that keep keys and values of their own, in order."""
        return [i for i, layer in enumerate(self.layers) if layer.kv_source_layer is None]


def place_page_ids(sizes: Sequence[tuple[int, int]], scratch: int) -> tuple[list[range], int]:
    """Where pages of several sizes lie in one buffer: for each (bytes, count) the ids of its pages, and the bytes of
    the buffer. Each size has a run of ids of its own, behind `scratch` bytes; page `id` is at byte id * bytes."""
    found, end = [], scratch
    for size, count in sizes:
        first = -(-end // size)
        found.append(range(first, first + count))
        end = (first + count) * size
    return found, end
