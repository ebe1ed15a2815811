"""After the start nobody waits for a kernel to be compiled or for a graph to be captured, whatever is served."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from gpu_serving import answers, engine_of, greedy, nothing_is_compiled, prompt

from quire.core.engine import Engine
from quire.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS = [
    {"model_config": "llama-125m"},
    {"model_config": "opt-125m", "dtype": "float16"},
    {"model_config": "gpt2", "dtype": "float32"},
    {"model_config": "qwen3-8b"},
    {"model_config": "llama-125m", "deterministic": True},
    {"model_config": "llama-125m", "deterministic": True, "max_num_batched_tokens": 8192, "max_num_seqs": 32},
    {"model_config": "llama-125m", "cuda_graphs": False},
    {"model_config": "llama-125m", "attention": "sdpa"},
    {"model_config": "llama-125m", "max_num_seqs": 4},
    {"model_config": "llama-125m", "max_num_seqs": 64},
    {"model_config": "llama-125m", "page_size": 64, "max_num_seqs": 37},
    {"model_config": "llama-125m", "memory": "orca-max", "max_model_len": 512},
]


def start(**settings: Any) -> Engine:
    return engine_of(**{"kv_tokens": 32768, "swap_gib": 0.25, "max_num_batched_tokens": 1024, **settings})


def serve(engine: Engine) -> int:
    """Requests that come in waves and end one after another: nearly every number of rows, alone and beside prompts."""
    from quire.kernels.triton.prefill_hopper import MIN_CONTEXT  # not before, see below

    kinds = (
        {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.8}, {"top_k": 5, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2}, {"n": 3, "seed": 1},
        {"prompt_logprobs": 1, "temperature": 0.0}, {"logit_bias": {3: 2.0}, "min_tokens": 2},
    )  # fmt: skip
    lengths, served = (1, 2, 5, 17, 33, 64, 100, 333), 0
    for wave in (1, 3, 9, 20, 45, 130):
        for i in range(wave):
            params = SamplingParams(max_tokens=3 + i % 11, ignore_eos=True, **kinds[(i + wave) % len(kinds)])
            engine.add(f"{wave}-{i}", prompt(i, lengths[(i * 5) % 8], 5000), params)
            served += 1
            if i % 7 == 0:
                engine.step()
        while engine.has_unfinished_requests:
            engine.step()
    if engine.limits.max_len > MIN_CONTEXT + 100:
        scored = (greedy(3, temperature=1.0, prompt_logprobs=scores) for scores in (None, 1))
        answers(engine, [(prompt(i, MIN_CONTEXT + 50, 5000), params) for i, params in enumerate(scored)])
    return served


@pytest.fixture
def nothing_loaded() -> None:
    """Kernels that earlier tests of this process have loaded are forgotten."""
    import triton

    import quire.kernels.triton as kernels
    from quire.kernels.triton.fast_launch import FastLauncher

    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, FastLauncher):
                kernel.compiled.clear()
            own = getattr(kernel, "kernel", kernel)
            if isinstance(own, triton.JITFunction):
                own.device_caches.clear()


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_nothing_is_compiled_or_captured_in_service(settings: dict[str, Any]) -> None:
    engine = start(**settings)
    graphs = engine.runner.decode_graphs
    mixed = engine.runner.mixed_graphs
    captured = 0 if graphs is None else len(graphs.epilogue_graphs)
    halves = None if mixed is None else (set(mixed.first_graphs), set(mixed.epilogue_graphs))
    with nothing_is_compiled():
        assert serve(engine) >= 208
    if mixed is not None:
        assert halves == (set(mixed.first_graphs), set(mixed.epilogue_graphs))
        assert halves[0] == set(mixed.half_sizes(engine.scheduler.token_budget)[0])
    if graphs is not None:
        assert captured == len(graphs.epilogue_graphs) == len(graphs.capture_sizes) * len(graphs.epilogues)
    assert engine.scheduler.memory.account().usage.used == 0
    engine.close()


def test_it_can_be_left_out() -> None:
    engine = start(model_config="llama-125m", warm_up=False)
    assert not engine.runner.decode_graphs.epilogue_graphs
    answers(engine, [([5, 6, 7], greedy(4, temperature=1.0))])
    assert len(engine.runner.decode_graphs.model_graphs) == 2, "the largest and that of one row"
    assert (len(engine.runner.mixed_graphs.first_graphs), len(engine.runner.mixed_graphs.second_graphs)) == (1, 1), (
        "the prompt's"
    )
    engine.close()
