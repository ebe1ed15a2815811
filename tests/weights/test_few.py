"""Weights of few bits: GGUF's blocks without loss, numbers rounded while loading, and the plan's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import gguf_files
import numpy as np
import pytest
import torch
from test_fp8 import save
from test_grouped import logprobs, without_kernels
from test_grouped_shards import held
from test_loading import Q, rewrite
from test_slices import with_bits

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.cpu.low_bit_linear import LowBitWeight, PackedLowBitLinear
from quire.layers.linear import Linear
from quire.layers.moe import SparseMLP
from quire.models.quantization import SCHEMES_ON_LOAD, resolve_scheme
from quire.startup.build import build
from quire.startup.checkpoint import read_checkpoint
from quire.weights import low_bit
from quire.weights.gguf_blocks import BLOCK_FORMATS, PIECE_NUMBERS, GGUFTensor, row_bytes
from quire.weights.low_bit import GGUF_FORMATS, INT4_FORMAT, INT8_FORMAT, choose_int4_format, from_gguf, quantize

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_blocks_lose_nothing(kind: str) -> None:
    blocks = random_blocks(kind)
    numbers = from_gguf(blocks)
    assert numbers.form == GGUF_FORMATS[kind]
    assert np.array_equal(numbers.dequantize().numpy(), blocks.dequantize())


@pytest.mark.parametrize("form", [INT8_FORMAT, INT4_FORMAT, choose_int4_format(256), choose_int4_format(640)])
def test_rounding(form: Any) -> None:
    """No number is farther from its own than half a step and what rounds the scale."""
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[3, :32], weight[4, 32:64] = 0.0, 0.25
    groups, found = weight.view(40, 8, 32), quantize(weight, form).dequantize().view(40, 8, 32)
    if form == INT8_FORMAT:
        step = groups.abs().amax(2, keepdim=True) / 127
    else:
        step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    error = (found - groups).abs()
    shared = step.amax() / 10 if form.superblock else 0.0  # half of 1/127 of the largest scale, 15 times
    assert (error <= step * 0.51 + groups.abs().amax(2, keepdim=True) * 1e-3 + 1e-7 + shared).all()
    assert error.mean() > 0.1 * step.mean()
    assert (found[3, 0] == 0).all()
    torch.testing.assert_close(found[4, 1], groups[4, 1], rtol=5e-3, atol=0)


def test_parts_are_gone_before_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are made of may take more memory than the layer."""

    class Part:
        def __call__(self) -> LowBitWeight:
            return quantize(torch.ones(8, 32), INT8_FORMAT)

    layer, part = Linear(32, 8, False, torch.float32, CPU), Part()
    alive = ref(part)
    layer.low_bit_parts, layer.low_bit_device = [part], torch.device("cuda")
    del part
    monkeypatch.setattr(layer, "_pack_for_gpu", lambda *given: alive() is None)
    assert layer.pack_low_bit(False) is True


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_the_plan_counts_what_is_held(asked: str) -> None:
    if not with_bits(
        low_bit.create_model(read_checkpoint(EngineConfig()).config, torch.bfloat16, CPU, SCHEMES_ON_LOAD[asked])
    ):
        pytest.skip("the kernels for CPUs aren't built")
    built = build(EngineConfig(kv_tokens=256, dtype="bfloat16", device="cpu", quantization=asked))
    plain = build(EngineConfig(kv_tokens=256, dtype="bfloat16", device="cpu"))
    assert built.memory_plan.weight_bytes == held(built.engine.runner.model)  # type: ignore[attr-defined]
    assert built.memory_plan.weight_bytes < plain.memory_plan.weight_bytes * (0.6 if asked == "int8" else 0.45)
    for engine in (built.engine, plain.engine):
        engine.close()


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_the_same_numbers_without_kernels(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are none, and on a GPU, weights in the model's dtype hold what the few bits stand for."""
    tokens = list(range(50, 114))
    ours = logprobs("", tokens, kv_tokens=256, quantization=asked)
    without_kernels(monkeypatch)
    plain, wide = (logprobs("", tokens, kv_tokens=256, quantization=each) for each in (asked, None))
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)
    assert (plain - wide).abs().max() > 5e-3


@pytest.mark.parametrize("source", ["int8", "int4", "q8_0"])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_experts(family: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded while loading, or in blocks of a GGUF file: the same with packed experts as with plain ones."""
    own = {"shared_expert_intermediate_size": 96} if family == "qwen2_moe" else {"norm_topk_prob": True, "head_dim": 32}
    save(tmp_path, family, hidden_size=128, moe_intermediate_size=64, intermediate_size=192, mlp_only_layers=[], **own)
    path, more = tmp_path, {"quantization": source}
    if source == "q8_0":
        arch = family.replace("_", "")
        keys = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 64}
        keys |= {"expert_shared_feed_forward_length": 96} if family == "qwen2_moe" else {}
        path, more = gguf_files.convert(tmp_path, arch, tmp_path / "model.gguf", "q8_0", **keys), {}
    settings = EngineConfig(
        model=str(path), kv_tokens=256, dtype="float32", device="cpu", skip_tokenizer_init=True, **more
    )
    made = build(settings)
    model = made.engine.runner.model  # type: ignore[attr-defined]
    packed = [module.packed for module in model.modules() if isinstance(module, SparseMLP)]
    if packed[0] is None:
        pytest.skip("the kernels for CPUs aren't built")
    assert isinstance(packed[0].down.weights[0], PackedLowBitLinear)
    made.engine.close()
    tokens = list(range(50))
    ours = logprobs(path, tokens, kv_tokens=256, **more)
    without_kernels(monkeypatch)
    torch.testing.assert_close(ours, logprobs(path, tokens, kv_tokens=256, **more), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma4_text", "falcon_mamba"])
def test_norms_without_weights_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """They are ones on the device, although the model began as meta tensors."""
    save(tmp_path, family, hidden_size=192)
    tokens = list(range(40))
    ours, wide = (logprobs(tmp_path, tokens, kv_tokens=256, quantization=each) for each in ("int8", None))
    assert 1e-4 < (ours - wide).abs().mean() < 0.05


@pytest.mark.parametrize(("asked", "method"), [("int4", "fbgemm_fp8"), ("fp8", "mxfp4"), ("int8", "mxfp4")])
def test_what_is_quantised_already(asked: str, method: str) -> None:
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": method}}
    with pytest.raises(StartupError, match=f"--quantization is {asked}, and the model's weights are quantised already"):
        resolve_scheme(config, asked)


@pytest.mark.parametrize(("architecture", "last"), [("GptOssForCausalLM", "gptq, mxfp4"), ("LlamaForCausalLM", "gptq")])
def test_methods_of_a_family(architecture: str, last: str) -> None:
    config = {"architectures": [architecture], "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(StartupError) as raised:
        resolve_scheme(config, None)
    assert f"awq, {last}. " in str(raised.value)


def test_what_is_in_fp8_already_stays_so() -> None:
    stored = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    assert resolve_scheme(stored, "fp8") == resolve_scheme(stored, None)


def test_what_is_not_finite_is_not_rounded(tmp_path: Path) -> None:
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors[Q][1, 2:3].fill_(torch.nan))
    with pytest.raises(StartupError, match=r"q_proj.weight' .* isn't finite"):
        logprobs(tmp_path, [1], quantization="int8")


# Blocks of quantised weights: the numbers that they stand for, beside the reference of the format's own project.


RANDOM = np.random.default_rng(7)


def random_blocks(kind: str, rows: int = 24, blocks: int = 3) -> GGUFTensor:
    """Random bits; scales, and floats, are finite."""
    form = BLOCK_FORMATS[kind]
    columns = form.block_size * blocks
    data = RANDOM.integers(0, 256, (rows, blocks, form.block_bytes), dtype=np.uint8)
    for at in form.scale_offsets:
        data[:, :, at + 1] &= 0xBB
    if kind == "mxfp4":  # exponents that fp16 has too
        data[:, :, 0] = RANDOM.integers(104, 144, data.shape[:2])
    made = GGUFTensor(kind, rows, columns, data.reshape(rows, -1))
    if made.is_float:
        numbers = RANDOM.normal(size=(rows, columns)).astype(np.float32)
        whole = numbers.astype(np.float16) if kind == "f16" else numbers
        made = made._replace(data=whole.view(np.uint8).reshape(rows, -1))
        if kind == "bf16":
            made = made._replace(data=numbers.view(np.uint16)[:, 1::2].copy().view(np.uint8))
    return made


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_numbers_are_those_of_the_formats_own_project(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf, the format's own project, is not installed")
    blocks = random_blocks(kind)
    theirs = gguf.quants.dequantize(blocks.data, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(blocks.dequantize().view(np.uint32), np.asarray(theirs, np.float32).view(np.uint32))
    assert row_bytes(kind, blocks.columns) == gguf.quants.quant_shape_to_byte_shape(
        (1, blocks.columns), gguf.GGMLQuantizationType[kind.upper()]
    )[1]  # fmt: skip


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_pieces_and_parts_are_rows_of_the_whole(kind: str) -> None:
    blocks = random_blocks(kind, rows=50, blocks=max(1, PIECE_NUMBERS // 16 // BLOCK_FORMATS[kind].block_size))
    whole = blocks.dequantize()
    found = list(blocks.iter_dequantized())
    assert len(found) > 1
    assert np.array_equal(np.concatenate([piece for _, piece in found]), whole)
    assert [start for start, _ in found] == [16 * i for i in range(len(found))]
    assert np.array_equal(blocks.slice_rows(7, 9).dequantize(), whole[7:9])
    order = RANDOM.permutation(50)
    assert np.array_equal(blocks.select_rows(order).dequantize(), whole[order])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_found(kind: str, bits: int) -> None:
    blocks, form = random_blocks(kind), BLOCK_FORMATS[kind]
    assert blocks.is_finite()
    for at in form.scale_offsets or (0,):
        data = blocks.data.copy().reshape(blocks.rows, -1, form.block_bytes)
        if blocks.is_float:
            data[3, 1] = np.array([np.float32(np.uint16(bits).view(np.float16))]).view(np.uint8)[-form.block_bytes :]
            if kind == "f16":
                data[3, 1] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
        elif kind == "mxfp4":
            data[3, 1, 0] = 255
        else:
            data[3, 1, at : at + 2] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
        assert not blocks._replace(data=data.reshape(blocks.rows, -1)).is_finite()
