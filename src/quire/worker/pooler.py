"""Pooled hidden states of prompts, after the model's last norm, for requests without output tokens. The engine sums the
results of a prompt's slices, so no state of a slot is lost by a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit

NOT_FINITE = "the model's hidden states are not finite (NaN or infinite)"


class Pooler:
    """Pools the hidden states of slots whose requests ask for it."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[bool, int]] = {}  # by slot: last token only, and the prompt's length

    def init_slots(self, new_slots: Iterable[SlotInit]) -> None:
        """Assign slots to new sequences."""
        for init in new_slots:
            if init.sampling is not None and init.sampling.pooling:
                self._slots[init.slot] = init.sampling.pooling == "last", init.prompt_len
            elif self._slots:
                self._slots.pop(init.slot, None)

    def needs_hidden(self, slices: Sequence[SeqSlice]) -> bool:
        """Return True if hidden states of some slice are pooled."""
        return bool(self._slots) and any(self._is_pooled(row) for row in slices)

    def _is_pooled(self, seq_slice: SeqSlice) -> bool:
        last, prompt_len = self._slots.get(seq_slice.slot, (True, 0))
        return not last or seq_slice.start + len(seq_slice.tokens) == prompt_len

    def pool(self, slices: Sequence[SeqSlice], offsets: Iterable[int], hidden: Tensor) -> dict[int, Tensor]:
        """Return float32 [hidden] for each slot that is pooled. `hidden` [T, hidden] has the tokens of all slices,
        which begin at `offsets`."""
        pooled: dict[int, Tensor] = {}
        for row, offset in zip(slices, offsets):
            if self._is_pooled(row):
                end = int(offset) + len(row.tokens)
                last, _ = self._slots[row.slot]
                pooled[row.slot] = hidden[end - 1].float() if last else hidden[int(offset) : end].float().sum(0)
        return pooled


def pooled_result(pooled: Tensor | None) -> SliceResult:
    """Return the result of a slice without samples; waits for the device."""
    if pooled is None:
        return SliceResult(())
    values = tuple(pooled.tolist())
    return SliceResult((), pooled=values) if all(map(math.isfinite, values)) else SliceResult((), error=NOT_FINITE)
