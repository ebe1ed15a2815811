"""The paper's interface on a GPU: a plain model decodes over it, and torch's kernels give what they give elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.reproduce.kernel_switch import WAYS, compared
from quire.vattention import init

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).parents[2] / "examples" / "virtual_memory.py"


def test_the_example() -> None:
    spec = importlib.util.spec_from_file_location("virtual_memory", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    texts, worst = example.main("cuda")
    assert [len(text) for text in texts] == [50, 160, 106]
    assert worst < 1e-4


def test_kernels_over_virtual_tensors() -> None:
    assert compared() == dict.fromkeys(WAYS, True)


def test_a_thread_maps_ahead_while_the_device_computes() -> None:
    layers, reqids, length, heads, dim, page = 2, 3, 4096, 4, 128, 2**21
    cache = init(layers, reqids, length, heads, dim, 2, page, pages=8, device="cuda", background=True)
    one, other = cache.alloc_reqid(), cache.alloc_reqid()
    work = torch.randn(4096, 4096, device="cuda")
    tokens = page // (heads * dim * 2)
    for more in range(8):
        lens = [0] * reqids
        lens[one], lens[other] = tokens - 3 + more, 1 + more
        assert cache.step(lens) == 0
        for tensor in cache.tensors:
            tensor[one, lens[one] - 1], tensor[other, lens[other] - 1] = more, -more
        work = torch.tanh(work @ work)
    assert cache.counts().in_step == 2
    for tensor in cache.tensors:
        assert tensor[one, tokens - 4 : tokens + 4, 0, 0].tolist() == list(range(8))
        assert tensor[other, :8, -1, -1].tolist() == [-i for i in range(8)]
    cache.free_reqid(one)
    assert cache.step([length if i == other else 0 for i in range(reqids)]) == 0
    del tensor
    cache.close()
    assert cache.driver.physical() == 0
