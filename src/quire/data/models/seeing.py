"""Models whose text has pictures' rows in place of tokens' embeddings: LLaVA-OneVision, InternVL, Phi-3-Vision and
PaliGemma. Eyes, and a text model that knows nothing of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.data.models.attending import Attending
from quire.data.models.gemma import Gemma
from quire.data.models.gemma_settings import GemmaSettings
from quire.data.models.llama import Llama
from quire.data.models.names import Stored
from quire.data.models.seeing_settings import SeeingSettings
from quire.data.models.vision import build_encoder
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")


class Seeing(nn.Module):
    """The model, its weights uninitialised: fill them (quire.data.weights), then `prepare`, then `forward`. `eyes` is
    an Encoder (quire.data.models.vision), which whoever runs the model asks before it."""

    @staticmethod
    def spec(config: dict[str, Any]) -> ModelSpec:
        """What a memory needs to know. StartupError for a config that isn't supported."""
        return SeeingSettings.read(config).spec()

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device, part: Part = WHOLE) -> None:
        super().__init__()
        s = SeeingSettings.read(config).of(part)
        self.text = (Gemma if isinstance(s.text, GemmaSettings) else Llama)(s.config, dtype, device, part)
        self.eyes = build_encoder(s.vision, dtype, device) if part.starts else None  # with the embedding
        self.prefixes = (*TEXT_PREFIXES, *(self.eyes.prefixes if self.eyes is not None else ()), *self.text.prefixes)

    def forward(self, tokens: Tensor, ctx: Attending) -> Tensor:
        """tokens [T] int64 -> hidden [T, hidden] (of the context's wanted tokens), after the final norm."""
        return self.behind(*self.begin(tokens, ctx), ctx)

    def begin(self, tokens: Tensor, ctx: Attending) -> tuple[Tensor, Tensor]:
        """Up to the last attention, itself included: x [T, hidden], and what it gives."""
        return self.text.through(ctx.pictures(self.text.embed(tokens)), ctx)

    def through(self, x: Tensor, ctx: Attending, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same from what the stage before gives, of this one's layers."""
        return self.text.through(x, ctx, delta)

    def behind(self, x: Tensor, attended: Tensor, ctx: Attending) -> Tensor:
        """`end`, of the context's wanted tokens."""
        return self.text.behind(x, attended, ctx)

    def end(self, x: Tensor, attended: Tensor) -> Tensor:
        """Behind the last attention, of the tokens whose x and attention these are: hidden [T, hidden]."""
        return self.text.end(x, attended)

    def logits(self, hidden: Tensor, own: bool = False) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab_size], in the model's dtype; with `own` this rank's, [R, room]."""
        return self.text.logits(hidden, own)

    def names(self) -> dict[str, Stored]:
        """Our parameters -> the checkpoint's tensors, without their prefix. Ask before `prepare`."""
        parts = {"text": self.text} if self.eyes is None else {"text": self.text, "eyes": self.eyes}
        return {f"{part}.{name}": stored for part, of in parts.items() for name, stored in of.names().items()}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of tensors that a checkpoint may hold and that are not needed."""
        return self.text.ignored if self.eyes is None else (*self.text.ignored, *self.eyes.ignored)

    def prepare(self, max_len: int | None = None, deterministic: bool = False) -> None:
        """After loading, once, as a text model."""
        self.text.prepare(max_len, deterministic)
        if self.eyes is not None:
            self.eyes.prepare(deterministic)
