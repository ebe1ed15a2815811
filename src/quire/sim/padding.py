"""What FasterTransformer computes for nothing (PagedAttention §2.3), which this engine does not: for models of cost."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.scheduler import Scheduler
from quire.protocol.step_plan import StepPlan


class PaddingCounts(NamedTuple):
    """In one step: tokens that pad prompts to the longest of their batch, and rows of members that ended, which the
    others still need."""

    prompt: int
    rows: int


class StaticBatchPadding:
    """Watches a scheduler of static batches, in which all members of a batch come in one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch_size = 0  # sequences of the batch under way, those to be forked included

    def __call__(self, plan: StepPlan) -> PaddingCounts:
        """What is computed for nothing in the step that was just planned."""
        by_slot = self.scheduler.by_slot
        prompts = [birth.prompt_len for birth in plan.new_slots if birth.parent_slot < 0]
        branches = sum(seq.num_forks for _, seq in by_slot.values())
        if prompts:
            self.batch_size = len(by_slot) + branches
        prompt = len(prompts) * max(prompts, default=0) - sum(prompts)
        return PaddingCounts(prompt, max(self.batch_size - len(by_slot) - branches, 0))
