"""What a slot's sampling parameters do to logits, token by token: masks, biases, bad words (see Sampler.sample)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import to_device
from quire.protocol.step_plan import DeviceSamplingParams
from quire.worker.penalties import PhraseTable


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What a slot's parameters do to logits, token by token. Derived from `sampling` alone, so forks share it."""

    sampling: DeviceSamplingParams
    biased_ids: np.ndarray  # token ids, and what is added to their logits: logit_bias, and -inf for one-token bad words
    biases: np.ndarray
    min_tokens_ids: np.ndarray  # token ids masked below min_tokens
    allowed_mask: Tensor | None  # [vocab] bool, on the device
    bad_word_prefixes: PhraseTable  # of bad words of several tokens, and the token that would complete each
    bad_word_last_ids: np.ndarray

    @property
    def changes_logits(self) -> bool:
        """Logits change, whatever the position; or the slot's tokens must be recorded."""
        return self.allowed_mask is not None or len(self.biased_ids) > 0 or self.sampling.needs_history

    @classmethod
    def from_sampling(
        cls, sampling: DeviceSamplingParams, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device
    ) -> LogitRules:
        bias = dict(sampling.logit_bias)
        words = [word for word in sampling.bad_word_ids if word and max(word) < vocab_size]
        bias.update((word[0], -np.inf) for word in words if len(word) == 1)
        longer = [word for word in words if len(word) > 1]
        ends = {*eos_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        allowed = None
        if sampling.allowed_token_ids is not None:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            mask[list(sampling.allowed_token_ids)] = True
            allowed = to_device(mask, device)
        return cls(
            sampling,
            np.array(list(bias), dtype=np.int64),
            np.array(list(bias.values()), dtype=np.float32),
            np.array(sorted(ends), dtype=np.int64),
            allowed,
            PhraseTable.from_phrases([word[:-1] for word in longer]),
            np.array([word[-1] for word in longer], dtype=np.int64),
        )
