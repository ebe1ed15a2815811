"""How memory that is contiguous in addresses is cut: which layers share a buffer, what a token takes there, how many
tokens a page holds, and how many addresses that needs. Integers only; no pages are given to anyone here.

vAttention §5.1.1 has a buffer for each layer's keys and one for its values. Others hold several layers of a token, one
behind another ("sliced"), so that a page of the same bytes holds fewer tokens, and fewer pages are mapped at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import StartupError

MAX_LAYERS = 4096  # of a buffer; a model has no more


class LayerLocation(NamedTuple):
    """Where a layer's keys or values are: in which buffer, and how many bytes behind the first of each token's."""

    buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The buffers of `layers` layers on one worker, alike in all: each holds the keys, or the values, of
    `layers_per_buffer` layers. In it a token takes `stride` bytes; the last buffer's are filled in part if
    `layers_per_buffer` doesn't divide `layers`.

    A page of the memory is `num_buffers` pages of `buffer_page_bytes` bytes, one at the same place of every buffer, so
    that they hold the same tokens. `run_tokens` tokens fill `run_pages` of them: 32 and 1, or 256 and 15, where a token
    may lie in two.
    """

    layers: int
    layer_bytes: int  # of a token's keys, or values, in one layer: heads x numbers of a head x bytes of a number
    layers_per_buffer: int
    buffer_page_bytes: int

    @property
    def num_buffers(self) -> int:
        """Buffers: for each `layers_per_buffer` layers one of keys and one of values."""
        return 2 * -(-self.layers // self.layers_per_buffer)

    @property
    def stride(self) -> int:
        """Bytes from a token to the next in a buffer."""
        return self.layers_per_buffer * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers: `num_buffers * stride`, less what a last buffer leaves "
        "empty."""
        return 2 * self.layers * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the memory, in all buffers."""
        return self.num_buffers * self.buffer_page_bytes

    @property
    def run_tokens(self) -> int:
        return self.buffer_page_bytes // math.gcd(self.buffer_page_bytes, self.stride)

    @property
    def run_pages(self) -> int:
        return self.stride // math.gcd(self.buffer_page_bytes, self.stride)

    def num_pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps in part."""
        return -(-tokens * self.stride // self.buffer_page_bytes)

    def slot_bytes(self, max_len: int) -> int:
        """Bytes from a sequence to the next in a buffer: `max_len` tokens in whole pages, since pages are mapped."""
        return self.num_pages(max_len) * self.buffer_page_bytes

    def buffer_bytes(self, slots: int, max_len: int) -> int:
        """Addresses of one buffer with a place for each of `slots` sequences."""
        return slots * self.slot_bytes(max_len)

    def total_address_bytes(self, slots: int, max_len: int) -> int:
        """Addresses of all buffers of a worker."""
        return self.num_buffers * self.buffer_bytes(slots, max_len)

    def locate(self, layer: int, values: bool) -> LayerLocation:
        """Keys and values of the same layers are in neighbouring buffers."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return LayerLocation(
            2 * (layer // self.layers_per_buffer) + values, layer % self.layers_per_buffer * self.layer_bytes
        )


def plan_buffers(layers: int, layer_bytes: int, page_bytes: int, layout: str) -> BufferLayout:
    """`layout` is "layer" (a buffer for each), "sliced" (one for all) or "sliced:8" (for so many at most: of 12 layers
    two buffers of six). StartupError for another one."""
    assert min(layers, layer_bytes, page_bytes) > 0, f"{layers} layers of {layer_bytes} bytes in pages of {page_bytes}"
    buffers = -(-layers // _parse_layers_per_buffer(layout, layers))
    return BufferLayout(layers, layer_bytes, -(-layers // buffers), page_bytes)


def _parse_layers_per_buffer(layout: str, layers: int) -> int:
    if layout in ("layer", "sliced"):
        return 1 if layout == "layer" else layers
    kind, _, number = layout.partition(":")
    if kind == "sliced" and len(number) <= 4 and number.isascii() and number.isdigit():
        width = int(number)
        if 1 <= width <= MAX_LAYERS:
            return width
    raise StartupError(
        f"{layout[:80]!r} is no layout of virtual memory",
        f'Give "layer", "sliced", or "sliced:N" with N layers of a buffer, from 1 to {MAX_LAYERS:,}',
    )


class WorkerShape(NamedTuple):
    """What one of several devices keeps: so many layers, and so many KV heads of each."""

    layers: int
    kv_heads: int


def split_workers(layers: int, kv_heads: int, tensor: int = 1, pipeline: int = 1) -> list[WorkerShape]:
    """The workers of a model whose heads are split `tensor` ways and whose layers `pipeline` ways: the first stages
    have one layer more where they don't come out even. Workers beyond the heads keep one too, in common with others.
    StartupError if heads can't be split so, or a stage would have no layer."""
    if min(tensor, pipeline) < 1 or pipeline > layers:
        raise StartupError(
            f"{tensor} x {pipeline} workers can't share {layers} layers",
            f"Give at least 1 each, and at most {layers} stages",
        )
    if kv_heads % tensor and tensor % kv_heads:
        raise StartupError(
            f"{kv_heads} KV heads can't be split {tensor} ways", f"Give a divisor or a multiple of {kv_heads}"
        )
    heads = max(kv_heads // tensor, 1)
    stages = [layers // pipeline + (stage < layers % pipeline) for stage in range(pipeline)]
    return [WorkerShape(stage, heads) for stage in stages for _ in range(tensor)]


def max_waste_bytes(buffers: list[BufferLayout]) -> int:
    """Bytes that a sequence wastes at most on these workers: a page of each is mapped and still empty (§7.4)."""
    return sum(one.page_bytes for one in buffers)
