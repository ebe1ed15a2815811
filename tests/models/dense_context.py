"""An Attending for tests: plain attention over everything seen so far, with one mask. Slow, and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.rotary import prepare_qkv
from quire.models.hidden_states import HiddenStates
from quire.protocol.model_spec import ModelSpec


class DenseContext:
    """Tokens of several sequences, one call of the model after another; keys and values are kept as they came."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.sinks = spec, dict[int, Tensor]()
        self.hidden_states: HiddenStates | None = None
        self.image_tokens: Tensor | None = None
        self.keys: list[list[Tensor]] = [[] for _ in spec.layers]
        self.values: list[list[Tensor]] = [[] for _ in spec.layers]
        self.seen_positions = torch.empty(0, dtype=torch.int64)
        self.seen_sequences = torch.empty(0, dtype=torch.int64)

    def step(self, positions: Tensor, sequences: Tensor) -> DenseContext:
        """Prepare for one call: token i is at positions[i] of sequence sequences[i]."""
        self.positions, self.sequences = positions, sequences
        self.seen_positions = torch.cat((self.seen_positions, positions))
        self.seen_sequences = torch.cat((self.seen_sequences, sequences))
        return self

    def attend(self, layer, qkv, rotary=None, norms=None, last=False) -> Tensor:
        spec = self.spec.layers[layer]
        angles = None if rotary is None else rotary.angles_at(self.positions, qkv.dtype)
        q, k, v = prepare_qkv(qkv, self.spec.heads, spec.kv_heads, angles, norms)
        assert q.shape[1:] == (self.spec.heads, spec.head_dim)
        if spec.kv_source_layer is None:
            assert k.shape[1:] == v.shape[1:] == (spec.kv_heads, spec.head_dim)
            self.keys[layer].append(k)
            self.values[layer].append(v)
        else:
            layer = spec.kv_source_layer
        group = q.shape[1] // spec.kv_heads
        k = torch.cat(self.keys[layer]).float().repeat_interleave(group, dim=1)
        v = torch.cat(self.values[layer]).float().repeat_interleave(group, dim=1)
        distance = self.positions[:, None] - self.seen_positions[None, :]
        mask = (self.sequences[:, None] == self.seen_sequences[None, :]) & (distance >= 0)
        if spec.window is not None:
            mask &= distance < spec.window
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (spec.scale or spec.head_dim**-0.5)
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        assert spec.has_sinks == (layer in self.sinks)
        if spec.has_sinks:
            scores = torch.cat((scores, self.sinks[layer][:, None, None].expand(-1, len(q), 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(k)], v).to(q.dtype)

    def merge_image_embeddings(self, x: Tensor) -> Tensor:
        return x

    def select_logits_rows(self, x: Tensor) -> Tensor:
        return x
