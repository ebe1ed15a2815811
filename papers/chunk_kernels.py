"""Run the attention of a prompt chunk by every kernel that a memory allows: ours, and torch's own, which need
contiguous keys and values and run unchanged over virtual memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from papers.paged_or_contiguous import prompt_calls

if TYPE_CHECKING:
    from torch import Tensor

    from quire.bench.placed_kv import Placed

APART = 0.05  # of the largest result: the largest difference from fp32


def chunk_calls(where: Placed, start: int, missing: dict[str, str]) -> dict[str, partial[Tensor]]:
    """Return by kernel the attention of the first sequence's tokens from `start` on: [tokens, heads, dim]. Kernels that
    can't compute it are left out, with the reason in `missing`."""
    import torch

    from quire.kernels import vendor

    cache, end = where.caches[0], int(where.lengths[0])
    one = where._replace(slots=where.slots[:1], lengths=where.lengths[:1])
    q = torch.randn(end - start, cache.heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
    calls = dict(prompt_calls(one, missing, start, q))
    if cache.contiguous:
        slot = int(where.tables[int(one.slots[0]), 0])
        k, v = (x[slot, :, :end] for x in (cache.keys, cache.values))
        for name, kernel in (("torch flash", vendor.flash), ("torch cuDNN", vendor.cudnn)):
            calls[f"{name}, contiguous"] = partial(kernel, q, k, v, start, cache.scale)
    return calls


def check(where: Placed, start: int, missing: dict[str, str]) -> list[str]:
    """Return the kernels whose results agree with a plain product in fp32."""
    import torch

    torch.manual_seed(0)
    right = []
    calls = chunk_calls(where, start, missing)
    expected = None
    for name, call in calls.items():
        try:
            found = call().float()
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0][:120]
            continue
        if expected is None:
            query = next(iter(calls.values())).args[0]  # our kernels' first argument
            expected = plain(query, where, start)
        apart = float((found - expected).abs().max())
        if apart <= APART * float(expected.abs().max()):
            right.append(name)
        else:
            missing[name] = f"its results are {apart:.3g} from those in fp32"
    return right


def plain(q: Tensor, where: Placed, start: int) -> Tensor:
    """Return the attention of q [n, heads, dim], tokens from `start` on, in fp32."""
    import torch

    cache, end = where.caches[0], int(where.lengths[0])
    named = where.tables[int(where.slots[0])]
    keys, values = (
        x[named].transpose(0, 1).reshape(cache.kv_heads, -1, cache.head_dim)[:, :end].float()
        for x in (cache.keys, cache.values)
    )
    group = cache.heads // cache.kv_heads
    scores = torch.einsum("nhd,hkd->hnk", q.float(), keys.repeat_interleave(group, 0)) * cache.scale
    later = torch.arange(end, device=q.device) > torch.arange(start, end, device=q.device)[:, None]
    weights = torch.softmax(scores.masked_fill_(later, float("-inf")), -1)
    return torch.einsum("hnk,hkd->nhd", weights, values.repeat_interleave(group, 0))
