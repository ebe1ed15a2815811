"""Rotary position embedding: a table of cos and sin for every position, and the rotation of queries and keys.

Angles are computed in fp32 on the CPU, so that they are the same on every device; scalings are those of transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.kernels.forward_batch import HeadNorms
from quire.layers.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """cos and sin for positions [0, length). Call `prepare` before `angles_at`."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int) -> None:
        super().__init__()
        self.rope, self.head_dim, self.length = rope, head_dim, length
        self.table: Tensor | None = None  # fp32 [length, 2, head_dim / 2]: cos, sin

    def prepare(self, device: torch.device, length: int | None = None) -> None:
        """Build the table on `device`, for `length` positions if that is less than the model's length."""
        self.table = cos_sin_table(self.rope, self.head_dim, min(length or self.length, self.length)).to(device)

    def angles_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for positions [T], each [T, 1, head_dim], as `rotate` takes them."""
        assert self.table is not None, "prepare() builds the table"
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).unbind(2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, head_dim] rotated, as a new tensor. The halves (a, b) of a head become (a cos - b sin, b cos
    + a sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def prepare_qkv(
    qkv: Tensor, heads: int, kv_heads: int, angles: tuple[Tensor, Tensor] | None, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, heads + 2 kv_heads, head_dim] into queries, keys and values (views or new tensors), which are
    normalised per head by their `norms`; then queries and keys are rotated, if `angles` are given. Without values in
    qkv, [T, heads + kv_heads, head_dim], they are the keys before norm and rotation; without keys there are none."""
    own = min(kv_heads, qkv.shape[1] - heads)
    qk, v = qkv[:, : heads + own], qkv[:, qkv.shape[1] - own :]
    if norms is not None:
        q, k = torch.split(qk, [heads, own], dim=1)
        qk = torch.cat((norms.q(q), k if norms.k is None else norms.k(k)), dim=1)
        v = v if norms.v is None else norms.v(v)
    if angles is not None:
        qk = rotate(qk, *angles)
    q, k = torch.split(qk, [heads, own], dim=1)
    return q, k, v


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int) -> Tensor:
    """Return the table of cos and sin, fp32 [length, 2, head_dim / 2].

    Dynamic NTK changes the base with the sequence's length, but cached keys stay rotated. So position p is rotated as
    in a sequence of p + 1 tokens: unscaled below `original_max_len`, beyond it with the base for p + 1. transformers'
    generation with a cache does the same token by token, and it doesn't depend on the batch.
    """
    rotary_dim, positions = rope.rotary_dim(head_dim), torch.arange(length, dtype=torch.float32).unsqueeze(1)
    lengths = {"dynamic": positions + 1, "longrope": torch.tensor(length)}
    frequencies = inverse_frequencies(rope, rotary_dim, lengths.get(rope.kind))
    angles = positions * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)
    if rotary_dim == head_dim:
        return table
    unrotated = torch.tensor((1.0, 0.0)).view(1, 2, 1).expand(length, 2, (head_dim - rotary_dim) // 2)
    return torch.cat((table, unrotated), dim=2)


def inverse_frequencies(rope: RopeConfig, head_dim: int, length: Tensor | None = None) -> Tensor:
    """Return the angles in radians per position, fp32 [head_dim / 2]; [N, head_dim / 2] for dynamic NTK, with `length`
    [N, 1]. For LongRoPE `length` is that of the longest sequence."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        assert length is not None, "dynamic NTK depends on the length"
        stretch = rope.factor * length.clamp(min=rope.original_max_len) / rope.original_max_len - (rope.factor - 1)
        return 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        rotated = int(rope.rotated_share * head_dim // 2)
        return torch.cat((plain[:rotated] / rope.factor, torch.zeros(head_dim // 2 - rotated)))
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, plain)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        assert length is not None, "LongRoPE depends on the longest sequence"
        return plain / torch.tensor(rope.long_factors if length > rope.original_max_len else rope.short_factors)
    return plain


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """YaRN section 3.2: pairs with more than beta_fast rotations over the original length are unchanged, those with
    less than beta_slow are interpolated, with a linear ramp between."""

    def pair_index(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: short wavelengths are unchanged, long ones are stretched by `factor`, with a linear step between."""
    rotations = rope.original_max_len * plain / (2 * math.pi)  # over the original length
    smooth = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain
