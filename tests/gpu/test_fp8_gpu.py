"""Weights in FP8 on a GPU that multiplies it: an engine's log-probabilities are those with what the weights stand for,
as near as bf16 is in steps of one row and as FP8 is in larger ones; its memory is as planned, while loading too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_serving import engine_of, greedy, prompt
from test_deterministic import serve

from quire.config import EngineConfig
from quire.models.named_configs import named_config
from quire.models.quantization import FP8_ON_LOAD
from quire.startup.checkpoint import read_checkpoint
from quire.startup.dtypes import quantization_savings
from quire.weights import fp8
from quire.weights.dummy import fill_dummy_weights

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not FP8, reason="this GPU has no FP8")]

CUDA = torch.device("cuda")
LENGTHS = (1, 5, 17, 30, 250, 64)
OUTPUT = 24
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
JAMBA = {
    **named_config("jamba-52b"), "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 32000, "max_position_embeddings": 2048,
    "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8, "mamba_dt_rank": 32,
}  # fmt: skip
SHAPES = {"llama-125m": named_config("llama-125m"), "jamba": JAMBA}


def log_probs(
    tokens: int, follow: list[list[int]] | None = None, **settings: Any
) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of greedy requests, and the log-probabilities of their prompts and of that; `tokens` in a step. With
    `follow` these are all prompts, and nothing is generated."""
    given = {"kv_tokens": 16384, "max_num_batched_tokens": tokens, "enable_prefix_caching": False}
    engine = engine_of(**given, **settings)
    prompts = follow or [prompt(i, length) for i, length in enumerate(LENGTHS)]
    tokens_by_request: list[list[int]] = [list(one) for one in prompts]
    found: list[list[float]] = [[] for _ in prompts]
    for i, one in enumerate(prompts):
        engine.add(str(i), one, greedy(1 if follow else OUTPUT, logprobs=0, prompt_logprobs=0))
    while engine.has_unfinished_requests:
        for output in engine.step():
            which = int(output.request_id)
            if output.prompt_logprobs is not None:
                found[which] += [top.logprob for top in output.prompt_logprobs]
            if not follow:
                tokens_by_request[which] += output.tokens
                found[which] += [top.logprob for top in output.top_logprobs]
    engine.close()
    return tokens_by_request, torch.tensor([number for one in found for number in one])


@pytest.fixture(scope="module", params=[None, BLOCKS], ids=["rows", "blocks"])
def settings(request: Any, shape: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights rounded at start, and as a checkpoint has them."""
    folder: Path = tmp_path_factory.mktemp("shape")
    quantization = {} if request.param is None else {"quantization_config": request.param}
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], **quantization}))
    return {"model": str(folder), "quantization": "fp8"}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: Any) -> Any:
    """Linear layers alone; and with experts and states."""
    return request.param


def test_log_probabilities(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_by_request, few = log_probs(16, **settings)
    _, one = log_probs(1, tokens_by_request, **settings)  # a row isn't rounded
    _, some = log_probs(16, tokens_by_request, **settings)
    _, many = log_probs(4096, tokens_by_request, **settings)
    monkeypatch.setattr(fp8, "has_fp8_matmul", lambda dtype, device: False)
    _, plain = log_probs(1, tokens_by_request, **settings)
    _, full = log_probs(4096, tokens_by_request, **settings)
    assert len(few) == len(tokens_by_request) * (OUTPUT - 1) + sum(LENGTHS)
    spread = full.std()
    assert spread > 0.05
    near = (plain - full).abs().mean()  # what bf16 alone makes of other tiles
    errors = [(got - want).abs().mean() for got, want in ((one, plain), (some, full), (many, full))]
    print(f"bf16 {near:.5f}, one row {errors[0]:.5f}, few {errors[1]:.5f}, many {errors[2]:.5f}, spread {spread:.3f}")
    assert errors[0] < 3 * near + 1e-3
    assert max(errors[1:]) < 0.1 * spread


def test_with_deterministic_a_batch_does_not_show() -> None:
    assert serve(quantization="fp8").tokens == serve(alone=True, quantization="fp8").tokens


def test_graphs_say_what_eager_steps_say() -> None:
    given = {"quantization": "fp8", "max_num_batched_tokens": 300}
    assert serve(**given).tokens == serve(cuda_graphs=False, **given).tokens


def test_a_mixtures_batch_does_not_show_with_deterministic(tmp_path: Path) -> None:
    """Nor do graphs."""
    (tmp_path / "config.json").write_text(json.dumps(JAMBA))
    given = {"quantization": "fp8", "model": str(tmp_path), "model_config": None}
    tokens_by_request = serve(**given).tokens
    assert tokens_by_request == serve(alone=True, **given).tokens
    assert tokens_by_request == serve(cuda_graphs=False, **given).tokens


@pytest.mark.parametrize("name", ["llama-125m", "llama3.2-1b", "jamba"])
def test_memory_is_as_planned_while_loading_too(name: str, tmp_path: Path) -> None:
    config = SHAPES.get(name) or named_config(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(model=str(tmp_path), quantization="fp8", dummy_weights=True)
    source = read_checkpoint(settings)
    planned = source.spec.weight_bytes(2) - quantization_savings(settings, source, "bfloat16", "cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = fp8.create_model(config, torch.bfloat16, CUDA, FP8_ON_LOAD)
    fill_dummy_weights(model, 0, FP8_ON_LOAD)
    torch.cuda.synchronize()
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    found = [fp8.get_scale(model, weight) for weight, _ in model.named_parameters()]
    scales = [scale for scale in found if scale is not None]
    assert scales
    real = sum(p.nbytes for p in model.parameters()) + sum(scale.nbytes for scale in scales)
    assert real == planned
    assert real <= held < 1.02 * real  # rounded up to pieces
    assert peak < held + 2**27
