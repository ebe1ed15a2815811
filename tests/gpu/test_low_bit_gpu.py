"""Weights in few bits on a GPU: an engine's log-probabilities are those with what the weights stand for, as near as
bf16 is; its memory is as planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_deterministic import serve
from test_fp8_gpu import CUDA, JAMBA, SHAPES, log_probs

from quire.config import EngineConfig
from quire.models.quantization import LowBitScheme, resolve_scheme
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import quantization_savings
from quire.weights import low_bit
from quire.weights.dummy import fill_dummy_weights

pytestmark = pytest.mark.gpu
QUANTIZATIONS = pytest.mark.parametrize("quantization", ["int4", "int8"])


@QUANTIZATIONS
@pytest.mark.parametrize("name", SHAPES)
def test_log_probabilities(name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    settings = {"model": str(tmp_path), "quantization": quantization}
    tokens_by_request, _ = log_probs(16, **settings)
    found = [log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 16, 4096)]
    monkeypatch.setattr(low_bit, "stays_low_bit", lambda *args: False)
    plain, full = (log_probs(tokens, tokens_by_request, **settings)[1] for tokens in (1, 4096))
    near = (plain - full).abs().mean()  # what bf16 alone makes of other tiles
    errors = [float((got - full).abs().mean()) for got in found]
    print(f"bf16 {near:.5f}, low bit {errors}, spread {full.std():.3f}")
    assert full.std() > 0.05
    assert max(errors) < 3 * near + 1e-3


@QUANTIZATIONS
def test_with_deterministic_a_batch_does_not_show(quantization: str, tmp_path: Path) -> None:
    assert serve(quantization=quantization).tokens == serve(alone=True, quantization=quantization).tokens
    (tmp_path / "config.json").write_text(json.dumps(JAMBA))
    given = {"quantization": quantization, "model": str(tmp_path), "model_config": None}
    assert serve(**given).tokens == serve(alone=True, **given).tokens


@QUANTIZATIONS
def test_graphs_say_what_eager_steps_say(quantization: str) -> None:
    given = {"quantization": quantization, "max_num_batched_tokens": 300}
    assert serve(**given).tokens == serve(cuda_graphs=False, **given).tokens


@QUANTIZATIONS
@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_as_planned(name: str, quantization: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    settings = EngineConfig(model=str(tmp_path), quantization=quantization, dummy_weights=True)
    source = read_checkpoint(settings)
    planned = source.spec.weight_bytes(2) - quantization_savings(settings, source, "bfloat16", "cuda")
    scheme = resolve_scheme(source.config, quantization)
    assert isinstance(scheme, LowBitScheme)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = low_bit.create_model(source.config, torch.bfloat16, CUDA, scheme)
    fill_dummy_weights(model, 0, scheme)
    model.prepare(max_len=16)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert planned <= held < 1.03 * planned + (1 << 20)
