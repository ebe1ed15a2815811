"""Word embeddings of a step's tokens; an id of -1 (plan.LAST) is the slot's most recent sample, held on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(
    tokens, last, slots, weight, out, weight_stride, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK numbers of one token's vector a program, BLOCKS programs a token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    token = tl.load(tokens + row).to(tl.int64)
    sampled = tl.load(last + tl.load(slots + row)).to(tl.int64)  # loaded always: both loads are in flight at once
    token = tl.where(token < 0, sampled, token)
    vector = tl.load(weight + token * weight_stride + columns, mask=mask, other=0.0)
    tl.store(out + row * out_stride + columns, vector, mask=mask)


def embed(
    tokens: Tensor, last: Tensor, slots: Tensor, weight: Tensor, out: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """tokens [T] int64 -> weight[tokens] [T, size] in `out`, a fresh tensor if None; -1 stands for last[slots[t]].

    `last` [slots] holds ids of the vocabulary, also at scratch slot 0; slots [T] int64. pdl: programmatic dependent
    launch, on GPUs of capability 9 and more.
    """
    rows, size = len(tokens), weight.shape[1]
    out = torch.empty((rows, size), dtype=weight.dtype, device=weight.device) if out is None else out
    assert (out.shape, out.dtype) == ((rows, size), weight.dtype), "one vector a token, as the weight holds it"
    assert weight.stride(1) == out.stride(1) == 1, "rows are contiguous"
    assert all(ids.is_contiguous() for ids in (tokens, last, slots)), "plain vectors of ids"
    block = min(triton.next_power_of_2(size), 1024)
    blocks = triton.cdiv(size, block)
    _embed[(rows * blocks,)](
        tokens, last, slots, weight, out, weight.stride(0), out.stride(0), size, block, blocks, pdl,
        num_warps=min(max(block // 256, 1), 4), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
