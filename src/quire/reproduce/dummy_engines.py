"""Engines of vAttention's three models with dummy weights, for sequences as long as asked, over any memory: what the
entries that run whole steps have in common.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from quire.bench.shapes import built
from quire.build import Built
from quire.config import EngineConfig
from quire.data.models.configs import named_config

ON = "cuda"
SHAPES: dict[str, dict[str, Any]] = {name: named_config(name) for name in ("yi-6b", "llama3-8b", "yi-34b")}
PAGED: dict[str, Any] = {"memory": "paged"}
SLACK = 2048  # tokens of a sequence's last page, at most


def dummy(model: str, length: int, seqs: int, **settings: Any) -> AbstractContextManager[Built]:
    """An engine with room for `seqs` sequences of `length` tokens at once. Nothing is compiled or captured before it is
    needed, so its first steps aren't to be timed. StartupError if the device is too small."""
    shape = {**SHAPES[model], "max_position_embeddings": length}
    config = EngineConfig(
        device=ON, max_model_len=length, max_num_seqs=seqs, kv_tokens=seqs * (length + SLACK), swap_gib=0.0,
        enable_prefix_caching=False, preemption="recompute", warm_up=False, gpu_memory_utilization=0.98, **settings,
    )  # fmt: skip
    return built(config, shape)


def virtual(layout: str, ahead: bool = True) -> dict[str, Any]:
    """The settings of virtual memory."""
    return {"memory": "virtual", "virtual_layout": layout, "map_ahead": "inline" if ahead else "off"}
