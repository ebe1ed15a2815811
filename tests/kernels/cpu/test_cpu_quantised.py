"""Products with weights of few bits on CPUs beside fp64: all instruction sets that run here, all forms, odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from native_kernels import NONE, VARIANTS, fenced
from torch import Tensor

from quire.kernels.cpu.library import Library
from quire.kernels.cpu.linear import linear, lookup_rows
from quire.kernels.cpu.low_bit_linear import (
    LowBitFormat,
    LowBitWeight,
    PackedLowBitLinear,
    StackedLowBitLinear,
)

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = (
    LowBitFormat(8, 0, 128, False), LowBitFormat(8, 0, 0, True), LowBitFormat(8, 128, 128, True), LowBitFormat(4, 0,
    8, False), LowBitFormat(4, 0, 0, True),
    LowBitFormat(4, 32, 0, True), LowBitFormat(4, 64, 0, True), LowBitFormat(4, 256, 0, True), LowBitFormat(6, 256,
    32, False), LowBitFormat(4, 0, 12, False, True),
)  # fmt: skip
ROUNDED = {torch.bfloat16: 0.04, torch.float32: 1e-4}
"""Of two vectors' lengths: what rounding one to 8 bits, or summing in fp32, adds to their product at most."""

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)


def weight_of(form: LowBitFormat, rows: int, columns: int, seed: int = 0) -> LowBitWeight:
    seeded = torch.Generator().manual_seed(seed)
    units, groups = columns // (form.superblock or form.group), columns // form.group

    def drawn(low: int, high: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, width), generator=seeded).to(dtype)

    d = (torch.rand(rows, units, generator=seeded) * 0.01 + 0.001).half()
    e = (torch.rand(rows, units, generator=seeded) * 0.02 - 0.01).half() if form.has_min else None
    a = drawn(-64 if form.bits == 6 else 0, 64, groups, torch.int8) if form.superblock else None
    b = drawn(0, 64, groups, torch.int8) if form.superblock and form.has_min else None
    return LowBitWeight(form, drawn(0, 2**form.bits, columns, torch.uint8), d, e, a, b)


def plain(weight: LowBitWeight) -> Tensor:
    """What the form says, number by number."""
    form, (rows, columns) = weight.form, weight.numbers.shape
    scale, least = torch.zeros(rows, columns, dtype=torch.float64), torch.zeros(rows, columns, dtype=torch.float64)
    for k in range(columns):
        unit, group = k // (form.superblock or form.group), k // form.group
        scale[:, k] = weight.d[:, unit].double()
        if weight.a is not None:
            scale[:, k] *= weight.a[:, group]
        if weight.e is not None:
            least[:, k] = weight.e[:, unit].double()
            if weight.b is not None:
                least[:, k] *= -weight.b[:, group].double()
    if form.is_e2m1:
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[(weight.numbers & 7).long()]
        return torch.where(weight.numbers >= 8, -sizes, sizes) * 2 * scale
    return (weight.numbers.double() - form.zero) * scale + least


def close(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | float = 0.0, times: float = 1.0) -> None:
    """`got` is x weight^T + bias, as near as its dtype lets one expect."""
    want = x.double() @ weight.T + bias
    assert got.shape == want.shape
    sizes = x.double().norm(dim=1)[:, None] * weight.norm(dim=1)[None] / x.shape[1] ** 0.5
    most = times * ROUNDED[got.dtype] * sizes + 2 * torch.finfo(got.dtype).eps * want.abs()
    assert ((got.double() - want).abs() <= most).all(), ((got.double() - want).abs() / most).max()


def rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.share(6)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_fp64(use: Callable[[int], Library], form: LowBitFormat) -> None:
    """Rows in fp32 as they are; rows in bf16 to within what their int8 rounds."""
    for threads, size, columns in ((1, 40, 256), (2, 1, 512), (3, 97, 768), (8, 64, 1280)):
        use(threads)
        weight, bias = weight_of(form, size, columns), torch.randn(size)
        exact = plain(weight)
        torch.testing.assert_close(weight.dequantize().double(), exact, rtol=1e-6, atol=1e-7)
        for dtype in (FP32, BF16):
            packed = PackedLowBitLinear(weight, dtype, bias)
            for count in (1, 2, 3, 5, 6, 7, 13, 39, 40, 129):
                wide = rows(count, columns + 3, dtype)
                for x in (wide[:, :columns], wide[:, 3:].contiguous()):
                    into = torch.full((count, size + 5), 7.0, dtype=dtype)
                    linear(x, packed, into[:, 2:-3])
                    close(into[:, 2:-3], x, exact, bias.double())
                    assert (into[:, :2] == 7).all(), "what is beside the output stays"
                    assert (into[:, -3:] == 7).all(), "what is beside the output stays"
            assert linear(rows(3, columns, dtype)[:0], packed).shape == (0, size)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gated_and_activated(use: Callable[[int], Library], dtype: torch.dtype) -> None:
    use(2)
    for form in FORMS:
        weight, bias = weight_of(form, 70, 256), torch.randn(70)
        for count in (1, 9, 64):
            x = rows(count, 256, dtype)
            gate, up = linear(x, PackedLowBitLinear(weight, dtype, bias)).float().chunk(2, 1)
            gated = linear(x, PackedLowBitLinear(weight, dtype, bias, "silu", True)).float()
            torch.testing.assert_close(gated, F.silu(gate) * up, rtol=0.03, atol=0.03)
            active = linear(x, PackedLowBitLinear(weight, dtype, bias, "relu"))
            assert torch.equal(active, F.relu(linear(x, PackedLowBitLinear(weight, dtype, bias)))), form


def test_rows_of_the_weight(use: Callable[[int], Library]) -> None:
    use(2)
    ids = torch.tensor([0, 31, 32, 69, 5, 5] * 4)
    for form in FORMS:
        weight = weight_of(form, 70, 768)
        for dtype in (FP32, BF16):
            assert torch.equal(
                lookup_rows(PackedLowBitLinear(weight, dtype), ids), weight.dequantize()[ids].to(dtype)
            ), form
            twice = lookup_rows(PackedLowBitLinear(weight, dtype), ids, 2.0)
            assert torch.equal(twice, (2 * weight.dequantize()[ids]).to(dtype)), form


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_rows_bits_depend_neither_on_the_rows_beside_it_nor_on_threads(
    use: Callable[[int], Library], form: LowBitFormat
) -> None:
    weight = weight_of(form, 100, 1280)
    for dtype in (FP32, BF16):
        x, found = rows(70, 1280, dtype), []
        for threads in (1, 2, 3, 8):
            use(threads)
            packed = PackedLowBitLinear(weight, dtype, deterministic=True)
            found.append(linear(x, packed))
            found.append(torch.cat([linear(x[i : i + 7], packed) for i in range(0, 70, 7)]))
            found.append(torch.cat([linear(x[i : i + 1], packed) for i in range(70)]))
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_is_not_a_number_stays_so(use: Callable[[int], Library]) -> None:
    use(2)
    packed = PackedLowBitLinear(weight_of(FORMS[0], 64, 256), BF16)
    for count in (1, 8, 64):
        for value in (torch.nan, torch.inf):
            x = rows(count, 256, BF16)
            x[0, 77] = value
            found = linear(x, packed)
            assert not found[0].isfinite().any()
            assert found[1:].isfinite().all()
        assert (linear(torch.zeros(count, 256, dtype=BF16), packed) == 0).all()


def test_several_forms_are_one_product(use: Callable[[int], Library]) -> None:
    use(2)
    weights = [weight_of(form, size, 512) for form, size in zip((FORMS[7], FORMS[8], FORMS[0]), (64, 20, 33))]
    several, x = StackedLowBitLinear([PackedLowBitLinear(weight, FP32) for weight in weights]), rows(3, 512, FP32)
    close(several(x), x, torch.cat([plain(weight) for weight in weights]))
    assert torch.equal(several(x[None]), several(x)[None])


def test_nothing_beyond_the_tensors_is_touched(use: Callable[[int], Library]) -> None:
    """Each lies right before a page that may not be read."""
    use(2)
    for form in FORMS:
        for dtype in (FP32, BF16):
            weight = weight_of(form, 33, 256)
            packed = PackedLowBitLinear(weight, dtype)
            packed.data = fenced(packed.data)
            for count in (1, 7, 41):
                x = fenced(rows(41, 256, dtype)[:count])
                out = fenced(torch.zeros(count, 33, dtype=dtype))
                linear(x, packed, out)
                close(out, x, plain(weight))
            assert lookup_rows(packed, torch.tensor([32])).isfinite().all()
