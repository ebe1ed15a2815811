"""Model specs: a LayerSpec says what one layer keeps in memory; a ModelSpec has the layers and sizes of a model. A
memory derives a KVCacheConfig from it, which says what the runner allocates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

STATE_ALIGNMENT = 16
"""Alignment in bytes of the tensors of a state: the width of one access."""
SCALE_BYTES = 4
"""Bytes of the fp32 scale of 8-bit numbers. A scale for each token's head depends on no other token; for the bundled
model it is three times as close as FP8 with such a scale, and little worse than scales for 16 or 32 numbers."""


class StateTensor(NamedTuple):
    """A tensor of a layer's running state; its numbers have `itemsize` bytes."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def padded_bytes(self) -> int:
        """Bytes of the tensor, padded to STATE_ALIGNMENT."""
        return -(-math.prod(self.shape) * self.itemsize // STATE_ALIGNMENT) * STATE_ALIGNMENT


class SavedInput(NamedTuple):
    """An input of a layer's state, of `width` numbers a token, in the model's dtype or in float32."""

    width: int
    is_fp32: bool = False

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's input, if the model's numbers have `itemsize`."""
        return self.width * (4 if self.is_fp32 else itemsize)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer keeps of each token: keys and values of `kv_heads` heads of `head_dim` numbers; and how it attends
    to them.

    `window` is None for full attention; otherwise the token at position p attends to positions > p - window; or, with
    `chunk`, to positions >= p - p % chunk. Products of queries and keys are multiplied by `scale` (None: head_dim **
    -0.5). `softcap` bounds them: x becomes softcap * tanh(x / softcap). `heads` are the query heads (None: the
    model's). A layer with `kv_source_layer` keeps nothing: it reads the keys and values of that earlier layer. `budget`
    is how many tokens of a prompt the layer keeps (PyramidKV); None: all. `policy` names a layer type that is not
    quire's own (see quire.memory.policies). With `has_sinks` each query head has a sink, a weight of
    the model (see quire.kernels.forward_batch.LayerCache).

    With `has_int8_kv` keys and values have 8 bits, and the numbers of each head are followed by their scale; such a
    cell is written once and can be copied as it is. A layer with `state_tensors` (Mamba) keeps these tensors for a
    sequence of any length, and nothing of tokens; a step saves `saved_inputs` of each draft token, from which the state
    is advanced once the token is accepted. A layer with `is_cross_attention` keeps keys and values of image
    embeddings, and none of tokens. A layer with `is_draft` belongs to the draft model; with `reads_hidden_states` that
    is a speculation head, which computes a token only in the step in which the model does.
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
    saved_inputs: tuple[SavedInput, ...] = ()
    is_cross_attention: bool = False
    has_int8_kv: bool = False
    is_draft: bool = False
    reads_hidden_states: bool = False
    has_sinks: bool = False

    def cell_bytes(self, itemsize: int) -> int:
        """Return the bytes of the key (or value) of one head and token."""
        return self.head_dim + SCALE_BYTES if self.has_int8_kv else self.head_dim * itemsize

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of the keys and values of one token, or of one image embedding with cross attention."""
        if self.kv_source_layer is not None or self.state_tensors:
            return 0
        return 2 * self.kv_heads * self.cell_bytes(itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of the running state of a sequence."""
        return sum(tensor.padded_bytes for tensor in self.state_tensors)

    @property
    def kind(self) -> str:
        """The name of the policy that says what is kept (see KVCacheGroup.kind)."""
        if self.policy is not None:
            return self.policy
        if self.state_tensors or self.is_cross_attention:
            return "state" if self.state_tensors else "cross"
        kinds = {"budget": self.budget, "chunked": self.chunk, "window": self.window}
        return next((kind for kind, length in kinds.items() if length is not None), "full")

    @property
    def group_key(self) -> tuple[str | int | tuple[StateTensor, ...] | None, ...]:
        """Layers with equal keys share page tables: they keep the same tokens in the same form."""
        lengths = self.window, self.chunk, self.budget
        flags = self.is_draft, self.reads_hidden_states
        return self.kind, self.kv_heads, self.head_dim, *lengths, self.state_tensors, *flags


@dataclass(frozen=True, slots=True)
class SnapKVSelection:
    """How layers with a budget choose the tokens of a prompt to keep (SnapKV §4, PyramidKV §4.2): the last
    `observation_window` ones, and of the others those to which these attend most, after averaging over `pooling_kernel`
    neighbours."""

    observation_window: int = 32
    pooling_kernel: int = 5


def max_parts_per_step(budget: int, part_tokens: int, part_embeds: int, max_embeds: int) -> int:
    """Return the most image parts that a step of `budget` tokens encodes: as many as take the time of these tokens, and
    no more than have embeddings among them, plus those of one image that has only some. See VisionSpec."""
    count = max(budget // max(part_tokens, 1), 1)
    return min(count, -(-(budget + max_embeds) // part_embeds)) if part_embeds else count


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The vision encoder of a model.

    An image has at most `max_embeds` embeddings of `embed_dim` numbers. `parameters`: of the encoder and the connector.
    Bytes, with 2-byte numbers: encoding needs `activations` whatever the number of parts, `part_bytes` for each part of
    a step, and `partial_image_bytes` for an image that a step leaves incomplete after it has completed another.
    `part_operations`: arithmetic operations of a part's products. `part_tokens`: how many prompt tokens take about as
    long as a part. `part_embeds`: the least number of tokens that the embeddings of a part replace (0: none). With
    `bidirectional_prompt` the tokens of a prompt attend to one another both ways, so one step computes all of it
    (PaliGemma); with `bidirectional_images` those of an image do (Gemma-3), with `causal_full_layers` only in layers
    with a window (Gemma-4)."""

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
    bidirectional_images: bool = False
    causal_full_layers: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes of a model, for the memory and the memory plan. `parameters` counts weights, tied ones once.
    `num_rope_tables` are its rotary embeddings, each a table for all positions. Of `parameters`, `expert_parameters`
    belong to experts, of which layers have `experts` each and a token uses `active_experts`; `fp32_parameters` are in
    float32 whatever the dtype. `captured_width`, of a speculation head: the numbers of another model's hidden states
    that it reads for each token."""

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
    captured_width: int = 0

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of all weights, the vision encoder included, with `itemsize` bytes a number."""
        vision = self.vision.parameters if self.vision is not None else 0
        return (self.parameters + vision) * itemsize + self.fp32_parameters * (4 - itemsize)

    @property
    def min_budget(self) -> int:
        """The least budget of a layer; 0 if none has one."""
        return min((layer.budget for layer in self.layers if layer.budget is not None), default=0)

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values over all layers (OPT-13B in fp16: 819,200)."""
        return sum(layer.token_bytes(itemsize) for layer in self.layers)

    def with_state_itemsize(self, itemsize: int, ssm_itemsize: int) -> ModelSpec:
        """Return the spec with `itemsize` bytes for the numbers of states, and `ssm_itemsize` for those of the tensor
        "ssm", in which rounding errors accumulate."""
        if not self.state_layers:
            return self
        itemsizes = {"ssm": ssm_itemsize}
        layers = []
        for layer in self.layers:
            tensors = [one._replace(itemsize=itemsizes.get(one.name, itemsize)) for one in layer.state_tensors]
            layers.append(replace(layer, state_tensors=tuple(tensors)))
        return replace(self, layers=tuple(layers))

    def with_int8_kv(self) -> ModelSpec:
        """Return the spec with keys and values in 8 bits."""
        return replace(self, layers=tuple(replace(layer, has_int8_kv=True) for layer in self.layers))

    def with_draft(self, draft: ModelSpec) -> ModelSpec:
        """Return the spec of this model together with its draft model, whose layers follow: both keep what they keep
        in one memory (Jenga §6.1). Weights add up; all other sizes are this model's."""
        moved = (
            replace(
                layer, is_draft=True, heads=draft.heads if layer.heads is None else layer.heads,
                kv_source_layer=None if layer.kv_source_layer is None else layer.kv_source_layer + len(self.layers),
            )
            for layer in draft.layers
        )  # fmt: skip
        return replace(
            self,
            layers=(*self.layers, *moved),
            parameters=self.parameters + draft.parameters,
            num_rope_tables=self.num_rope_tables + draft.num_rope_tables,
            fp32_parameters=self.fp32_parameters + draft.fp32_parameters,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's running state over all layers (Jamba 52B in bf16: 8,716,288)."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def state_layers(self) -> list[int]:
        """The layers that keep a running state."""
        return [i for i, layer in enumerate(self.layers) if layer.state_tensors]

    @property
    def images_replace_tokens(self) -> bool:
        """True if image embeddings replace those of tokens. Other vision models use cross attention."""
        return self.vision is not None and not any(layer.is_cross_attention for layer in self.layers)

    @property
    def kv_layers(self) -> list[int]:
        """The layers that keep keys and values of their own, in order."""
        return [i for i, layer in enumerate(self.layers) if layer.kv_source_layer is None]


def place_page_ids(sizes: Sequence[tuple[int, int]], scratch: int) -> tuple[list[range], int]:
    """Return the ids of pages of several sizes in one buffer, for each (bytes, count), and the bytes of the buffer.
    Each size has its own range of ids, after `scratch` bytes; page `id` is at byte id * bytes."""
    ids, end = [], scratch
    for size, count in sizes:
        first = -(-end // size)
        ids.append(range(first, first + count))
        end = (first + count) * size
    return ids, end
