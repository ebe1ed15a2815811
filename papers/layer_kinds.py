"""Describe the layers of Jenga's models by kind: their number, the bytes of a unit (a token, an image token, a state),
and the number of units that a request needs. Models that quire does not implement have their published shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from papers.closed_forms import spec_of
from quire.protocol.model_spec import ModelSpec

BF16 = 2


class Kind(NamedTuple):
    """`layers` layers, each of which keeps `unit_bytes` for each `unit`. `most`: the largest number of units that a
    request needs, however long it is (a window, a budget; 1 for states)."""

    name: str
    layers: int
    unit_bytes: int
    most: int | None = None
    unit: str = "token"

    @property
    def bytes(self) -> int:
        """Return the bytes of a unit in all layers together."""
        return self.layers * self.unit_bytes

    def needed(self, tokens: int) -> int:
        """Return the units that a request of `tokens` tokens needs for the next one."""
        return tokens if self.most is None else min(tokens, self.most)


def kinds_of(spec: ModelSpec, itemsize: int = BF16) -> list[Kind]:
    """Return the kinds of a model's layers. Layers that share another's KV keep nothing and are omitted."""
    own = [layer for layer in spec.layers if layer.kv_source_layer is None]
    found = []
    for kept in dict.fromkeys(layer.group_key for layer in own):
        mine = [layer for layer in own if layer.group_key == kept]
        first = mine[0]
        most = next((n for n in (first.window, first.chunk, first.budget) if n is not None), None)
        name = "full" if most is None else "window" if first.window else "chunk" if first.chunk else "budget"
        label = name if most is None else f"{name} {most:,}"
        found.append(Kind(label, len(mine), first.token_bytes(itemsize), most))
    return found


def drafted(target: Sequence[Kind], draft: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of a model together with those of its draft model."""
    return [*target, *(kind._replace(name=f"draft's {kind.name}") for kind in draft)]


def named(name: str) -> list[Kind]:
    """Return the kinds of a named config."""
    return kinds_of(spec_of(name))


def attention(name: str, layers: int, kv_heads: int, head_dim: int, most: int | None = None) -> Kind:
    """Return the kind of attention layers with keys and values in bfloat16."""
    return Kind(name, layers, 2 * kv_heads * head_dim * BF16, most)


# Llama 3.2 11B Vision: 40 layers, every fifth of cross attention to image tokens (transformers' MllamaConfig).
MLLAMA = [attention("self", 32, 8, 128), attention("cross", 8, 8, 128)._replace(unit="image token")]
# Embeddings of image tokens as the vision encoder returns them: the hidden size in bfloat16.
EMBEDDED = Kind("embedding", 1, 4096 * BF16, unit="image token")
# Jamba 1.5 mini, 52B (transformers' JambaConfig): 32 layers, every eighth of attention; a state is convolution's last 3
# of 4 inputs and 16 numbers for each of 8,192 channels. The bytes of a state's number are a choice.
JAMBA_ATTENTION = attention("full", 4, 8, 128)
CHANNELS, STATES, CONVOLVED = 8192, 16, 3


def jamba(state_bytes: int) -> list[Kind]:
    """Return Jamba's kinds, with states in numbers of `state_bytes` bytes, and convolution inputs in bfloat16."""
    state = CHANNELS * (CONVOLVED * BF16 + STATES * state_bytes)
    return [JAMBA_ATTENTION, Kind("state", 28, state, 1, "state")]


# "Ministral 1B" is defined by the paper, "following the model configuration of Llama 3.2 1B" (§7.4).
LLAMA_1B = [attention("full", 16, 8, 64)]
GEMMA2_2B = [attention("full", 13, 4, 256), attention("window 4,096", 13, 4, 256, 4096)]
GEMMA2_9B = [attention("full", 21, 8, 256), attention("window 4,096", 21, 8, 256, 4096)]
GEMMA2_27B = [attention("full", 23, 16, 128), attention("window 4,096", 23, 16, 128, 4096)]
LLAMA_70B = [attention("full", 80, 8, 128)]
