"""The declaration of a text model: its sizes, its layers, its options and the names of its weights, as the readers of
config.json (quire.models.families) make it; and what follows from it. No torch: memory plans and simulations read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from quire.errors import StartupError
from quire.layers.experts_config import ExpertsConfig
from quire.layers.rope_config import RopeConfig
from quire.layers.state_config import StateMixerConfig
from quire.models.vision.settings import VisionSettings
from quire.models.weight_names import WeightNames
from quire.protocol.model_spec import LayerSpec, ModelSpec, SnapKVSelection
from quire.protocol.parallel_layout import MAX_RANKS, UNSHARDED, Shard, check_tp_division

MAX_LAYERS = 4096


class LayerConfig(NamedTuple):
    """A layer attends to the last `window` positions, to those of its `chunk`, or to all. It rotates queries and keys
    if it has a `rope`, reads the keys and values of `kv_sharing_layer` if that is given, and keeps `budget` tokens of
    a prompt (None: all). `mixer` may be "state" in place of "attention", the model's `state_mixer` (Mamba), or
    "cross", attention to images (Llama 3.2 Vision). `feed_forward` may be "experts" in place of "mlp", "both", whose
    outputs are added, or "none". `kv_heads`, `head_dim` and `intermediate` are the model's unless they are given.
    `keys_are_values`: one product makes both, before norms and rotation."""

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
class DecoderConfig:
    """A text model. In a shard heads, `intermediate`, channels and `parameters` are those of the shard.

    Each block f (attention, feed-forward) computes x += f(norm(x)); with `post_norms` x += norm(f(norm(x))), without
    `pre_norms` x += norm(f(x)). Norms are RMS norms, with `norm_offset` of weights stored minus one, or with
    `layer_norm` layer norms. `qk_norm`: queries and keys are normalised, "head" each head, "projection" all heads
    together; with `v_norm` also values, by a norm without weights. `layer_scales`: the output of a layer is
    multiplied by a number of the checkpoint. With `sinks` each query head has a sink (see LayerSpec). Products of
    queries and keys are multiplied by `scale` (None: head_dim ** -0.5) and bounded by `softcap`, logits by
    `final_softcap`; embeddings have `embed_dim` numbers and are multiplied by `embed_scale`, f(norm(x)) by
    `residual_scale`, and logits by `logits_scale`. With `attention_gate` each number of an attention's output is
    multiplied by the sigmoid of a gate, which a checkpoint has among the queries: for each head its queries, then its
    gates.

    `max_len` includes the rope scaling. `positions` are the rows of a learned table of positions, whose first row is at
    `position_offset`. `extra_tokens` have embeddings, but are never generated. `experts` are those of layers that have
    them. Layers may have inputs of `per_layer_dim` numbers of a token, from a table of `per_layer_vocab` rows
    (quire.models.per_layer_inputs); tokens that stand for images have the row of `per_layer_image_token`.
    `intermediate_key` is the name of `intermediate` in config.json, for errors.

    `weight_names` are without the prefix, one of `weight_prefixes`; tensors that match `ignored_weights` are not
    loaded. `stacked_experts`: the tensors of all experts are one (see quire.weights.stacked_tensors). `grouped_qkv`: a
    tensor of queries, keys and values has these of one key head after another. Parameters that match
    `transposed_weights` are [in, out] in a checkpoint."""

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
    attention_gate: bool = False
    v_norm: bool = False
    layer_scales: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    final_softcap: float | None = None
    embed_scale: float | None = None
    residual_scale: float | None = None
    logits_scale: float | None = None
    layers: tuple[LayerConfig, ...]
    selection: SnapKVSelection = field(default_factory=SnapKVSelection)
    state_mixer: StateMixerConfig | None = None
    experts: ExpertsConfig | None = None
    max_len: int
    positions: int = 0
    position_offset: int = 0
    extra_tokens: int = 0
    per_layer_dim: int = 0
    per_layer_vocab: int = 0
    per_layer_image_token: int = 0
    eos_ids: tuple[int, ...]
    vision: VisionSettings | None = None
    weight_names: WeightNames = field(repr=False)
    weight_prefixes: tuple[str, ...] = ("model.",)
    ignored_weights: tuple[str, ...] = ()
    grouped_qkv: bool = False
    stacked_experts: bool = False
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
        ranks, mixer, experts = shard.tp_size, self.state_mixer, self.experts
        columns = {self.intermediate_key: self.intermediate} if self._has("mlp", "both") else {}
        columns |= {} if experts is None else experts.divided_columns(shard)
        columns |= {} if mixer is None else mixer.columns
        most = MAX_RANKS if experts is None or not shard.expert_parallel else min(experts.count, MAX_RANKS)
        if self.heads:
            for kv_heads in dict.fromkeys(self.heads_of(layer)[0] for layer in self.layers):
                check_tp_division(ranks, self.heads, kv_heads, most, **columns)
        elif any(size % ranks for size in columns.values()):
            sizes = ", ".join(f"{name} {size}" for name, size in columns.items())
            raise StartupError(
                f"--tp is {ranks}, which doesn't divide the model: it has {sizes}", "Use a number that divides them"
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
            state_mixer=None if mixer is None else mixer.divide(ranks),
            experts=None if experts is None else experts.divide(shard),
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
        if layer.mixer == "state":
            total += 0 if self.state_mixer is None else self.state_mixer.parameters
        else:
            shares_kv = layer.kv_sharing_layer is not None
            rows = queries if shares_kv else queries + (1 if layer.keys_are_values else 2) * keys
            rows += queries if self.attention_gate else 0
            total += h * (rows + queries) + self.qkv_bias * rows + self.out_bias * h
            total += {"": 0, "head": (1 if shares_kv else 2) * head_dim, "projection": queries + keys}[self.qk_norm]
            total += self.heads if self.sinks else 0
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
        states, attending = (sum(layer.mixer == mixer for layer in self.layers) for mixer in ("state", "attention"))
        inner = max(layer.intermediate or self.intermediate for layer in self.layers) if self._has("mlp", "both") else 0
        inner += len(self.layers) * self.per_layer_dim
        mixer, experts = self.state_mixer, self.experts
        if experts is not None:
            inner = max(inner, experts.per_token * experts.intermediate + experts.shared_intermediate)
        return ModelSpec(
            family=self.family,
            layers=tuple(map(self._layer_spec, self.layers)),
            vocab_size=self.vocab_size,
            max_len=self.max_len,
            hidden=self.hidden,
            heads=self.heads,
            intermediate=inner if mixer is None else max(inner, mixer.width),
            parameters=self.parameters,
            eos_ids=self.eos_ids,
            num_rope_tables=len(self.rope_tables) + (self.positions > 0),
            selection=self.selection,
            vision=None if self.vision is None else self.vision.spec(self.parameters),
            experts=0 if experts is None else experts.count,
            active_experts=0 if experts is None else experts.per_token,
            expert_parameters=0 if experts is None else sparse * experts.projection_parameters(self.hidden),
            fp32_parameters=(0 if mixer is None else states * mixer.fp32_parameters)
            + self.sinks * attending * self.heads,
        )

    def _layer_spec(self, layer: LayerConfig) -> LayerSpec:
        if layer.mixer == "state":
            assert self.state_mixer is not None, "a model with layers with states declares their mixer"
            return self.state_mixer.layer_spec()
        if layer.mixer == "cross":
            return LayerSpec(self.kv_heads, self.head_dim, is_cross_attention=True)
        return LayerSpec(
            *self.heads_of(layer), layer.window, scale=self.scale, softcap=self.softcap, chunk=layer.chunk,
            kv_source_layer=layer.kv_sharing_layer, budget=layer.budget, has_sinks=self.sinks,
        )  # fmt: skip
