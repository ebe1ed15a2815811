"""What a layer with a budget keeps of a prompt (SnapKV §4, PyramidKV §4.2), and its move to the front of its pages.

The prompt's last queries vote: their attention to each token before them is averaged over these queries and over the
query heads that share a key head, then over neighbouring tokens. Each key head keeps the tokens that it finds
likeliest, the earlier one of two that are equal, and the last ones themselves, in the order in which they came.
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
    """A row that computes the end of its sequence's prompt, of `prompt` tokens: `count` of them, the last one in front
    of the step's token `stop`."""

    slot: int
    stop: int
    prompt: int
    count: int


def prompt_ends(batch: ForwardBatch) -> list[PromptEnd]:
    """The rows of a step that do."""
    if batch.prompt_lens is None:
        return []
    prompts, stops = batch.prompt_lens[0], batch.starts + batch.lengths
    rows = np.flatnonzero((batch.starts < prompts) & (stops >= prompts))
    counts = (prompts - batch.starts)[rows]
    ends = (batch.slots[rows], batch.offsets[rows] + counts, prompts[rows], counts)
    return [PromptEnd(*numbers) for numbers in zip(*(x.tolist() for x in ends))]


def compress_prompts(q: Tensor, cache: LayerCache, tables: Tensor, ends: list[PromptEnd]) -> None:
    """Leave of these prompts what the layer keeps: its keys and values are all written, and q [T, heads, dim] are the
    step's queries as they were compared with them."""
    queries = cache.selection.observation_window
    for slot, stop, prompt, count in ends:
        if cache.budget is not None and prompt > cache.budget:
            assert count >= queries, f"the last {queries} tokens of a prompt were computed in several steps"
            _compress_prompt(q[stop - queries : stop], cache, tables[slot], prompt)


def _compress_prompt(q: Tensor, cache: LayerCache, table: Tensor, prompt: int) -> None:
    assert cache.budget is not None, "a layer that keeps all"
    size, shared = cache.page_tokens, cache.heads // cache.kv_heads
    pages = table[: -(-prompt // size)]
    to = torch.arange(cache.budget, device=q.device)
    most = max(MAX_SCORES // (shared * len(q) * prompt), 1)  # key heads at once
    for head in range(0, cache.kv_heads, most):
        heads = slice(head, head + most)
        keys, values = (_gather_tokens(x[pages, heads], prompt) for x in (cache.keys, cache.values))
        query = q[:, head * shared : (head + len(keys)) * shared]
        kept = select_positions(query, keys, cache)[:, :, None].expand(-1, -1, cache.head_dim)
        for there, found in ((cache.keys, keys), (cache.values, values)):
            there[pages[to // size], heads, to % size] = found.gather(1, kept).transpose(0, 1)


def _gather_tokens(pages: Tensor, tokens: int) -> Tensor:
    """[pages, heads, page_tokens, dim] -> [heads, tokens, dim], a copy."""
    return pages.transpose(0, 1).flatten(1, 2)[:, :tokens]


def select_positions(q: Tensor, keys: Tensor, cache: LayerCache) -> Tensor:
    """The positions to keep, rising, a key head: q [queries, heads, dim] are the last queries of the prompt whose keys
    are [kv_heads, tokens, dim]. -> [kv_heads, budget]."""
    assert cache.budget is not None, "a layer that keeps all"
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
