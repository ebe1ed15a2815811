"""Products with chosen experts equal a dense loop over tokens in fp64, however the choice falls and however many tokens
there are: with weights as they are, and in FP8, with scales by row and by group, with what the weights stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grids import CUDA, DEVICE, DTYPES, LAUNCHES, PDL, TYPES
from same_bits import check_same
from test_linear import FP8, weights
from torch import Tensor

from quire.kernels.triton import fused_moe as experts
from quire.kernels.triton.fused_moe import ONE_TILE, Routing, choose_tile, fused_moe, route
from quire.kernels.triton.linear import E4M3
from quire.kernels.triton.tiles import measured_card
from quire.layers.experts_config import ExpertsConfig
from quire.layers.moe import SparseMLP
from quire.protocol.parallel_layout import ParallelLayout

KINDS = ("plain", "rows", "groups") if FP8 else ("plain",)
IN_FP8 = ("rows", "groups", "groups of one", "one in FP8") if FP8 else ()
SMALL = {"inner": 32, "hidden": 144}
Tokens = tuple[Tensor, Tensor, Tensor]
"""Numbers, and each token's shares of the experts that it chose."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)  # a real layer's weights take a CPU half a minute
    return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)).to(dtype)


def list_pairs(weights: Tensor, expert_ids: Tensor, experts: int) -> Routing:
    """Return the Routing of experts that are chosen already, computed by torch."""
    tokens, top = expert_ids.shape
    sorted_ids, order = expert_ids.flatten().sort()
    counts = torch.bincount(sorted_ids, minlength=experts)
    place = torch.arange(tokens * top, device=order.device) - (counts.cumsum(0) - counts)[sorted_ids]
    pairs = torch.empty((experts, tokens), dtype=torch.int32, device=order.device)
    pairs[sorted_ids, place] = order.int()
    return Routing(weights, expert_ids, counts.int(), pairs)


class Experts:
    """Random weights of some experts, stacked, and what they stand for. Sizes of those in FP8 fill no last group."""

    def __init__(
        self, count: int, kind: str = "plain", dtype: torch.dtype = torch.float32, inner: int = 0, hidden: int = 0,
        biased: bool = False,
    ) -> None:  # fmt: skip
        self.kind, self.dtype, self.biased = kind, dtype, biased
        inner, hidden = inner or (24 if kind == "plain" else 144), hidden or (40 if kind == "plain" else 272)
        self.weights: list[Tensor] = []
        self.scales: list[Tensor | None] = []
        self.full: list[Tensor] = []
        for seed, (rows, depth) in enumerate(((2 * inner, hidden), (hidden, inner))):
            shape, scale = (count, rows, depth), None
            if kind == "plain":
                numbers = random(*shape, dtype=dtype, seed=2 - 2 * seed)
            else:
                groups = kind == "groups" or (kind == "groups of one" and seed == 1)
                numbers, scale, full = weights(count * rows, depth, groups, seed=10 * seed + 1)
                if kind == "one in FP8" and seed == 0:
                    numbers, scale = full.to(dtype), None
            self.weights.append(numbers.view(shape))
            self.scales.append(scale)
            self.full.append((numbers.double() if scale is None else full).view(shape))

    def tokens(self, count: int, top: int) -> Tokens:
        shares, chosen = random(count, len(self.full[0])).softmax(dim=1).topk(top, dim=1)
        hidden = self.full[0].shape[2]
        wide = random(count, hidden + 8, seed=1) * (1 if self.kind == "plain" else 0.07)
        return wide.to(self.dtype)[:, :hidden], shares, chosen

    def mixture(self, tokens: Tokens, deterministic: bool = False, pdl: bool = False) -> Tensor:
        x, shares, chosen = tokens
        routing = list_pairs(shares, chosen, len(self.weights[0]))
        options: dict[str, Any] = {"deterministic": deterministic, "pdl": pdl}
        if self.biased:
            options["biases"] = tuple(bias.to(self.dtype).flatten() for bias in self.biases)
        act = "clamped_swiglu" if self.biased else "silu"
        return fused_moe(x, routing, *self.weights, act, (self.scales[0], self.scales[1]), **options)

    @property
    def biases(self) -> list[Tensor]:
        """Large enough to be clamped, in the type's numbers."""
        return [(16 * random(*full.shape[:2], seed=9)).to(self.dtype).double() for full in self.full]

    def dense(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        out, (gate_up, down) = torch.zeros(x.shape, dtype=torch.float64, device=x.device), self.full
        biases = self.biases
        for token in range(len(x)):
            for share, expert in zip(shares[token].tolist(), chosen[token].tolist()):
                inner = gate_up[expert] @ x[token].double()
                if not self.biased:
                    gate, up = inner.chunk(2)
                    out[token] += share * (down[expert] @ (F.silu(gate) * up))
                    continue
                gate, up = (inner + biases[0][expert]).chunk(2)
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                out[token] += share * (down[expert] @ inner + biases[1][expert])
        return out

    def check(self, tokens: Tokens, deterministic: bool = False, pdl: bool = False) -> None:
        got, want = self.mixture(tokens, deterministic, pdl), self.dense(*tokens)
        size, plain = float(want.abs().max()), self.kind == "plain"
        assert size > 1e-3
        eps = torch.finfo(got.dtype).eps  # fp32's too: the sums of a large layer are large, but where terms cancel
        eps = eps if plain or got.dtype != torch.float32 else 0.0
        atol = 4 * eps * size + 2e-5 * (1.0 if plain else size)
        torch.testing.assert_close(got.double(), want, rtol=eps + 2e-5, atol=atol)


@pytest.mark.parametrize("deterministic", [False, True])
@TYPES
@pytest.mark.parametrize(
    ("kind", "count", "top"),
    [("plain", 4, 2), ("plain", 5, 1), ("plain", 3, 3), *((kind, 3, 2) for kind in IN_FP8)],
)
def test_equal_to_a_dense_loop(kind: str, count: int, top: int, dtype: torch.dtype, deterministic: bool) -> None:
    """One token; a few; tiles of an expert that aren't full, and several of them."""
    made = Experts(count, kind, dtype)
    for tokens, pdl in product((1, 3, 70), PDL):
        made.check(made.tokens(tokens, top), deterministic, pdl)


@TYPES
def test_biases_and_the_clamped_activation(dtype: torch.dtype) -> None:
    """One token, a few, and many."""
    made = Experts(4, "plain", dtype, biased=True)
    for tokens in (1, 3, 131):
        made.check(made.tokens(tokens, 2))


@TYPES
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("count", "top"), [(16, 2), (5, 3), (8, 1), (3, 3), (128, 8), (512, 10)])
def test_choice_equals_torch(count: int, top: int, normalised: bool, dtype: torch.dtype) -> None:
    logits = 9 * random(33, count + 4, dtype=dtype)[:, :count]
    want, at = logits.float().softmax(dim=1).topk(top, dim=1)
    for pdl in PDL:
        routing = route(logits, top, normalised, pdl=pdl)
        chosen = routing.expert_ids
        if dtype == torch.float32:  # in others there are ties
            assert torch.equal(chosen, at)
        torch.testing.assert_close(routing.weights, want / want.sum(dim=1, keepdim=True) if normalised else want)
        scale = random(count)
        scaled = route(logits, top, normalised, False, scale, pdl=pdl)
        torch.testing.assert_close(scaled.weights, routing.weights * scale[chosen], atol=0, rtol=1e-6)
        assert routing.pairs is not None
        assert routing.counts is not None
        lists = [sorted(pairs[:used]) for pairs, used in zip(routing.pairs.tolist(), routing.counts.tolist())]
        assert lists == [torch.where(chosen.flatten() == expert)[0].tolist() for expert in range(count)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_what_is_not_a_number_shows() -> None:
    """In its own row alone."""
    made, logits = Experts(5), random(5, 5)
    x = made.tokens(5, 2)[0]
    want = made.mixture((x, *route(logits, 2, False)[:2]))
    logits[3, 1] = torch.nan
    got = made.mixture((x, *route(logits, 2, False)[:2]))
    assert got.isnan().all(dim=1).tolist() == [False, False, False, True, False]
    assert torch.equal(got[[0, 1, 2, 4]], want[[0, 1, 2, 4]])


@contextmanager
def nan_where_nothing_is_stored() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are filled with NaN
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("own", [range(3), range(3, 5), range(1, 2)], ids=str)
def test_choice_among_a_ranks_experts(own: range) -> None:
    """Pairs of other experts are in no list."""
    logits = 9 * random(33, 5)
    every, routing = route(logits, 2, True), route(logits, 2, True, own=own)
    assert torch.equal(routing.weights, every.weights)
    mine = (every.expert_ids >= own.start) & (every.expert_ids < own.stop)
    assert torch.equal(routing.expert_ids, torch.where(mine, every.expert_ids - own.start, -1))
    assert routing.pairs is not None
    assert routing.counts is not None
    lists = [sorted(pairs[:used]) for pairs, used in zip(routing.pairs.tolist(), routing.counts.tolist())]
    assert lists == [torch.where(every.expert_ids.flatten() == expert)[0].tolist() for expert in own]
    assert 0 < sum(map(len, lists)) < 66


@pytest.mark.parametrize("deterministic", [False, True])
@TYPES
@pytest.mark.parametrize(("kind", "biased"), [*((kind, False) for kind in KINDS), ("plain", True)])
def test_ranks_with_whole_experts(kind: str, biased: bool, dtype: torch.dtype, deterministic: bool) -> None:
    """The sum of their outputs is that of all experts; a rank whose experts no token chose adds zeros."""
    made = Experts(5, kind, dtype, biased=biased)
    for count, pdl in product((1, 3, 35), PDL):
        x, logits = made.tokens(count, 2)[0], 9 * random(count, 5, dtype=dtype, seed=3)
        logits[:, 4] = -99
        got = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for own in (range(2), range(2, 4), range(4, 5)):
            mine = slice(own.start, own.stop)
            weights = [weight[mine].contiguous() for weight in made.weights]
            scales = [None if scale is None else scale.unflatten(1, (5, -1))[:, mine] for scale in made.scales]
            scales = [None if scale is None else scale.flatten(1).contiguous() for scale in scales]
            biases = [bias[mine].to(dtype).flatten() if biased else None for bias in made.biases]
            act, options = "clamped_swiglu" if biased else "silu", {"deterministic": deterministic, "pdl": pdl}
            with nan_where_nothing_is_stored():
                routing = route(logits, 2, True, count > 1 or deterministic, own=own, pdl=pdl)
                part = fused_moe(x, routing, *weights, act, (scales[0], scales[1]), (biases[0], biases[1]), **options)
            assert part.any() == (routing.expert_ids >= 0).any()
            got += part.double()
        want = made.dense(x, *route(logits, 2, True)[:2])
        atol = (8 * torch.finfo(dtype).eps + 2e-5) * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=atol)


@TYPES
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tiles of prompts, with rounded outputs of experts."""
    monkeypatch.setattr(experts, "MAX_EXACT_PAIRS", 8)
    count = 276
    made = Experts(2, kind, dtype, **({"inner": 70, "hidden": 72} if kind == "plain" else SMALL))
    for pdl in PDL:
        made.check(made.tokens(count, 1), pdl=pdl)


@LAUNCHES
@pytest.mark.parametrize(
    ("kind", "top", "inner", "hidden"),
    [
        *(("plain", top, *size) for top in (1, 2, 3) for size in ((1, 40), (24, 40), (144, 1032))),
        *((kind, 2, *size) for kind in IN_FP8 for size in ((16, 32), (1040, 272), (256, 1040))),
        *(("plain", top, 14336, 4096) for top in (1, 2, 3) if CUDA),
    ],
)
def test_one_token(kind: str, top: int, inner: int, hidden: int, dtype: torch.dtype, pdl: bool) -> None:
    """In kernels of its own, which add its experts' outputs in the order of their shares; lines of a tile and less, of
    several and of parts."""
    made = Experts(5 if kind == "plain" else 3, kind, dtype, inner, hidden)
    made.check(made.tokens(1, top), pdl=pdl)


@pytest.mark.parametrize("count", [1, 3, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_nobody_chose_are_not_read(kind: str, count: int) -> None:
    made = Experts(4, kind, DTYPES[0], **({} if kind == "plain" else SMALL))
    tokens = made.tokens(count, 2)
    tokens[2][:] = torch.tensor([[1, 3], [3, 1], [1, 3]] * 13)[:count]
    for weight, scale in zip(made.weights, made.scales):
        if scale is None:
            weight[[0, 2]] = torch.nan
        else:
            weight.view(torch.uint8)[[0, 2]] = 0x7F  # NaN
            scale.view(len(scale), 4, -1)[:, [0, 2]] = torch.nan
    made.check(tokens)


@TYPES
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_each_other(kind: str, dtype: torch.dtype) -> None:
    """With one tile for all numbers of rows, a row's bits are the same alone and among others; there may be none."""
    most = 128
    made = Experts(3, kind, dtype, **({} if kind == "plain" else SMALL))
    tokens = made.tokens(most + 1, 2)
    if kind != "plain":
        tokens[0].mul_(0.1)  # so that results are about one
    every = made.mixture(tokens, deterministic=True)
    for few in (slice(0, 1), slice(33, 34), slice(40, 60), slice(0, most), slice(most, most + 1), slice(0, 0)):
        x, shares, chosen = (part[few] for part in tokens)
        check_same(made.mixture((x, shares, chosen), deterministic=True), every[few])


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pairs, and with no more stages than there is room for."""
    weight = torch.zeros(16, 1, 1, dtype=torch.bfloat16)
    for gated, shape in ((True, "gated"), (False, "plain")):
        tiles = measured_card(weight.device).tiles[f"experts/half/{shape}"]
        sizes = [choose_tile(16 * pairs, weight, weight, gated) for pairs in (*list(tiles)[:-1], 999)]
        assert sizes == list(tiles.values())
    kept = {choose_tile(pairs, weight, weight, True, deterministic=True) for pairs in (2, 5000)}
    assert kept == {ONE_TILE}
    assert choose_tile(99, weight.float(), weight.float(), True)._replace(stages=ONE_TILE.stages) == ONE_TILE
    monkeypatch.setattr(experts, "shared_memory", lambda device: 101_376)
    for pairs, gated in product((2, 257, 1025, 9999), (True, False)):
        tile = choose_tile(pairs, weight, weight, gated)
        assert 2 <= tile.stages <= 4
        assert ((1 + gated) * tile.columns + tile.rows) * tile.depth * 2 * tile.stages <= 101_376


def test_tiles_of_groups_hold_whole_ones() -> None:
    """Every step of a sum has one scale a row; with weights of a byte there is room for more stages."""
    half, byte = (torch.empty(16, 0, 0, dtype=dtype) for dtype in (torch.bfloat16, E4M3))
    for pairs in (2, 257, 1025):
        found = choose_tile(pairs, half, byte, True, 128)
        assert 128 % found.depth == 0
        assert choose_tile(pairs, half, byte, True).depth == choose_tile(pairs, half, half, True).depth


@pytest.mark.skipif(not FP8, reason="this GPU has no FP8")
def test_the_layer_with_its_scales() -> None:
    """As with weights that hold the same values, which a CPU multiplies."""
    made = Experts(4, "groups", **SMALL)
    x, *_ = made.tokens(9, 2)
    config = ExpertsConfig(count=4, per_token=2, intermediate=32, renormalize=True)
    plain, kept = (SparseMLP(144, config, "silu", torch.float32, DEVICE) for _ in range(2))
    for layer in (plain, kept):
        assert layer.router.weight is not None
        layer.router.weight.copy_(x[:4])
    for name, scale, weight, full in zip(("gate_up", "down"), made.scales, made.weights, made.full):
        getattr(plain, name).weight.copy_(full.flatten(0, 1))
        part = getattr(kept, name)
        part.weight, part.scale = torch.nn.Parameter(weight.flatten(0, 1), requires_grad=False), scale
    kept.route_kernel, kept.experts_kernel = route, fused_moe
    want = plain(x)
    torch.testing.assert_close(kept(x), want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("count", "top"), [(128, 8), (512, 10), (60, 4)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_layers_of_many_experts(count: int, top: int, renormalize: bool) -> None:
    """As many as Qwen's models have, and a shared one: the kernels and torch compute the same."""
    config = ExpertsConfig(count=count, per_token=top, intermediate=16, renormalize=renormalize, shared_intermediate=24)
    layer = SparseMLP(40, config, "silu", torch.float32, DEVICE)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.copy_(random(*parameter.shape, seed=seed))
    for tokens in (1, 3, 40):
        x = 3 * random(tokens, 40, seed=9)
        layer.experts_kernel = None
        want = layer(x)
        layer.route_kernel, layer.experts_kernel = route, fused_moe
        torch.testing.assert_close(layer(x), want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
    x = x[:3]
    terms = torch.zeros(2, *x.shape, device=DEVICE)
    for shard in ParallelLayout(3, expert_parallel=True).shards():
        part = SparseMLP(40, replace(config, shared_intermediate=0), "silu", torch.float32, DEVICE, shard)
        part.router.weight = layer.router.weight
        for own, whole in ((part.gate_up, layer.gate_up), (part.down, layer.down)):
            assert whole.weight is not None
            rows = whole.weight.unflatten(0, (count, -1))[part.own.start : part.own.stop]
            own.weight = torch.nn.Parameter(rows.flatten(0, 1), requires_grad=False)
        terms[0] += part.mix(x)
        part.route_kernel, part.experts_kernel = route, fused_moe
        terms[1] += part.mix(x)
    want = layer.mix(x).expand_as(terms)
    torch.testing.assert_close(terms, want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
