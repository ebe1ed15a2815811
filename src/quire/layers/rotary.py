"""Rotary position embedding: a table of cos and sin for every position, and the rotation of queries and keys.

Angles are computed in fp32 on the CPU, so that every device has the same; scalings as in transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.layers.norm import RMSNorm
from quire.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """cos and sin for positions [0, length). Call `prepare` before `angles_at`."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int) -> None:
        super().__init__()
        self.rope, self.head_dim, self.length = rope, head_dim, length
        self.table: Tensor | None = None  # fp32 [length, 2, head_dim / 2]: cos, sin

    def prepare(self, device: torch.device, length: int | None = None) -> None:
        """Build the table on `device`, for `length` positions if fewer than the model's are enough."""
        self.table = cos_sin_table(self.rope, self.head_dim, min(length or self.length, self.length)).to(device)

    def angles_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> (cos, sin), each [T, 1, head_dim], as `rotate` takes them. Once a step, for all layers."""
        assert self.table is not None, "prepare() builds the table"
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).unbind(2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] -> the same, rotated, a fresh tensor. The halves (a, b) of a head become
    (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def prepare_qkv(
    qkv: Tensor, heads: int, angles: tuple[Tensor, Tensor] | None, norms: tuple[RMSNorm, RMSNorm] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, heads + 2 kv_heads, head_dim] -> queries and keys, normalised a head and rotated where asked, and values:
    views, or fresh tensors."""
    kv_heads = (qkv.shape[1] - heads) // 2
    both, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = both.split((heads, kv_heads), dim=1)
        both = torch.cat((norms[0](q), norms[1](k)), dim=1)
    if angles is not None:
        both = rotate(both, *angles)
    q, k = both.split((heads, kv_heads), dim=1)
    return q, k, v


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """fp32 [length, 2, head_dim / 2].

    Dynamic NTK changes the base with the sequence's length, but cached keys stay as they were rotated. So position p is
    rotated as a sequence of p + 1 tokens would be: unscaled below `original_len`, with the base for p + 1 beyond.
    That is what transformers' generation with a cache does token by token, and it doesn't depend on the batch.
    """
    turned, positions = rope.rotary_dim(head_dim), torch.arange(length, dtype=torch.float32).unsqueeze(1)
    lengths = {"dynamic": positions + 1, "longrope": torch.tensor(length)}
    frequencies = inverse_frequencies(rope, turned, lengths.get(rope.kind))
    angles = positions * frequencies
    found = torch.stack((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)
    if turned == head_dim:
        return found
    still = torch.tensor((1.0, 0.0)).view(1, 2, 1).expand(length, 2, (head_dim - turned) // 2)
    return torch.cat((found, still), dim=2)


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: Tensor | None = None) -> Tensor:
    """fp32 [head_dim / 2], radians a position; [N, head_dim / 2] for dynamic NTK, which needs the lengths [N, 1].
    LongRoPE needs the longest."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        assert length is not None, "dynamic NTK depends on the length"
        stretch = rope.factor * length.clamp(min=rope.original_max_len) / rope.original_max_len - (rope.factor - 1)
        return 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, plain)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        assert length is not None, "LongRoPE depends on the longest sequence"
        return plain / torch.tensor(rope.long_factors if length > rope.original_max_len else rope.short_factors)
    return plain


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """YaRN section 3.2: pairs that turn more than beta_fast times over the original length stay, those that turn less
    than beta_slow times are interpolated, a linear ramp between."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(rope.original_max_len / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: short waves stay, long waves are stretched by `factor`, with a smooth step between."""
    turns = rope.original_max_len * plain / (2 * math.pi)  # over the original length
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain
