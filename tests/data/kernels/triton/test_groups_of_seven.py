"""Yi-34B's heads, 56 of queries for 8 of keys and values of 128 numbers: no power of two, through every kernel."""

from __future__ import annotations

import pytest
import test_prompt_hopper
import torch
from test_paged_attention import (
    CONTIGUOUS,
    DEVICE,
    DTYPES,
    PAGED,
    Shape,
    assert_close,
    check_decode,
    check_prompt,
    dense,
    run_backend,
)
from test_rope_write import Case, check

from quire.data.kernels.triton.backend import TritonBackend
from quire.data.layers.rope import Rope
from quire.data.layers.rotary import Rotary

HEADS, KV_HEADS, DIM = 56, 8, 128


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [*PAGED, *CONTIGUOUS])
def test_decode_and_prompts(layout: str, dtype: torch.dtype) -> None:
    shape = Shape(HEADS, KV_HEADS, DIM, layout=layout)
    check_decode(shape, dtype, (1, 0, 33, 150))
    check_prompt(shape, dtype, ((12, 9), (0, 20), (40, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backend(deterministic: bool, dtype: torch.dtype) -> None:
    rotary = Rotary(Rope(kind="default", theta=5e6, original_len=256), DIM, 256)
    rotary.prepare(DEVICE)
    backend = TritonBackend(deterministic=deterministic)
    run_backend(backend, [(12, 1), (0, 5), (3, 2)], Shape(HEADS, KV_HEADS, DIM), dtype, rotary, fused=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["pages", *CONTIGUOUS])
def test_rotation_and_writes(layout: str, dtype: torch.dtype) -> None:
    check(Case(HEADS, KV_HEADS, DIM, 16, layout), dtype)


@test_prompt_hopper.on_hopper
@pytest.mark.parametrize("dtype", test_prompt_hopper.HALVES)
def test_prompts_by_roles_of_warps(dtype: torch.dtype) -> None:
    chunks = ((12, 9), (0, 300), (500, 40))
    memory, q, want, got = test_prompt_hopper.both(Shape(HEADS, KV_HEADS, DIM), chunks, dtype)
    assert torch.equal(got, want), "to the bit"
    start, count = chunks[0]
    assert_close(got[:count], dense(q[:count], memory.histories[0], start, None))
