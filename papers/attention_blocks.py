"""Measure what page tables cost the attention kernel, on a GPU (PagedAttention Figure 18a)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

PAGE = 16


def decode_kernels(
    models: Mapping[str, tuple[int, int, int]], batches: Sequence[int], contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the microseconds of one layer's decode attention: of our kernel over scattered pages (`paged`) and over
    contiguous ones, the same source, and of torch's (`sdpa`). `models` have query heads, key/value heads of 128, and
    layers."""
    return [
        {"model": model, "batch": batch, "context": context, **_measure(shape, batch, context)}
        for model, shape in models.items()
        for batch in batches
        for context in contexts
    ]


def _measure(shape: tuple[int, int, int], batch: int, context: int) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from quire.bench.kernels import DIM
    from quire.bench.placed_kv import decode_calls, placed
    from quire.bench.replay import inputs, replayed

    heads, kv_heads, layers = shape
    several = min(inputs(2 * batch * kv_heads * context * DIM * 2), layers)

    def ours(contiguous: bool) -> float:
        where = placed(batch, context, kv_heads, DIM, PAGE, several, torch.float16, heads, contiguous)
        return 1e6 * replayed(decode_calls(where), 2)

    paged, contiguous = ours(False), ours(True)
    q, *kv = (
        torch.randn(batch, count, length, DIM, dtype=torch.float16, device="cuda")
        for count, length in ((heads, 1), *((kv_heads, context),) * (2 * several))
    )
    attend = partial(scaled_dot_product_attention, q, enable_gqa=heads > kv_heads)
    calls = [partial(attend, k, v) for k, v in zip(kv[::2], kv[1::2])]
    return {"paged": paged, "contiguous": contiguous, "sdpa": 1e6 * replayed(calls, 2)}
