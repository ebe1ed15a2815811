"""Speculation heads: a layer that drafts tokens from the hidden states of its target (quire.models.head_config).

The row of a head at position p has the hidden state of the target's token p and the embedding of token p + 1, and its
logits are those of token p + 2. In a first pass the hidden states are the target's; a later pass reads those that the
pass before left. They are always in the same memory, so graphs may run a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import ShardedModule, gather_logits
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.module_list import module_list
from quire.layers.norm import ResidualSum, RMSNorm
from quire.layers.prepare import MappedWeights, prepare_layers
from quire.layers.rotary import RotaryEmbedding
from quire.layers.sharding import shard_vocab
from quire.models.architectures import read_model_config
from quire.models.decoder import Attention, Decoder, DecoderLayer
from quire.models.forward_context import ForwardContext
from quire.models.head_config import HeadConfig
from quire.models.weight_names import WeightSource, expand_weight_names
from quire.protocol.parallel_layout import UNSHARDED, Shard


class TargetParts(NamedTuple):
    """The parts that a head takes from its target: functions, so that they are no submodules of the head."""

    embed: Callable[[Tensor], Tensor]
    logits: Callable[..., Tensor]


class SpeculationHead(ShardedModule):
    """A head with uninitialised weights: load them, call `prepare`, then `attach` and `allocate`. Its layer is layer 0
    of its context. `hidden` [rows, hidden] holds the hidden states that the next pass reads, row by row."""

    __call__: Callable[..., Tensor]
    norm: RMSNorm

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__()
        read = read_model_config(config)
        assert isinstance(read, HeadConfig), "the configuration of a head declares one"
        self.config = s = read
        s.for_shard(shard)  # raises StartupError if the head can't be divided so
        self.weight_prefixes, self.ignored_weights = s.weight_prefixes, s.ignored_weights
        self.vocab_shard = shard_vocab(shard, s.vocab_size)
        [rope] = s.ropes
        self.rotary = RotaryEmbedding(rope, s.head_dim, s.max_len)
        self.dtype = dtype
        self.target: TargetParts | None = None
        self.hidden: Tensor  # see `allocate`

    def allocate(self, rows: int) -> None:
        """Allocate `hidden`, for passes of up to `rows` rows, where the weights are: a quantized head was made on
        another device."""
        self.hidden = torch.zeros((rows, self.config.hidden), dtype=self.dtype, device=self.norm.weight.device)

    def attach(self, target: Decoder) -> None:
        """Use the target's embedding and LM head, where the head has none."""
        assert target.embed_tokens is not None, "the target is whole"
        self.target = TargetParts(target.embed_tokens, target.logits)

    def start_pass(self, states: Tensor) -> None:
        """Set the first rows of `hidden` for a first pass, from the target's hidden states [T, captured_width]."""
        self.hidden[: len(states)].copy_(self.combine(states))

    def keep_rows(self, index: Tensor) -> None:
        """Keep the rows of `hidden` at `index` [R], in its order, for the next pass."""
        self.hidden[: len(index)].copy_(self.hidden.index_select(0, index))

    def combine(self, states: Tensor) -> Tensor:
        """Return hidden states [T, hidden] from the target's [T, captured_width]."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64 with the first rows of `hidden`. Return the hidden states [R, hidden] of those that
        `ctx` selects, for `logits`; they are the first rows of `hidden` then."""
        x, mixed = self.embed(tokens, ctx)
        return self.finish_selected(ctx.select_logits_rows(x), mixed)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the head up to its attention: return x [T, hidden] and the attention's output, of the selected tokens."""
        raise NotImplementedError

    def finish_selected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Run what follows the attention, for the selected tokens. Return their hidden states [R, hidden], and leave
        them in `hidden`."""
        hidden = self.finish(x, mixed)
        self.hidden[: len(hidden)].copy_(hidden)
        return hidden

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the hidden states of `finish_selected`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden]: -inf for tokens that the head doesn't draft. If
        `local`, this rank's columns, padding included."""
        raise NotImplementedError

    def weight_sources(self) -> dict[str, WeightSource]:
        """See Decoder."""
        return expand_weight_names(self, self.config.weight_names)

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """See Decoder."""
        self.rotary.prepare(self.norm.weight.device, max_len)
        prepare_layers(self, deterministic, mapped_files)


class Eagle3Layer(nn.Module):
    """x += attention([norm(embedding), norm(x)]); returns x and the next residual, mlp(norm(x))."""

    def __init__(
        self, s: HeadConfig, rotary: RotaryEmbedding, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__()
        self.norm_before_residual = s.norm_before_residual
        self.attention_norm, self.hidden_norm, self.mlp_norm = (
            RMSNorm(s.hidden, s.norm_eps, dtype, device) for _ in range(3)
        )
        self.attention = Attention(s, 0, rotary, dtype, device, shard, inputs=2 * s.hidden)
        self.mlp = GatedMLP(s.hidden, s.intermediate, s.activation, s.mlp_bias, dtype, device, shard)

    def mix(self, embeddings: Tensor, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the layer up to the attention: return the residual, and the attention's output, before `out`."""
        normed = self.hidden_norm(x)
        mixed = self.attention(torch.cat((self.attention_norm(embeddings), normed), dim=1), ctx, True)
        return (normed if self.norm_before_residual else x), mixed

    def feed_forward(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Run the rest of the layer: return x and the next residual."""
        return x, self.mlp(self.mlp_norm(x, self.attention.out(mixed)))


class Eagle3Head(SpeculationHead):
    """EAGLE-3: `fc` combines the target's hidden states. The next pass reads the head's hidden states as they are
    before the last norm."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__(config, dtype, device, shard)
        s = self.config
        self.embed_tokens = self.head = self.fc = None
        if s.has_embedding:
            self.embed_tokens = Embedding(self.vocab_shard, s.hidden, dtype, device)
        if s.captured_layers:
            self.fc = Linear(s.captured_width, s.hidden, False, dtype, device)
        self.layers = module_list([Eagle3Layer(s, self.rotary, dtype, device, shard)])
        self.residual = ResidualSum()
        self.norm = RMSNorm(s.hidden, s.norm_eps, dtype, device)
        self.draft_shard = shard_vocab(shard, s.draft_vocab)
        if s.has_lm_head:
            self.head = Linear(s.hidden, self.draft_shard, False, dtype, device)
        self.draft_ids = torch.arange(s.draft_vocab)  # the token of each of the head's logits; with dummy weights

    def set_draft_ids(self, ids: Tensor) -> None:
        """Set the tokens [draft_vocab] that the head drafts. Call it before `prepare`."""
        self.draft_ids = ids

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """See SpeculationHead."""
        self.draft_ids = self.draft_ids.to(self.norm.weight.device)
        super().prepare(max_len, deterministic, mapped_files)

    def combine(self, states: Tensor) -> Tensor:
        """See SpeculationHead."""
        return states if self.fc is None else self.fc(states)

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """See SpeculationHead."""
        assert self.target is not None, "a head is attached before it runs"
        embeddings = self.target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)
        return self.layers[0].mix(embeddings, self.hidden[: len(tokens)], ctx)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See SpeculationHead."""
        return self.residual(*self.layers[0].feed_forward(x, mixed))

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """See SpeculationHead."""
        normed = self.norm(hidden)
        if self.head is None:
            assert self.target is not None, "a head is attached before it runs"
            return self.target.logits(normed, local=local)
        drafted = gather_logits(self.head(normed), self.draft_shard, self.exchange)
        own = self.vocab_shard.local
        logits = drafted.new_full((len(hidden), self.config.vocab_size), -torch.inf)
        logits.index_copy_(1, self.draft_ids, drafted)
        if not local:
            return logits
        padding = self.vocab_shard.padded - len(own)
        return torch.nn.functional.pad(logits[:, own.start : own.stop], (0, padding), value=-torch.inf)


class MtpHead(SpeculationHead):
    """MiMo's MTP layer: a decoder layer after `project_in`, with a norm of its own at the end, whose result the next
    pass reads."""

    def __init__(
        self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED
    ) -> None:
        super().__init__(config, dtype, device, shard)
        s = self.config
        self.token_norm, self.hidden_norm, self.norm = (RMSNorm(s.hidden, s.norm_eps, dtype, device) for _ in range(3))
        self.project_in = Linear(2 * s.hidden, s.hidden, False, dtype, device)
        self.layers = module_list([DecoderLayer(s, 0, self.rotary, dtype, device, shard)])

    def combine(self, states: Tensor) -> Tensor:
        """See SpeculationHead."""
        return states

    def embed(self, tokens: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """See SpeculationHead. As in the published model, the embedding at position 0 counts as zero."""
        assert self.target is not None, "a head is attached before it runs"
        embeddings = self.target.embed(tokens).masked_fill_((ctx.positions == 0)[:, None], 0)
        hidden = self.hidden[: len(tokens)]
        x = self.project_in(torch.cat((self.hidden_norm(hidden), self.token_norm(embeddings)), dim=1))
        return x, self.layers[0].mix(x, None, ctx, True)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See SpeculationHead."""
        return self.norm(*self.layers[0].feed_forward(x, mixed))

    def logits(self, hidden: Tensor, local: bool = False) -> Tensor:
        """See SpeculationHead."""
        assert self.target is not None, "a head is attached before it runs"
        return self.target.logits(hidden, local=local)
