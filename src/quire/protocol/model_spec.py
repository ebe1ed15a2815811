"""What a model needs of a memory, and what a memory needs of a runner: the vocabulary that both sides share.

A LayerSpec says what one layer keeps; a ModelSpec lists them; a Geometry, derived by a memory, says which tensors the
runner must allocate. Integers only: no tensors, no policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import NamedTuple

STATE_ALIGNMENT = 16
"""Bytes of one access: where tensors of a state begin."""

SCALE_BYTES = 4
"""What numbers of 8 bits are multiplied by, in fp32."""


class KVCacheLayout(Enum):
    """Where a memory puts a sequence's tokens: `PAGED`, wherever page tables say, or `CONTIGUOUS`, one after another in
    addresses, so that position p is p strides behind the first one. A kernel that needs the latter is refused over the
    former; one that reads page tables works over both."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


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
    `chunk`, to positions >= p - p % chunk. Products of queries and keys are multiplied by `scale` (None:
    head_dim ** -0.5); then `softcap`, if any, bounds them: x becomes softcap * tanh(x / softcap). `heads` are the query
    heads (None: the model's). A layer that `kv_source_layer` keeps nothing: it reads the keys and values of that
    earlier layer.
    `budget` is how many tokens of a prompt the layer keeps (PyramidKV); None: all. `policy` names a layer type that
    isn't quire's own (see quire.memory.policies).

    With `has_int8_kv` keys and values are in 8 bits, and behind each head's is what they are multiplied by: such a
    cell is
    written once, and is as good wherever it lies. A layer with a `state_tensors` (Mamba) keeps these tensors of a
    sequence,
    whatever its length, and nothing of a token. A layer that is `is_cross_attention` keeps keys and values of the rows
    that pictures
    are encoded to, and none of tokens.
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
    `observation_window`
    tokens, and of those before them what these attend to most, once attention is averaged over `pooling_kernel`
    neighbours."""

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
    `parameters`
    of tower and connector; where numbers have 2 bytes, `activations`, bytes that encoding takes, however many parts a
    step has, `part_bytes` of each of these beside, and `partial_image_bytes` of a picture that a step leaves in parts,
    where it
    has ended another one; `part_operations` of a part's products; `part_tokens`, how many tokens of a prompt take about
    as long as a part, and `part_embeds`, the places of how many of them a part's rows take at least (0: of none). With
    `bidirectional_prompt` the tokens of a prompt attend to one another both ways, so that all of it is computed in one
    step
    (PaliGemma)."""

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
    `num_rope_tables`
    are its rotary embeddings, each a table for all positions. Of `parameters`, `expert_parameters` are those of all
    experts of all layers that have `experts` of them each, of which a token takes `active_experts`; and
    `fp32_parameters` are in float32 whatever the others are in."""

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
        which
        what was rounded adds up, `ssm_itemsize`."""
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


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share page tables: how large their pages are, how many tokens fill them, which pages are theirs.

    A page of `page_bytes` holds a run of tokens of all the layers, one layer after another. `run_tokens` tokens fill
    `run_pages` pages: 16 and 1, say, or 256 and 15 where a page is so many bytes that its tokens aren't whole; then a
    token's `token_bytes` may lie in two pages. Page `id` is at byte id * page_bytes of the memory; `ids` may be given
    to this group, or to another one with the same `ids`, and so may `host_ids` in host memory, whose page `id` is at
    byte (id - 1) * page_bytes. `layers` are those that keep keys and values: one that shares another's is in none.
    `table_width` is how many pages a sequence has at most. `kind` says what is kept (see
    quire.memory.policies): "full", "window", "chunked", "budget" (`budget` tokens of a prompt), "uniform" (all,
    where layers have budgets, the least of which is `budget`), "state" (a page is the running state after the latest of
    the tokens of its run, of `token_bytes` however many these are), and two whose runs are of the rows that a
    sequence's pictures are encoded to, each picture in pages of its own: "cross" (keys and values of them) and "vision"
    (the rows themselves; of no layer). Where a sequence's tokens are contiguous in addresses, a page is `parts` equal
    pages of the device, one in each buffer of the group's keys and values.
    """

    layers: tuple[int, ...]
    page_bytes: int
    token_bytes: int
    table_width: int
    ids: range
    host_ids: range = range(0)
    run_tokens: int = 16
    run_pages: int = 1
    window: int | None = None
    kind: str = "full"
    parts: int = 1
    chunk: int | None = None
    budget: int | None = None

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps in part."""
        return -(-tokens * self.run_pages // self.run_tokens)

    def num_full_pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return tokens * self.run_pages // self.run_tokens

    def tokens_in_pages(self, pages: int) -> int:
        """Tokens that lie in the first `num_pages` pages, whole ones only."""
        return pages * self.run_tokens // self.run_pages

    @property
    def payload_bytes(self) -> int:
        """Bytes of what fills a page: of one that isn't padded, all."""
        return self.token_bytes if self.kind == "state" else self.run_tokens * self.token_bytes // self.run_pages

    def payload_of_page(self, page: int, tokens: int) -> int:
        """Bytes of the first `tokens` tokens of a sequence that lie in its page `page`."""
        if self.kind == "state":
            return self.token_bytes if self.num_pages(tokens) > page else 0
        return min(max(tokens * self.token_bytes - page * self.payload_bytes, 0), self.payload_bytes)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, where they are whole."""
        assert self.run_pages == 1, f"{self.run_tokens} tokens fill {self.run_pages} pages: a page has no whole tokens"
        return self.run_tokens


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the runner must allocate: one buffer of `bytes`, `host_bytes` of host memory where swapped sequences wait,
    and for each group a table of `slots` x `table_width` page ids. Slot 0 and every group's page 0 are scratch: padding
    resolves to them and no sequence owns them.

    With `large_bytes` the groups' pages are parts of large pages of so many bytes (Jenga §4), and all groups have all
    of the memory in common: page `id` of a group is in large page id * page_bytes // large_bytes, and large page 0 is
    scratch. With 0 each size of pages has a run of ids, and a part of the memory, of its own.

    Of a prompt of more than `budget` tokens some layer keeps a part (0: of none), which its last `queries` tokens
    choose: one step computes all of these, and nothing behind them.

    `sight` says where the rows lie that take the places of a picture's tokens ("pages", "inside" or "off": see
    plan.Encode); "" if none do. They have `row_bytes` bytes; `part_tokens`, `part_rows` and `most_rows` say how many
    parts of pictures a step encodes (see `max_parts_per_step`). With `both_ways` one step computes all of a prompt
    that isn't
    there yet, and what follows it another.
    """

    layout: KVCacheLayout
    bytes: int
    slots: int
    groups: tuple[KVCacheGroup, ...]
    itemsize: int
    host_bytes: int = 0
    large_bytes: int = 0
    budget: int = 0
    queries: int = 0
    sight: str = ""
    row_bytes: int = 0
    part_tokens: int = 0
    part_rows: int = 0
    most_rows: int = 0
    both_ways: bool = False

    @property
    def has_images(self) -> bool:
        """There are pictures among the prompts."""
        return bool(self.sight) or any(group.kind == "cross" and group.layers for group in self.groups)

    @property
    def image_embed_group(self) -> int:
        """The group in whose pages rows lie that take tokens' places, where `sight` is "inside": a page has room for as
        many of them as of tokens."""
        hosts = (g for g, one in enumerate(self.groups) if one.kind == "full" and one.run_pages == 1)
        return next(g for g in hosts if self.groups[g].page_bytes >= self.row_bytes * self.groups[g].run_tokens)

    def clip_chunk(self, prompt_len: int, planned: int, count: int) -> int:
        """How many of a sequence's next `count` tokens one step may compute, behind the `planned` first ones;
        `prompt_len`
        is the length of its prompt."""
        rest = prompt_len - planned
        if self.both_ways:
            return count if rest <= 0 else rest if count >= rest else 0
        if not 0 < self.budget < prompt_len or rest <= 0:
            return count
        return rest if count >= rest else max(min(count, rest - self.queries), 0)

    def tokens_in_large_pages(self, on_host: bool = False) -> int:
        """Tokens that every group of tokens holds at once in large pages, on the device or on the host."""
        groups = [group for group in self.groups if group.kind not in ("cross", "vision")]
        ratios = [self.large_bytes // group.page_bytes for group in groups]
        count = len(groups[0].host_ids if on_host else groups[0].ids) // ratios[0]
        runs = sum(Fraction(group.run_pages, group.run_tokens * ratio) for group, ratio in zip(groups, ratios))
        tokens = int(count / runs)
        while sum(-(-group.num_pages(tokens) // ratio) for group, ratio in zip(groups, ratios)) > count:
            tokens -= 1
        return tokens


def place_page_ids(sizes: Sequence[tuple[int, int]], scratch: int) -> tuple[list[range], int]:
    """Where pages of several sizes lie in one buffer: for each (bytes, count) the ids of its pages, and the bytes of
    the buffer. Each size has a run of ids of its own, behind `scratch` bytes; page `id` is at byte id * bytes."""
    found, end = [], scratch
    for size, count in sizes:
        first = -(-end // size)
        found.append(range(first, first + count))
        end = (first + count) * size
    return found, end
