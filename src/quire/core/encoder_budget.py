"""The budget of a step for encoding images, which are encoded in parts, as prompts are computed in chunks."""

from __future__ import annotations

from quire.memory.interface import KVMemory
from quire.protocol.model_spec import max_parts_per_step
from quire.protocol.sequence import Sequence


class EncoderBudget:
    """The encoder budget of a scheduler whose steps compute `budget` tokens. A step encodes image parts of at most as
    many tokens, at least one part, and no more than memory is planned for (`max_parts_per_step`). A slice waits until
    the images that it needs are encoded, while others go on."""

    def __init__(self, memory: KVMemory, budget: int) -> None:
        kv_config = memory.kv_config
        self.memory, self.clip_chunk = memory, kv_config.clip_chunk
        self.max_parts = max_parts_per_step(budget, kv_config.part_tokens, kv_config.part_rows, kv_config.most_rows)
        self.used_parts = 0  # in the step that is being planned

    def start_step(self) -> None:
        """Start planning a step. Encodings that were planned but not sent are undone: the requests that needed them may
        have ended since, and their images with them."""
        self.used_parts = 0
        self.memory.undo_encoding()

    def schedule_encoding(self, seq: Sequence, count: int) -> int:
        """Return how many of its next `count` tokens, which have pages, a sequence can compute in this step."""
        if not seq.images:
            return count
        end, parts = self.memory.plan_encoding(seq, seq.planned + count, self.max_parts - self.used_parts)
        self.used_parts += parts
        seen = end - seq.planned
        return seen if seen == count else self.clip_chunk(seq.prompt_len, seq.planned, seen)
