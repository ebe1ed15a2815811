"""The decoder: a frame for the models of all families, whose parts a DecoderConfig declares.

A model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from quire.kernels.forward_batch import HeadNorms
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.delta_rule import DeltaRuleMixer
from quire.layers.embedding import Embedding
from quire.layers.exchange import ShardedModule, gather_logits
from quire.layers.linear import Linear
from quire.layers.mamba import MambaMixer
from quire.layers.mamba2 import Mamba2Mixer
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.module_list import module_list
from quire.layers.moe import SparseMLP
from quire.layers.norm import LayerNorm, ResidualSum, RMSNorm
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.rotary import RotaryEmbedding
from quire.layers.sharding import ParameterShards, ShardRange, shard_heads, shard_vocab
from quire.layers.short_conv import ShortConvMixer
from quire.layers.softcap import Softcap
from quire.layers.state_config import (
    DeltaRuleConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvConfig,
    StateMixerConfig,
)
from quire.layers.state_mixer import StateMixer
from quire.models.architectures import read_model_config
from quire.models.decoder_config import DecoderConfig, LayerConfig
from quire.models.forward_context import ForwardContext
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.parallel_layout import UNSHARDED, Shard

Layer = TypeVar("Layer", bound=nn.Module)
STATE_MIXERS: dict[type[StateMixerConfig], Callable[..., StateMixer]] = {
    MambaConfig: MambaMixer,
    ShortConvConfig: ShortConvMixer,
    Mamba2Config: Mamba2Mixer,
    DeltaRuleConfig: DeltaRuleMixer,
}
"""The mixers with states, by their declarations."""


class PPMissingLayer(nn.Module):
    """The placeholder for a layer of another pipeline stage (GPipe, arXiv:1811.06965), so that layers keep their
    numbers: returns x and delta, the pending residual, unchanged."""

    def mix(self, x: Tensor, delta: Tensor | None, *rest: Any, last: bool = False) -> Tensor | None:
        """As the last layer: return the delta that the next stage adds."""
        return delta

    def feed_forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The part of the layer after `mix`."""
        return x, delta


def make_layers(shard: Shard, count: int, make: Callable[[int], Layer]) -> Sequence[Layer]:
    """Return an nn.ModuleList of `count` layers: those of the shard's stage, and placeholders for the others. These are
    typed as layers too: they have the methods that `run_layers` of a model calls."""
    local = shard.layer_range(count)
    return module_list(make(layer) if layer in local else cast(Layer, PPMissingLayer()) for layer in range(count))


class Attention(nn.Module):
    """Queries, keys and values from one product, or queries alone if the layer shares another's keys and values; their
    norms and rotation, if any; attention through the context; its product with the sigmoid of gates, if any; the output
    projection. Ranks divide the heads. The product has the gates first. `sinks` reach the kernels by the layer's cache.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED, inputs: int | None = None,
    ) -> None:  # fmt: skip
        """`inputs`: the numbers of a row of its input (None: `s.hidden`)."""
        super().__init__()
        kind = s.layers[layer]
        kv_heads, head_dim = s.heads_of(kind)
        self.layer, self.head_dim, self.rotary = layer, head_dim, rotary
        queries, keys = shard_heads(shard, s.heads, kv_heads, head_dim)
        shares_kv = kind.kv_sharing_layer is not None
        self.gate_heads = queries.padded // head_dim if s.attention_gate else 0
        own = () if shares_kv else (keys,) if kind.keys_are_values else (keys, keys)
        products = (queries,) * (1 + s.attention_gate) + own
        self.qkv = Linear(inputs or s.hidden, products, s.qkv_bias, dtype, device)
        self.out = Linear(queries, s.hidden, s.out_bias, dtype, device)
        self.sinks: nn.Parameter | None = None
        self.param_shards: dict[str, ParameterShards] = {}
        if s.sinks:
            local, _ = shard.head_ranges(s.heads, s.kv_heads)
            self.param_shards["sinks"] = ParameterShards((ShardRange(local, s.heads, len(local), shard),), None)
            self.sinks = nn.Parameter(torch.empty(len(local), dtype=torch.float32, device=device), requires_grad=False)
        self.projection_norms: tuple[RMSNorm, ...] = ()
        self.head_norms: HeadNorms | None = None
        norm = partial(RMSNorm, eps=s.norm_eps, dtype=dtype, device=device)
        if s.qk_norm == "projection":
            self.q_norm, self.k_norm = (norm(part.padded, offset=s.norm_offset) for part in (queries, keys))
            self.projection_norms = self.q_norm, self.k_norm
        elif s.qk_norm:
            self.q_norm = norm(head_dim, offset=s.norm_offset)
            self.head_norms = HeadNorms(self.q_norm, None)
            if not shares_kv:
                self.k_norm = norm(head_dim, offset=s.norm_offset)
                self.v_norm = norm(head_dim, learned=False) if s.v_norm else None
                self.head_norms = HeadNorms(self.q_norm, self.k_norm, self.v_norm)

    def forward(self, x: Tensor, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Return the heads' outputs [T, heads * head_dim], before `out`."""
        qkv = self.qkv(x)
        if self.projection_norms:
            for norm, part in zip(self.projection_norms, qkv.split(self.qkv.output_sizes, dim=1)):
                norm.normalize_(part)
        qkv = qkv.view(len(x), -1, self.head_dim)
        if not self.gate_heads:
            return ctx.attend(self.layer, qkv, self.rotary, self.head_norms, last).flatten(1)
        gate, qkv = qkv[:, : self.gate_heads], qkv[:, self.gate_heads :]
        out = ctx.attend(self.layer, qkv, self.rotary, self.head_norms, last).flatten(1)
        return out * (ctx.select_logits_rows(gate) if last else gate).flatten(1).sigmoid()


@contextmanager
def one_layer_of_each_kind(model: Any) -> Iterator[None]:
    """Return a context in which `model` has one layer of each kind, and its last layer. A step then loads all kernels.

    Layers launch the same kernels if their settings, those of the layers before them, and the names, shapes and dtypes
    of their weights are equal. The model keeps all layers if it is not a Decoder, or if it has other ranks, which must
    run the same. It also keeps them with low-bit weights on a GPU, whose formats are not compared here."""
    if not isinstance(model, Decoder) or model.exchange is not None or any(map(_is_low_bit, model.modules())):
        yield
        return
    layers, kinds = model.layers, model.config.layers
    assert len(layers) == len(kinds), "layers are left out already, and a graph would be captured without them"
    first: dict[Any, nn.Module] = {}
    for before, kind, layer in zip((None, *kinds), kinds, layers[:-1]):
        tensors = chain(layer.named_parameters(), layer.named_buffers())
        first.setdefault((before, kind, *((name, x.shape, x.dtype) for name, x in tensors)), layer)
    model.layers = module_list([*first.values(), layers[-1]])
    try:
        yield
    finally:
        model.layers = layers


def _is_low_bit(module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.low_bit_device.type == "cuda"


def attention_sinks(model: nn.Module) -> dict[int, Tensor]:
    """Return the sinks of the layers that have them, fp32 [heads] each, by the layer's number."""
    layers = (module for module in model.modules() if isinstance(module, Attention))
    return {module.layer: module.sinks for module in layers if module.sinks is not None}


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); returns x and the next residual, mlp(norm(x)), or the attention's output if there is no
    feed-forward block. Each sum, with its post norm if there is one, is left to the norm that follows, which reads all
    of x anyway. Experts may stand in the place of the MLP, and a mixer with a state in that of attention. A subclass
    may have another mixer."""

    attention: Attention

    def __init__(
        self, s: DecoderConfig, layer: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        kind = s.layers[layer]
        after = s.layers[layer - 1] if layer else None
        self.attention_norm = make_norm(s, dtype, device, after=after, first=layer == 0)
        self.layer, self.residual_scale = layer, s.residual_scale
        self.mixer: StateMixer | None = None
        if kind.mixer == "state":
            assert s.state_mixer is not None, "a model with layers with states declares their mixer"
            self.mixer = STATE_MIXERS[type(s.state_mixer)](s.state_mixer, dtype, device, shard)
        elif kind.mixer == "attention":
            self.attention = Attention(s, layer, rotary, dtype, device, shard)
        self.mlp: GatedMLP | MLP | None = None
        self.experts: SparseMLP | None = None
        if kind.feed_forward != "none":
            self.mlp_norm = make_norm(s, dtype, device)
        if kind.feed_forward in ("mlp", "both"):
            options = s.hidden, kind.intermediate or s.intermediate, s.activation, s.mlp_bias, dtype, device, shard
            scaled = s.residual_scale is not None
            self.mlp = GatedMLP(*options, output_modified=scaled) if s.gated else MLP(*options)
            assert s.gated or not scaled, "a plain block is not scaled"
        if kind.feed_forward in ("experts", "both"):
            assert s.experts is not None, "a model with experts declares them"
            self.experts = SparseMLP(s.hidden, s.experts, s.activation, dtype, device, shard)
        if kind.feed_forward == "both":
            norm = partial(RMSNorm, s.hidden, s.norm_eps, dtype, device)
            self.experts_norm, self.router_norm = norm(), norm(factor=s.hidden**-0.5)
            self.mlp_post_norm, self.experts_sum = norm(), ResidualSum(norm())

    def mix(self, x: Tensor, delta: Tensor | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Run the layer up to the mixer: return its output, before `out`."""
        normed = self.attention_norm(x, delta)
        if self.mixer is not None:
            return self.mixer.mix(normed, *ctx.state(self.layer))
        return self.attention(normed, ctx, last)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the rest of the layer: return x and the next residual."""
        if self.residual_scale is not None:
            mixed = mixed * self.residual_scale  # not the output, which ranks may be sending already
        return self.run_mlp(x, (self.attention if self.mixer is None else self.mixer).out(mixed))

    def run_mlp(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Run the feed-forward block, if there is one."""
        if self.mlp is not None and self.experts is not None:  # norm(mlp(norm(x))) + norm(experts(norm(x))) (Gemma 4)
            dense = self.mlp_post_norm.normalize_term(self.mlp(self.mlp_norm(x, delta)))
            return x, self.experts_sum(dense, self.experts(self.experts_norm(x), self.router_norm(x)))
        mlp = self.mlp or self.experts
        if mlp is None:
            return x, delta
        delta = mlp(self.mlp_norm(x, delta))
        return x, delta if self.residual_scale is None else delta.mul_(self.residual_scale)


def arrange_rows(model: nn.Module, s: DecoderConfig, sources: dict[str, WeightSource]) -> dict[str, WeightSource]:
    """Return the sources of a model's parameters with the order of their rows in the checkpoint, where it is another
    one than in the parameter."""
    turned = any(rope.partial_rotary_factor < 1 for rope in s.ropes)
    arranged = {}
    for name, source in sources.items():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        if path.startswith("layers.") and path.endswith(".attention.qkv"):
            assert isinstance(module, Linear), f"{name} is no weight of a linear layer"
            if s.grouped_qkv:
                source = source._replace(group_rows=(s.heads // s.kv_heads * s.head_dim, s.head_dim, s.head_dim))
            if s.attention_gate:
                source = source._replace(group_rows=(s.head_dim, s.head_dim))
            if turned or s.attention_gate:
                source = source._replace(row_order=_qkv_row_order(s, *module.output_sizes))
        elif path.endswith((".attention.q_norm", ".attention.k_norm")) and s.qk_norm == "head" and turned:
            [rope] = s.ropes
            source = source._replace(row_order=tuple(rope.rotary_order(s.head_dim)))
        elif isinstance(s.state_mixer, DeltaRuleConfig) and len(source.tensors) == 1 and kind == "weight":
            # A tensor that has all of a product has it by key heads.
            w = s.state_mixer
            shared = w.heads // w.key_heads
            if path.endswith(".mixer.in_proj"):
                values = shared * w.value_dim
                source = source._replace(group_rows=(w.key_dim, w.key_dim, values, values))
            elif path.endswith(".mixer.ba_proj"):
                source = source._replace(group_rows=(shared, shared))
        arranged[name] = source
    return arranged


def _qkv_row_order(s: DecoderConfig, *sizes: int) -> tuple[int, ...]:
    """Return the row order of a qkv weight of projections with these `sizes`: gates before queries; queries and keys as
    rotation needs them; values unchanged."""
    [rope], dim = s.ropes, s.head_dim
    gates = sizes[0] if s.attention_gate else 0
    *turned, values = sizes[1:] if s.attention_gate else sizes
    starts = (*range(0, turned[0], dim), *range(turned[0] + gates, gates + sum(turned), dim))
    heads = [head + row for head in starts for row in rope.rotary_order(dim)]
    end = gates + sum(turned)
    return (*range(turned[0], turned[0] + gates), *heads, *range(end, end + values))


def make_norm(
    s: DecoderConfig, dtype: torch.dtype, device: torch.device, *, first: bool = False, final: bool = False,
    after: LayerConfig | None = None,
) -> RMSNorm | LayerNorm | ResidualSum:  # fmt: skip
    """Return the norm of a block's input, or the `final` one. It adds the output of the block before, through that
    one's post norm, unless it is the `first`. `after`: the layer that ends there."""
    if s.layer_norm:
        return LayerNorm(s.hidden, s.norm_eps, dtype, device) if s.final_norm or not final else ResidualSum()
    norm = partial(RMSNorm, s.hidden, s.norm_eps, dtype, device, offset=s.norm_offset)
    post_norm = norm() if s.post_norms and not first else None
    if not s.pre_norms and not final:
        return ResidualSum(post_norm)
    scaled = s.layer_scales and after is not None
    sums_ranks = after is None or (after.feed_forward != "both" and not s.per_layer_dim)
    return norm(post_norm=post_norm, scaled=scaled, sums_ranks=sums_ranks)


class Decoder(ShardedModule):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        self.config = s = read_model_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.weight_prefixes = s.weight_prefixes
        self.vocab_shard = shard_vocab(shard, s.vocab_size)
        rows = shard_vocab(shard, s.vocab_size + s.extra_tokens)
        embeds = shard.has_embedding(s.tied)
        self.embed_tokens = Embedding(rows, s.embed_dim, dtype, device, s.embed_scale) if embeds else None
        self.positions = None
        if s.positions and shard.is_first_stage:
            self.positions = Embedding(s.positions, s.hidden, dtype, device)
        self.rotary = module_list(RotaryEmbedding(rope, head_dim, s.max_len) for rope, head_dim in s.rope_tables)
        rotary = dict(zip(s.rope_tables, self.rotary))

        def make(layer: int) -> nn.Module:
            kind = s.layers[layer]
            table = None if kind.rope is None else rotary[kind.rope, s.heads_of(kind)[1]]
            return self.make_layer(layer, table, dtype, device, shard)

        self.layers: Sequence[Any] = make_layers(shard, len(s.layers), make)
        self.norm = make_norm(s, dtype, device, final=True, after=s.layers[-1])
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        has_head = shard.has_lm_head(s.tied)
        self.head = Linear(s.embed_dim, self.vocab_shard, False, dtype, device, tied) if has_head else None
        self.softcap = None if s.final_softcap is None else Softcap(s.final_softcap, dtype, device)
        projected = s.embed_dim != s.hidden
        self.project_in = Linear(s.embed_dim, s.hidden, False, dtype, device) if projected else None
        self.project_out = Linear(s.hidden, s.embed_dim, False, dtype, device) if projected else None

    def make_layer(self, layer: int, *args: Any) -> nn.Module:
        """Return the layer of that number; `args` are those of DecoderLayer after it."""
        return DecoderLayer(self.config, layer, *args)

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last layer's mixer: return x [T, hidden] and the mixer's output. That of a mixer
        with a state is of all tokens, since all of them advance it."""
        return self.run_layers(self.embed_inputs(tokens, ctx), ctx)

    def embed_inputs(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the first layer's input [T, hidden], a new tensor."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        x = self.embed_tokens(tokens)
        x = x if self.project_in is None else self.project_in(x)
        if self.positions is None:
            return x
        return self.positions(ctx.positions, add_to=x, offset=self.config.position_offset)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        states = ctx.hidden_states
        for number, layer in enumerate(layers):
            mixed = layer.mix(x, delta, ctx)
            if states is not None:  # x includes delta now
                states.store_layer(number, x)
            x, delta = layer.feed_forward(x, mixed)
        mixed = last.mix(x, delta, ctx, last=True)
        if states is not None:
            states.store_layer(len(layers), x)
        return x, mixed

    def finish(self, x: Tensor, mixed: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        if self.config.layers[-1].mixer == "state":
            mixed = ctx.select_logits_rows(mixed)
        hidden = self.finish_selected(ctx.select_logits_rows(x), mixed)
        if ctx.hidden_states is not None:
            ctx.hidden_states.store_final(hidden)
        return hidden

    @property
    def can_cut_attention(self) -> bool:
        """True if the last layer's mixer may compute all tokens in one graph up to its keys and values, or its states,
        and the outputs of some rows in another, for `finish_selected`. Gates would be missing there."""
        return not self.config.attention_gate

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Run what follows the last mixer, for the selected tokens: return hidden states [R, hidden]."""
        return self.norm(*self.layers[-1].feed_forward(x, mixed))

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        logits = self.head(hidden if self.project_out is None else self.project_out(hidden))
        if self.config.logits_scale is not None:
            logits.mul_(self.config.logits_scale)
        if self.softcap is not None:
            logits = self.softcap(logits)
        return gather_logits(logits, self.vocab_shard, None if local else self.exchange)

    def advance_states(self, tokens: int, state: Callable[[int], tuple[StateCache, StatePlan]]) -> None:
        """Advance all layers' states over rows of the first `tokens` saved tokens: see StateMixer.advance. `state`
        returns those of a layer, and the plan."""
        for layer in self.layers:
            if isinstance(layer, DecoderLayer) and layer.mixer is not None:
                layer.mixer.advance(*state(layer.layer), tokens)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        sources = expand_weight_names(self, self.config.weight_names, self.config.transposed_weights)
        return arrange_rows(self, self.config, sources)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        s, frequencies = self.config, (r"(.*\.)?rotary_emb\.inv_freq",)
        return (*s.ignored_weights, *(frequencies if s.ropes else ()), *((r"lm_head\.weight",) if s.tied else ()))

    @property
    def num_stacked_experts(self) -> int:
        """The number of experts of a layer if a checkpoint has one tensor of all of them, else 0."""
        s = self.config
        return s.experts.count if s.stacked_experts and s.experts is not None else 0

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels, pack weights, build the rotary tables for positions below `max_len`. Call once, after
        loading. `deterministic`, `mapped_files`: see quire.layers.prepare."""
        for rotary in self.rotary:
            assert isinstance(self.norm, RMSNorm), "models with rotary embeddings have RMS norms"
            rotary.prepare(self.norm.weight.device, max_len)
        prepare_layers(self, deterministic, mapped_files)
