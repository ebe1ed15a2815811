"""LLaMA (Touvron et al., 2023) with grouped-query attention, and its relatives Mistral (sliding window), Qwen2
(biases), Qwen3 (normalised queries and keys), InternLM2 and Phi-3 (other weight names).

The model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.rotary import RotaryEmbedding
from quire.layers.sharding import shard_columns, shard_heads, shard_vocab
from quire.models.forward_context import ForwardContext
from quire.models.gemma_settings import GemmaSettings
from quire.models.mamba_settings import JambaSettings
from quire.models.settings import LlamaSettings
from quire.models.weight_names import INTERNLM2_WEIGHT_NAMES, PHI3_WEIGHT_NAMES, WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens.weight": "embed_tokens.weight",
    "layers.*.attention_norm.weight": "layers.*.input_layernorm.weight",
    "layers.*.attention.qkv.weight": tuple(f"layers.*.self_attn.{x}_proj.weight" for x in "qkv"),
    "layers.*.attention.q.weight": "layers.*.self_attn.q_proj.weight",
    "layers.*.attention.q.bias": "layers.*.self_attn.q_proj.bias",
    "layers.*.attention.qkv.bias": tuple(f"layers.*.self_attn.{x}_proj.bias" for x in "qkv"),
    "layers.*.attention.q_norm.weight": "layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "layers.*.self_attn.k_norm.weight",
    "layers.*.attention.out.weight": "layers.*.self_attn.o_proj.weight",
    "layers.*.attention.out.bias": "layers.*.self_attn.o_proj.bias",
    "layers.*.mlp_norm.weight": "layers.*.post_attention_layernorm.weight",
    "layers.*.mlp.gate_up.weight": ("layers.*.mlp.gate_proj.weight", "layers.*.mlp.up_proj.weight"),
    "layers.*.mlp.gate_up.bias": ("layers.*.mlp.gate_proj.bias", "layers.*.mlp.up_proj.bias"),
    "layers.*.mlp.down.weight": "layers.*.mlp.down_proj.weight",
    "layers.*.mlp.down.bias": "layers.*.mlp.down_proj.bias",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}
WEIGHT_NAMES_BY_FORMAT = {"internlm2": INTERNLM2_WEIGHT_NAMES, "phi3": PHI3_WEIGHT_NAMES}


class LlamaAttention(nn.Module):
    """Queries, keys and values from one product, or queries alone if the layer shares another's keys and values; their
    rotation, if any; attention through the context; the output projection."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, settings: LlamaSettings | GemmaSettings | JambaSettings, layer: int, dtype: torch.dtype,
        device: torch.device, shares_kv: bool = False, shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.head_dim = layer, settings.head_dim
        queries, keys = shard_heads(shard, settings.heads, settings.kv_heads, settings.head_dim)
        rows = (queries, keys, keys)
        self.qkv = None if shares_kv else Linear(settings.hidden, rows, settings.qkv_bias, dtype, device)
        self.q = Linear(settings.hidden, rows[:1], settings.qkv_bias, dtype, device) if shares_kv else None
        self.out = Linear(queries, settings.hidden, settings.out_bias, dtype, device)
        norm = partial(RMSNorm, settings.head_dim, settings.norm_eps, dtype, device, offset=settings.norm_offset)
        self.q_norm = norm() if settings.qk_norm else None
        self.k_norm = norm() if settings.qk_norm else None

    def forward(self, x: Tensor, rotary: RotaryEmbedding | None, ctx: ForwardContext, last: bool = False) -> Tensor:
        """Return the heads' outputs [T, heads * head_dim], before `out`."""
        product = self.qkv or self.q
        assert product is not None, "a layer has queries"
        qkv = product(x).view(len(x), -1, self.head_dim)
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        return ctx.attend(self.layer, qkv, rotary, norms, last).flatten(1)


class LlamaDecoderLayer(nn.Module):
    """x += attention(norm(x)); returns x and the next residual, mlp(norm(x)). Each sum is left to the norm that
    follows, which reads all of x anyway."""

    def __init__(
        self, settings: LlamaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = settings
        self.attention_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.attention = LlamaAttention(
            s, layer, dtype, device, s.attention_kinds[layer].kv_sharing_layer is not None, shard
        )
        self.mlp_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.mlp = GatedMLP(s.hidden, shard_columns(shard, s.intermediate), s.activation, s.mlp_bias, dtype, device)

    def forward(
        self, x: Tensor, delta: Tensor | None, rotary: RotaryEmbedding, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        return self.feed_forward(x, self.attention.out(self.attend(x, delta, rotary, ctx)))

    def attend(
        self, x: Tensor, delta: Tensor | None, rotary: RotaryEmbedding, ctx: ForwardContext, last: bool = False
    ) -> Tensor:
        """Run the layer up to the attention: return its output, before `out`."""
        return self.attention(self.attention_norm(x, delta), rotary, ctx, last)

    def feed_forward(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rest of the layer: return x and the next residual."""
        return x, self.mlp(self.mlp_norm(x, delta))


class Llama(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`."""

    weight_prefixes: ClassVar[tuple[str, ...]] = ("model.",)

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return LlamaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        self.settings = s = LlamaSettings.from_config(config)
        s.for_shard(shard)  # raises StartupError if the model can't be divided so
        self.exchange: Exchange | None = None
        self.vocab_shard = rows = shard_vocab(shard, s.vocab_size)
        self.tied = s.tied
        self.kv_sharing_layers = [i for i, kind in enumerate(s.attention_kinds) if kind.kv_sharing_layer is not None]
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.has_embedding(s.tied) else None
        self.layers = make_layers(
            shard, len(s.attention_kinds), lambda layer: LlamaDecoderLayer(s, layer, dtype, device, shard)
        )
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        tied = self.embed_tokens.weight if s.tied and self.embed_tokens is not None else None
        self.head = Linear(s.hidden, rows, False, dtype, device, tied) if shard.has_lm_head(s.tied) else None
        self.rotary = RotaryEmbedding(s.rope, s.head_dim, s.max_len)

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        for layer in layers:
            x, delta = layer(x, delta, self.rotary, ctx)
        return x, last.attend(x, delta, self.rotary, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run what follows the last attention, for the selected tokens: return hidden states [R, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, self.layers[-1].attention.out(attended))
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        s, attention = self.settings, "attention.qkv.weight"
        names = expand_weight_names(self, {**WEIGHT_NAMES, **WEIGHT_NAMES_BY_FORMAT.get(s.weight_format, {})})
        if s.weight_format == "internlm2":
            grouped = s.heads // s.kv_heads * s.head_dim, s.head_dim, s.head_dim
            names |= {k: source._replace(group_rows=grouped) for k, source in names.items() if k.endswith(attention)}
        if s.rope.partial_rotary_factor < 1:
            names |= {
                k: source._replace(row_order=self._qkv_row_order(k))
                for k, source in names.items()
                if k.endswith(attention)
            }
        return names

    def _qkv_row_order(self, name: str) -> tuple[int, ...]:
        """Return the row order of a qkv weight: queries and keys as rotation needs them, values unchanged."""
        qkv = self.get_submodule(name.rpartition(".")[0])
        assert isinstance(qkv, Linear), f"{name} is no weight of a linear layer"
        *rotated, values = qkv.output_sizes
        dim, end = self.settings.head_dim, sum(rotated)
        heads = [head + row for head in range(0, end, dim) for row in self.settings.rope.rotary_order(dim)]
        return (*heads, *range(end, end + values))

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        shared = tuple(rf"layers\.{layer}\.self_attn\.[kv]_proj\..*" for layer in self.kv_sharing_layers)
        return (r"(.*\.)?rotary_emb\.inv_freq", *shared, *((r"lm_head\.weight",) if self.tied else ()))

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels, pack weights, build the rotary table for positions below `max_len`. Call once, after loading.
        `deterministic`, `mapped_files`: see quire.layers.prepare."""
        self.rotary.prepare(self.norm.weight.device, max_len)
        prepare_layers(self, deterministic, mapped_files)
