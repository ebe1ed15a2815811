"""Llama 3.2 Vision (Grattafiori et al., 2024, §7): a Llama with cross-attention layers between its layers, which attend
to the vision encoder's rows of images. Their outputs are multiplied by learned gates, initially 0.

The model works on tokens and a ForwardContext; batching, the cache and sampling are outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from quire.models.llama import WEIGHT_NAMES as LLAMA_NAMES
from quire.models.llama import LlamaDecoderLayer
from quire.models.mllama_settings import EXTRA_TOKENS, MllamaSettings
from quire.models.settings import LlamaSettings
from quire.models.vision import build_encoder
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **LLAMA_NAMES,
    "layers.*.cross.q.weight": "layers.*.cross_attn.q_proj.weight",
    "layers.*.cross.kv.weight": tuple(f"layers.*.cross_attn.{x}_proj.weight" for x in "kv"),
    "layers.*.cross.out.weight": "layers.*.cross_attn.o_proj.weight",
    **{f"layers.*.cross.{x}_norm.weight": f"layers.*.cross_attn.{x}_norm.weight" for x in "qk"},
    "layers.*.attention_gate": "layers.*.cross_attn_attn_gate",
    "layers.*.mlp_gate": "layers.*.cross_attn_mlp_gate",
}


class CrossAttention(nn.Module):
    """Attention of tokens' queries to keys and values of image rows. Queries and keys are normalised per head, and not
    rotated."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, settings: LlamaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = settings
        queries, keys = shard_heads(shard, s.heads, s.kv_heads, s.head_dim)
        self.layer, self.head_dim = layer, s.head_dim
        self.q = Linear(s.hidden, queries, False, dtype, device)
        self.kv = Linear(s.hidden, (keys, keys), False, dtype, device)
        self.out = Linear(queries, s.hidden, False, dtype, device)
        self.q_norm = RMSNorm(s.head_dim, s.norm_eps, dtype, device)
        self.k_norm = RMSNorm(s.head_dim, s.norm_eps, dtype, device)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        queries = self.q_norm(self.q(x).view(len(x), -1, self.head_dim))
        return self.out(ctx.cross_attend(self.layer, queries).flatten(1))

    def project_kv(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of image rows [R, hidden], [R, kv_heads, head_dim] each."""
        keys, values = self.kv(rows).view(len(rows), 2, -1, self.head_dim).unbind(1)
        return self.k_norm(keys), values


class CrossAttentionLayer(nn.Module):
    """x += gate * cross(norm(x)); returns x and the next residual, gate * mlp(norm(x)). Nothing is added for a token
    that attends to no image."""

    def __init__(
        self, settings: LlamaSettings, layer: int, dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        s = settings
        self.attention_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.cross = CrossAttention(s, layer, dtype, device, shard)
        self.mlp_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.mlp = GatedMLP(s.hidden, shard_columns(shard, s.intermediate), s.activation, s.mlp_bias, dtype, device)
        self.cross.out.output_modified = self.mlp.down.output_modified = True  # by gates, in place
        self.attention_gate = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)
        self.mlp_gate = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)

    def forward(
        self, x: Tensor, delta: Tensor | None, image_mask: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """`image_mask` [T, 1] is 1 for tokens that attend to an image, 0 for others."""
        attended = self.cross(self.attention_norm(x, delta), ctx)
        inner = self.mlp(self.mlp_norm(x, attended.mul_(self.attention_gate)))
        return x, inner.mul_(image_mask).mul_(self.mlp_gate)

    def prepare(self) -> None:
        """Replace the gates' parameters by their tanh. Call once, after loading."""
        for gate in (self.attention_gate, self.mlp_gate):
            gate.tanh_()


class Mllama(nn.Module):
    """The model, with uninitialised weights: load them (quire.weights), call `prepare`, then `forward`. The caller runs
    `vision_encoder`, an Encoder (quire.models.vision), before; `project_kv` makes a layer's keys and values of its
    rows."""

    weight_prefixes: ClassVar[tuple[str, ...]] = (
        "model.language_model.", "language_model.model.", "language_model.", "model.vision_model.", "vision_model.",
        "model.",
    )  # fmt: skip

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """Return the ModelSpec of a config.json. Raise StartupError if it is not supported."""
        return MllamaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        settings = MllamaSettings.from_config(config)
        settings.for_shard(shard)  # raises StartupError if the model can't be divided so
        s, cross = settings.text, settings.cross_layers
        self.exchange: Exchange | None = None
        self.vocab_shard = shard_vocab(shard, s.vocab_size)
        rows = shard_vocab(shard, s.vocab_size + EXTRA_TOKENS)
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.is_first_stage else None

        def make(layer: int) -> CrossAttentionLayer | LlamaDecoderLayer:
            return (CrossAttentionLayer if layer in cross else LlamaDecoderLayer)(s, layer, dtype, device, shard)

        self.layers = make_layers(shard, len(s.attention_kinds), make)
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.head = Linear(s.hidden, self.vocab_shard, False, dtype, device) if shard.is_last_stage else None
        self.rotary = RotaryEmbedding(s.rope, s.head_dim, s.max_len)
        local = shard.layer_range(len(s.attention_kinds))  # a stage without cross-attention needs no vision encoder
        self.vision_encoder = build_encoder(settings.vision, dtype, device) if any(i in local for i in cross) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the model up to the last attention: return x [T, hidden] and the attention's output. Cross-attention
        layers are skipped if no token attends to an image."""
        assert self.embed_tokens is not None, "only the first stage embeds"
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `embed`, from embeddings `x`, or from the previous stage's x and delta. x is overwritten."""
        *layers, last = self.layers
        for layer in layers:
            if not isinstance(layer, CrossAttentionLayer):
                x, delta = layer(x, delta, self.rotary, ctx)
            elif ctx.image_mask is not None:
                x, delta = layer(x, delta, ctx.image_mask, ctx)
        assert not isinstance(last, CrossAttentionLayer), "the last layer has self-attention"
        return x, last.attend(x, delta, self.rotary, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """Call `finish_selected` for the tokens that `ctx` selects."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Run what follows the last attention, for the selected tokens: return hidden states [R, hidden]."""
        last = self.layers[-1]
        assert isinstance(last, LlamaDecoderLayer), "the last layer has self-attention"
        return self.norm(*last.feed_forward(x, last.attention.out(attended)))

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype; if `local`, this rank's
        columns, padding included."""
        assert self.head is not None, "only the last stage has logits"
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def project_kv(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a cross-attention layer's keys and values [R, kv_heads, head_dim] of image rows [R, hidden]."""
        block = self.layers[layer]
        assert isinstance(block, CrossAttentionLayer), f"layer {layer} has no cross-attention"
        return block.cross.project_kv(rows)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Map parameter names to the checkpoint's tensors, without prefix. Call before `prepare`."""
        text = nn.ModuleDict({name: part for name, part in self.named_children() if name != "vision_encoder"})
        vision = {} if self.vision_encoder is None else self.vision_encoder.weight_sources()
        return {
            **expand_weight_names(text, WEIGHT_NAMES),
            **{f"vision_encoder.{name}": source for name, source in vision.items()},
        }

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not loaded."""
        return (
            r"(.*\.)?rotary_emb\.inv_freq",
            *(() if self.vision_encoder is None else self.vision_encoder.ignored_weights),
        )

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Choose kernels, pack weights, build the rotary table for positions below `max_len`. Call once, after loading.
        `deterministic`, `mapped_files`: see quire.layers.prepare."""
        self.rotary.prepare(self.norm.weight.device, max_len)
        for layer in self.layers:
            if isinstance(layer, CrossAttentionLayer):
                layer.prepare()
        if self.vision_encoder is not None:
            self.vision_encoder.prepare(deterministic)
        ends = [self.norm] if self.head is None else [self.norm, self.head]
        prepare_layers(nn.ModuleList([*self.layers, *ends]), deterministic, mapped_files)
