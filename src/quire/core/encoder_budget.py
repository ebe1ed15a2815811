"""What a step spends on pictures: their encoder's work is cut to fit, as prompts are. Knows no memory's inside."""

from __future__ import annotations

from quire.memory.interface import KVMemory
from quire.protocol.model_spec import max_parts_per_step
from quire.protocol.sequence import Sequence


class EncoderBudget:
    """Of a scheduler whose steps compute `budget` tokens: encoding parts of pictures costs a step as much again, at
    most, and a part if that is more; and they are no more than memory is planned for (`parts_a_step`). A row waits
    until the pictures that it needs are encoded, while others go on."""

    def __init__(self, memory: KVMemory, budget: int) -> None:
        self.memory, self.clip_chunk = memory, memory.kv_config.clip_chunk
        geometry = memory.kv_config
        self.max_parts = max_parts_per_step(budget, geometry.part_tokens, geometry.part_rows, geometry.most_rows)
        self.used_parts = 0  # parts, in the step that is planned

    def start_step(self) -> None:
        """A step is planned. If the one before came to nothing, so did what it was to encode: who needed that may be
        gone, and his pictures with him."""
        self.used_parts = 0
        self.memory.undo_encoding()

    def schedule_encoding(self, seq: Sequence, count: int) -> int:
        """How many of its next `count` tokens, for which there is room, a sequence can compute in this step."""
        if not seq.images:
            return count
        end, parts = self.memory.plan_encoding(seq, seq.planned + count, self.max_parts - self.used_parts)
        self.used_parts += parts
        seen = end - seq.planned
        return seen if seen == count else self.clip_chunk(seq.prompt_len, seq.planned, seen)
