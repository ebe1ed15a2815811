"""Products with chosen experts equal a dense loop over tokens in fp64, however the choice falls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from same_bits import check_same
from torch import Tensor

from quire.data.kernels.triton import experts
from quire.data.kernels.triton.experts import FEW, MANY, MOST_UNSORTED, SOME, mixture, route, tile_of

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32,)
PDL = (False, True) if CUDA and torch.cuda.get_device_capability()[0] >= 9 else (False,)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)  # a real layer's weights take a CPU half a minute
    return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)).to(dtype)


def dense(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist()):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


def case(tokens: int, count: int, top: int, dtype: torch.dtype, inner: int = 24, hidden: int = 40) -> list[Tensor]:
    scores = random(tokens, count, dtype=torch.float32).softmax(dim=1)
    weights, chosen = scores.topk(top, dim=1)
    gate_up, down = random(count, 2 * inner, hidden, dtype=dtype, seed=2), random(count, hidden, inner, dtype=dtype)
    wide = random(tokens, hidden + 8, dtype=dtype, seed=1)
    return [wide[:, :hidden], weights, chosen, gate_up, down]


def check(made: list[Tensor], deterministic: bool = False, pdl: bool = False) -> None:
    got, want = mixture(*made, "silu", deterministic=deterministic, pdl=pdl), dense(*made)
    eps = torch.finfo(got.dtype).eps  # fp32's too: the sums of a large layer are large, but where their terms cancel
    torch.testing.assert_close(got.double(), want, rtol=eps + 2e-5, atol=4 * eps * float(want.abs().max()) + 2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "top"), [(4, 2), (5, 1), (3, 3)])
def test_equal_to_a_dense_loop(count: int, top: int, dtype: torch.dtype, deterministic: bool) -> None:
    """One token; a few; tiles of an expert that aren't full, and several of them."""
    for tokens in (1, 3, 70):
        check(case(tokens, count, top, dtype), deterministic)


@pytest.mark.parametrize("top", [1, 2])
def test_sorted_and_not(top: int) -> None:
    """The same, bit by bit, on both sides of the most pairs that programs look through."""
    made = case(MOST_UNSORTED // top + 1, 5, top, torch.float32)
    every = mixture(*made, "silu", deterministic=True)
    torch.testing.assert_close(every.double(), dense(*made), rtol=2e-5, atol=2e-5)
    fewer = mixture(*(part[:-1] for part in made[:3]), *made[3:], "silu", deterministic=True)
    assert torch.equal(fewer, every[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("count", "top"), [(16, 2), (5, 3), (8, 1), (3, 3)])
def test_choice_equals_torch(count: int, top: int, normalised: bool, dtype: torch.dtype) -> None:
    logits = 9 * random(33, count + 4, dtype=dtype)[:, :count]
    want, at = logits.float().softmax(dim=1).topk(top, dim=1)
    weights, chosen = route(logits, top, normalised)
    if dtype == torch.float32:  # in others there are ties
        assert torch.equal(chosen, at)
    torch.testing.assert_close(weights, want / want.sum(dim=1, keepdim=True) if normalised else want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_what_is_not_a_number_shows() -> None:
    """In its own row alone."""
    made, logits = case(5, 5, 2, torch.float32), random(5, 5, dtype=torch.float32)
    want = mixture(made[0], *route(logits, 2, False), *made[3:], "silu")
    logits[3, 1] = torch.nan
    got = mixture(made[0], *route(logits, 2, False), *made[3:], "silu")
    assert got.isnan().all(dim=1).tolist() == [False, False, False, True, False]
    assert torch.equal(got[[0, 1, 2, 4]], want[[0, 1, 2, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(dtype: torch.dtype) -> None:
    made = case(150, 2, 1, dtype, inner=70, hidden=72)
    assert tile_of(150, 2, False, made[0], *made[3:])._replace(stages=0) == MANY._replace(stages=0)
    check(made)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "hidden"), [(1, 40), (24, 40), (144, 1032), *([(14336, 4096)] if CUDA else [])])
@pytest.mark.parametrize("top", [1, 2, 3])
def test_one_token(top: int, inner: int, hidden: int, dtype: torch.dtype, pdl: bool) -> None:
    """In kernels of its own, which add its experts' outputs in the order of their shares."""
    check(case(1, 5, top, dtype, inner, hidden), pdl=pdl)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("tokens", [3, MOST_UNSORTED])
def test_early_launches(tokens: int, pdl: bool) -> None:
    """The whole of it, from the choice on, sorted and not."""
    made, logits = case(tokens, 5, 2, DTYPES[-1]), random(tokens, 5, dtype=DTYPES[-1])
    made[1:3] = route(logits, 2, True, pdl=pdl)
    check(made, pdl=pdl)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_choose_one_expert(dtype: torch.dtype) -> None:
    """And nobody the others: the first, the last, one in between."""
    for expert in (0, 2, 4):
        made = case(37, 5, 1, dtype)
        made[2].fill_(expert)
        check(made)


@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_that_nobody_chose_are_not_read(tokens: int) -> None:
    made = case(tokens, 4, 2, torch.float32)
    made[2][:] = torch.tensor([[1, 3], [3, 1], [1, 3]])[:tokens]
    for weight in made[3:]:
        weight[[0, 2]] = torch.nan
    check(made)


def test_rows_do_not_know_each_other() -> None:
    """With one tile for all numbers of rows, a row's bits are the same alone."""
    made = case(70, 4, 2, torch.float32)
    every = mixture(*made, "silu", deterministic=True)
    for row in (0, 33, 69):
        alone = mixture(*(part[row : row + 1] for part in made[:3]), *made[3:], "silu", deterministic=True)
        check_same(alone, every[row : row + 1])


def test_no_tokens() -> None:
    assert mixture(*case(0, 4, 2, torch.float32), "silu").shape == (0, 40)


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pairs, and with no more stages than there is room for."""
    weight = torch.zeros(1, dtype=torch.bfloat16)
    sizes = [tile_of(pairs, 16, False, weight, weight).pairs for pairs in (2, 256, 257, 1024, 1025)]
    assert sizes == [FEW.pairs, FEW.pairs, SOME.pairs, SOME.pairs, MANY.pairs]
    assert {tile_of(pairs, 16, True, weight, weight) for pairs in (2, 5000)} == {SOME}
    monkeypatch.setattr(experts, "shared_memory", lambda device: 101_376)
    for pairs in (2, 257, 1025):
        tile = tile_of(pairs, 16, False, weight, weight)
        assert 2 <= tile.stages <= 4
        assert (2 * tile.columns + tile.pairs) * tile.depth * 2 * tile.stages <= 101_376
