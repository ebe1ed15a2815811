"""Log-probabilities of tokens: computed for a batch on the device, and converted to TopLogprobs on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.limits import MAX_SCORED_POSITIONS
from quire.protocol.step_plan import TopLogprobs


class LogprobLayout(NamedTuple):
    """The kind of log-probabilities of a row. Rows with equal layouts are computed together."""

    processed: bool  # of processed logits, for a decoding method, or of the model's own
    num_alternatives: int
    uses_requested_ids: bool = False  # alternatives are the request's ids

    @classmethod
    def for_token_ids(cls, ids: Sequence[int]) -> LogprobLayout:
        """Return the layout of a row with requested ids. Its width is a power of two, for few layouts a step."""
        return cls(False, 1 << (len(ids) - 1).bit_length(), True)


def logprob_details(
    logits: Tensor,
    tokens: Tensor,
    num_alternatives: int,
    log_normalizers: Tensor | None = None,
    requested_ids: Tensor | None = None,
) -> Tensor:
    """Return float64 [N, 2 + 2 width]: log-probability and rank of tokens [N], the `num_alternatives` most likely ids
    and their log-probabilities.

    Equally likely ids are in rising order. `log_normalizers` [N, 1] replace the logits' own. `requested_ids` [N, width]
    replace the most likely ids, in their order.
    """
    logprobs = log_softmax(logits) if log_normalizers is None else logits - log_normalizers
    token_logprobs = logprobs.gather(1, tokens[:, None])
    rank = 1 + (logits > logits.gather(1, tokens[:, None])).sum(-1, keepdim=True)
    parts = [token_logprobs, rank]
    if requested_ids is not None:
        parts += [requested_ids, logprobs.gather(1, requested_ids)]
    elif num_alternatives:
        ids = logprobs.topk(min(num_alternatives, logits.shape[1])).indices.sort(-1).values
        values, order = logprobs.gather(1, ids).sort(stable=True, dim=-1, descending=True)
        parts += [ids.gather(1, order), values]
    return torch.cat([part.double() for part in parts], 1)


def prompt_logprob_details(
    lm_head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, num_alternatives: int
) -> Tensor:
    """Return `logprob_details` of the tokens [N] that follow `hidden` [N, H], computed in chunks. `lm_head` returns the
    logits of hidden states."""
    parts = zip(hidden.split(MAX_SCORED_POSITIONS), tokens.split(MAX_SCORED_POSITIONS))
    return torch.cat([logprob_details(lm_head(chunk).float(), ids, num_alternatives) for chunk, ids in parts])


def log_normalizer(logits: Tensor) -> Tensor:
    """Return the logarithm [N, 1] of the sum of exp(logits [N, V]), computed by `log_softmax`, so that it does not
    depend on the number of rows (`logsumexp` on a GPU does)."""
    best, ids = logits.max(-1, keepdim=True)
    return best - log_softmax(logits).gather(1, ids)


def log_softmax(logits: Tensor) -> Tensor:
    """Return log_softmax of float32 [N, V]. On a GPU rows are padded to multiples of 16 bytes: torch sums a row in an
    order that depends on its alignment, so its result would depend on its place in the batch."""
    vocab = logits.shape[1]
    if logits.is_cuda and vocab % 4:
        logits = torch.nn.functional.pad(logits, (0, -vocab % 4), value=-math.inf)
    return logits.log_softmax(-1)[:, :vocab]


def to_top_logprobs(
    token: int, details: list[float], num_logprobs: int, uses_requested_ids: bool = False
) -> TopLogprobs:
    """Return TopLogprobs from one row of `logprob_details`, with at most `num_logprobs` alternatives and, unless
    `uses_requested_ids`, without those that masks forbid."""
    width = (len(details) - 2) // 2
    logprobs = details[2 + width :][:num_logprobs]
    while logprobs and logprobs[-1] == -math.inf and not uses_requested_ids:
        del logprobs[-1]
    ids = details[2 : 2 + len(logprobs)]
    return TopLogprobs(token, details[0], int(details[1]), tuple(map(int, ids)), tuple(logprobs))
