"""Compute the sizes of models' keys and values in contiguous memory, from their shapes and the layout alone.

KB, MB and GB are powers of two here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers.closed_forms import spec_of
from papers.entry import Point
from quire.memory.virtual.buffers import BufferLayout, max_waste_bytes, plan_buffers, split_workers

HALF = 2  # bytes of a number
KIB, MIB = 2**10, 2**20


def on_workers(name: str, tensor: int, page: int, layout: str) -> list[BufferLayout]:
    """Return the buffers of each of `tensor` workers."""
    spec = spec_of(name)
    layer = spec.layers[0]
    return [
        plan_buffers(worker.layers, worker.kv_heads * layer.head_dim * HALF, page, layout)
        for worker in split_workers(len(spec.layers), layer.kv_heads, tensor)
    ]


def buffers(
    models: Sequence[tuple[str, int]], layouts: Sequence[str], pages: Mapping[str, int], requests: int, length: int
) -> list[Point]:
    """Return for each model with its number of tensor-parallel workers, each layout and page size in KB: the `tokens`
    of a page, rounded to hundredths; the `mb` that a request wastes at most, of all workers; and of one worker its
    `buffers`, the bytes of a token in one (`stride`), the share of a page that stays `empty`, the MB that a request of
    `length` tokens takes in a buffer, and the addresses for `requests` of these."""
    points: list[Point] = []
    for name, tensor in models:
        for layout in layouts:
            for label, kib in pages.items():
                workers = on_workers(name, tensor, kib * KIB, layout)
                one = workers[0]
                points.append({
                    "model": name, "tensor": tensor, "layout": layout, "page": label,
                    "tokens": _plain(round(one.run_tokens / one.run_pages, 2)),
                    "mb": _plain(max_waste_bytes(workers) / MIB), "token_kb": spec_of(name).token_bytes(HALF) // KIB,
                    "buffers": one.num_buffers, "stride": one.stride,
                    "empty": 1 - one.token_bytes / (one.num_buffers * one.stride),
                    "request_mb": _plain(one.slot_bytes(length) / MIB),
                    "buffer_mb": _plain(one.buffer_bytes(requests, length) / MIB),
                    "addresses_mb": _plain(one.total_address_bytes(requests, length) / MIB),
                })  # fmt: skip
    return points


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
