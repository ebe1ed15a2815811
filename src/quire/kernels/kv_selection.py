"""Selection of the tokens of a prompt that a layer with a budget keeps (SnapKV §4, PyramidKV §4.2), and their move to
the front of the sequence's pages.

The prompt's last queries (the observation window) vote: their attention to each earlier token is averaged over these
queries and over the query heads that share a key head, then over neighbouring tokens. Each key head keeps the tokens
with the most votes, of equal ones the earlier, and the observation window itself, in their original order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.limits import MAX_SCORES


class PromptEnd(NamedTuple):
    """A row that computes the last `count` of its prompt's `prompt` tokens, which end before token `stop` of the
    step."""

    slot: int
    stop: int
    prompt: int
    count: int  # type: ignore[assignment]  # in place of tuple.count, which is not used


def prompt_ends(batch: ForwardBatch) -> list[PromptEnd]:
    """Return a PromptEnd for each row in which a prompt ends."""
    if batch.prompt_lens is None:
        return []
    prompts, stops = batch.prompt_lens[0], batch.starts + batch.lengths
    rows = np.flatnonzero((batch.starts < prompts) & (stops >= prompts))
    counts = (prompts - batch.starts)[rows]
    ends = (batch.slots[rows], batch.offsets[rows] + counts, prompts[rows], counts)
    return [PromptEnd(*numbers) for numbers in zip(*(x.tolist() for x in ends))]


def compress_prompts(q: Tensor, cache: LayerCache, tables: Tensor, ends: list[PromptEnd]) -> None:
    """Reduce these prompts to the tokens that the layer keeps. Their keys and values must all be written; q [T, heads,
    dim] are the step's queries, normalised and rotated."""
    queries = cache.selection.observation_window
    for slot, stop, prompt, count in ends:
        if cache.budget is not None and prompt > cache.budget:
            assert count >= queries, f"the last {queries} tokens of a prompt must be computed in one step"
            _compress_prompt(q[stop - queries : stop], cache, tables[slot], prompt)


def _compress_prompt(q: Tensor, cache: LayerCache, table: Tensor, prompt: int) -> None:
    assert cache.budget is not None, "the layer has no budget"
    size, shared = cache.page_tokens, cache.heads // cache.kv_heads
    pages = table[: -(-prompt // size)]
    to = torch.arange(cache.budget, device=q.device)
    most = max(MAX_SCORES // (shared * len(q) * prompt), 1)  # key heads at once
    for head in range(0, cache.kv_heads, most):
        heads = slice(head, head + most)
        keys, values = (_gather_tokens(x[pages, heads], prompt) for x in (cache.keys, cache.values))
        query = q[:, head * shared : (head + len(keys)) * shared]
        selected = select_positions(query, keys, cache)[:, :, None].expand(-1, -1, cache.head_dim)
        for target, source in ((cache.keys, keys), (cache.values, values)):
            target[pages[to // size], heads, to % size] = source.gather(1, selected).transpose(0, 1)


def _gather_tokens(pages: Tensor, tokens: int) -> Tensor:
    """Copy the first `tokens` tokens of pages [pages, heads, page_tokens, dim] to [heads, tokens, dim]."""
    return pages.transpose(0, 1).flatten(1, 2)[:, :tokens]


def select_positions(q: Tensor, keys: Tensor, cache: LayerCache) -> Tensor:
    """Return the positions that each key head keeps, ascending, [kv_heads, budget]. q [queries, heads, dim] are the
    last queries of the prompt, whose keys are [kv_heads, tokens, dim]."""
    assert cache.budget is not None, "the layer has no budget"
    heads, tokens, dim = keys.shape
    last, before = len(q), tokens - len(q)
    query = q.view(last, heads, -1, dim).permute(1, 2, 0, 3).float() * cache.scale
    scores = query.flatten(1, 2) @ keys.float().transpose(1, 2)
    if cache.softcap is not None:
        scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    scores = scores.view(heads, -1, last, tokens)
    later = torch.ones(last, last, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., before:].masked_fill_(later, -torch.inf)
    votes = torch.softmax(scores, -1)[..., :before].mean((1, 2))
    votes = F.avg_pool1d(votes, cache.selection.pooling_kernel, stride=1, padding=cache.selection.pooling_kernel // 2)
    order = votes.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : cache.budget - last].sort(dim=1).values
    return torch.cat((chosen, torch.arange(before, tokens, device=q.device).expand(heads, -1)), 1)
