"""The baseline kernel in vLLM's structure computes attention, in both versions, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from papers.vllm_paged import attend, uses_v1

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 512, 700)  # a token, a whole part, and a part of a part and of a block
CASES = [(16, 1), (16, 4), (32, 4), (64, 8), (128, 1), (128, 4)]


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize(("block", "group"), CASES)
def test_equal_to_torch(block: int, group: int, v1: bool) -> None:
    torch.manual_seed(0)
    rows, longest, kv_heads, dim, x = len(LENGTHS), max(LENGTHS), 2, 16, 4
    count = -(-longest // block)
    k, v = torch.randn(2, rows, kv_heads, count * block, dim, device=DEVICE).unbind()
    tables = torch.randperm(rows * count, device=DEVICE).view(rows, count)
    keys = torch.empty(rows * count, kv_heads, dim // x, block, x, device=DEVICE)
    values = torch.empty(rows * count, kv_heads, dim, block, device=DEVICE)
    by_block = (rows, kv_heads, count, block, dim)
    keys[tables] = k.view(*by_block[:4], dim // x, x).permute(0, 2, 1, 4, 3, 5)
    values[tables] = v.view(by_block).permute(0, 2, 1, 4, 3)
    q = torch.randn(rows, kv_heads * group, dim, device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    results = attend(q, keys, values, tables.int(), lengths, longest, dim**-0.5, v1)
    for i, length in enumerate(LENGTHS):
        one = (x[i : i + 1].double() for x in (q[:, :, None], k[:, :, :length], v[:, :, :length]))
        expected = scaled_dot_product_attention(*one, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(results[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_choice_of_a_version() -> None:
    assert uses_v1(1, 32, 512), "one part"
    assert not uses_v1(16, 32, 513)
    assert uses_v1(17, 32, 8192), "enough programs"
    assert not uses_v1(17, 32, 8193), "too many scores for shared memory"
