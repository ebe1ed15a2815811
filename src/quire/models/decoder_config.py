"""The declaration of a text model: its sizes, its layers, its options and the names of its weights, as the readers of
config.json (quire.models.families) make it; and what follows from it. No torch: memory plans and simulations read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from quire.errors import StartupError
from quire.layers.experts_config import ExpertsConfig
from quire.layers.rope_config import RopeConfig
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.model_spec import LayerSpec, ModelSpec, SnapKVSelection, StateTensor
from quire.protocol.parallel_layout import UNSHARDED, Shard, check_tp_division

MAX_LAYERS = 4096
STATE_ITEMSIZE = 4
"""Bytes of a number of the `ssm` state, unless --state-dtype is given."""


class LayerConfig(NamedTuple):
    """A layer attends to the last `window` positions, to those of its `chunk`, or to all. It rotates queries and keys
    if it has a `rope`, reads the keys and values of `kv_sharing_layer` if that is given, and keeps `budget` tokens of a
    prompt (None: all). `mixer` may be "mamba" in place of "attention", or "cross", attention to images (Llama 3.2
    Vision). `feed_forward` may be "experts" in place of "mlp", "both", whose outputs are added, or "none". `kv_heads`,
    `head_dim` and `intermediate` are the model's unless they are given. `keys_are_values`: one product makes both,
    before norms and rotation."""

    window: int | None = None
    chunk: int | None = None
    kv_sharing_layer: int | None = None
    rope: RopeConfig | None = None
    budget: int | None = None
    mixer: str = "attention"
    feed_forward: str = "mlp"
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    keys_are_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """The mixer of a Mamba layer: `d_inner` channels with states of `d_state` numbers each, a convolution over `d_conv`
    tokens, and step sizes of rank `dt_rank`. `norms`, with `norm_eps`: step sizes, B and C are normalised with weights
    ("learned", Jamba), without ("plain", FalconMamba), or not at all ("none"). States have `itemsize` bytes a
    number."""

    hidden: int
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    conv_bias: bool
    bias: bool
    norms: str
    norm_eps: float
    itemsize: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        s, selected = self, self.dt_rank + 2 * self.d_state
        products = 3 * s.hidden * s.d_inner + s.bias * (2 * s.d_inner + s.hidden)
        per_channel = (s.d_conv + s.conv_bias) + selected + (s.dt_rank + 1) + (s.d_state + 1)
        return products + s.d_inner * per_channel + (s.norms == "learned") * selected

    @property
    def fp32_parameters(self) -> int:
        """Number of parameters that are in float32 regardless of the model's dtype."""
        return self.d_inner * (self.d_state + 2)

    def layer_spec(self) -> LayerSpec:
        """Return the layer's spec: its states."""
        conv = StateTensor("conv", (self.d_inner, self.d_conv - 1), self.itemsize)
        return LayerSpec(0, 0, state_tensors=(conv, StateTensor("ssm", (self.d_inner, self.d_state), STATE_ITEMSIZE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A text model. In a shard heads, `intermediate`, channels and `parameters` are those of the shard.

    Each block f (attention, feed-forward) computes x += f(norm(x)); with `post_norms` x += norm(f(norm(x))), without
    `pre_norms` x += norm(f(x)). Norms are RMS norms, with `norm_offset` of weights stored minus one, or with
    `layer_norm` layer norms. `qk_norm`: queries and keys are normalised, "head" each head, "projection" all heads
    together; with `v_norm` also values, by a norm without weights. `layer_scales`: the output of a layer is multiplied
    by a number of the checkpoint. Products of queries and keys are multiplied by `scale` (None: head_dim ** -0.5) and
    bounded by `softcap`, logits by `final_softcap`; embeddings have `embed_dim` numbers and are multiplied by
    `embed_scale`.

    `max_len` includes the rope scaling. `positions` are the rows of a learned table of positions, whose first row is at
    `position_offset`. `extra_tokens` have embeddings, but are never generated. `experts` are those of layers that have
    them. Layers may have inputs of `per_layer_dim` numbers of a token, from a table of `per_layer_vocab` rows
    (quire.models.per_layer_inputs). `intermediate_key` is the name of `intermediate` in config.json, for errors.

    `weight_names` are without the prefix, one of `weight_prefixes`; tensors that match `ignored_weights` are not
    loaded. `stacked_tensors`: see quire.weights.stacked_tensors. `grouped_qkv`: a tensor of queries, keys and values
    has these of one key head after another. Parameters that match `transposed_weights` are [in, out] in a
    checkpoint."""

    family: str
    vocab_size: int
    hidden: int
    embed_dim: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    intermediate_key: str = "intermediate_size"
    activation: str = "silu"
    gated: bool = True
    norm_eps: float
    layer_norm: bool = False
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    final_norm: bool = True
    qk_norm: str = ""
    v_norm: bool = False
    layer_scales: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool
    scale: float | None = None
    softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float | None = None
    layers: tuple[LayerConfig, ...]
    selection: SnapKVSelection = field(default_factory=SnapKVSelection)
    mamba: MambaConfig | None = None
    experts: ExpertsConfig | None = None
    max_len: int
    positions: int = 0
    position_offset: int = 0
    extra_tokens: int = 0
    per_layer_dim: int = 0
    per_layer_vocab: int = 0
    eos_ids: tuple[int, ...]
    vision: VisionSettings | None = None
    weight_names: WeightNames = field(repr=False)
    weight_prefixes: tuple[str, ...] = ("model.",)
    ignored_weights: tuple[str, ...] = ()
    stacked_tensors: Mapping[str, int] = field(default_factory=dict)
    grouped_qkv: bool = False
    transposed_weights: str = ""
    shard: Shard = UNSHARDED

    def heads_of(self, layer: LayerConfig) -> tuple[int, int]:
        """Return a layer's number of key heads and its head size."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    @property
    def rope_tables(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotary embeddings of all layers with the head sizes that they rotate, each once."""
        pairs = [(layer.rope, self.heads_of(layer)[1]) for layer in self.layers if layer.rope is not None]
        return tuple(dict.fromkeys(pairs))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's part. Raise StartupError if the model can't be divided among that many ranks."""
        ranks, mamba, experts = shard.tp_size, self.mamba, self.experts
        columns = {self.intermediate_key: self.intermediate} if self._has("mlp", "both") else {}
        columns |= {} if experts is None else experts.columns
        if mamba is not None:
            columns["mamba_expand times hidden_size"] = mamba.d_inner
        if self.heads:
            for kv_heads in dict.fromkeys(self.heads_of(layer)[0] for layer in self.layers):
                check_tp_division(ranks, self.heads, kv_heads, **columns)
        elif mamba is not None and mamba.d_inner % ranks:
            raise StartupError(
                f"--tp is {ranks}, which doesn't divide the model: it has {mamba.d_inner} channels",
                "Use a number that divides them",
            )
        if ranks > self.kv_heads and any(layer.budget for layer in self.layers):
            # A key head selects tokens by all its query heads.
            raise StartupError(
                f"--tp is {ranks}, and pyramid_kv of config.json needs whole key heads: there are {self.kv_heads}",
                f"Use a --tp of at most {self.kv_heads}",
            )
        if shard.pp_size > 1 and self.per_layer_dim:
            raise StartupError(
                f"--pp is {shard.pp_size}, and each layer of the model has an input that its first stage computes",
                "Use --tp",
            )
        if ranks > 1 and self.qk_norm == "projection":
            raise StartupError(
                f"--tp is {ranks}, and the model normalises the queries of all heads together",
                "Use --tp 1; --pp divides the layers",
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=-(-self.kv_heads // ranks),
            intermediate=self.intermediate // ranks,
            layers=tuple(
                layer._replace(
                    kv_heads=None if layer.kv_heads is None else -(-layer.kv_heads // ranks),
                    intermediate=None if layer.intermediate is None else layer.intermediate // ranks,
                )
                for layer in self.layers
            ),
            mamba=None if mamba is None else replace(mamba, d_inner=mamba.d_inner // ranks),
            experts=None if experts is None else experts.divide(ranks),
            shard=shard,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of the text model, all experts included; tied ones count once."""
        rows = self.shard.padded_vocab_rows
        total = rows(self.vocab_size + self.extra_tokens) * self.embed_dim + self.positions * self.hidden
        total += 0 if self.tied else rows(self.vocab_size) * self.embed_dim
        total += 2 * self.hidden * self.embed_dim if self.embed_dim != self.hidden else 0  # projections in and out
        total += self.per_layer_dim * (
            len(self.layers) * (self.per_layer_vocab + self.hidden) + (self.per_layer_dim > 0)
        )
        return total + sum(map(self._layer_parameters, self.layers)) + self.final_norm * self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.layer_norm else 1)

    def _layer_parameters(self, layer: LayerConfig) -> int:
        h, (kv_heads, head_dim) = self.hidden, self.heads_of(layer)
        queries, keys = self.heads * head_dim, kv_heads * head_dim
        blocks = 1 if layer.feed_forward == "none" else 2
        total = blocks * (self.pre_norms + self.post_norms) * self._norm_parameters
        if layer.mixer == "mamba":
            total += 0 if self.mamba is None else self.mamba.parameters
        else:
            shares_kv = layer.kv_sharing_layer is not None
            rows = queries if shares_kv else queries + (1 if layer.keys_are_values else 2) * keys
            total += h * (rows + queries) + self.qkv_bias * rows + self.out_bias * h
            total += {"": 0, "head": (1 if shares_kv else 2) * head_dim, "projection": queries + keys}[self.qk_norm]
            total += 2 * head_dim + 2 if layer.mixer == "cross" else 0  # norms of a head, and gates
        columns = layer.intermediate or self.intermediate
        inner = (2 if self.gated else 1) * columns
        mlp = h * (inner + columns) + self.mlp_bias * (inner + h)
        experts = 0 if self.experts is None else self.experts.parameters(h)
        both = mlp + experts + 4 * self._norm_parameters
        total += self.per_layer_dim * 2 * h + (self._norm_parameters if self.per_layer_dim else 0)
        return total + self.layer_scales + {"none": 0, "mlp": mlp, "experts": experts, "both": both}[layer.feed_forward]

    def _has(self, *kinds: str) -> bool:
        return any(layer.feed_forward in kinds for layer in self.layers)

    def spec(self) -> ModelSpec:
        """Return the ModelSpec. `parameters` are the text model's; those of a vision encoder are in `vision`."""
        sparse = sum(layer.feed_forward in ("experts", "both") for layer in self.layers)
        states = sum(layer.mixer == "mamba" for layer in self.layers)
        inner = max(layer.intermediate or self.intermediate for layer in self.layers) if self._has("mlp", "both") else 0
        inner += len(self.layers) * self.per_layer_dim
        mamba, experts = self.mamba, self.experts
        if experts is not None:
            inner = max(inner, experts.per_token * experts.intermediate + experts.shared_intermediate)
        return ModelSpec(
            family=self.family,
            layers=tuple(map(self._layer_spec, self.layers)),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=inner if mamba is None else max(inner, 2 * mamba.d_inner),
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            num_rope_tables=len(self.rope_tables) + (self.positions > 0),
            selection=self.selection,
            vision=None if self.vision is None else self.vision.spec(self.parameters),
            experts=0 if experts is None else experts.count,
            active_experts=0 if experts is None else experts.per_token,
            expert_parameters=0 if experts is None else sparse * experts.count * 3 * self.hidden * experts.intermediate,
            fp32_parameters=0 if mamba is None else states * mamba.fp32_parameters,
        )

    def _layer_spec(self, layer: LayerConfig) -> LayerSpec:
        if layer.mixer == "mamba":
            assert self.mamba is not None, "a model with Mamba layers declares them"
            return self.mamba.layer_spec()
        if layer.mixer == "cross":
            return LayerSpec(self.kv_heads, self.head_dim, is_cross_attention=True)
        return LayerSpec(
            *self.heads_of(layer), layer.window, scale=self.scale, softcap=self.softcap, chunk=layer.chunk,
            kv_source_layer=layer.kv_sharing_layer, budget=layer.budget,
        )  # fmt: skip
