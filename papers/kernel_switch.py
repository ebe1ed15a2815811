"""Count the lines that change when an attention kernel is replaced: the functions below compute the same attention by
several of torch's functions over memory with contiguous addresses.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from papers.entry import Point
from quire.vattention import init

if TYPE_CHECKING:
    from torch import Tensor


# Arguments: a request's queries [T, heads, D], of all its tokens or of the last one, and its keys and values
# [L, KV heads, D], views of virtual tensors.


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def sdpa_flash(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def sdpa_cudnn(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def varlen_attn(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    sizes = len(query), len(keys)
    starts = [torch.tensor([0, size], dtype=torch.int32, device=query.device) for size in sizes]
    return _grouped(varlen_attn)(query, keys, values, *starts, *sizes, window_size=(-1, 0))


def _grouped(attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return torch's varlen_attn with several query heads per key head. Its signature depends on torch's version."""
    from quire.kernels.vendor import gqa_kwargs

    return partial(attend, **gqa_kwargs(attend))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    way.__name__: way for way in (sdpa, sdpa_flash, sdpa_cudnn, varlen_attn)
}
ON_A_CPU = ("sdpa", "sdpa_flash")


def switches() -> list[Point]:
    """Return the `diff` and its `lines` for each switch from one call to another (`before`, `after`), and for each
    `call` that runs here whether its results over virtual tensors are `equal`."""
    changes: list[Point] = [
        {"before": before, "after": after, "lines": len(lines), "diff": lines}
        for before, after in itertools.permutations(WAYS, 2)
        for lines in [change(before, after)]
    ]
    return [*changes, *({"call": call, "equal": same} for call, same in compared().items())]


def change(before: str, after: str) -> list[str]:
    """Return the lines that two ways do not share, without their names, marked - and +."""
    old, new = ([line for line in inspect.getsource(WAYS[name]).splitlines()[1:] if line] for name in (before, after))
    found = difflib.unified_diff(old, new, lineterm="", n=0)
    return [line for line in found if line[:3] not in ("---", "+++") and line[0] in "+-"]


def compared() -> dict[str, bool]:
    """Check for each layout, and each way that runs here, that outputs of a prompt and of a later token over virtual
    tensors equal those over plain ones."""
    import torch

    device, page, dtype, names = "cpu", 4096, torch.float32, [*ON_A_CPU]
    if torch.cuda.is_available():
        device, page, dtype, names = "cuda", 2**21, torch.bfloat16, [*WAYS]
    heads, dim, length, layers = 2, 64, 200, 2
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, 3 * heads, dim, generator=generator).to(device, dtype)
    kept = torch.randn(2 * layers, length, heads, dim, generator=generator).to(device, dtype)
    same = dict.fromkeys(names, True)
    for layout in ("layer", "sliced"):
        cache = init(
            layers, 2, length, heads, dim, dtype.itemsize, page, pages=60, layout=layout, device=device, dtype=dtype
        )
        cache.alloc_reqid()
        reqid = cache.alloc_reqid()
        assert cache.step([1, length]) == 0, "there are pages enough"
        virtual = [tensor[reqid] for tensor in cache.tensors]
        for place, plain in zip(virtual, kept):
            place.copy_(plain)
        for name, asks in itertools.product(names, (query, query[-1:])):
            ours, theirs = (WAYS[name](asks, some[-2], some[-1]) for some in (virtual, kept))
            same[name] &= bool((ours == theirs).all())
        del virtual, place
        cache.close()
    return same
