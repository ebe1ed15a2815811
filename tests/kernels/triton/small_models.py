"""Models of two layers that keep keys and values, and runners of them over poisoned pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from geometries import one_size
from grids import DEVICE

from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import TableWrite
from quire.weights.dummy import fill_dummy_weights
from quire.worker.model_runner import ModelRunner

PAGE, WIDTH = 4, 8
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama-125m": {**COMMON, "head_dim": 8},
    "characterai-8b": {**COMMON, "num_hidden_layers": 4, "sliding_window": 6, "kv_sharing": [None, 0, None, 2],
                       "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
    "opt-125m": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "ffn_dim": 48, "vocab_size": 64, "max_position_embeddings": 64},
    "gemma-2-2b": {**COMMON, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 5},
    "gemma-3-4b": {**COMMON, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    "pyramidkv-8b": {**COMMON, "head_dim": 8, "pyramid_kv": {"budgets": [9, 7], "queries": 1, "pool": 3}},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64},
}  # fmt: skip


def built(config: dict[str, Any], grows: Callable[[str, torch.Tensor], bool]) -> tuple[Any, Any]:
    """A model and its spec; parameters that `grows` names are large, so that logits differ."""
    kind = resolve_model_class(config)
    model = kind(config, torch.float32, DEVICE)
    fill_dummy_weights(model, 3)
    for name, parameter in model.named_parameters():
        if grows(name, parameter):
            parameter.mul_(8)
    model.prepare(64)
    return model, read_spec(config)


def a_model(name: str) -> tuple[Any, Any]:
    def grows(name: str, parameter: torch.Tensor) -> bool:
        if parameter.count_nonzero() == 0:
            parameter.uniform_(-0.5, 0.5)  # norms that keep their difference from one
            return False
        return True

    return built({**named_config(name), **SMALL[name]}, grows)


def bind(runner: ModelRunner, spec: ModelSpec, slots: int) -> None:
    page_bytes = sum(layer.token_bytes(4) for layer in spec.layers) * PAGE
    pages = slots * WIDTH + 1
    runner.bind(
        one_size(
            (tuple(spec.kv_layers), None), pages=pages, page_bytes=page_bytes, slots=slots, width=WIDTH, tokens=PAGE
        )
    )
    runner.store.group_pages[0][1:].fill_(torch.nan)  # recycled pages hold anything


def a_runner(model: Any, spec: Any, attention: str, slots: int = 5) -> ModelRunner:
    runner = ModelRunner(model, spec, torch.float32, DEVICE, attention)
    bind(runner, spec, slots)
    return runner


def pages_of(*slots: int) -> list[TableWrite]:
    """A place for each slot."""
    return [TableWrite(slot, 0, 0, tuple(range(1 + slot * WIDTH, 1 + (slot + 1) * WIDTH))) for slot in slots]
