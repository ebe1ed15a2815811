"""Hidden states of prompts, after the model's last norm, for requests that ask for these and for no tokens. What a
sequence needs between its rows is kept by whoever reads the results, so that a slot has nothing to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit

NOT_FINITE = "the model's hidden states are not finite (NaN or infinite)"


class Pooler:
    """Which slots' rows are pooled, and how."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[bool, int]] = {}  # of each: only the last token's; the length of its prompt

    def init_slots(self, new_slots: Iterable[SlotInit]) -> None:
        """Slots have other sequences."""
        for birth in new_slots:
            if birth.sampling is not None and birth.sampling.pooling:
                self._slots[birth.slot] = birth.sampling.pooling == "last", birth.prompt_len
            elif self._slots:
                self._slots.pop(birth.slot, None)

    def needs_hidden(self, slices: Sequence[SeqSlice]) -> bool:
        """Whether some row's hidden states are wanted."""
        return bool(self._slots) and any(self._is_pooled(row) for row in slices)

    def _is_pooled(self, seq_slice: SeqSlice) -> bool:
        last, prompt_len = self._slots.get(seq_slice.slot, (True, 0))
        return not last or seq_slice.start + len(seq_slice.tokens) == prompt_len

    def pool(self, slices: Sequence[SeqSlice], offsets: Iterable[int], hidden: Tensor) -> dict[int, Tensor]:
        """For each slot whose row is pooled, float32 [hidden]; `hidden` [T, hidden] are those of all rows' tokens,
        which begin at `offsets`."""
        found: dict[int, Tensor] = {}
        for row, offset in zip(slices, offsets):
            if self._is_pooled(row):
                end = int(offset) + len(row.tokens)
                last, _ = self._slots[row.slot]
                found[row.slot] = hidden[end - 1].float() if last else hidden[int(offset) : end].float().sum(0)
        return found


def pooled_result(pooled: Tensor | None) -> SliceResult:
    """What a row brought that drew nothing; waits for the device."""
    if pooled is None:
        return SliceResult(())
    numbers = tuple(pooled.tolist())
    return SliceResult((), pooled=numbers) if all(map(math.isfinite, numbers)) else SliceResult((), error=NOT_FINITE)
