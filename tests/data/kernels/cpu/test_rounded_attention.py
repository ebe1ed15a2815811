"""Keys and values in 8 bits: what is written is the nearest that a cell holds, and nothing else is written. Attention
over them is in test_native_attention.py."""

from __future__ import annotations

import pytest
import torch
from native_kernels import NONE, VARIANTS
from paged_rows import Shape, cells, cells_of, filled, kernels, of_cells

from quire.data.kernels.cpu.backend import NativeBackend

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 7, 64, 80])
def test_cells_are_the_nearest_and_nothing_else_is_written(variant, dtype, dim) -> None:
    """A head's numbers are off by half of a 127th of its largest one at most. All bytes of other tokens stay."""
    backend = NativeBackend(kernels=kernels(variant, 3))
    rows = filled(Shape(dim=dim, dtype=dtype, rounded=True), [(40, 1), (3, 9)])
    generator = torch.Generator().manual_seed(1)
    size = 10 ** torch.randn(len(rows.k), 2, 1, generator=generator)
    k, v = ((torch.randn(x.shape, generator=generator) * size).to(dtype) for x in (rows.k, rows.v))
    k[1, 0], v[1, 1] = 0, 1e-32
    k[2, 0, 3], v[2, 1, 5] = torch.inf, torch.nan
    before = [x.clone() for x in cells(rows.cache)]
    backend.attend(rows.q, k, v, rows.cache, backend.plan(rows.batch, rows.cache))
    pages, places = rows.batch.places(rows.cache)
    for x, old, now in zip((k, v), before, cells(rows.cache)):
        found, wanted = now[pages, :, places], x.double()
        bound = wanted.abs().amax(-1, keepdim=True) / 127
        off = (of_cells(found) - wanted).abs()
        finite = wanted.isfinite().all(-1)
        assert (off <= 0.5001 * bound + 1e-30)[finite].all()
        assert of_cells(found)[~finite].isnan().all()
        assert (~finite).sum() == 1
        usual = finite & (bound[..., 0] > 1e-20)
        assert (found[..., :dim].int() - cells_of(x)[..., :dim].int()).abs()[usual].max() <= 1
        old[pages, :, places] = found
        assert torch.equal(old, now)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_once_behind_their_rotation(variant, dtype) -> None:
    backend = NativeBackend(kernels=kernels(variant, 2))
    rows = filled(Shape(dtype=dtype, rounded=True), [(40, 1), (3, 9)])
    qkv, generator = torch.cat((rows.q, rows.k, rows.v), 1), torch.Generator().manual_seed(1)

    class Turned:
        table = torch.randn(50, 2, 32, generator=generator)

    k, (cos, sin) = rows.k.double(), Turned.table[rows.batch.positions].double().unsqueeze(1).unbind(2)
    low, high = k.chunk(2, -1)
    k = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    backend.rotate_and_attend(qkv, Turned(), None, rows.cache, backend.plan(rows.batch, rows.cache))
    pages, places = rows.batch.places(rows.cache)
    keys, values = (of_cells(x[pages, :, places]) for x in cells(rows.cache))
    assert ((keys - k).abs() <= 0.5001 / 127 * k.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(values, rows.v.double())
