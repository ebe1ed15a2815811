"""The memory plan: what weights, activations and KV pages will take of a device, before anything is loaded
(PagedAttention Figure 1). Arithmetic only; torch is asked for the free memory of a GPU and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import psutil

from quire.config import EngineConfig
from quire.control.memory.layout import page_layout
from quire.data.kernels.limits import MAX_SCORES, MOST_GRAPH_ROWS, MOST_GRAPH_TOKENS, SCORED_AT_ONCE
from quire.errors import StartupError
from quire.vocabulary.specs import ModelSpec

GIB = 2**30
CPU_KV_SHARE = 0.4  # of the memory that is free, when no size is given
CPU_KV_MOST = 4 * GIB


class MemoryPlan(NamedTuple):
    """Bytes, tokens and lengths. `max_len` is what one sequence may reach; `clipped` says what cut it, if anything."""

    model: str
    parameters: int
    dtype: str
    device: str
    device_bytes: int
    free_bytes: int
    weights: int
    activations: int
    kv_bytes: int
    kv_tokens: int
    token_bytes: int
    page_tokens: int  # 0: pages are of bytes
    max_len: int
    clipped: str
    max_seqs: int

    def lines(self) -> list[str]:
        """One screen."""
        left = self.free_bytes - self.weights - self.activations - self.kv_bytes
        at_full = self.kv_tokens / self.max_len
        rows = [
            ("model", f"{self.model}: {self.parameters:,} parameters in {self.dtype}"),
            ("device", f"{self.device}: {_size(self.free_bytes)} free of {_size(self.device_bytes)}"),
            ("weights", _size(self.weights)),
            ("activations", f"{_size(self.activations)} at most"),
            ("KV cache", f"{_size(self.kv_bytes)} = {self.kv_tokens:,} tokens of {self.token_bytes:,} bytes, "
                         + (f"in pages of {self.page_tokens}" if self.page_tokens else "in pages that are mapped")),
            ("left over", _size(left) if left >= 0 else f"-{_size(-left)}: this does not fit"),
            ("longest", f"{self.max_len:,} tokens a sequence{self.clipped}"),
            ("at once", f"{at_full:,.1f} sequences of that length, {self.max_seqs:,} sequences at most"),
        ]  # fmt: skip
        return [f"{name:<12} {text}" for name, text in rows]


def plan_memory(config: EngineConfig, spec: ModelSpec, name: str, dtype: str, itemsize: int, device: str) -> MemoryPlan:
    """How to divide the device. StartupError if the model or one token of KV doesn't fit, naming the numbers."""
    config = config.sized(device)
    assert config.max_num_seqs is not None
    total, free = device_memory(device)
    weights = spec.parameters * itemsize
    activations = activation_bytes(config, spec, itemsize)
    if device != "cpu":
        activations += replay_bytes(config, spec, itemsize)
    pages = sum(sheet.page_bytes for sheet in page_layout(config, spec, itemsize))
    token_bytes = -(-pages // config.page_size)  # what pads smaller groups' pages is taken too
    if config.memory == "virtual":
        token_bytes = spec.token_bytes(itemsize)
    usable = free if device == "cpu" else int(total * config.gpu_memory_utilization) - (total - free)
    room = usable - weights - activations
    wanted_len = config.max_model_len or spec.max_len
    if config.max_model_len is not None and config.max_model_len > spec.max_len:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the model was made for {spec.max_len} tokens",
            f"Use at most {spec.max_len}",
        )
    if config.kv_tokens is not None:
        tokens = config.kv_tokens
    elif config.kv_gib is not None:
        tokens = int(config.kv_gib * GIB) // token_bytes
    else:
        share = min(int(free * CPU_KV_SHARE), CPU_KV_MOST, room) if device == "cpu" else room
        tokens = min(share // token_bytes, config.max_num_seqs * wanted_len)
    tokens = tokens // config.page_size * config.page_size
    if config.kv_tokens is not None:
        tokens = -(-config.kv_tokens // config.page_size) * config.page_size
    fixed = config.kv_tokens is not None or config.kv_gib is not None
    if tokens < 2 or (fixed and tokens * token_bytes > room):
        raise StartupError(
            f"out of memory: {_size(weights)} of weights, {_size(activations)} of activations and "
            f"{_size(max(tokens, config.page_size) * token_bytes)} of KV cache don't fit into "
            f"{_size(max(usable, 0))} on {device}",
            "Use a smaller --kv-gib, --max-num-batched-tokens or model",
        )
    max_len, clipped = wanted_len, ""
    if tokens < wanted_len:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len is {config.max_model_len}, but the KV cache holds {tokens} tokens",
                f"Use --max-model-len {tokens} or less, or a larger --kv-gib",
            )
        max_len, clipped = tokens, f" (the model allows {wanted_len:,}; a larger --kv-gib would too)"
    return MemoryPlan(
        name, spec.parameters, dtype, device, total, free, weights, activations, tokens * token_bytes, tokens,
        token_bytes, 0 if config.memory == "virtual" else config.page_size, max_len, clipped, config.max_num_seqs,
    )  # fmt: skip


def activation_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """The largest tensors of a step of `max_num_batched_tokens`: residual, projections and the MLP's inner layer;
    attention's scores, weights and mask, and the keys and values gathered for them; logits of every sequence, or of as
    many prompt tokens as are scored at once, in float32 and in the sampler's working copies; the rotary tables."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = config.max_num_batched_tokens * (6 * spec.hidden + 4 * kv + 3 * spec.intermediate) * itemsize
    logits = min(max(config.max_num_seqs, SCORED_AT_ONCE), config.max_num_batched_tokens) * spec.vocab_size * 16
    head_dim = max(layer.head_dim for layer in spec.layers)
    gathered = MAX_SCORES * kv // max(spec.heads, 1)  # keys, of as many positions as the scores have
    attention = (
        MAX_SCORES * (2 * itemsize + 1) + 5 * min(gathered, config.max_num_seqs * spec.max_len * kv) * itemsize // 2
    )
    if config.attention == "cudnn":  # two answers for a chunk, and both in float32
        attention += (
            2 * config.max_num_batched_tokens * spec.heads * max(s.head_dim for s in spec.layers) * (itemsize + 4)
        )
    rotary = spec.rotaries * min(config.max_model_len or spec.max_len, spec.max_len) * head_dim * 4
    return int(step + logits + attention + rotary)


def replay_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int) -> int:
    """What a GPU holds beside: logits that graphs leave, in their pool and kept; the sampler's lists; how often each
    sequence has said each token, and room to double that; page tables."""
    assert config.max_num_seqs is not None, "a sized config"
    rows = min(config.max_num_seqs, MOST_GRAPH_ROWS)
    groups = len(page_layout(config, spec, itemsize))
    longest = min(config.max_model_len or spec.max_len, spec.max_len)
    tables = groups * (config.max_num_seqs + 1) * -(-longest // config.page_size) * 8
    kv = max(layer.kv_heads * layer.head_dim for layer in spec.layers)
    step = min(config.max_num_batched_tokens, MOST_GRAPH_TOKENS) * (8 * spec.hidden + 4 * kv + 3 * spec.intermediate)
    return rows * spec.vocab_size * (2 * itemsize + 4 + 6) + step * itemsize + tables


def device_memory(device: str) -> tuple[int, int]:
    """Bytes of `device` in all, and free now."""
    if device == "cpu":
        memory = psutil.virtual_memory()
        return memory.total, memory.available
    import torch

    free, total = torch.cuda.mem_get_info()
    return total, free


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
