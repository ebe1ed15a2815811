"""Layers beside what torch and transformers compute."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.data.layers.embedding import Embedding
from quire.data.layers.linear import Linear, pack
from quire.data.layers.norm import LayerNorm, RMSNorm
from quire.data.layers.rotary import Rotary, inverse_frequencies, rotate
from quire.data.layers.softcap import Softcap
from quire.data.models.configs import named_config
from quire.data.models.settings import LlamaSettings

CPU = torch.device("cpu")


FAST_BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no products in bfloat16 for this CPU"
)


def linear(rows: int | tuple[int, ...], columns: int, bias: bool, dtype: torch.dtype) -> Linear:
    layer = Linear(columns, rows, bias, dtype, CPU)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(columns))
    return layer


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for which no kernels are built."""
    monkeypatch.setattr("quire.data.kernels.cpu.linear.library", lambda: None)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.bfloat16, 2e-2, marks=FAST_BFLOAT16), (torch.float32, 1e-5)]
)
def test_packed_equals_plain(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    for rows, columns in (((96, 32, 32), 64), (7, 33), (513, 100)):
        layer = linear(rows, columns, bias, dtype)
        assert layer.weight is not None
        weight, offset = layer.weight.clone(), layer.bias
        layer.prepare()
        assert layer.packed is not None, "this torch build should have the packed operators"
        assert layer.weight is None, "the plain weight should be gone"
        for count in (0, 1, 4, 31, 200):
            x = torch.randn(count, 2 * columns).to(dtype)
            for view in (x[:, :columns], x[:, columns:], x[:, :columns].contiguous()):
                expected = F.linear(view.float(), weight.float(), None if offset is None else offset.float())
                got = layer(view)
                assert got.dtype == dtype
                torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("plain")
def test_few_numbers_of_rows_are_multiplied() -> None:
    layer = linear(8, 8, False, torch.float32)
    layer.prepare()
    assert isinstance(layer.packed, functools.partial)
    seen = set()

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    for rows in range(1, 2049):
        x = torch.full((rows, 1), float(rows))
        assert torch.equal(layer.packed.func(product, x), x)
    assert {1, 2, 4, 32, 256, 2048} < seen, "powers of two stay as they are"
    assert len(seen) == 72


@pytest.mark.usefixtures("plain")
def test_packing_is_given_up_where_it_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8)
    assert pack(weight, None) is not None
    assert pack(weight * torch.nan, None) is None  # nothing to check the operator by
    real = torch.ops.mkldnn

    class Wrong:
        _reorder_linear_weight = real._reorder_linear_weight

        class _linear_pointwise:
            @staticmethod
            def default(x: torch.Tensor, *rest: Any) -> torch.Tensor:
                return real._linear_pointwise(x, *rest) * 1.1

    monkeypatch.setattr(torch.ops, "mkldnn", Wrong)
    assert pack(weight, None) is None
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    layer = linear(8, 8, True, torch.float32)
    x = torch.randn(3, 8)
    before = layer(x)
    layer.prepare()
    assert layer.packed is None
    assert torch.equal(layer(x), before)


def test_other_dtypes_stay_plain() -> None:
    layer = linear(8, 8, False, torch.float16)
    layer.prepare()
    assert layer.packed is None
    assert layer.weight is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_equal_transformers_and_torch(dtype: torch.dtype) -> None:
    x = torch.randn(5, 48).to(dtype) * 3
    theirs = transformers.models.llama.modeling_llama.LlamaRMSNorm(48, 1e-3).to(dtype)
    rms, layer = RMSNorm(48, 1e-3, dtype, CPU), LayerNorm(48, 1e-5, dtype, CPU)
    rms.weight.normal_()
    layer.weight.normal_()
    layer.bias.normal_()
    theirs.weight.data.copy_(rms.weight)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rms(x), theirs(x).detach(), atol=tolerance, rtol=tolerance)
    plain = (x.double() - x.double().mean(-1, keepdim=True)) / (
        x.double().var(-1, keepdim=True, correction=0) + 1e-5
    ) ** 0.5
    expected = plain * layer.weight.double() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance * 2, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_of_gemma_equal_transformers(dtype: torch.dtype) -> None:
    """Weights near -1 and near 0, where one plus them in bf16 would lose most of them; and the norm before a sum."""
    x, delta = (torch.randn(5, 48) * 3).to(dtype), torch.randn(5, 48).to(dtype)
    theirs, ours = [], []
    for i in range(2):
        theirs.append(transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(48, 1e-3).to(dtype))
        ours.append(RMSNorm(48, 1e-3, dtype, CPU, offset=True))
        ours[i].weight.copy_(torch.cat((torch.randn(24) * 0.01, torch.randn(24) * 0.001 - 1)))
        theirs[i].weight.data.copy_(ours[i].weight)
        with pytest.raises(AssertionError, match="prepare"):
            ours[i](x)
        ours[i].prepare()
        assert torch.equal(ours[i].weight - 1, theirs[i].weight.detach().float() + 1 - 1), "nothing more is lost"
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0](x), theirs[0](x).detach(), atol=1e-6, rtol=step)
    total = x + theirs[1](delta).detach()
    torch.testing.assert_close(ours[0](x, delta, ours[1]), theirs[0](total).detach(), atol=1e-6, rtol=2 * step)
    torch.testing.assert_close(x, total, atol=1e-6, rtol=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_and_bounds_of_gemma_equal_transformers(dtype: torch.dtype) -> None:
    module = transformers.models.gemma2.modeling_gemma2
    theirs = module.Gemma2TextScaledWordEmbedding(7, 40, 0, embed_scale=40**0.5).to(dtype)
    ours = Embedding(7, 40, dtype, CPU, scale=40**0.5)
    ours.weight.copy_(theirs.weight)
    assert torch.equal(ours(torch.arange(7)), theirs(torch.arange(7)).detach())
    assert torch.equal(ours.weight, theirs.weight), "a tied head's weight stays as it was"
    logits = (torch.randn(3, 50) * 40).to(dtype)
    exact = 30 * torch.tanh(logits.double() / 30)
    got = Softcap(30.0, logits.dtype, CPU)(logits)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps / 2)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 0.8, "mscale_all_dim": 1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {**named_config("llama3.1-8b")["rope_scaling"]},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_of_a_real_shape_equal_transformers(scaling: dict[str, Any]) -> None:
    options = {**named_config("llama3-8b"), "rope_theta": 500000.0}
    settings = LlamaSettings.read({**options, "rope_scaling": scaling})
    options = {key: value for key, value in options.items() if key not in ("architectures", "model_type", "rope_theta")}
    config = transformers.LlamaConfig(**options, rope_parameters={**scaling, "rope_theta": 500000.0})
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU)
    torch.testing.assert_close(inverse_frequencies(settings.rope, 128), expected, atol=0, rtol=2e-6)
    assert settings.rope.attention_factor == pytest.approx(attention_factor)


def test_rotation_equals_transformers_in_bf16() -> None:
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512)
    module = transformers.models.llama.modeling_llama
    positions = torch.tensor([0, 1, 7, 300, 511])
    q, k = torch.randn(5, 4, 16).bfloat16(), torch.randn(5, 2, 16).bfloat16()
    cos, sin = module.LlamaRotaryEmbedding(config)(q, positions[None])
    expected = module.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = Rotary(LlamaSettings.read({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope, 16, 512)
    rotary.prepare(CPU)
    angles = rotary.at(positions, torch.bfloat16)
    for got, want in zip((rotate(q, *angles), rotate(k, *angles)), expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
