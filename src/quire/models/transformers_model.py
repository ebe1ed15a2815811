"""A model of transformers on quire's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import StartupError
from quire.layers.prepare import MappedWeights
from quire.models.forward_context import ForwardContext
from quire.models.transformers_spec import REMEDY, running, split_head

MAX_DIFFERENCE = 0.02
"""Of equal hidden states, in proportion to their norm; rounding to bfloat16 changes less."""


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
        return out[None, :, :, :size].contiguous()


class _SelfAttention:
    """Stands for a step whose tokens attend to themselves alone. The output depends on the query and its rotation."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]) -> Tensor:
        gate = query.mean(dim=-1, keepdim=True) / query.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (values * (1 + gate)).transpose(1, 2).contiguous()


class TransformersModel(nn.Module):
    """A causal language model of transformers, with its weights, as the runner needs it."""

    __call__: Callable[..., Tensor]

    def __init__(self, model: Any, num_layers: int) -> None:
        super().__init__()
        self.base, self.head, self.num_layers = split_head(model), model, num_layers
        self.requires_grad_(False).eval()

    def prepare(
        self, max_len: int | None = None, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()
    ) -> None:
        """Do nothing: transformers' layers compute with the weights as they are."""

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Run tokens [T] int64: return hidden states [R, hidden] of those that `ctx` selects, after the final norm."""
        step = PagedStep(ctx)
        hidden = self._run_base(tokens, ctx.positions, step)
        assert step.layer == self.num_layers, f"{step.layer} layers attended, and the ModelSpec has {self.num_layers}"
        return ctx.select_logits_rows(hidden)

    def _run_base(self, tokens: Tensor, positions: Tensor, step: object) -> Tensor:
        with running(step):
            hidden: Tensor = self.base(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False
            ).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def check_tokens_are_separate(self) -> None:
        """Raise StartupError if a token's hidden state depends on others of its step other than by attention, or on its
        place among them: a recurrence or a shift over tokens, or positions that the model counts itself.

        The model runs two times, with attention that sees the token itself alone: eight tokens, and the same in reverse
        order with every second one replaced. The hidden states of the others must be equal but for rounding."""
        device = next(self.parameters()).device
        positions = torch.arange(8, device=device)
        tokens = positions + 1
        replaced = torch.where(positions % 2 == 0, tokens, 0)
        first = self._run_base(tokens, positions, _SelfAttention())[::2].float()
        second = self._run_base(replaced.flip(0), positions.flip(0), _SelfAttention()).flip(0)[::2].float()
        name = type(self.head).__name__
        if not (first.isfinite().all() and second.isfinite().all()):
            raise StartupError(f"the hidden states of transformers' {name} are not finite numbers: its weights aren't, "
                               "or --dtype has too small a range", "Download the checkpoint again, or use "
                               "--dtype float32")  # fmt: skip
        difference = (first - second).norm(dim=-1) / first.norm(dim=-1)
        if not difference.median() < MAX_DIFFERENCE:  # a median, since experts may change by rounding; not NaN
            raise StartupError(
                f"in transformers' {name} tokens of a step depend on others without attention, or on their order",
                REMEDY,
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden [R, hidden], in the model's dtype."""
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(hidden.dtype)
