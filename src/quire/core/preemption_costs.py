"""The costs of a preemption by swapping and by recomputation (PagedAttention §4.5, §7.3), measured on a machine.

`quire bench preemption` fits the numbers; the policy `auto` takes the cheaper mode for each victim. Speculative
decoding chooses the number of draft tokens by costs of the same form.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.protocol.model_spec import ModelSpec


class PreemptionCosts(NamedTuple):
    """Costs in seconds. A swap moves every page out and in; a recomputation runs the model on all tokens again."""

    swap_fixed: float
    swap_byte: float  # out and in together
    compute_fixed: float
    compute_token: float
    compute_pair: float  # one token attends to another
    free_tokens: float = 0.0  # of a step, that are computed while it reads the weights

    def swap_seconds(self, held_bytes: int) -> float:
        """Return the seconds to move `held_bytes` out and back."""
        return self.swap_fixed + held_bytes * self.swap_byte

    def recompute_seconds(self, tokens: int, pairs: float) -> float:
        """Return the seconds of a step of `tokens` tokens, which attend to `pairs` positions in all."""
        computed = max(tokens - self.free_tokens, 0)
        return self.compute_fixed + computed * self.compute_token + pairs * self.compute_pair

    def cheaper_mode(self, held_bytes: int, tokens: int, lengths: list[int]) -> str:
        """Return "swap" or "recompute" for sequences of these `lengths`, which have `tokens` different tokens in
        all."""
        pairs = sum(length * length for length in lengths) / 2 * (tokens / max(sum(lengths), 1))
        return "swap" if self.swap_seconds(held_bytes) < self.recompute_seconds(tokens, pairs) else "recompute"


DEFAULT_COSTS = PreemptionCosts(1e-4, 1 / 5e9, 1e-3, 2.5e-4, 1e-8)
"""The default without a measurement: a small model on a few CPU cores."""


class DeviceSpeed(NamedTuple):
    """Rough numbers of a device: bytes and operations per second, and the least seconds of a step and of a pass of a
    draft model within it."""

    bytes: float
    operations: float
    step: float
    draft_pass: float


DEVICE_SPEEDS = {"cpu": DeviceSpeed(3e10, 3e11, 5e-4, 1.5e-4), "cuda": DeviceSpeed(3e12, 8e14, 3e-4, 3e-4)}
"""A few CPU cores, and a large GPU."""
IDLE_SECONDS, IDLE_ROW_SECONDS = 5e-4, 1.5e-5
"""The seconds, roughly, that a GPU waits for the host if no step is in flight while the next one is planned: for a step
and for each of its sequences."""


class SpeculationCosts(NamedTuple):
    """Costs in seconds: of a step of the model, of a pass of the draft model, and of planning a step while none is in
    flight (`idle_row` for each of its sequences)."""

    model: PreemptionCosts
    draft: PreemptionCosts
    idle_seconds: float = 0.0
    idle_row: float = 0.0

    @classmethod
    def estimate(cls, device: str, itemsize: int, spec: ModelSpec, draft: ModelSpec | None) -> SpeculationCosts:
        """Return the costs on a "cpu" or "cuda" device without a measurement, for numbers of `itemsize` bytes. A step
        reads all weights, and computes with them for each token; a token reads the keys and values before it."""
        speed = DEVICE_SPEEDS[device]
        model, draft_model = (
            DEFAULT_COSTS._replace(
                compute_fixed=fixed + each.weight_bytes(itemsize) / speed.bytes,
                compute_token=2 * each.parameters / speed.operations,
                compute_pair=each.token_bytes(itemsize) / speed.bytes,
            )
            for each, fixed in ((spec, speed.step), (draft or spec, speed.draft_pass))
        )
        return cls(model, draft_model, *((IDLE_SECONDS, IDLE_ROW_SECONDS) if device == "cuda" else ()))


DEFAULT_SPECULATION_COSTS = SpeculationCosts(
    DEFAULT_COSTS, DEFAULT_COSTS._replace(compute_fixed=1e-4, compute_token=2.5e-5, compute_pair=1e-9)
)
"""The same, with a draft model that is ten times smaller."""
