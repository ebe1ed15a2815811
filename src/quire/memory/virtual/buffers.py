"""The layout of virtually contiguous memory: which layers share a buffer, the bytes of a token there, the tokens of a
page, and the addresses that it needs.

vAttention §5.1.1 has one buffer for each layer's keys and one for its values. Other layouts ("sliced") hold several
layers of a token one after another, so that a page of the same bytes holds fewer tokens, and fewer pages are mapped at
once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import StartupError

MAX_LAYERS = 4096  # of a buffer: more than any model has


class LayerLocation(NamedTuple):
    """The place of a layer's keys or values: a buffer, and the byte offset in each token's part of it."""

    buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The buffers of `layers` layers on one worker.

    Each holds the keys, or the values, of `layers_per_buffer` layers, and a token takes `stride` bytes of it. The last
    buffers are filled in part if `layers_per_buffer` does not divide `layers`.

    A page of the memory is `num_buffers` pages of `buffer_page_bytes` bytes, one at the same place of every buffer, so
    that they hold the same tokens. `run_tokens` tokens fill `run_pages` pages: 32 and 1, or 256 and 15, where a token
    may lie in two pages."""

    layers: int
    layer_bytes: int  # of a token's keys, or values, in one layer: heads x numbers of a head x bytes of a number
    layers_per_buffer: int
    buffer_page_bytes: int

    @property
    def num_buffers(self) -> int:
        """The number of buffers: for each `layers_per_buffer` layers one of keys and one of values."""
        return 2 * -(-self.layers // self.layers_per_buffer)

    @property
    def stride(self) -> int:
        """The bytes from a token to the next in a buffer."""
        return self.layers_per_buffer * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values in all layers, without the unused part of a last buffer."""
        return 2 * self.layers * self.layer_bytes

    @property
    def page_bytes(self) -> int:
        """The bytes of a page of the memory, in all buffers."""
        return self.num_buffers * self.buffer_page_bytes

    @property
    def run_tokens(self) -> int:
        return self.buffer_page_bytes // math.gcd(self.buffer_page_bytes, self.stride)

    @property
    def run_pages(self) -> int:
        return self.stride // math.gcd(self.buffer_page_bytes, self.stride)

    def num_pages(self, tokens: int) -> int:
        """Return the pages that hold `tokens` tokens; the last one may be partial."""
        return -(-tokens * self.stride // self.buffer_page_bytes)

    def slot_bytes(self, max_len: int) -> int:
        """Return the bytes from a slot to the next in a buffer: the whole pages of `max_len` tokens."""
        return self.num_pages(max_len) * self.buffer_page_bytes

    def buffer_bytes(self, slots: int, max_len: int) -> int:
        """Return the bytes of addresses of one buffer with `slots` slots."""
        return slots * self.slot_bytes(max_len)

    def total_address_bytes(self, slots: int, max_len: int) -> int:
        """Return the bytes of addresses of all buffers of a worker."""
        return self.num_buffers * self.buffer_bytes(slots, max_len)

    def locate(self, layer: int, values: bool) -> LayerLocation:
        """Return the place of a layer's keys or values; those of the same layers are in neighbouring buffers."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        return LayerLocation(
            2 * (layer // self.layers_per_buffer) + values, layer % self.layers_per_buffer * self.layer_bytes
        )


def plan_buffers(layers: int, layer_bytes: int, page_bytes: int, layout: str) -> BufferLayout:
    """Return the buffers for a layout: "layer" (one layer each), "sliced" (all layers in one) or "sliced:8" (at most 8
    layers each: two buffers of six for 12 layers). StartupError for any other."""
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
