"""PyramidKV for tests, written apart from the engine: all keys and values of one sequence are kept as they came, and
for each layer and key head a list says which positions of the prompt may still be looked at. One query at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.layers.rotary import prepare_qkv
from quire.protocol.model_spec import ModelSpec


class DensePyramid:
    """An Attending of one sequence whose prompt has `prompt` tokens: first one call of the model with all of these,
    then one a token."""

    def __init__(self, spec: ModelSpec, prompt: int) -> None:
        self.spec, self.prompt, self.hidden_states = spec, prompt, None
        self.keys: list[list[Tensor]] = [[] for _ in spec.layers]  # [kv_heads, dim], a position
        self.values: list[list[Tensor]] = [[] for _ in spec.layers]
        self.kept: list[list[list[int]]] = [[list(range(prompt))] * layer.kv_heads for layer in spec.layers]

    def step(self, start: int, count: int) -> DensePyramid:
        self.positions = torch.arange(start, start + count)
        return self

    def attend(self, layer: int, qkv: Tensor, rotary: Any = None, norms: Any = None, last: bool = False) -> Tensor:
        spec = self.spec.layers[layer]
        q, k, v = prepare_qkv(qkv, self.spec.heads, spec.kv_heads, rotary.angles_at(self.positions, qkv.dtype), norms)
        self.keys[layer] += k
        self.values[layer] += v
        out = torch.empty_like(q)
        shared = self.spec.heads // spec.kv_heads
        seen: dict[tuple[int, int], Tensor] = {}
        for row, position in enumerate(self.positions.tolist()):
            for head in range(self.spec.heads):
                look = [p for p in self.kept[layer][head // shared] if p <= position]
                look += range(self.prompt, position + 1)
                keys = torch.stack([self.keys[layer][p][head // shared] for p in look])
                values = torch.stack([self.values[layer][p][head // shared] for p in look])
                weights = torch.softmax(keys @ q[row, head] / math.sqrt(spec.head_dim), 0)
                out[row, head] = weights @ values
                seen[position, head] = weights
        if self.positions[-1] == self.prompt - 1 and spec.budget is not None and spec.budget < self.prompt:
            self._choose(layer, seen, shared)
        return out

    def _choose(self, layer: int, seen: dict[tuple[int, int], Tensor], shared: int) -> None:
        budget, choice = self.spec.layers[layer].budget, self.spec.selection
        before, reach = self.prompt - choice.observation_window, choice.pooling_kernel // 2
        assert budget is not None
        for head in range(self.spec.layers[layer].kv_heads):
            votes = [0.0] * before
            for position in range(before, self.prompt):
                for query in range(head * shared, (head + 1) * shared):
                    for p in range(before):
                        votes[p] += float(seen[position, query][p])
            pooled = [sum(votes[max(p - reach, 0) : p + reach + 1]) for p in range(before)]
            best = sorted(range(before), key=lambda p: -pooled[p])[: budget - choice.observation_window]
            self.kept[layer][head] = sorted(best) + list(range(before, self.prompt))

    def select_logits_rows(self, x: Tensor) -> Tensor:
        return x


@torch.inference_mode()
def dense_logprobs(model: Any, spec: ModelSpec, prompt: list[int], outputs: list[int]) -> Tensor:
    """[outputs, vocabulary]: the log-probabilities of what follows the prompt, and each output but the last."""
    context = DensePyramid(spec, len(prompt))
    rows = [model.logits(model(torch.tensor(prompt), context.step(0, len(prompt))))[-1]]
    for i, token in enumerate(outputs[:-1]):
        rows.append(model.logits(model(torch.tensor([token]), context.step(len(prompt) + i, 1)))[-1])
    return torch.stack(rows).float().log_softmax(-1)
