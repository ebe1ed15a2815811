"""Open engines of vAttention's three models with dummy weights, over any memory, for entries that run whole steps."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.models.named_configs import named_config
from quire.startup.build import BuiltEngine

ON = "cuda"
SHAPES: dict[str, dict[str, Any]] = {name: named_config(name) for name in ("yi-6b", "llama3-8b", "yi-34b")}
PAGED: dict[str, Any] = {"memory": "paged"}
LAYER_SLACK, SLACK = 2048, 128  # tokens of a sequence's last page of 2 MB at most, with a buffer a layer, and others


def dummy(
    model: str | Mapping[str, Any], length: int, seqs: int, **settings: Any
) -> AbstractContextManager[BuiltEngine]:
    """Open an engine of one of SHAPES, or of a given shape, with room for `seqs` sequences of `length` tokens at once.
    Nothing is compiled or captured in advance, so its first steps must not be timed. Raise StartupError if the device
    is too small."""
    shape = {**(SHAPES[model] if isinstance(model, str) else model), "max_position_embeddings": length}
    slack = LAYER_SLACK if settings.get("virtual_layout") == "layer" else SLACK
    return built(EngineConfig.of(**{
        "device": ON, "max_model_len": length, "max_num_seqs": seqs, "kv_tokens": seqs * (length + slack),
        "swap_gib": 0.0, "enable_prefix_caching": False, "preemption": "recompute", "warm_up": False,
        "gpu_memory_utilization": 0.98, **settings,
    }), shape)  # fmt: skip


def virtual(layout: str, ahead: bool = True) -> dict[str, Any]:
    """Return the settings of virtual memory."""
    return {"memory": "virtual", "virtual_layout": layout, "map_ahead": "inline" if ahead else "off"}


def release() -> None:
    """Release the device memory of closed engines, for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
