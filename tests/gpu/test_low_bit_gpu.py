"""Weights in few bits on a GPU: an engine's log-probabilities are those with what the weights stand for, as near as
bf16 is; its memory is as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deterministic import serve
from test_fp8_gpu import CUDA, SHAPES, log_probs

from quire.config import EngineConfig
from quire.models.named_configs import named_config
from quire.models.quantization import LowBitScheme, resolve_scheme
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import quantization_savings
from quire.weights import low_bit
from quire.weights.dummy import fill_dummy_weights

pytestmark = pytest.mark.gpu
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False, "sym": True}
GPT_OSS = {
    **named_config("gpt-oss-20b"), "hidden_size": 480, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 288, "vocab_size": 32000, "max_position_embeddings": 2048,
    "num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None]] = {
    **{f"{name} {stored['quant_method']}": (SHAPES[name], stored, None) for name in SHAPES for stored in (AWQ, GPTQ)},
    "gpt-oss mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, None),
    "llama-125m int4": (SHAPES["llama-125m"], None, "int4"),
    "jamba int8": (SHAPES["jamba"], None, "int8"),
}
ALL = pytest.mark.parametrize("case", CASES)


def folder(path: Path, case: str) -> dict[str, Any]:
    """The settings of a case, with its config.json in `path`."""
    config, stored, quantization = CASES[case]
    (path / "config.json").write_text(json.dumps({**config, **({"quantization_config": stored} if stored else {})}))
    return {"model": str(path), **({"quantization": quantization} if quantization else {})}


@ALL
def test_log_probabilities(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = folder(tmp_path, case)
    tokens_by_request, _ = log_probs(16, **settings)
    found = [log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 16, 4096)]
    monkeypatch.setattr(low_bit, "stays_low_bit", lambda *args: False)
    plain, full = (log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 4096))
    near = (plain - full).abs().mean()  # what bf16 alone makes of other tiles
    errors = [float((got - full).abs().mean()) for got in found]
    print(f"bf16 {near:.5f}, low bit {errors}, spread {full.std():.3f}")
    assert full.std() > 0.05
    assert max(errors) < 3 * near + 1e-3


@ALL
def test_with_deterministic_a_batch_does_not_show(case: str, tmp_path: Path) -> None:
    given = {**folder(tmp_path, case), "model_config": None}
    assert serve(**given).tokens == serve(alone=True, **given).tokens


@ALL
def test_graphs_say_what_eager_steps_say(case: str, tmp_path: Path) -> None:
    given = {**folder(tmp_path, case), "model_config": None, "max_num_batched_tokens": 300}
    assert serve(**given).tokens == serve(cuda_graphs=False, **given).tokens


@ALL
def test_memory_is_as_planned(case: str, tmp_path: Path) -> None:
    settings = EngineConfig(dummy_weights=True, **folder(tmp_path, case))
    source = read_checkpoint(settings)
    savings = quantization_savings(settings, source, "bfloat16", "cuda")
    planned, scheme = source.spec.weight_bytes(2) - savings, resolve_scheme(source.config, settings.quantization)
    assert savings
    assert isinstance(scheme, LowBitScheme)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = low_bit.create_model(source.config, torch.bfloat16, CUDA, scheme)
    fill_dummy_weights(model, 0, scheme)
    model.prepare(max_len=16)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert planned <= held < 1.03 * planned + (1 << 20)
