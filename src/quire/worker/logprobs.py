"""Log-probabilities of tokens: computed for a batch on the device, and read as a `TopLogprobs` a token on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.limits import MAX_SCORED_POSITIONS
from quire.protocol.step_plan import TopLogprobs


class LogprobLayout(NamedTuple):
    """Rows whose log-probabilities are looked up together: by `processed` for a method to choose from, after masks and
    biases, or as the model has them; by the number of alternatives, which is nobody else's concern; and by whether
    these are tokens that the request names, filled up to this number, or the likeliest ones."""

    processed: bool
    num_alternatives: int
    uses_requested_ids: bool = False

    @classmethod
    def for_token_ids(cls, ids: Sequence[int]) -> LogprobLayout:
        """That of a row which asks for `ids`: a power of two, so that a step has few widths."""
        return cls(False, 1 << (len(ids) - 1).bit_length(), True)


def logprob_details(
    logits: Tensor,
    tokens: Tensor,
    num_alternatives: int,
    log_normalizers: Tensor | None = None,
    requested_ids: Tensor | None = None,
) -> Tensor:
    """[N, 2 + 2 width] float64: log-probability and rank of tokens [N], the `num_alternatives` likeliest ids, and
    theirs.

    Equals come in the order of their ids. `log_normalizers` [N, 1] normalises in place of the logits' own sum. With
    `requested_ids` [N, width] these ids come in place of the likeliest, as they are.
    """
    logprobs = log_softmax(logits) if log_normalizers is None else logits - log_normalizers
    own = logprobs.gather(1, tokens[:, None])
    rank = 1 + (logits > logits.gather(1, tokens[:, None])).sum(-1, keepdim=True)
    parts = [own, rank]
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
    """`logprob_details` the tokens [N] that follow `hidden` [N, H], some at a time: `lm_head` makes logits of "
    "hidden states."""
    parts = zip(hidden.split(MAX_SCORED_POSITIONS), tokens.split(MAX_SCORED_POSITIONS))
    return torch.cat([logprob_details(lm_head(some).float(), wanted, num_alternatives) for some, wanted in parts])


def log_normalizer(logits: Tensor) -> Tensor:
    """The logarithm of the sum of exp(logits [N, V]), [N, 1]; as `log_softmax` has it, so that a row's doesn't depend
    on how many rows there are (which `logsumexp` on a GPU does)."""
    best, ids = logits.max(-1, keepdim=True)
    return best - log_softmax(logits).gather(1, ids)


def log_softmax(logits: Tensor) -> Tensor:
    """Of float32 [N, V]. On a GPU rows begin at multiples of 16 bytes: torch sums a row in an order that depends on
    where it begins, so that a row's result would depend on its place in the batch."""
    vocab = logits.shape[1]
    if logits.is_cuda and vocab % 4:
        logits = torch.nn.functional.pad(logits, (0, -vocab % 4), value=-math.inf)
    return logits.log_softmax(-1)[:, :vocab]


def to_top_logprobs(
    token: int, details: list[float], num_logprobs: int, uses_requested_ids: bool = False
) -> TopLogprobs:
    """`TopLogprobs` from one row of `logprob_details`, its alternatives cut to `num_logprobs` and, unless they are
    `uses_requested_ids`, to those that masks left possible."""
    most = (len(details) - 2) // 2
    logprobs = details[2 + most :][:num_logprobs]
    while logprobs and logprobs[-1] == -math.inf and not uses_requested_ids:
        del logprobs[-1]
    ids = details[2 : 2 + len(logprobs)]
    return TopLogprobs(token, details[0], int(details[1]), tuple(map(int, ids)), tuple(logprobs))
