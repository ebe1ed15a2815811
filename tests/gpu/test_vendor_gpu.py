"""Kernels of torch that know nothing of pages, over virtual memory on a GPU: attention of any chunk is that in fp32,
nothing behind a sequence's end counts, and the engine answers as with our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_serving import engine_of
from test_virtual_gpu import serve
from torch import Tensor

from papers.attention_times import on_mapped
from quire.bench.kv_batches import KVBatch
from quire.config import VENDOR_ATTENTIONS
from quire.errors import StartupError
from quire.kernels import vendor
from quire.protocol.model_spec import LayerSpec, ModelSpec

pytestmark = pytest.mark.gpu

CONTEXT = 5120
CHUNKS = [  # tokens before, tokens now
    (0, 1), (0, 2), (0, 63), (0, 129), (0, 1000), (0, 5000), (1, 1), (1, 64), (64, 64), (127, 130), (511, 513),
    (1000, 3), (4000, 1000), (4999, 1), (4096, 1024),
]  # fmt: skip
HEADS = [(32, 8, 128), (56, 8, 128), (32, 4, 128), (12, 12, 64)]


def plain(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """The same in fp32, a key head at a time."""
    count, every = len(q), torch.arange(keys.shape[1], device=q.device)
    later = every > every[start : start + count, None]
    parts = []
    for query, key, value in zip(q.float().transpose(0, 1).chunk(len(keys)), keys.float(), values.float()):
        scores = (query @ key.T * scale).masked_fill_(later, -torch.inf)
        parts.append(torch.softmax(scores, -1) @ value)
    return torch.cat(parts).transpose(0, 1)


@pytest.mark.parametrize("layout", ["sliced", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("name", VENDOR_ATTENTIONS)
def test_every_chunk_is_that_in_fp32(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, layout: str
) -> None:
    """What is behind a chunk's end isn't a number there."""
    spec = ModelSpec("test", (LayerSpec(kv_heads, dim),) * 2, 10, CONTEXT, 16, heads, 16, 0)

    def apart(where: KVBatch) -> dict[tuple[int, int], float]:
        found = {}
        cache, slot = where.caches[1], int(where.tables[1, 0])
        kept = [x[slot].clone() for x in (cache.keys, cache.values)]
        for start, count in CHUNKS:
            views, end = [x[slot] for x in (cache.keys, cache.values)], start + count
            for view, numbers in zip(views, kept):
                view.copy_(numbers)
                view[:, end:CONTEXT] = torch.nan
            q = torch.randn(count, heads + 2 * kv_heads, dim, dtype=dtype, device="cuda")[:, :heads]
            keys, values = (view[:, :end] for view in views)
            got = vendor.KERNELS[name](q, keys, values, start, cache.scale)
            expected = plain(q, keys, values, start, cache.scale)
            assert got.shape == expected.shape
            found[start, count] = float((got.float() - expected).abs().max())
        return found

    most = 0.02 if dtype is torch.bfloat16 else 0.004
    found = on_mapped(spec, 1, CONTEXT, layout, apart, dtype=dtype)
    assert {at: far for at, far in found.items() if not far <= most} == {}  # NaN isn't either


@pytest.mark.parametrize("name", VENDOR_ATTENTIONS)
@pytest.mark.parametrize("layout", ["sliced", "layer"])
def test_the_engine_answers_as_with_our_kernels(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts begin the same way; what they go on with may part at a draw that is near."""
    calls, kernel = set(), vendor.KERNELS[name]

    def counted(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
        calls.add((len(q), start))
        return kernel(q, keys, values, start, scale)

    monkeypatch.setitem(vendor.KERNELS, name, counted)
    monkeypatch.setattr(vendor, "MIN_CONTEXT", 64)
    settings: dict[str, Any] = {
        "memory": "virtual", "virtual_layout": layout, "dtype": "float16", "max_num_batched_tokens": 1024
    }  # fmt: skip
    expected, tokens = (serve(attention=attention, **settings).tokens for attention in ("triton", name))
    first = sum(a[0] == b[0] for a, b in zip(tokens, expected))
    assert first >= len(expected) - 2, f"{len(expected) - first} of {len(expected)} answers begin in another way"
    assert any(start > 64 and count > 64 for count, start in calls), "the longest prompt comes in chunks"


def test_with_deterministic_they_are_refused() -> None:
    with pytest.raises(StartupError, match="--deterministic is given, and the attention is flash"):
        engine_of(model_config="llama-125m", memory="virtual", attention="flash", deterministic=True)
