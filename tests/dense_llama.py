"""A Llama of unlike layers as one reads it off its config.json: a whole sequence at once, a mask for each layer, and
where a layer shares the other one's own keys and values. Plain torch in fp32; nothing of it is the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class DenseLlama:
    """Of a folder with one file of tensors."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        layers = self.config["num_hidden_layers"]
        self.types = self.config.get("layer_types") or ["full_attention"] * layers
        self.owners = self.config.get("kv_sharing") or [None] * layers

    def _weight(self, name: str, layer: int | None = None) -> Tensor:
        where = "model." if layer is None else f"model.layers.{layer}."
        return self.weights[f"{where}{name}.weight"]

    def mask(self, layer: int, length: int) -> Tensor:
        """[length, length]: true where a token (row) sees another (column)."""
        seen = torch.zeros(length, length, dtype=torch.bool)
        for at in range(length):
            first = 0
            if self.types[layer] == "sliding_attention":
                first = max(0, at + 1 - self.config["sliding_window"])
            elif self.types[layer] == "chunked_attention":
                first = at // self.config["attention_chunk_size"] * self.config["attention_chunk_size"]
            seen[at, first : at + 1] = True
        return seen

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _turned(self, x: Tensor) -> Tensor:
        """x [length, heads, dim], each at its position."""
        length, _, dim = x.shape
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        angles = torch.outer(torch.arange(length), theta ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)[:, None]
        low, high = x.split(dim // 2, dim=-1)
        return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()

    def _heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        heads = self.config["num_attention_heads" if name == "q" else "num_key_value_heads"]
        return (x @ self._weight(f"self_attn.{name}_proj", layer).T).view(len(x), heads, -1)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[length, vocabulary]."""
        x = self._weight("embed_tokens")[tokens]
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        for layer, owner in enumerate(self.owners):
            inner = self._norm(x, self._weight("input_layernorm", layer))
            q = self._turned(self._heads(inner, layer, "q"))
            if owner is None:
                kept[layer] = self._turned(self._heads(inner, layer, "k")), self._heads(inner, layer, "v")
            k, v = (one.repeat_interleave(group, 1) for one in kept[layer if owner is None else owner])
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~self.mask(layer, len(tokens)), -torch.inf).softmax(-1)
            found = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + found @ self._weight("self_attn.o_proj", layer).T
            inner = self._norm(x, self._weight("post_attention_layernorm", layer))
            gate, up = (inner @ self._weight(f"mlp.{name}_proj", layer).T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self._weight("mlp.down_proj", layer).T
        return self._norm(x, self._weight("norm")) @ self.weights["lm_head.weight"].T
