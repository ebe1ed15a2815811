"""What a model needs of a memory, and what a memory needs of a runner: the vocabulary that both sides share.

A LayerSpec says what one layer keeps; a ModelSpec lists them; a Geometry, derived by a memory, says which tensors the
runner must allocate. Integers only: no tensors, no policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Layout(Enum):
    """How a memory places tokens: `PAGED` through page tables, `CONTIGUOUS` at base + position."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps of each token: keys and values of `kv_heads` heads of `head_dim` numbers.

    `window` is None for full attention; otherwise the token at position p attends to positions > p - window.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values in this layer."""
        return 2 * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the control plane and the memory plan see it. `parameters` counts weights, tied ones once."""

    family: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_len: int
    hidden: int
    heads: int
    intermediate: int
    parameters: int
    eos_ids: tuple[int, ...] = ()

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of one token's keys and values over all layers (OPT-13B in fp16: 819,200)."""
        return sum(layer.token_bytes(itemsize) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one page table. A page holds `page_tokens` tokens of all of them, one layer after another,
    each layer as keys then values: [layers, 2, page_tokens, kv_heads, head_dim]."""

    layers: tuple[int, ...]
    page_tokens: int
    page_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the runner must allocate: one buffer of `pages` pages of `page_bytes` bytes, and for each group a table of
    `slots` x `table_width` page ids. Slot 0 and page 0 are scratch: padding resolves to them and no sequence owns them.
    Host pages, where swapped sequences wait, are numbered from 1 too.
    """

    layout: Layout
    pages: int
    page_bytes: int
    slots: int
    table_width: int
    groups: tuple[Group, ...]
    itemsize: int
    host_pages: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the buffer, scratch page included."""
        return self.pages * self.page_bytes
