"""The parameters of a rotary embedding (RoFormer), scalings included. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Pair i of a head is rotated by position * theta^(-2i / head_dim), scaled by the method `kind` to reach `factor`
    times `original_max_len`, the length that the model was trained for. `attention_factor` multiplies cos and sin
    (YaRN).

    LongRoPE divides the angle of pair i by `long_factors[i]` if sequences may be longer than `original_max_len`, else
    by `short_factors[i]`. Cached keys stay rotated, so the choice is the same for all sequences.

    `partial_rotary_factor`: only this fraction of a head's dimensions is rotated (Phi-4-mini), and their number
    replaces head_dim in the formula. Loading permutes the rows of Q and K (`rotary_order`), which leaves their products
    unchanged. Kernels rotate whole heads, the other pairs by an angle of 0.

    The kind "proportional" (Gemma 4) rotates the first `rotated_share` of a head's pairs, all angles divided by
    `factor`; head_dim in the formula stays that of the head.
    """

    kind: str
    theta: float
    original_max_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    rotated_share: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.partial_rotary_factor)

    def rotary_order(self, head_dim: int) -> list[int]:
        """Return the order in which quire has a checkpoint's dimensions of a head. In quire pair i is dimensions i and
        i + head_dim / 2. In a checkpoint the first `rotary_dim` are rotated, in pairs i and i + rotary_dim / 2."""
        half, rest = self.rotary_dim(head_dim) // 2, list(range(self.rotary_dim(head_dim), head_dim))
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return [*range(half), *first, *range(half, 2 * half), *second]
