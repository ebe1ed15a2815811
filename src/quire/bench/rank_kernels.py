"""Families of `quire bench kernels` whose sizes are those of a model, or of one of the ranks that share it out:
products and decode attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.bench.replay import Call, Case, inputs
from quire.errors import StartupError
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import MAX_RANKS, Shard

LAYERS, PAGE = 8, 16  # maximum number of caches or weights in turn; tokens
DECODES = ((1, 1024), (1, 8192), (1, 65536), (8, 4096), (32, 1024), (32, 4096), (128, 1024), (256, 1024))
KIND = "LlamaForCausalLM"


class Shape(NamedTuple):
    """The part of a dense model on one rank: `hidden` is the model's. `label` begins the names of its cases."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int
    depth: int
    label: str = ""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each weight."""
        own = self.heads * self.dim
        return {
            "qkv": (own + 2 * self.kv_heads * self.dim, self.hidden), "o": (self.hidden, own),
            "gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn), "head": (self.vocab, self.hidden),
        }  # fmt: skip


LLAMA_8B = Shape(4096, 32, 8, 128, 14336, 128256, 32)


def shape_of(name: str, ranks: int) -> Shape:
    """Return the shape of the first of `ranks` ranks of the config `name`. Raise StartupError for a model that is not a
    Llama or cannot be sharded so."""
    if not 1 <= ranks <= MAX_RANKS:
        raise StartupError(f"--tp is {ranks}", f"Give a number between 1 and {MAX_RANKS}")
    config, part = named_config(name), Shard(0, ranks)
    if config["architectures"] != [KIND]:
        raise StartupError(f"--model-config is {name}, whose products aren't those of a {KIND}", "Use llama3-70b")
    spec = read_spec(config, part)
    layer = spec.layers[0]
    label = f"{name}, 1 of {ranks}: "
    return Shape(
        spec.hidden, spec.heads, layer.kv_heads, layer.head_dim, spec.intermediate,
        part.padded_vocab_rows(spec.vocab_size),
        len(spec.layers), label,
    )  # fmt: skip


def decodes(shape: Shape) -> Iterator[Case]:
    """Yield decode attention over scattered pages, and over contiguous tokens."""
    from quire.bench.kv_batches import decode_calls, random_kv

    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    for batch, context in DECODES:
        size = 2 * batch * kv_heads * context * dim * 2
        for name, contiguous in (("decode paged", False), ("decode contiguous", True)):
            layers = min(inputs(size), LAYERS)
            where = random_kv(batch, context, kv_heads, dim, PAGE, layers, torch.bfloat16, heads, contiguous)
            yield Case(name, f"{shape.label}{batch} x {context}", decode_calls(where), size)


def products(shape: Shape) -> Iterator[Case]:
    """Yield linear layers: cuBLAS, and our kernels for few rows; then all products of a step, in order."""
    from quire.kernels.triton.linear import gated_linear, linear, supports

    matrices = shape.matrices
    for name, (size, width) in matrices.items():
        weights = [_random(size, width) for _ in range(min(inputs(size * width * 2), LAYERS))]
        for rows in (1, 8, 16, 32, 256, 2048):
            x = _random(rows, width)
            calls: list[Call] = [partial(F.linear, x, weight) for weight in weights]
            case, moved = f"{shape.label}{name}, {rows} rows", (size * width + rows * (size + width)) * 2
            if supports(weights[0], rows):
                yield Case("linear", case, [partial(linear, x, weight) for weight in weights], moved)
            if rows <= 256:
                yield Case("cuBLAS", case, calls, moved)
            else:
                yield Case("cuBLAS", case, calls, 2 * rows * size * width, "compute")

    layers = [[_random(*matrices[name]) for name in ("qkv", "o", "gate_up", "down")] for _ in range(LAYERS)]
    head, early = _random(*matrices["head"]), partial(linear, pdl=True)
    size = 2 * (shape.depth * sum(weight.numel() for weight in layers[0]) + head.numel())
    for rows in (1, 2, 4, 8, 16, 32):
        x, attended, inner = (_random(rows, matrices[name][1]) for name in ("qkv", "o", "down"))
        gate_up = partial(gated_linear, activation="silu", pdl=True)
        for name, product, both in (("linear", early, gate_up), ("cuBLAS", F.linear, F.linear)):
            step = partial(_step, shape.depth, product, both, layers, head, x, attended, inner)
            yield Case(f"{name}, a step", f"{shape.label}{shape.depth} layers and the head, {rows} rows", [step], size)


def _step(
    depth: int, product: Any, both: Any, layers: list[list[Tensor]], head: Tensor, x: Tensor, attended: Tensor,
    inner: Tensor,
) -> None:  # fmt: skip
    """Compute the products of a step from `x` [rows, hidden], the attention output `attended` and the MLP's `inner`
    [rows, intermediate]. `both`: the stacked gate and up projections."""
    for i in range(depth):
        qkv, o, gate_up, down = layers[i % len(layers)]
        product(x, qkv)
        product(attended, o)
        both(x, gate_up)
        product(inner, down)
    product(x, head)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
