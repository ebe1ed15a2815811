"""Log-probabilities of tokens: computed for a batch on the device, and read as a `Top` a token on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.data.kernels.limits import SCORED_AT_ONCE
from quire.vocabulary.plan import Top


class Width(NamedTuple):
    """Rows whose log-probabilities are looked up together: by `candidates` for a method to choose from, after masks and
    biases, or as the model has them; by the number of alternatives, which is nobody else's concern; and by whether
    these are tokens that the request names, filled up to this number, or the likeliest ones."""

    candidates: bool
    alternatives: int
    named: bool = False

    @classmethod
    def of_named(cls, ids: Sequence[int]) -> Width:
        """That of a row which asks for `ids`: a power of two, so that a step has few widths."""
        return cls(False, 1 << (len(ids) - 1).bit_length(), True)


def details_of(
    logits: Tensor, tokens: Tensor, width: int, total: Tensor | None = None, named: Tensor | None = None
) -> Tensor:
    """[N, 2 + 2 width] float64: log-probability and rank of tokens [N], the `width` likeliest ids, and theirs.

    Equals come in the order of their ids. `total` [N, 1] normalises in place of the logits' own sum. With `named`
    [N, width] these ids come in place of the likeliest, as they are.
    """
    logprobs = log_softmax(logits) if total is None else logits - total
    own = logprobs.gather(1, tokens[:, None])
    rank = 1 + (logits > logits.gather(1, tokens[:, None])).sum(-1, keepdim=True)
    parts = [own, rank]
    if named is not None:
        parts += [named, logprobs.gather(1, named)]
    elif width:
        ids = logprobs.topk(min(width, logits.shape[1])).indices.sort(-1).values
        values, order = logprobs.gather(1, ids).sort(stable=True, dim=-1, descending=True)
        parts += [ids.gather(1, order), values]
    return torch.cat([part.double() for part in parts], 1)


def scores_of(head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, width: int) -> Tensor:
    """`details_of` the tokens [N] that follow `hidden` [N, H], some at a time: `head` makes logits of hidden states."""
    parts = zip(hidden.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE))
    return torch.cat([details_of(head(some).float(), wanted, width) for some, wanted in parts])


def total_of(logits: Tensor) -> Tensor:
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


def top_of(token: int, details: list[float], k: int, named: bool = False) -> Top:
    """`Top` from one row of `details_of`, its alternatives cut to `k` and, unless they are `named`, to those that masks
    left possible."""
    most = (len(details) - 2) // 2
    logprobs = details[2 + most :][:k]
    while logprobs and logprobs[-1] == -math.inf and not named:
        del logprobs[-1]
    ids = details[2 : 2 + len(logprobs)]
    return Top(token, details[0], int(details[1]), tuple(map(int, ids)), tuple(logprobs))
