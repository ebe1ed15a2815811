"""A model of transformers on quire's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.prepare import MappedWeights
from quire.models.forward_context import ForwardContext
from quire.models.transformers_spec import running, split_head


class PagedStep:
    """A step of a model of transformers, whose attention functions call `attend`, layer by layer in the order of the
    ModelSpec."""

    def __init__(self, ctx: ForwardContext) -> None:
        self.ctx, self.layer = ctx, 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]) -> Tensor:
        """Attend over the pages: see quire.models.transformers_spec. The LayerSpec says window, scale and soft cap.
        Smaller values (multi-head latent attention) are padded, and so are smaller queries and keys."""
        size = value.shape[-1]
        head_dim = max(query.shape[-1], size)
        parts = (F.pad(part[0], (0, head_dim - part.shape[-1])).transpose(0, 1) for part in (query, key, value))
        out = self.ctx.attend(self.layer, torch.cat([*parts], dim=1))
        self.layer += 1
        return out[None, :, :, :size]


class TransformersModel(nn.Module):
    """A causal language model of transformers, with its weights, as the runner needs it."""

    __call__: Callable[..., Tensor]

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base, self.head = split_head(model), model
        self.requires_grad_(False).eval()

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Do nothing: transformers' layers compute with the weights as they are."""

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        with running(PagedStep(ctx)):
            out = self.base(input_ids=tokens[None], position_ids=ctx.positions[None], use_cache=False)
        return ctx.select_logits_rows(out.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype."""
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(hidden.dtype)
