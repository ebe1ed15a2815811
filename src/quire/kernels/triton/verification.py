"""Verification of draft tokens: how many of them are equal to the samples before them, for all slices in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch

BLOCK = 32  # more than the most draft tokens of a slice


@fast_launch
@triton.jit(do_not_specialize=["width"])
def _accept(
    tokens, sampled, slots, first_samples, drafts, accepted, num_slots, width, KEEPS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    slot, first = tl.load(slots + index), tl.load(first_samples + index)
    i = tl.arange(0, BLOCK)
    draft = tl.load(drafts + index * width + i, mask=i < width, other=-1)
    marked = draft < -1
    proposed = tl.load(sampled + (-1 - draft) * num_slots + slot, mask=marked, other=-1)
    draft = tl.where(marked, proposed, draft)
    sample = tl.load(tokens + first + i, mask=draft >= 0, other=-2)
    count = tl.min(tl.where(sample == draft, BLOCK, i), 0)
    tl.store(accepted + index, count)
    tl.store(sampled + slot, tl.load(tokens + first + count))
    if KEEPS:
        tl.store(sampled + (1 + i) * num_slots + slot, sample, mask=draft >= 0)


def accept_drafts(
    tokens: Tensor, sampled_tokens: Tensor, slots: Tensor, first_samples: Tensor, drafts: Tensor
) -> Tensor:
    """Return the number of accepted draft tokens of each slice [V]. Set sampled_tokens[0] of its slot to the sample
    after these, and sampled_tokens[1 + i], if there is a draft model, to that at the position of its i-th draft token.

    The samples of slice v begin at tokens[first_samples[v]]. Its drafts [V, K] are tokens, -1 after the last one, or
    below -1: -1 - i is sampled_tokens[i] [1 + D, slots] of its slot. All tensors are int64.
    """
    accepted, width = torch.empty_like(slots), drafts.shape[1]
    assert width < BLOCK, f"{width} draft tokens of a slice, at most {BLOCK - 1}"
    _accept[(len(slots),)](
        tokens, sampled_tokens, slots, first_samples, drafts, accepted, sampled_tokens.shape[1], width,
        KEEPS=len(sampled_tokens) > 1, BLOCK=BLOCK,
    )  # fmt: skip
    return accepted


@fast_launch
@triton.jit
def _take(samples, accepted, slots, first_samples, indices, ends, drafts, base_positions):
    row = tl.program_id(0).to(tl.int64)
    slot, index = tl.load(slots + row), tl.load(indices + row)
    count = tl.load(accepted + index, mask=index >= 0, other=0)
    tl.store(drafts + slot, tl.load(samples + tl.load(first_samples + row) + count))
    tl.store(base_positions + slot, tl.load(ends + row) + count + 1)


def take_proposals(
    samples: Tensor,
    accepted: Tensor | None,
    slots: Tensor,
    first_samples: Tensor,
    indices: Tensor,
    ends: Tensor,
    sampled_tokens: Tensor,
    base_positions: Tensor,
) -> None:
    """Set sampled_tokens[1] of each of `slots` [S] to its first proposal, and base_positions to that one's position.

    The draft model's samples of slot s are samples[first_samples[s]], ...: after the token at position ends[s], and
    after each draft token at a later position. accepted[indices[s]] of these were accepted, or none if the index is -1.
    All tensors are int64.
    """
    accepted = slots if accepted is None else accepted
    _take[(len(slots),)](
        samples, accepted, slots, first_samples, indices, ends, sampled_tokens[1], base_positions
    )  # fmt: skip
