"""Experts with packed weights on CPUs beside the plain loop over experts, for all instruction sets that run here: in
fp32, in bf16, and with weights of few bits."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from native_kernels import NONE, VARIANTS, fenced, served_by
from test_cpu_quantised import FORMS, weight_of
from torch import Tensor

from quire.kernels.cpu import experts
from quire.kernels.cpu.experts import PackedExperts, route
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight, PackedLowBitLinear
from quire.layers.experts_config import ExpertsConfig
from quire.layers.moe import SparseMLP
from quire.layers.prepare import prepare_layers
from quire.protocol.parallel_layout import Shard
from quire.weights.low_bit import INT8_FORMAT, choose_int4_format, quantize

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
ERROR = {FP32: 1e-5, BF16: 0.02}  # beside the greatest number
MIXTRAL = ExpertsConfig(count=4, per_token=2, intermediate=48, renormalize=True)
QWEN2 = ExpertsConfig(count=60, per_token=4, intermediate=40, shared_intermediate=56)
QWEN3 = ExpertsConfig(count=128, per_token=8, intermediate=24, renormalize=True)

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)


def layer_of(config: ExpertsConfig, hidden: int, dtype: torch.dtype, act: str = "silu") -> SparseMLP:
    layer, seeded = SparseMLP(hidden, config, act, dtype, CPU), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_((0.3 if act != "clamped_swiglu" else 1.5) * torch.randn(parameter.shape, generator=seeded))
    return layer


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Tensor, want: Tensor, error: float) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all()
    off = (got.double() - want.double()).abs().max()
    assert off <= error * float(want.abs().max()), f"off by {off}"


def choose(plain: SparseMLP, choice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plain loop and the packed experts choose alike."""
    monkeypatch.setattr(plain, "route", lambda x: choice)
    monkeypatch.setattr(experts, "route", lambda *_: choice)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("config", "hidden", "act"),
    [
        (MIXTRAL, 96, "silu"), (QWEN2, 64, "gelu"), (QWEN3, 33, "silu"),
        (ExpertsConfig(count=3, per_token=3, intermediate=7), 20, "relu"),
        (ExpertsConfig(count=4, per_token=2, intermediate=40, renormalize=True, biases=True), 64, "clamped_swiglu"),
        (ExpertsConfig(count=5, per_token=1, intermediate=300, renormalize=True), 1100, "silu"),
        (ExpertsConfig(count=512, per_token=10, intermediate=16, shared_intermediate=16), 32, "silu"),
    ],
    ids=lambda value: f"{value.count}-{value.per_token}" if isinstance(value, ExpertsConfig) else str(value),
)  # fmt: skip
@pytest.mark.usefixtures("variant")
def test_equal_to_the_plain_loop(
    config: ExpertsConfig, hidden: int, act: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, a few, more than a chunk has; also rows that are a part of wider ones."""
    plain, packed = (layer_of(config, hidden, dtype, act) for _ in range(2))
    prepare_layers(packed)
    assert packed.packed is not None
    for count in (1, 2, 5, 33, 300):
        wide = rows(count, hidden + 3, dtype)
        for x in (wide[:, :hidden], wide[:, 3:].contiguous()):
            logits = plain.router(x)
            choose(plain, route(logits, config.per_token, config.renormalize), monkeypatch)
            check(packed.packed(x, logits, config.per_token, config.renormalize), plain.mix(x), ERROR[dtype])
            monkeypatch.undo()
            if dtype == FP32:  # in bf16 a tie may be decided otherwise
                check(packed(x), plain(x), ERROR[dtype])
    assert packed(rows(0, hidden, dtype)).shape == (0, hidden)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.usefixtures("variant")
def test_the_choice_equals_torch(renormalize: bool, dtype: torch.dtype) -> None:
    for count, top in ((1, 1), (4, 2), (60, 4), (128, 8), (512, 10), (17, 17)):
        logits = 6 * rows(40, count + 5, dtype)[:, :count]
        weights, chosen = route(logits, top, renormalize)
        at = logits.float().sort(dim=1, descending=True, stable=True).indices
        want = logits.float().softmax(1).gather(1, at)
        assert torch.equal(chosen, at[:, :top]), "the first of equal ones"
        want = want[:, :top]
        torch.testing.assert_close(weights, want / want.sum(1, keepdim=True) if renormalize else want)
        scale = torch.rand(count)
        assert torch.equal(route(logits, top, renormalize, scale)[0], weights * scale[chosen])
    for wrong in (torch.nan, torch.inf):
        logits[7, 3] = wrong
        weights, chosen = route(logits, top, renormalize)
        assert weights.isnan().any(1).nonzero().flatten().tolist() == [7]
        assert chosen[7].tolist() == list(range(top))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.usefixtures("variant")
def test_weights_of_few_bits(
    form: LowBitFormat, dtype: torch.dtype, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the weights stand for, multiplied by the plain loop."""
    act = "clamped_swiglu" if biases else "silu"
    config, hidden = ExpertsConfig(count=4, per_token=2, intermediate=256, renormalize=True, biases=biases), 512
    gate_up = [weight_of(form, 512, hidden, seed) for seed in range(4)]
    down = [weight_of(form, hidden, 256, seed) for seed in range(4, 8)]
    plain = layer_of(config, hidden, FP32, act)
    parts = plain.gate_up, plain.down
    inner_bias, outer_bias = ((None,) * 4 if part.bias is None else part.bias.chunk(4) for part in parts)
    for part, weights in ((plain.gate_up, gate_up), (plain.down, down)):
        assert part.weight is not None
        part.weight.data.copy_(torch.cat([weight.dequantize() for weight in weights]))
    packed = PackedExperts(
        [PackedLowBitLinear(weight, dtype, bias, act, True) for weight, bias in zip(gate_up, inner_bias)],
        [PackedLowBitLinear(weight, dtype, bias) for weight, bias in zip(down, outer_bias)],
    )
    for count in (1, 2, 7, 90, 300):
        x = 0.05 * rows(count, hidden, dtype)
        logits = plain.router(x.float())
        choose(plain, route(logits, 2, True), monkeypatch)
        check(packed(x, logits, 2, True), plain.mix(x.float()), 2 * ERROR[dtype])


GRID = list(product((8, 128), (1, 2, 8), (0, 32), ("float32", "bfloat16", "int8", "int4")))


def part_of(whole: SparseMLP, rank: int, ranks: int, dtype: torch.dtype, kind: str) -> SparseMLP:
    """A rank's part of `whole`, with routed experts in few bits if `kind` is int8 or int4; `whole`, in fp32, gets the
    numbers that the part computes with."""
    config = ExpertsConfig(
        count=whole.experts, per_token=whole.top_k, intermediate=64, renormalize=whole.renormalize,
        shared_intermediate=32 * (whole.shared is not None),
    )  # fmt: skip
    part = SparseMLP(64, config, "silu", dtype, CPU, Shard(rank, ranks))
    halves = {name: parameter.data for name, parameter in whole.named_parameters()}
    for name, parameter in part.named_parameters():
        data = halves[name]
        if name.endswith("gate_up.weight"):
            pieces = data.view(-1, 2, ranks, data.shape[0] // 2 // ranks // (1 if "shared" in name else whole.experts),
                               data.shape[1])  # fmt: skip
            data = pieces[:, :, rank].flatten(0, 2)
        elif name.endswith("down.weight"):
            data = data.tensor_split(ranks, 1)[rank]
        parameter.data.copy_(data)
    for layer in (part.gate_up, part.down) if kind.startswith("int") else ():
        assert layer.weight is not None
        form = INT8_FORMAT if kind == "int8" else choose_int4_format(layer.weight.shape[1])
        stacked, size, count = quantize(layer.weight.float(), form), layer.output_sizes[0], len(layer.output_sizes)
        pieces = [[None] * count if piece is None else piece.split(size) for piece in stacked[1:]]
        made = [LowBitWeight(form, *each) for each in zip(*pieces)]
        layer.low_bit_parts = [partial(lambda weight: weight, weight) for weight in made]
        layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
    return part


@pytest.mark.parametrize(("count", "top", "shared", "kind"), GRID)
@pytest.mark.usefixtures("variant")
def test_kinds_of_weights_and_ranks(
    count: int, top: int, shared: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also two ranks, whose outputs are terms of a sum, and rows that all choose the same experts."""
    config = ExpertsConfig(count=count, per_token=top, intermediate=64, renormalize=top > 1, shared_intermediate=shared)
    dtypes = (BF16, FP32) if kind.startswith("int") else (getattr(torch, kind),) * 2
    for ranks, dtype in zip((1, 2), dtypes):
        parts, whole = [], layer_of(config, 64, FP32)
        for rank in range(ranks):
            part, plain = (part_of(whole, rank, ranks, dtype, kind) for _ in range(2))
            prepare_layers(part)
            assert part.packed is not None
            for layer in (plain.gate_up, plain.down):
                layer.dequantize()
            parts.append((part, plain.float()))
        for rows_of_step, alike in ((1, False), (8, True), (33, False), (300, False), (300, True)):
            x = 0.3 * rows(rows_of_step, 64, dtype)
            x = x[:1].expand(rows_of_step, -1) if alike else x
            choice = route(parts[0][1].router(x.float()), top, config.renormalize)
            got, want = torch.zeros(2, rows_of_step, 64)
            for part, plain in parts:
                choose(plain, choice, monkeypatch)
                got += part(x).float()
                want += plain(x.float())
                monkeypatch.undo()
            rounded = 2 if kind.startswith("int") else 1  # x as well
            check(got, want, rounded * ERROR[dtype])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.usefixtures("variant")
def test_ranks_with_whole_experts(kind: str) -> None:
    """Their outputs are terms of a sum. Where no token chose any of a rank's experts, its term is zero."""
    config = ExpertsConfig(count=9, per_token=3, intermediate=64, renormalize=True)
    dtype = BF16 if kind == "int8" else getattr(torch, kind)
    layer = part_of(layer_of(config, 64, FP32), 0, 1, dtype, kind)
    prepare_layers(layer)
    whole = layer.packed
    assert whole is not None
    products = whole.gate_up.weights, whole.down.weights
    ranks = [
        PackedExperts(*(each[own] for each in products), own.start) for own in (slice(0, 4), slice(4, 5), slice(5, 9))
    ]
    for count in (1, 2, 33, 300):
        x = 0.3 * rows(count, 64, dtype)
        logits = layer.router(x)
        got = torch.stack([rank(x, logits, 3, True).float() for rank in ranks])
        check(got.sum(0), whole(x, logits, 3, True), ERROR[dtype])
        assert count < 33 or got.any(2).any(1).all()
        logits[:, 4:] -= 99
        first, *others = (rank(x, logits, 3, True) for rank in ranks)
        assert torch.equal(first, whole(x, logits, 3, True))
        assert not torch.stack(others).any()
    assert ranks[1](rows(0, 64, dtype), logits[:0], 3, True).shape == (0, 64)
    with pytest.raises(AssertionError, match="not of 9 experts"):
        ranks[2](x, logits[:, :8], 3, True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_weights_take_the_memory_of_plain_ones(dtype: torch.dtype) -> None:
    layer = layer_of(ExpertsConfig(count=8, per_token=2, intermediate=64), 96, dtype)
    plain = sum(parameter.nbytes for parameter in (layer.gate_up.weight, layer.down.weight) if parameter is not None)
    prepare_layers(layer)
    assert layer.packed is not None
    assert layer.packed.gate_up.nbytes + layer.packed.down.nbytes == plain
    assert not list(layer.parameters()), "no plain weight is left"


@pytest.mark.usefixtures("variant")
def test_weights_of_which_one_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop computes with the numbers that low-bit weights stand for."""
    whole = layer_of(ExpertsConfig(count=8, per_token=2, intermediate=64), 64, FP32)
    part, plain = (part_of(whole, 0, 1, FP32, "int8") for _ in range(2))
    prepare_layers(plain)
    down = part_of(whole, 0, 1, FP32, "float32").down.weight
    part.down.weight, part.down.low_bit_parts = down, None
    monkeypatch.setattr("quire.layers.moe.supports", lambda weight: False)
    prepare_layers(part)
    assert part.packed is None
    assert part.gate_up.low_bit_parts is None
    x = rows(9, 64, FP32)
    check(part(x), plain(x), 0.01)


@pytest.mark.usefixtures("variant")
def test_wrong_shapes_are_refused() -> None:
    layer = layer_of(QWEN2, 64, FP32)
    prepare_layers(layer)
    assert layer.packed is not None
    x, logits, shared, gate = rows(5, 64, FP32), rows(5, 60, FP32), rows(5, 64, FP32), rows(5, 1, FP32)
    layer.packed(x, logits, 4, True, shared, gate)
    for wrong in (
        (x.to(BF16), logits, 4), (x[:, :63], logits, 4), (x[:4], logits, 4), (x, logits[:, :59], 4), (x, logits, 0),
        (x, logits, 61), (x, logits, 4, True, shared), (x, logits, 4, True, shared[:, 1:], gate),
        (x, logits, 4, True, shared, gate[:4]), (x, logits, 4, True, shared.to(BF16), gate),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            layer.packed(*wrong[:3], *(wrong[3:] or (True,)))
    weights, other = layer.packed.down.weights, PackedLinear(rows(64, 40, BF16))
    gate_up = layer.packed.gate_up.weights
    for inner, outer in (
        (gate_up, weights[1:]), (gate_up, ()), (gate_up, gate_up), (weights, weights), (gate_up, [other] * 60),
        (gate_up, [*weights[1:], other]), (gate_up, [PackedLinear(rows(64, 48, FP32))] * 60),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            PackedExperts(inner, outer)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_depend_on_neither_threads_nor_other_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    for variant, threads in product(VARIANTS[:1], (1, 3)):
        with served_by(variant, threads, monkeypatch):
            layer = layer_of(QWEN2, 64, dtype)
            prepare_layers(layer, deterministic=True)
            x = rows(90, 64, dtype)
            found += [layer(x), torch.cat([layer(x[:1]), layer(x[1:40]), layer(x[40:])])]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.usefixtures("variant")
def test_nothing_is_touched_after_the_tensors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*shape: int, **options: Any) -> Tensor:
        return fenced(torch.zeros(*shape, dtype=options["dtype"]))

    for config, hidden in ((QWEN2, 33), (MIXTRAL, 64)):
        layer = layer_of(config, hidden, dtype)
        prepare_layers(layer)
        assert layer.packed is not None
        for products in (layer.packed.gate_up, layer.packed.down):
            for weight in products.weights:
                weight.data = fenced(weight.data)
            products.addresses = fenced(torch.tensor([weight.data.data_ptr() for weight in products.weights]))
        monkeypatch.setattr(experts.torch, "empty", empty)
        for count in (1, 3, 20):
            x, logits = fenced(rows(count, hidden, dtype)), fenced(rows(count, config.count, dtype))
            shared = fenced(rows(count, hidden, dtype)), fenced(rows(count, 1, dtype))
            assert layer.packed(x, logits, config.per_token, True, *shared).isfinite().all()
        monkeypatch.undo()
