"""Products with weights in few bits equal those with the numbers that the weights stand for, in fp64."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from grids import CUDA, DEVICE, DTYPES, PDL, TYPES
from same_bits import check_same
from torch import Tensor

from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight
from quire.kernels.triton import launch, low_bit
from quire.kernels.triton.fused_moe import route
from quire.kernels.triton.tiles import Tile
from quire.layers.experts_config import ExpertsConfig
from quire.layers.linear import Linear
from quire.layers.moe import SparseMLP
from quire.models.quantization import LowBitScheme
from quire.weights.awq_gptq import quantize_groups
from quire.weights.low_bit import INT4_FORMAT, INT8_FORMAT, MXFP4_FORMAT, Q6_K_FORMAT, quantize

FORMATS = {
    "int8": INT8_FORMAT, "int4": INT4_FORMAT, "q4_k": LowBitFormat(4, 256, 0, True), "mxfp4": MXFP4_FORMAT
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def six_bits(rows: int, columns: int) -> LowBitWeight:
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(0, 64, (rows, columns), generator=generator, dtype=torch.uint8)
    a = torch.randint(-9, 9, (rows, columns // 16), generator=generator, dtype=torch.int8)
    return LowBitWeight(Q6_K_FORMAT, numbers, 0.01 * random(rows, columns // 256).half(), None, a)


def weights(rows: int, columns: int, name: str) -> LowBitWeight:
    if name in FORMATS:
        return quantize(random(rows, columns), FORMATS[name])
    if name == "q6_k":
        return six_bits(rows, columns)
    method, _, group = name.partition("-")
    bits = 4 if method == "awq" else 8
    return quantize_groups(random(rows, columns), LowBitScheme(bits, method, group_size=int(group)))


GROUPS = {
    "int8": 32,
    "int4": 32,
    "q4_k": 256,
    "q6_k": 256,
    "mxfp4": 32,
    "awq-32": 32,
    "awq-64": 64,
    "awq-128": 128,
    "gptq-128": 128,
}
NAMES = pytest.mark.parametrize("name", GROUPS)


def close(got: Tensor, want: Tensor, depth: int, inputs: float) -> None:
    """The weight is rounded to x's dtype, and so is the result."""
    eps = torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 1e-6
    torch.testing.assert_close(got.double(), want, rtol=eps, atol=4 * eps * inputs * depth**0.5)


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, columns) for name in GROUPS for columns in (256, 384, 160) if columns % GROUPS[name] == 0],
)
def test_packing_keeps_values(name: str, columns: int) -> None:
    """Also of columns that fill a part of the last step."""
    weight = weights(24, columns, name)
    packed = low_bit.pack([weight, weight], DEVICE)
    assert packed.codes.nbytes + packed.scales.nbytes == 48 * weight.form.gpu_row_bytes(columns)
    want = weight.dequantize()
    least = float(weight.scales()[0].abs().max()) * 2.0**-17  # a code is the end of a mantissa of 128 or 256
    for dtype in DTYPES:
        got = low_bit.expand(packed, dtype).cpu()
        near = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(got.float(), torch.cat([want, want]), rtol=near, atol=least)


def test_mxfp4_is_exact() -> None:
    """Each code, with the least and the largest scales."""
    numbers = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    scales = torch.tensor([2.0**-24, 1.0, 2.0**15, 0.0]).half()[:, None]
    weight = LowBitWeight(MXFP4_FORMAT, numbers, scales)
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        got = low_bit.expand(low_bit.pack([weight], DEVICE), dtype)
        assert torch.equal(got.float().cpu(), weight.dequantize())


@TYPES
@NAMES
def test_linear(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row, some, and so many that the weight is expanded, by pieces; with a bias, an activation, and strided
    rows. The last step of a row is not full, unless a group fills one."""
    columns = 256 + GROUPS[name] % 128
    monkeypatch.setattr(low_bit, "EXPANDED_NUMBERS", columns * 50)
    weight = weights(72, columns, name)
    packed, full = low_bit.pack([weight], DEVICE), weight.dequantize().to(DEVICE).double()
    bias = random(72, seed=5).to(DEVICE, dtype)
    for rows, pdl in product((1, 5, 20, 40, 140), PDL):
        x = random(rows, columns + 8, seed=6).to(DEVICE, dtype)[:, :columns]
        want = x.double() @ full.T + bias.double()
        size = float(full.abs().max() * x.abs().max())
        close(low_bit.low_bit_linear(x, packed, bias, pdl=pdl), want, columns, size)
        gate, up = (x.double() @ full.T).chunk(2, dim=1)
        got = low_bit.low_bit_linear(x, packed, None, "silu", pdl=pdl)
        close(got, F.silu(gate) * up, columns, size * float(1 + gate.abs().max()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_rows(deterministic: bool) -> None:
    packed = low_bit.pack([weights(72, 256, "int8")], DEVICE)
    x, bias = torch.empty(0, 256, device=DEVICE), torch.zeros(72, device=DEVICE)
    assert low_bit.low_bit_linear(x, packed, bias, deterministic=deterministic).shape == (0, 72)
    assert low_bit.low_bit_linear(x, packed, None, "silu", deterministic=deterministic).shape == (0, 36)


@TYPES
def test_rows_do_not_know_each_other(dtype: torch.dtype) -> None:
    packed = low_bit.pack([weights(72, 256, "int4")], DEVICE)
    x = random(140, 256).to(DEVICE, dtype)
    every = low_bit.low_bit_linear(x, packed, deterministic=True)
    for few in (slice(0, 1), slice(33, 35), slice(100, 140)):
        check_same(low_bit.low_bit_linear(x[few], packed, deterministic=True), every[few])


@TYPES
@pytest.mark.parametrize("name", ["int4", "int8", "mxfp4", "awq-128"])
@pytest.mark.parametrize(("experts", "top"), [(4, 2), (9, 3)])
def test_experts(name: str, experts: int, top: int, dtype: torch.dtype) -> None:
    hidden, inner = 256, 128
    gate_up, down = weights(experts * 2 * inner, hidden, name), weights(experts * hidden, inner, name)
    packed = [low_bit.pack([weight], DEVICE) for weight in (gate_up, down)]
    full = [
        weight.dequantize().to(DEVICE).double().view(experts, -1, depth)
        for weight, depth in ((gate_up, hidden), (down, inner))
    ]
    for (tokens, listed), pdl in product(((1, False), (1, True), (3, True), (70 if CUDA else 36, True)), PDL):
        x = random(tokens, hidden, seed=7).to(DEVICE, dtype)
        routing = route(random(tokens, experts, seed=8).to(DEVICE, dtype), top, True, listed, pdl=pdl)
        want = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
        for token, (shares, chosen) in enumerate(zip(routing.weights.tolist(), routing.expert_ids.tolist())):
            for share, expert in zip(shares, chosen):
                gate, up = (full[0][expert] @ x[token].double()).chunk(2)
                want[token] += share * (full[1][expert] @ (F.silu(gate) * up))
        got = low_bit.low_bit_moe(x, routing, *packed, "silu", pdl=pdl)
        size = float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=(2e-2 if CUDA else 1e-5) * size)


@TYPES
@NAMES
@pytest.mark.parametrize("own", [range(6), range(2, 5)])
def test_one_token(name: str, own: range, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, and some experts on other ranks. The last turn of the loop is not full, except with the first tile,
    nor is the last step of a row with groups of 32 and 64."""
    top, (hidden, inner) = 3, {32: (160, 96), 64: (192, 64), 128: (256, 128), 256: (256, 256)}[GROUPS[name]]
    gate_up, down = weights(6 * 2 * inner, hidden, name), weights(6 * hidden, inner, name)
    full = [weight.dequantize().double().view(6, -1, weight.numbers.shape[1])[own] for weight in (gate_up, down)]
    packed = []
    for weight, rows in ((gate_up, 2 * inner), (down, hidden)):
        parts = (None if part is None else part[own.start * rows : own.stop * rows] for part in weight[1:])
        packed.append(low_bit.pack([LowBitWeight(weight.form, *parts)], DEVICE))
    x, biases = random(1, hidden, seed=7), [random(len(own) * rows, seed=9) for rows in (2 * inner, hidden)]
    x, biases = x.to(DEVICE, dtype), [bias.to(DEVICE, dtype) for bias in biases]
    logits = torch.tensor([[0.0, -9, 1, -9, 2, -9]]).to(DEVICE, dtype)
    for tile, pdl in zip((Tile(0, 32, 64, 2, 1), Tile(0, 8, 512, 3, 2), Tile(0, 32, 1024, 3, 4)), cycle(PDL)):
        monkeypatch.setattr(low_bit, "card_tile", lambda *entry, tile=tile: tile)
        routing = route(logits, top, True, False, own=own, pdl=pdl)
        got = low_bit.low_bit_moe(x, routing, *packed, "silu", (biases[0], biases[1]), pdl=pdl).cpu().double()
        want = torch.zeros(1, hidden, dtype=torch.float64)
        inputs, (inner_bias, outer_bias) = x.cpu().double(), (bias.cpu().double().view(len(own), -1) for bias in biases)
        for share, expert in zip(routing.weights[0].tolist(), routing.expert_ids[0].tolist()):
            if expert >= 0:
                gate, up = (inputs @ full[0][expert].T + inner_bias[expert]).chunk(2, dim=1)
                want += share * ((F.silu(gate) * up) @ full[1][expert].T + outer_bias[expert])
        assert routing.expert_ids.min() == (0 if len(own) == 6 else -1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=(2e-2 if CUDA else 1e-5) * float(want.abs().max()))


@TYPES
@pytest.mark.parametrize("name", ["mxfp4", "awq-128"])
@pytest.mark.parametrize("chosen", [[0, 4, 5], [0, 1, 5]], ids=["one", "none"])
def test_experts_that_are_not_chosen_do_not_matter(
    name: str, chosen: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has the experts 2 to 4, and infinite or NaN scales of 2 and 3. Steps are full, and what the first product
    does not store is NaN."""
    matrices = [low_bit.pack([weights(rows * 128, 128, name)], DEVICE) for rows in (6, 3)]
    x, logits = random(1, 128, seed=7).to(DEVICE, dtype), torch.full((1, 6), -9.0, device=DEVICE, dtype=dtype)
    logits[:, chosen] = 0
    monkeypatch.setattr(low_bit, "card_tile", lambda *entry: Tile(0, 16, 64, 2, 1))
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are filled with NaN
    try:
        routing = route(logits, 3, True, False, own=range(2, 5))
        want = low_bit.low_bit_moe(x, routing, *matrices, "silu")
        assert bool(want.any()) == (4 in chosen)
        for matrix in matrices:
            matrix.scales[..., : matrix.rows // 3 * 2] = -1
        for pdl in PDL:
            check_same(low_bit.low_bit_moe(x, routing, *matrices, "silu", pdl=pdl), want)
    finally:
        torch.use_deterministic_algorithms(False)


@TYPES
def test_ranks_with_whole_experts(dtype: torch.dtype) -> None:
    """The sum of their outputs is that of all experts."""
    wholes = weights(4 * 256, 128, "awq-128"), weights(4 * 128, 128, "mxfp4")
    experts = [
        [LowBitWeight(form, *each) for each in zip(*([None] * 4 if part is None else part.chunk(4) for part in parts))]
        for form, *parts in wholes
    ]
    for tokens, pdl in product((1, 20), PDL):
        x, logits = (random(tokens, size, seed=size).to(DEVICE, dtype) for size in (128, 4))
        terms = []
        for own in (range(4), range(1), range(1, 4)):
            gate_up, down = (low_bit.pack(each[own.start : own.stop], DEVICE) for each in experts)
            routing = route(logits, 2, True, own=own, pdl=pdl)
            terms.append(low_bit.low_bit_moe(x, routing, gate_up, down, "silu", pdl=pdl))
        want, *others = terms
        torch.testing.assert_close(sum(others), want, rtol=0, atol=(2e-2 if CUDA else 1e-5) * float(want.abs().max()))


def test_layers_multiply_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer of parts in two formats, and experts, as layers with what the weights stand for."""
    monkeypatch.setattr(launch, "supports_pdl", lambda device: False)
    parts = [weights(24, 128, "awq-128"), weights(16, 128, "int8"), weights(16, 128, "int8")]
    layer = Linear(128, (24, 16, 16), True, torch.float32, DEVICE)
    assert layer.bias is not None
    layer.bias.copy_(random(56))
    packed = layer._pack_for_gpu([parts[:1], parts[1:]], False, None)
    x = random(2, 3, 128, seed=9).to(DEVICE)
    full = torch.cat([part.dequantize() for part in parts]).to(DEVICE)
    torch.testing.assert_close(packed(x), F.linear(x, full, layer.bias), rtol=1e-4, atol=1e-4)
    config = ExpertsConfig(count=4, per_token=2, intermediate=128, shared_intermediate=24)
    plain, kept = (SparseMLP(128, config, "silu", torch.float32, DEVICE) for _ in range(2))
    for seed, (one, other) in enumerate(zip(plain.parameters(), kept.parameters())):
        one.copy_(random(*one.shape, seed=seed))
        other.copy_(one)
    for name, rows in (("gate_up", 128), ("down", 128)):
        made = [weights(rows * (2 if name == "gate_up" else 1), 128, "awq-128") for _ in range(4)]
        getattr(plain, name).weight.copy_(torch.cat([one.dequantize() for one in made]))
        part = getattr(kept, name)
        part.low_bit_device, part.low_bit_parts = DEVICE, [partial(lambda one: one, one) for one in made]
    kept._prepare_low_bit(False)
    for tokens in (1, 5):
        x = random(tokens, 128, seed=10).to(DEVICE)
        want = plain(x)
        torch.testing.assert_close(kept(x), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
