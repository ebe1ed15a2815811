"""Norms, activations, embedding rows and the bound on logits, against torch in float64; in every variant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native_kernels import NONE, VARIANTS, served_by
from torch import Tensor

from quire.kernels.cpu import rows as row_kernels
from quire.kernels.cpu.rows import embedding, layer_norm, rms_norm
from quire.layers.mlp import ACTIVATIONS

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # beside the greatest number
SIZES = (1, 8, 31, 64, 576, 1000)


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    error = (got.double() - want).abs().max()
    assert error <= ERROR[got.dtype] * max(1.0, float(want.abs().max())), f"off by {error}"


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("variant")
def test_norms_equal_torch(dtype: torch.dtype, size: int) -> None:
    for rows in (1, 3, 200):
        wide = some(rows, size + 3, dtype=dtype)
        x, delta = wide[:, :size], some(rows, size, dtype=dtype, seed=1)
        weight, bias, behind = (some(size, dtype=dtype, seed=seed) for seed in (2, 3, 4))
        check(rms_norm(x, weight, 1e-5), rms(x, weight))
        check(rms_norm(x, weight.float(), 1e-5), rms(x, weight.float()))
        want = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
        check(layer_norm(x, weight, bias, 1e-5), want)
        for through in (None, behind, behind.float()):
            stream = wide.clone()
            added = delta if through is None else rms(delta, through).to(dtype)
            summed = (x.float() + added.float()).to(dtype)
            scale = weight if through is None else weight.to(through.dtype)
            got = rms_norm(stream[:, :size], scale, 1e-5, delta=delta, post_norm_weight=through)
            assert (stream[:, :size].float() - summed.float()).abs().max() <= ERROR[dtype] * 8
            assert torch.equal(stream[:, size:], wide[:, size:]), "nothing is written beside the rows"
            check(got, rms(stream[:, :size], scale))
            if through is None:
                assert torch.equal(stream[:, :size], summed), "the sum is rounded as torch rounds it"
                got = rms_norm(stream[:, :size], scale, 1e-5, delta=delta, scale=0.3)
                assert torch.equal(stream[:, :size], (summed + delta) * 0.3), "and so is its multiple"
                check(got, rms(stream[:, :size], scale))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", sorted(set(row_kernels.ACTIVATIONS) & set(ACTIVATIONS)))
@pytest.mark.usefixtures("variant")
def test_activations_equal_torch(dtype: torch.dtype, name: str) -> None:
    for rows, size in ((1, 1), (3, 37), (2, 1536), (1, 20000)):
        both, bias = some(rows, 2 * size, dtype=dtype) * 4, some(size, dtype=dtype, seed=1)
        gate, up = both.double().chunk(2, dim=1)
        check(row_kernels.act_and_mul(both, name), ACTIVATIONS[name](gate) * up)
        x = both[:, :size].clone()
        assert row_kernels.act(x, name, bias) is x
        check(x, ACTIVATIONS[name](both[:, :size].double() + bias.double()))


@pytest.mark.usefixtures("variant")
def test_extreme_numbers_are_activated_as_torch_does() -> None:
    x = torch.tensor([-torch.inf, -1e30, -200.0, -1e-30, 0.0, 1e-30, 200.0, 1e30, torch.inf, torch.nan] * 3)[None]
    for name in ("relu", "gelu", "gelu_new"):
        got, want = row_kernels.act(x.clone(), name), ACTIVATIONS[name](x)
        finite = want.isfinite()
        assert torch.allclose(got[finite], want[finite], rtol=1e-5, atol=1e-37), name
        assert got[0, -1].isnan(), f"{name} keeps what is not a number"


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.usefixtures("variant")
def test_softcap_equals_torch(dtype: torch.dtype) -> None:
    for rows, size in ((1, 5), (3, 20001)):
        x = some(rows, size, dtype=dtype) * 30
        x[0, 0], x[0, 1] = 1e-4, 5000
        want = 30.0 * torch.tanh(x.double() / 30.0)
        got = row_kernels.softcap(x.clone(), 30.0)
        check(got, want)
        assert abs(got[0, 0].double() / want[0, 0] - 1) < 2**-8, "small ones are as exact as large ones"


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.usefixtures("variant")
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    for size in SIZES:
        table, ids = some(50, size, dtype=dtype), torch.tensor([3, 49, 0, 3])
        assert torch.equal(embedding(ids, table), table[ids])
        scale = torch.tensor(5.5, dtype=dtype).item()
        assert torch.equal(embedding(ids, table, scale=scale), table[ids] * scale)
        onto = some(4, size, dtype=dtype, seed=1)
        want = onto + table[torch.tensor([2, 7, 2, 9]) + 2]
        assert torch.equal(embedding(torch.tensor([2, 7, 2, 9]), table, add_to=onto, offset=2), want)
        assert torch.equal(onto, want)


def test_results_depend_neither_on_threads_nor_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, both = some(300, 576, dtype=torch.bfloat16), some(576, seed=1), some(300, 600, dtype=torch.bfloat16)
    found = []
    for threads in (1, 2, 3, 8):
        with served_by(VARIANTS[0], threads, monkeypatch):
            found.append((rms_norm(x, weight, 1e-6), row_kernels.act_and_mul(both, "silu")))
            alone = rms_norm(x[7:8], weight, 1e-6), row_kernels.act_and_mul(both[7:8], "silu")
        assert all(torch.equal(one[0], many[7]) for one, many in zip(alone, found[-1], strict=True))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
