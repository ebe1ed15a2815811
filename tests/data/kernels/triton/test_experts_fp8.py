"""Products with chosen experts whose weights are in FP8 equal a dense loop with what the weights stand for, with scales
by row and by group, however many tokens there are."""

from __future__ import annotations

import pytest
import torch
from same_bits import check_same
from test_experts import DEVICE, DTYPES, dense
from test_linear_fp8 import CUDA, FP8, weights
from torch import Tensor

from quire.data.kernels.triton.experts import FEW, MANY, MOST_UNSORTED, SOME, mixture, tile_of
from quire.data.kernels.triton.linear import E4M3
from quire.data.layers.moe import SparseMLP

pytestmark = pytest.mark.skipif(not FP8, reason="this GPU has no FP8")
INNER, HIDDEN = 144, 272  # the last group of either isn't full
KINDS = ["rows", "groups", "groups of one", "one in FP8"]


class Experts:
    """Random weights of some experts, stacked, and what they stand for."""

    def __init__(self, count: int, kind: str, dtype: torch.dtype, inner: int = INNER, hidden: int = HIDDEN) -> None:
        shapes = ((2 * inner, hidden), (hidden, inner))
        self.weights: list[Tensor] = []
        self.scales: list[Tensor | None] = []
        self.full: list[Tensor] = []
        for seed, (rows, depth) in enumerate(shapes):
            groups = kind == "groups" or (kind == "groups of one" and seed == 1)
            numbers, scale, full = weights(count * rows, depth, groups, seed=10 * seed + 1)
            plain = kind == "one in FP8" and seed == 0
            self.weights.append((full.to(dtype) if plain else numbers).view(count, rows, depth))
            self.scales.append(None if plain else scale)
            self.full.append(self.weights[-1].double() if plain else full.view(count, rows, depth))

    def mixture(self, x: Tensor, shares: Tensor, chosen: Tensor, deterministic: bool = False) -> Tensor:
        gate_up, down = self.scales
        return mixture(x, shares, chosen, *self.weights, "silu", (gate_up, down), deterministic=deterministic)

    def check(self, x: Tensor, shares: Tensor, chosen: Tensor, deterministic: bool = False) -> None:
        got, want = self.mixture(x, shares, chosen, deterministic), dense(x, shares, chosen, *self.full)
        half, size = 0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps, float(want.abs().max())
        assert size > 1e-3
        torch.testing.assert_close(got.double(), want, rtol=half + 2e-5, atol=(4 * half + 2e-5) * size)


def tokens(count: int, experts: int, top: int, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[Tensor, ...]:
    """Some, with their shares of the experts that they chose."""
    generator = torch.Generator().manual_seed(count)
    x = 0.02 * torch.randn(count, hidden + 16, generator=generator).to(dtype).to(DEVICE)
    scores = torch.randn(count, experts, generator=generator).to(DEVICE).softmax(dim=1)
    return x[:, :hidden], *scores.topk(top, dim=1)


@pytest.mark.share(2)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_a_dense_loop(kind: str, dtype: torch.dtype, deterministic: bool) -> None:
    """One token; a few; tiles of an expert that aren't full, and several of them."""
    experts = Experts(3, kind, dtype)
    for count in (1, 3, 70):
        experts.check(*tokens(count, 3, 2, dtype), deterministic)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "hidden"), [(16, 32), (1040, 272), (256, 1040)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_token(kind: str, inner: int, hidden: int, dtype: torch.dtype) -> None:
    """Lines of a tile and less, of several and of parts."""
    Experts(3, kind, dtype, inner, hidden).check(*tokens(1, 3, 2, dtype, hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_many_tokens(kind: str, dtype: torch.dtype) -> None:
    """Sorted, in the tiles of prompts."""
    count, experts = MOST_UNSORTED + 20, Experts(2, kind, dtype, 32, 144)
    assert tile_of(count, 2, False, torch.empty(0), torch.empty(0)).pairs == MANY.pairs
    experts.check(*tokens(count, 2, 1, dtype, 144))


@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_rows_do_not_know_each_other(kind: str) -> None:
    """With one tile for all numbers of rows, a row's bits are the same alone, sorted and not."""
    experts = Experts(3, kind, DTYPES[-1], 32, 144)
    made = tokens(MOST_UNSORTED // 2 + 1, 3, 2, DTYPES[-1], 144)
    every = experts.mixture(*made, deterministic=True)
    for few in (slice(0, 1), slice(40, 60), slice(0, MOST_UNSORTED // 2)):
        check_same(experts.mixture(*(part[few] for part in made), deterministic=True), every[few])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_experts_that_nobody_chose_are_not_read(kind: str, count: int) -> None:
    experts, (x, shares, chosen) = Experts(4, kind, DTYPES[0], 32, 144), tokens(count, 4, 2, DTYPES[0], 144)
    chosen[:] = torch.tensor([[1, 3], [3, 1], [1, 3]])[:count]
    for weight, scale in zip(experts.weights, experts.scales):
        assert scale is not None
        weight.view(torch.uint8)[[0, 2]] = 0x7F  # NaN
        scale.view(len(scale), 4, -1)[:, [0, 2]] = torch.nan
    experts.check(x, shares, chosen)


def test_scales_that_do_not_fit_are_a_mistake() -> None:
    experts, made = Experts(3, "groups", DTYPES[0], 32, 272), tokens(2, 3, 2, DTYPES[0], 272)
    good = experts.scales[0]
    assert good is not None
    for wrong in (None, good[:2].contiguous(), good[:, 1:].contiguous(), good.t().contiguous().t()):
        experts.scales[0] = wrong
        with pytest.raises(AssertionError):
            experts.mixture(*made)


def test_tiles_of_groups_hold_whole_ones() -> None:
    """Every step of a sum has one scale a row; with weights of a byte there is room for more stages."""
    x, half, byte = (torch.empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, E4M3))
    for pairs, tile in ((2, FEW), (257, SOME), (1025, MANY)):
        found = tile_of(pairs, 16, False, x, byte, byte, group=128)
        assert 128 % found.depth == 0
        assert tile_of(pairs, 16, False, x, byte, byte).depth == tile.depth
        assert tile_of(pairs, 16, False, x, byte, half) == tile_of(pairs, 16, False, x, half, half)


@pytest.mark.skipif(not CUDA, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("count", [1, 16, 200])
def test_a_graph_gives_the_same(count: int) -> None:
    experts, made = Experts(8, "rows", torch.bfloat16, 512, 1024), tokens(count, 8, 2, torch.bfloat16, 1024)
    want = experts.mixture(*made).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts.mixture(*made)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


def test_the_layer_with_its_scales() -> None:
    """As with weights that hold the same values, which a CPU multiplies."""
    experts, made = Experts(4, "groups", torch.float32, 32, 144), tokens(9, 4, 2, torch.float32, 144)
    plain, kept = (SparseMLP(144, 32, 4, 2, "silu", True, torch.float32, DEVICE) for _ in range(2))
    for layer in (plain, kept):
        assert layer.router.weight is not None
        layer.router.weight.copy_(made[0][:4])
    for name, scale, weight, full in zip(("gate_up", "down"), experts.scales, experts.weights, experts.full):
        getattr(plain, name).copy_(full.flatten(0, 1))
        setattr(kept, name, torch.nn.Parameter(weight.flatten(0, 1), requires_grad=False))
        setattr(kept, SparseMLP.FP8[name], scale)
    kept.grouped = mixture
    want = plain(made[0])
    torch.testing.assert_close(kept(made[0]), want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
