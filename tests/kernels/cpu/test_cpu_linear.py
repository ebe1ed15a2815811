"""Packed products on CPUs beside fp64: all instruction sets that are built and run here, threads, odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from native_kernels import NONE, VARIANTS
from torch import Tensor

from quire.kernels.cpu import linear as products
from quire.kernels.cpu.library import Library
from quire.kernels.cpu.linear import PackedLinear, linear, lookup_rows
from quire.layers.mlp import ACTIVATIONS, get_gated_activation

BOTH = (torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
SIZES = (
    (1, 64, 64), (2, 1, 1), (3, 100, 33), (5, 31, 2), (13, 96, 576), (32, 65, 100), (47, 7, 1101), (300, 130, 65),
    (145, 70, 2080), (7, 960, 576), (1, 576, 1536), (64, 200, 2100), (7, 64, 5000),
)  # fmt: skip

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor, columns: int) -> None:
    """As near to fp64 as sums in fp32 that are rounded once."""
    step = torch.finfo(got.dtype).eps
    assert got.shape == want.shape
    atol = 4e-7 * columns**0.5 + 1e-6 + 1e-30
    torch.testing.assert_close(got.double(), want, rtol=step, atol=atol * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_products_are_those_of_fp64(use: Callable[[int], Library], dtype: torch.dtype, threads: int) -> None:
    use(threads)
    for rows, size, columns in SIZES:
        weight, bias = numbers(size, columns, dtype=dtype), numbers(size, dtype=dtype, seed=1)
        wide = numbers(rows, 2 * columns + 3, dtype=dtype, seed=2)
        for x in (wide[:, :columns], wide[:, 3 : columns + 3], wide[:, :columns].contiguous()):
            want = x.double() @ weight.double().T
            close(linear(x, PackedLinear(weight)), want, columns)
            into = torch.full((rows, size + 5), 7, dtype=dtype)
            linear(x, PackedLinear(weight, bias), out=into[:, 2:-3])
            close(into[:, 2:-3], want + bias.double(), columns)
            assert (into[:, :2] == 7).all(), "what is beside the output stays"
            assert (into[:, -3:] == 7).all(), "what is beside the output stays"
        assert linear(wide[:0, :columns], PackedLinear(weight)).shape == (0, size)


def test_products_of_pairs(use: Callable[[int], Library], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD: by vdpbf16ps, where the machine has it and no tiles are used."""
    use(2)
    monkeypatch.setattr(products, "has_fast_bf16_dot", lambda: True)
    for rows, size, columns in SIZES:
        weight, x = (numbers(n, columns, dtype=torch.bfloat16, seed=n) for n in (size, rows))
        got = linear(x, packed := PackedLinear(weight))
        close(got, x.double() @ weight.double().T, columns)
        if "amx" not in products.library().path.name:  # type: ignore[union-attr]
            assert all(torch.equal(linear(x[i : i + 1], packed)[0], got[i]) for i in range(rows))


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", products.ACTIVATIONS)
def test_activations(use: Callable[[int], Library], dtype: torch.dtype, name: str) -> None:
    use(2)
    for rows, size, columns in ((1, 64, 40), (9, 50, 33), (40, 6, 8)):
        weight, bias = numbers(size, columns, dtype=dtype), numbers(size, dtype=dtype, seed=1) * 5
        x = numbers(rows, columns, dtype=dtype, seed=2)
        for offset in (None, bias):
            want = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
            if name in ACTIVATIONS:  # others are of a gate and up alone
                close(linear(x, PackedLinear(weight, offset, name)), ACTIVATIONS[name](want), columns)
            gated = get_gated_activation(name)(*want.chunk(2, dim=1))
            close(linear(x, PackedLinear(weight, offset, name, gated=True)), gated, columns)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(
    use: Callable[[int], Library], dtype: torch.dtype
) -> None:
    weight, x = numbers(100, 2200, dtype=dtype), numbers(70, 2200, dtype=dtype, seed=1)
    all_of = []
    for threads in (1, 2, 3, 8):
        use(threads)
        packed = PackedLinear(weight, deterministic=True)
        all_of.append(linear(x, packed))
        for start, end in ((0, 1), (3, 5), (1, 17), (5, 38), (2, 70)):
            assert torch.equal(linear(x[start:end], packed), all_of[0][start:end])
    assert all(torch.equal(one, all_of[0]) for one in all_of)


@pytest.mark.parametrize("dtype", BOTH)
def test_what_is_no_number_stays_in_its_row(use: Callable[[int], Library], dtype: torch.dtype) -> None:
    use(2)
    packed = PackedLinear(numbers(70, 45, dtype=dtype))
    for rows in (2, 6, 40):
        wide = torch.full((rows, 90), torch.nan, dtype=dtype)  # behind the columns too
        wide[:, :45] = numbers(rows, 45, dtype=dtype, seed=1)
        sound = linear(wide[:, :45], packed)
        assert sound.isfinite().all()
        wide[1, 3], wide[rows - 1, 44] = torch.nan, torch.inf
        got = linear(wide[:, :45], packed)
        assert got[1].isnan().all()
        assert not got[rows - 1].isfinite().any()
        kept = [row for row in range(rows) if row not in (1, rows - 1)]
        assert torch.equal(got[kept], sound[kept])


@pytest.mark.parametrize("dtype", BOTH)
def test_rows_of_a_packed_weight(use: Callable[[int], Library], dtype: torch.dtype) -> None:
    use(2)
    for size, columns in ((100, 33), (5, 64), (64, 1)):
        weight, ids = numbers(size, columns, dtype=dtype), torch.randint(size, (50,))
        packed = PackedLinear(weight)
        assert torch.equal(lookup_rows(packed, ids), weight[ids])
        assert torch.equal(lookup_rows(packed, ids[:0]), weight[:0])
        scale = torch.tensor(8.5).item()
        assert torch.equal(lookup_rows(packed, ids, scale), weight[ids] * scale)


def test_more_dimensions_and_none(use: Callable[[int], Library]) -> None:
    use(1)
    weight, x = numbers(20, 16, dtype=torch.float32), numbers(2, 3, 16, dtype=torch.float32, seed=1)
    torch.testing.assert_close(linear(x, PackedLinear(weight)), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert not products.supports(weight.half())
    assert not products.supports(torch.empty(2, 10**6))
    assert products.supports(weight)
