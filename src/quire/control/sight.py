"""What a step spends on pictures: their encoder's work is cut to fit, as prompts are. Knows no memory's inside."""

from __future__ import annotations

from quire.control.memory import KVMemory
from quire.control.request import Sequence
from quire.vocabulary.specs import parts_a_step


class Sight:
    """Of a scheduler whose steps compute `budget` tokens: encoding parts of pictures costs a step as much again, at
    most, and a part if that is more; and they are no more than memory is planned for (`parts_a_step`). A row waits
    until the pictures that it needs are encoded, while others go on."""

    def __init__(self, memory: KVMemory, budget: int) -> None:
        self.memory, self.part = memory, memory.geometry.part
        geometry = memory.geometry
        self.most = parts_a_step(budget, geometry.part_tokens, geometry.part_rows, geometry.most_rows)
        self.spent = 0  # parts, in the step that is planned

    def begin(self) -> None:
        """A step is planned. If the one before came to nothing, so did what it was to encode: who needed that may be
        gone, and his pictures with him."""
        self.spent = 0
        self.memory.unencode()

    def clear(self, seq: Sequence, count: int) -> int:
        """How many of its next `count` tokens, for which there is room, a sequence can compute in this step."""
        if not seq.media:
            return count
        end, parts = self.memory.encode(seq, seq.planned + count, self.most - self.spent)
        self.spent += parts
        seen = end - seq.planned
        return seen if seen == count else self.part(seq.prompt_len, seq.planned, seen)
