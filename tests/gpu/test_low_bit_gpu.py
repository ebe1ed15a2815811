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
from quire.models.quantization import LowBitScheme, resolve_scheme
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import quantization_savings
from quire.weights import low_bit
from quire.weights.dummy import fill_dummy_weights

pytestmark = pytest.mark.gpu
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False, "sym": True}
STORED = pytest.mark.parametrize("stored", [AWQ, GPTQ], ids=["awq", "gptq"])


def folder(path: Path, name: str, stored: dict[str, Any]) -> dict[str, Any]:
    (path / "config.json").write_text(json.dumps({**SHAPES[name], "quantization_config": stored}))
    return {"model": str(path)}


@STORED
@pytest.mark.parametrize("name", SHAPES)
def test_log_probabilities(name: str, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = folder(tmp_path, name, stored)
    tokens_by_request, _ = log_probs(16, **settings)
    found = [log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 16, 4096)]
    monkeypatch.setattr(low_bit, "stays_low_bit", lambda *args: False)
    plain, full = (log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 4096))
    near = (plain - full).abs().mean()  # what bf16 alone makes of other tiles
    errors = [float((got - full).abs().mean()) for got in found]
    print(f"bf16 {near:.5f}, low bit {errors}, spread {full.std():.3f}")
    assert full.std() > 0.05
    assert max(errors) < 3 * near + 1e-3


@STORED
@pytest.mark.parametrize("name", SHAPES)
def test_with_deterministic_a_batch_does_not_show(name: str, stored: Any, tmp_path: Path) -> None:
    given = {**folder(tmp_path, name, stored), "model_config": None}
    assert serve(**given).tokens == serve(alone=True, **given).tokens


@STORED
def test_graphs_say_what_eager_steps_say(stored: Any, tmp_path: Path) -> None:
    given = {**folder(tmp_path, "llama-125m", stored), "model_config": None, "max_num_batched_tokens": 300}
    assert serve(**given).tokens == serve(cuda_graphs=False, **given).tokens


@STORED
@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_as_planned(name: str, stored: Any, tmp_path: Path) -> None:
    settings = EngineConfig(dummy_weights=True, **folder(tmp_path, name, stored))
    source = read_checkpoint(settings)
    savings = quantization_savings(settings, source, "bfloat16", "cuda")
    planned, scheme = source.spec.weight_bytes(2) - savings, resolve_scheme(source.config, None)
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
