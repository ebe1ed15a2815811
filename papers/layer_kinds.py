"""Compute from the shapes of Jenga's models what uniform pages waste, and the pages that are compatible.

The layers of a model are described by kind: their number, the bytes of a unit (a token, an image token, a state), and
the units that a request needs. Models that quire does not implement have their published shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.memory.jenga.page_sizes import LayerType, max_page, plan_pages
from quire.models import read_spec
from quire.models.named_configs import named_config
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


def named(name: str) -> list[Kind]:
    """Return the kinds of a named config."""
    return kinds_of(read_spec(named_config(name)))


def attention(name: str, layers: int, kv_heads: int, head_dim: int, most: int | None = None) -> Kind:
    """Return the kind of attention layers with keys and values in bfloat16."""
    return Kind(name, layers, 2 * kv_heads * head_dim * BF16, most)


def embedding(hidden: int) -> Kind:
    """Return the embeddings of image tokens as the vision encoder returns them, in bfloat16."""
    return Kind("embedding", 1, hidden * BF16, unit="image token")


def jamba(kv_heads: int, state_bytes: int) -> list[Kind]:
    """Return the kinds of Jamba 1.5 mini (transformers' JambaConfig): 32 layers, every eighth of attention; a state has
    8,192 channels of `state_bytes` bytes."""
    return [attention("full", 4, kv_heads, 128), Kind("state", 28, 8192 * state_bytes, 1, "state")]


def drafted(target: Sequence[Kind], draft: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of a model together with those of its draft model."""
    return [*target, *(kind._replace(name=f"draft's {kind.name}") for kind in draft)]


def gemma2(layers: int, kv_heads: int, head_dim: int) -> list[Kind]:
    """Return the kinds of Gemma-2, with `layers` layers of each kind."""
    return [
        attention("full", layers, kv_heads, head_dim), attention("window 4,096", layers, kv_heads, head_dim, 4096)
    ]  # fmt: skip


def character(layers: int, windows: int) -> list[Kind]:
    return [attention("global", layers, 8, 128), attention("window 1,024", windows, 8, 128, 1024)]


def pyramid(layers: int) -> list[Kind]:
    return [attention(f"budget {i}", layers, 8, 128) for i in range(1, 9)]


# Llama 3.2 11B Vision: 40 layers, every fifth of cross attention to image tokens (transformers' MllamaConfig).
MLLAMA = [attention("self", 32, 8, 128), attention("cross", 8, 8, 128)._replace(unit="image token")]
# "Ministral 1B" is defined by the paper, "following the model configuration of Llama 3.2 1B" (§7.4).
LLAMA_1B = [attention("full", 16, 8, 64)]
LLAMA_70B = [attention("full", 80, 8, 128)]


def models() -> dict[str, list[Kind]]:
    """Return the models of §7.1: those of Table 1, those with vision embeddings, and targets with their drafts (§7.4).

    A state of Jamba keeps, for each channel, the last 3 of 4 inputs of a convolution in 16 bits, and 16 numbers. The
    bytes of such a number are a choice. The 48 bytes (16 numbers of 16 bits and 4 inputs of 32 bits) give the paper's
    numbers."""
    ministral, llama = named("ministral-8b"), named("llama3-8b")
    gemma_9b, gemma_27b = gemma2(21, 8, 256), gemma2(23, 16, 128)
    return {
        "Llama 3.2 11B Vision": MLLAMA,
        "Gemma-2 9B": gemma_9b,
        "Gemma-2 27B": gemma_27b,
        "Ministral 8B": ministral,
        "Jamba 52B, states in 16 bits": jamba(8, 3 * 2 + 16 * 2),
        "Jamba 52B, states in 32 bits": jamba(8, 3 * 2 + 16 * 4),
        "Jamba 52B, KV in 8 bits, states of 48 bytes a channel": jamba(4, 4 * 4 + 16 * 2),
        "character.ai 8B": character(2, 16),
        "character.ai 70B": character(5, 40),
        "PyramidKV 8B": pyramid(4),
        "PyramidKV 70B": pyramid(10),
        "Llama 3 8B": llama,
        "Llama 3 70B": LLAMA_70B,
        "Llama 3.2 11B Vision, embeddings cached": [*MLLAMA, embedding(4096)],
        "LLaVA-OneVision 7B": [attention("full", 28, 4, 128), embedding(3584)],
        "InternVL2 8B": [attention("full", 32, 8, 128), embedding(4096)],
        "Phi-3 Vision 4B": [attention("full", 32, 32, 96), embedding(3072)],
        "PaliGemma2 10B": [*gemma_9b, embedding(3584)],
        "Llama 8B and its draft of 1B": drafted(llama, LLAMA_1B),
        "Llama 70B and its draft of 1B": drafted(LLAMA_70B, LLAMA_1B),
        "Ministral 8B and its draft of 1B": drafted(ministral, LLAMA_1B),
        "Gemma-2 27B and its draft of 2B": drafted(gemma_27b, gemma2(13, 4, 256)),
    }  # fmt: skip


# Runners


def uniform_waste(requests: Mapping[str, tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Return what a request of a model's text and image tokens takes of uniform pages, which hold all its tokens in
    every layer: a point for each kind of layers, and one for the waste. `share` is in per cent.

    All layers of a model must have equal bytes per token. Cross-attention layers need image tokens, others text."""
    points: list[dict[str, Any]] = []
    for name, (model, text, image) in requests.items():
        kinds, held = models()[model], text + image
        assert len({kind.unit_bytes for kind in kinds}) == 1, "layers keep different bytes of a token"
        needs = [kind.needed(image if kind.unit == "image token" else text) for kind in kinds]
        whole = held * sum(kind.layers for kind in kinds)
        points += [
            {"request": name, "layers": kind.name, "count": kind.layers, "needed": need, "held": held,
             "share": 100 * kind.layers * need / whole}
            for kind, need in zip(kinds, needs)
        ]  # fmt: skip
        needed = sum(kind.layers * need for kind, need in zip(kinds, needs))
        points.append({"request": name, "layers": "wasted", "share": 100 * (whole - needed) / whole})
    return points


def page_plans(tokens: int) -> list[dict[str, Any]]:
    """Plan the pages of all models with quire's planner, for small pages of `tokens` tokens, or of one state.

    A point has, for an exact plan and for the one that may be padded (`chosen_`), the bytes of a large page and the
    small pages in it by kind; the largest `padding` of a kind in per cent; MAX and GCD pages in bytes; and the tokens
    of a MAX page of the layers with the fewest bytes per token."""
    points = []
    for model, kinds in models().items():
        types = [LayerType(kind.name, kind.bytes * (1 if kind.unit == "state" else tokens)) for kind in kinds]
        exact, chosen = plan_pages(types, None), plan_pages(types)
        points.append({
            "model": model, "pages": [[kind.name, kind.page_bytes] for kind in exact.types],
            "large": exact.large_bytes, "ratios": [*exact.small_pages_per_large],
            "chosen_large": chosen.large_bytes, "chosen_ratios": [*chosen.small_pages_per_large],
            "padding": max(100 * pad / kind.page_bytes for pad, kind in zip(chosen.padding, chosen.types)),
            "max": max_page(types), "gcd": math.gcd(*(kind.page_bytes for kind in types)),
            "max_tokens": max_page(types) / min(kind.bytes for kind in kinds if kind.unit != "state"),
        })  # fmt: skip
    return points
