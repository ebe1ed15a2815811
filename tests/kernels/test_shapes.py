"""Few shapes, and few programs kept for them: what the memory of a process that serves on a CPU would else go into."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.kernels.onednn import limit_onednn_cache, round_up_bits

MANY_SHAPES = """
import os, sys
import psutil, torch
from quire.layers.linear import Linear
dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
layer = Linear(256, 1408, False, dtype, torch.device("cpu"))
layer.weight.fill_(0.1)
layer.prepare()
if int(sys.argv[1]):
    layer.packed = layer.packed.args[0]  # the product itself, of as many rows as are given
x, process = torch.ones(2048, 256).to(dtype), psutil.Process()
x_ = layer(x), layer(x[:7])
before = process.memory_info().rss
with torch.inference_mode():
    for rows in range(1, 1024, 2):
        layer(x[:rows])
print((process.memory_info().rss - before) >> 20, os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""


def test_rounded() -> None:
    for bits in (1, 2, 3, 4):
        for number in range(5000):
            padded = round_up_bits(number, bits)
            assert padded == number or number < padded <= number * (1 + 2.0 ** (1 - bits))
            assert len(f"{padded:b}".rstrip("0")) <= bits
            assert round_up_bits(padded, bits) == padded
    assert [round_up_bits(n, 1) for n in (1, 2, 3, 5, 200, 256, 257)] == [1, 2, 4, 8, 256, 256, 512]
    assert [round_up_bits(n, 3) for n in (7, 9, 31, 33, 2000)] == [7, 10, 32, 40, 2048]


@pytest.mark.parametrize("unpadded", [0, 1])
def test_512_shapes_take_little_memory(unpadded: int) -> None:
    """By the padding, and without it by the bound; with neither it was 460 MiB on a CPU with AMX."""
    grown, kept = many_shapes(unpadded)
    assert grown < 200, f"{grown} MiB"
    assert kept == 64


def test_the_users_own_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.setenv(name, "7")
    limit_onednn_cache()
    assert [os.environ[name] for name in names] == ["7", "7"]


def many_shapes(unpadded: int) -> tuple[int, int]:
    """MiB that oneDNN's products of 512 shapes leave behind, and the bound, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES, str(unpadded)], capture_output=True, text=True,
                          env={**clean, "QUIRE_CPU_KERNELS": "off"}, check=True)  # fmt: skip
    grown, kept = map(int, done.stdout.split())
    return grown, kept
