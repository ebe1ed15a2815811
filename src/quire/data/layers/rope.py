"""The numbers that define a rotary embedding (RoFormer), scalings included. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Pair i of a head turns by position * theta^(-2i / head_dim), changed as `kind` says to reach `factor` times
    `original_len`, the length that the model was trained for. `attention_factor` multiplies cos and sin (YaRN).

    LongRoPE divides what pair i turns by its number in `long` where sequences may be longer than `original_len`, and in
    `short` where none is: keys stay as they were rotated, so that it is one or the other for all sequences.
    """

    kind: str
    theta: float
    original_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
