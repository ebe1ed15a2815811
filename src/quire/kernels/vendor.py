"""Attention of one sequence's tokens by kernels of torch that do not support pages: they read keys and values that are
contiguous in virtual memory as views (vAttention §5.2, Figure 12). The kernels handle grouped heads and strides
themselves: nothing is gathered, copied or repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.kernels.forward_batch import LayerCache

MIN_CONTEXT = 4096
"""The shortest context in tokens for which these kernels compute a prompt. On an H200 cuDNN's is as fast as ours at
2,048 and a seventh faster at 4,096; FlashAttention-2 is never faster. Smaller steps can be replayed as graphs."""

MIN_QUERIES = 64
"""The fewest queries: the kernels have tiles of 64 or 128, and torch makes a cuDNN plan for each number of queries."""

MAX_HEAD_DIMS = {"flash": 256, "cudnn": 128, "varlen": 256}
"""The largest head_dim of each kernel; it must be a multiple of 8."""

Kernel = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
"""(q [Q, heads, dim], keys and values [kv_heads, start + Q, dim], start, scale) -> [Q, heads, dim]: causal attention of
the tokens at positions `start` and on. Any strides, the last of which is 1."""


def supports_layer(name: str, cache: LayerCache) -> bool:
    """Return True if the kernel can compute this layer: contiguous, without window, chunk, softcap and sinks,
    and of supported sizes."""
    plain = cache.contiguous and not cache.is_local and cache.softcap is None and cache.sinks is None
    return plain and supports_heads(name, cache)


def supports_heads(name: str, cache: LayerCache) -> bool:
    """Return True if the kernel supports the layer's dtype and head_dim. On a CPU a substitute supports all."""
    sizes = cache.dtype.itemsize == 2 and cache.head_dim % 8 == 0 and cache.head_dim <= MAX_HEAD_DIMS[name]
    return sizes or cache.device.type == "cpu"


def flash(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attend by FlashAttention-2, as torch's SDPA calls it. Its causal mask ends with the last key, so a chunk is one
    call."""
    if q.device.type == "cpu":
        return _attend_in_two(q, keys, values, start, scale)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return _tokens_first(attend(_heads_first(q), keys[None], values[None], 0.0, True, scale=scale)[0])


def cudnn(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attend by cuDNN's kernel, as torch's SDPA calls it."""
    return _attend_in_two(q, keys, values, start, scale)


def varlen(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attend by `torch.nn.attention.varlen.varlen_attn`; with a window of 0 tokens to the right, its causal mask ends
    with the last key."""
    from torch.nn.attention.varlen import varlen_attn

    sizes = len(q), keys.shape[1]
    bounds = [torch.arange(0, size + 1, size, dtype=torch.int32, device=q.device) for size in sizes]  # without a copy
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    attend: Callable[..., Any] = varlen_attn  # its signature depends on torch's version
    out: Tensor = attend(q, k, v, *bounds, *sizes, scale=scale, window_size=(-1, 0), **gqa_kwargs(varlen_attn))
    return out


KERNELS: dict[str, Kernel] = {"flash": flash, "cudnn": cudnn, "varlen": varlen}


def _attend_in_two(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Attend by a kernel whose causal mask begins with the first key, in two calls: one for the tokens before the
    chunk, which all of its queries see, one for the chunk. Results are weighted by their sums of exponentials."""
    attend, query = SDPA_OPS[q.device.type], _heads_first(q)
    k, v = keys[None], values[None]
    chunk, logs = attend(query, k[:, :, start:], v[:, :, start:], True, start > 0, scale)
    if start == 0:
        return _tokens_first(chunk)
    before, logs_before = attend(query, k[:, :, :start], v[:, :, :start], False, True, scale)
    share = torch.sigmoid(logs.reshape(*query.shape[:3], 1) - logs_before.reshape(*query.shape[:3], 1))
    return _tokens_first(before.float().lerp_(chunk.float(), share).to(q.dtype))


def _cudnn_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, logs: bool, scale: float) -> Any:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q, k, v, None, logs, 0.0, causal, scale=scale)[:2]


def _cpu_op(q: Tensor, k: Tensor, v: Tensor, causal: bool, logs: bool, scale: float) -> Any:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, 0.0, causal, scale=scale)


SDPA_OPS = {"cuda": _cudnn_op, "cpu": _cpu_op}
"""(q, k, v [1, heads, *, dim], causal, whether to return the sums, scale) -> (result, logarithms of its sums of
exponentials, [1, heads, Q] or with a last dimension of 1)."""


def _heads_first(q: Tensor) -> Tensor:
    return q.transpose(0, 1)[None]


def _tokens_first(out: Tensor) -> Tensor:
    return out[0].transpose(0, 1)


@lru_cache
def gqa_kwargs(varlen_attn: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments that permit query heads to share key heads: torch 2.12 and later require one."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
