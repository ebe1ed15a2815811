"""Compute sizes of weights and of KV from models' shapes, and the lengths that our workloads draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from papers.plots import beside
from quire.bench.workloads import DRAWN
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec

FP16 = 2
GIB = 2**30
bars = beside


def spec_of(name: str) -> ModelSpec:
    return read_spec(named_config(name))


def model_sizes(kv_gib: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return, for models and the sizes of their KV memory, the 10^9 bytes of parameters, thousands of KV slots, the
    1,024 bytes of KV of a token, and the 1,000 * 2^20 bytes of a request of the greatest length."""
    points = []
    for name, gib in kv_gib.items():
        spec = spec_of(name)
        token = spec.token_bytes(FP16)
        points.append({
            "model": name, "parameters": spec.parameters * FP16 / 1e9, "kv_gib": gib,
            "slots": gib * GIB / token / 1000, "token": token // 1024, "request": token * spec.max_len / 2**20 / 1000,
        })  # fmt: skip
    return points


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
