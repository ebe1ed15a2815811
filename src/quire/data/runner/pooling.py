"""Hidden states of prompts, after the model's last norm, for requests that ask for these and for no tokens. What a
sequence needs between its rows is kept by whoever reads the results, so that a slot has nothing to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from quire.vocabulary.plan import Birth, Row, Sampled

FAULT = "the model's hidden states are not finite (NaN or infinite)"


class Pooling:
    """Which slots' rows are pooled, and how."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[bool, int]] = {}  # of each: only the last token's; the length of its prompt

    def born(self, births: Iterable[Birth]) -> None:
        """Slots have other sequences."""
        for birth in births:
            if birth.sampling is not None and birth.sampling.pooling:
                self._slots[birth.slot] = birth.sampling.pooling == "last", birth.prompt_len
            elif self._slots:
                self._slots.pop(birth.slot, None)

    def asked(self, rows: Sequence[Row]) -> bool:
        """Whether some row's hidden states are wanted."""
        return bool(self._slots) and any(self._wants(row) for row in rows)

    def _wants(self, row: Row) -> bool:
        last, prompt_len = self._slots.get(row.slot, (True, 0))
        return not last or row.start + len(row.tokens) == prompt_len

    def of(self, rows: Sequence[Row], offsets: Iterable[int], hidden: Tensor) -> dict[int, Tensor]:
        """For each slot whose row is pooled, float32 [hidden]; `hidden` [T, hidden] are those of all rows' tokens,
        which begin at `offsets`."""
        found: dict[int, Tensor] = {}
        for row, offset in zip(rows, offsets):
            if self._wants(row):
                end = int(offset) + len(row.tokens)
                last, _ = self._slots[row.slot]
                found[row.slot] = hidden[end - 1].float() if last else hidden[int(offset) : end].float().sum(0)
        return found


def sampled(pooled: Tensor | None) -> Sampled:
    """What a row brought that drew nothing; waits for the device."""
    if pooled is None:
        return Sampled(())
    numbers = tuple(pooled.tolist())
    return Sampled((), pooled=numbers) if all(map(math.isfinite, numbers)) else Sampled((), error=FAULT)
