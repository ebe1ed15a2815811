"""Compute sizes of weights and of KV from models' shapes, and the lengths that our workloads draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.bench.workloads import DRAWN
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec

FP16 = 2


def spec_of(name: str) -> ModelSpec:
    return read_spec(named_config(name))


def shapes(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the shape of each model: heads, layers, parameters, the longest sequence, and the bytes of a token's KV
    in numbers of two bytes."""
    return [
        {"model": name, "heads": spec.heads, "kv_heads": spec.layers[0].kv_heads, "head_dim": spec.layers[0].head_dim,
         "layers": len(spec.layers), "parameters": spec.parameters, "max_len": spec.max_len,
         "token": spec.token_bytes(FP16)}
        for name, spec in zip(names, map(spec_of, names))
    ]  # fmt: skip


def lengths(longest: Mapping[str, int], count: int, bins: int) -> list[dict[str, Any]]:
    """Return the mean lengths of prompts and outputs of workloads before clipping (`drawn`) and as served, and the per
    cent that are clipped; then the densities before clipping, up to the longest length of each workload."""
    means, densities = [], []
    for name, most in longest.items():
        rng = np.random.default_rng(0)
        for length, kind in zip(("prompt", "output"), DRAWN[name]):
            drawn = kind.draw(rng, count)
            of = {"workload": name, "length": length}
            clipped = kind.clip(drawn)
            means.append({
                **of, "drawn": float(drawn.mean()), "served": float(clipped.mean()),
                "clipped": 100 * float((clipped != drawn).mean()),
            })  # fmt: skip
            density, edges = np.histogram(drawn, np.linspace(0, most, bins + 1), density=True)
            middles = (edges[:-1] + edges[1:]) / 2
            densities += [{**of, "tokens": x, "density": y} for x, y in zip(middles.tolist(), density.tolist())]
    return [*means, *densities]
