"""Llama 3.2 Vision (Grattafiori et al., 2024, §7): a Llama between whose layers others attend to what its eyes make of
pictures. Gates that were 0 when their training began let through what those layers add.

The model knows tokens and an Attending; it knows no batch, no cache, no sampling.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.pipeline import make_layers
from quire.layers.prepare import prepare_layers
from quire.layers.rotary import RotaryEmbedding
from quire.layers.sharding import shard_columns, shard_heads, shard_vocab
from quire.models import llama
from quire.models.forward_context import ForwardContext
from quire.models.mllama_settings import EXTRA_TOKENS, MllamaSettings
from quire.models.settings import LlamaSettings
from quire.models.vision import build_encoder
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    **llama.WEIGHT_NAMES,
    "layers.*.cross.q.weight": "layers.*.cross_attn.q_proj.weight",
    "layers.*.cross.kv.weight": tuple(f"layers.*.cross_attn.{x}_proj.weight" for x in "kv"),
    "layers.*.cross.out.weight": "layers.*.cross_attn.o_proj.weight",
    **{f"layers.*.cross.{x}_norm.weight": f"layers.*.cross_attn.{x}_norm.weight" for x in "qk"},
    "layers.*.attention_gate": "layers.*.cross_attn_attn_gate",
    "layers.*.mlp_gate": "layers.*.cross_attn_mlp_gate",
}


class CrossAttention(nn.Module):
    """Queries of tokens, keys and values of the rows of pictures; both queries and keys are normalised a head, and
    neither is rotated."""

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
        """rows [R, hidden] -> their keys and values, [R, kv_heads, head_dim] each."""
        keys, values = self.kv(rows).view(len(rows), 2, -1, self.head_dim).unbind(1)
        return self.k_norm(keys), values


class CrossAttentionLayer(nn.Module):
    """x += gate * cross(norm(x)), then x and what is to be added to it next, gate * mlp(norm(x)). Nothing is added for
    a token that sees no picture."""

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
        """`image_mask` [T, 1] is 1 for tokens that see a picture, and 0 for others."""
        looked = self.cross(self.attention_norm(x, delta), ctx)
        inner = self.mlp(self.mlp_norm(x, looked.mul_(self.attention_gate)))
        return x, inner.mul_(image_mask).mul_(self.mlp_gate)

    def prepare(self) -> None:
        """Call once, after loading: gates are what their tanh lets through."""
        for gate in (self.attention_gate, self.mlp_gate):
            gate.tanh_()


class Mllama(nn.Module):
    """The model, its weights uninitialised: fill them (quire.weights), then `prepare`, then `forward`. `vision_encoder`
    is an Encoder (quire.models.vision), which whoever runs the model asks; `project_kv` makes of its rows what a layer
    attends to."""

    weight_prefixes: ClassVar[tuple[str, ...]] = (
        "model.language_model.", "language_model.model.", "language_model.", "model.vision_model.", "vision_model.",
        "model.",
    )  # fmt: skip

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return MllamaSettings.from_config(config).spec()

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        settings = MllamaSettings.from_config(config)
        settings.for_shard(shard)  # refuses what can't be
        s, cross = settings.text, settings.cross_layers
        self.exchange: Exchange | None = None
        self.vocab_shard = shard_vocab(shard, s.vocab_size)
        rows = shard_vocab(shard, s.vocab_size + EXTRA_TOKENS)
        self.embed_tokens = Embedding(rows, s.hidden, dtype, device) if shard.is_first_stage else None

        def make(layer: int) -> nn.Module:
            return (CrossAttentionLayer if layer in cross else llama.LlamaDecoderLayer)(s, layer, dtype, device, shard)

        self.layers = make_layers(shard, len(s.attention_kinds), make)
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.head = Linear(s.hidden, self.vocab_shard, False, dtype, device) if shard.is_last_stage else None
        self.rotary = RotaryEmbedding(s.rope, s.head_dim, s.max_len)
        own = shard.layer_range(len(s.attention_kinds))  # a stage without layers for pictures needs no eyes
        self.vision_encoder = build_encoder(settings.vision, dtype, device) if any(i in own for i in cross) else None

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.finish(*self.embed(tokens, ctx), ctx)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives. Layers for pictures are left out
        where no token sees one."""
        return self.run_layers(self.embed_tokens(tokens), ctx)

    def run_layers(self, x: Tensor, ctx: ForwardContext, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from embeddings on, which are used up; or from what the stage before gives, of this one's layers."""
        *layers, last = self.layers
        for layer in layers:
            if not isinstance(layer, CrossAttentionLayer):
                x, delta = layer(x, delta, self.rotary, ctx)
            elif ctx.image_mask is not None:
                x, delta = layer(x, delta, ctx.image_mask, ctx)
        return x, last.attend(x, delta, self.rotary, ctx, last=True)

    def finish(self, x: Tensor, attended: Tensor, ctx: ForwardContext) -> Tensor:
        """`finish_selected`, of the context's wanted tokens."""
        return self.finish_selected(ctx.select_logits_rows(x), attended)

    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        x, delta = self.layers[-1].feed_forward(x, self.layers[-1].attention.out(attended))
        return self.norm(x, delta)

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `local` this rank's, [R, room]."""
        return gather_logits(self.head(hidden), self.vocab_shard, None if local else self.exchange)

    def project_kv(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer for pictures attends to: keys and values [R, kv_heads, head_dim] of rows [R, hidden]."""
        block = self.layers[layer]
        assert isinstance(block, CrossAttentionLayer), f"layer {layer} attends to no picture"
        return block.cross.project_kv(rows)

    def weight_sources(self) -> dict[str, WeightSource]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        text = nn.ModuleDict({name: part for name, part in self.named_children() if name != "vision_encoder"})
        eyes = {} if self.vision_encoder is None else self.vision_encoder.weight_sources()
        return {
            **expand_weight_names(text, WEIGHT_NAMES),
            **{f"vision_encoder.{name}": stored for name, stored in eyes.items()},
        }

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return (
            r"(.*\.)?rotary_emb\.inv_freq",
            *(() if self.vision_encoder is None else self.vision_encoder.ignored_weights),
        )

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once: choose kernels, pack weights, build the rotary table for positions below `max_len`.
        `deterministic`: see quire.layers.prepare."""
        self.rotary.prepare(self.norm.weight.device, max_len)
        for layer in self.layers:
            if isinstance(layer, CrossAttentionLayer):
                layer.prepare()
        if self.vision_encoder is not None:
            self.vision_encoder.prepare(deterministic)
        ends = [self.norm] if self.head is None else [self.norm, self.head]
        prepare_layers(nn.ModuleList([*self.layers, *ends]), deterministic)
