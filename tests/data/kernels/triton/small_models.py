"""Models of two layers that keep keys and values, and runners of them over poisoned pages."""

from __future__ import annotations

from typing import Any

import torch
from geometries import one_size

from quire.data.models import resolve
from quire.data.models.configs import named_config
from quire.data.runner.model_runner import ModelRunner
from quire.data.weights.dummy import fill_dummy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, WIDTH = 4, 8
SMALL = {
    "llama-125m": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64},
    "characterai-8b": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "sliding_window": 6,
                       "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
                       "kv_sharing": [None, 0, None, 2]},
    "opt-125m": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "ffn_dim": 48, "vocab_size": 64, "max_position_embeddings": 64},
    "gemma-2-2b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
                   "sliding_window": 4, "query_pre_attn_scalar": 5},
    "gemma-3-4b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
                   "sliding_window": 4, "sliding_window_pattern": 2},
    "pyramidkv-8b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
                     "pyramid_kv": {"budgets": [9, 7], "queries": 1, "pool": 3}},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64},
}  # fmt: skip


def a_model(name: str) -> tuple[Any, Any]:
    config = {**named_config(name), **SMALL[name]}
    kind = resolve(config)
    model = kind(config, torch.float32, DEVICE)
    fill_dummy(model, 3)
    for parameter in model.parameters():
        parameter.mul_(8)  # logits that differ
        if parameter.count_nonzero() == 0:
            parameter.uniform_(-0.5, 0.5)  # norms that keep their difference from one
    model.prepare(64)
    return model, kind.spec(config)


def a_runner(model: Any, spec: Any, attention: str, slots: int = 5) -> ModelRunner:
    runner = ModelRunner(model, spec, torch.float32, DEVICE, attention)
    page_bytes = sum(layer.token_bytes(4) for layer in spec.layers) * PAGE
    pages = slots * WIDTH + 1
    runner.bind(
        one_size((tuple(spec.owners), None), pages=pages, page_bytes=page_bytes, slots=slots, width=WIDTH, tokens=PAGE)
    )
    runner.store.views[0][1:].fill_(torch.nan)  # recycled pages hold anything
    return runner
