"""The numbers that define a rotary embedding (RoFormer), scalings included. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Pair i of a head turns by position * theta^(-2i / head_dim), changed as `kind` says to reach `factor` times
    `original_max_len`, the length that the model was trained for. `attention_factor` multiplies cos and sin (YaRN).

    LongRoPE divides what pair i turns by its number in `long_factors` where sequences may be longer than
    `original_max_len`, and in `short_factors` where none is: keys stay as they were rotated, so that it is one or the
    other for all sequences.

    `partial_rotary_factor` is config.json's partial_rotary_factor: only these dimensions of a head are rotated
    (Phi-4-mini), and their number stands for head_dim. Loading permutes the rows of Q and K (`rotary_order`), which
    leaves their products unchanged. Kernels rotate whole heads, the other pairs by an angle of 0.
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

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's numbers are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def rotary_order(self, head_dim: int) -> list[int]:
        """A head's numbers as rotation has them, pair i being numbers i and i + head_dim / 2: those that are rotated
        are the first `rotary_dim` of a checkpoint's, whose pairs are i and i + turned / 2."""
        half, rest = self.rotary_dim(head_dim) // 2, list(range(self.rotary_dim(head_dim), head_dim))
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return [*range(half), *first, *range(half, 2 * half), *second]
