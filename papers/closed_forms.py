"""Compute sizes of weights and of KV from models' shapes and layouts alone, and the lengths that our workloads draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.bench.workloads import parse
from quire.memory.virtual.buffers import BufferLayout, plan_buffers
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec

FP16 = 2
KIB, MIB = 2**10, 2**20


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
    """Return the mean lengths of prompts and outputs of workloads, then their densities, up to the longest length of
    each workload."""
    means, densities = [], []
    for name, most in longest.items():
        pairs = parse(f"{name}@{count}").lengths()
        for length, drawn in zip(("prompt", "output"), np.array(pairs).T):
            of = {"workload": name, "length": length}
            means.append({**of, "mean": float(drawn.mean())})
            density, edges = np.histogram(drawn, np.linspace(0, most, bins + 1), density=True)
            middles = (edges[:-1] + edges[1:]) / 2
            densities += [{**of, "tokens": x, "density": y} for x, y in zip(middles.tolist(), density.tolist())]
    return [*means, *densities]


def on_workers(name: str, tensor: int, page: int, layout: str) -> list[BufferLayout]:
    """Return the buffers of each of `tensor` workers, which divide the key heads."""
    spec = spec_of(name)
    layer = spec.layers[0]
    assert layer.kv_heads % tensor == 0, f"{tensor} workers can't divide {layer.kv_heads} key heads"
    layer_bytes = layer.kv_heads // tensor * layer.head_dim * FP16
    return [plan_buffers(len(spec.layers), layer_bytes, page, layout)] * tensor


def max_waste_bytes(workers: Sequence[BufferLayout]) -> int:
    """Return the most bytes that a sequence wastes: one mapped and empty page on each worker (§7.4)."""
    return sum(one.page_bytes for one in workers)


def buffers(
    models: Sequence[tuple[str, int]], layouts: Sequence[str], pages: Mapping[str, int], requests: int, length: int
) -> list[dict[str, Any]]:
    """Return for each model with its number of tensor-parallel workers, each layout and page size in KB: the `tokens`
    of a page, rounded to hundredths; the `mb` that a request wastes at most, of all workers; and of one worker its
    `buffers`, the bytes of a token in one (`stride`), the share of a page that stays `empty`, the MB that a request of
    `length` tokens takes in a buffer, and the addresses for `requests` of these. KB and MB are powers of two."""
    points: list[dict[str, Any]] = []
    for name, tensor in models:
        for layout in layouts:
            for label, kib in pages.items():
                workers = on_workers(name, tensor, kib * KIB, layout)
                one = workers[0]
                points.append({
                    "model": name, "tensor": tensor, "layout": layout, "page": label,
                    "tokens": _plain(round(one.run_tokens / one.run_pages, 2)),
                    "mb": _plain(max_waste_bytes(workers) / MIB), "token_kb": spec_of(name).token_bytes(FP16) // KIB,
                    "buffers": one.num_buffers, "stride": one.stride,
                    "empty": 1 - one.token_bytes / (one.num_buffers * one.stride),
                    "request_mb": _plain(one.slot_bytes(length) / MIB),
                    "buffer_mb": _plain(one.buffer_bytes(requests, length) / MIB),
                    "addresses_mb": _plain(one.total_address_bytes(requests, length) / MIB),
                })  # fmt: skip
    return points


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
