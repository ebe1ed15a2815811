"""The costs of a preemption by swapping and by recomputation (PagedAttention §4.5, §7.3), measured on a machine.

`quire bench preemption` fits the numbers; the policy `auto` takes the cheaper mode for each victim.
"""

from __future__ import annotations

from typing import NamedTuple


class PreemptionCosts(NamedTuple):
    """Costs in seconds. A swap moves every page out and in; a recomputation runs the model on all tokens again."""

    swap_fixed: float
    swap_byte: float  # out and in together
    compute_fixed: float
    compute_token: float
    compute_pair: float  # one token attends to another

    def swap_seconds(self, held_bytes: int) -> float:
        """Return the seconds to move `held_bytes` out and back."""
        return self.swap_fixed + held_bytes * self.swap_byte

    def recompute_seconds(self, tokens: int, pairs: float) -> float:
        """Return the seconds to compute `tokens` again, which attend to `pairs` positions in all."""
        return self.compute_fixed + tokens * self.compute_token + pairs * self.compute_pair

    def cheaper_mode(self, held_bytes: int, tokens: int, lengths: list[int]) -> str:
        """Return "swap" or "recompute" for sequences of these `lengths`, which have `tokens` different tokens in
        all."""
        pairs = sum(length * length for length in lengths) / 2 * (tokens / max(sum(lengths), 1))
        return "swap" if self.swap_seconds(held_bytes) < self.recompute_seconds(tokens, pairs) else "recompute"


DEFAULT_COSTS = PreemptionCosts(1e-4, 1 / 5e9, 1e-3, 2.5e-4, 1e-8)
"""The default without a measurement: a small model on a few CPU cores."""
