"""What FasterTransformer computes for nothing (PagedAttention §2.3), which this engine does not: for models of cost."""

from __future__ import annotations

from typing import NamedTuple

from quire.control.scheduler import Scheduler
from quire.vocabulary.plan import StepPlan


class Padded(NamedTuple):
    """In one step: tokens that pad prompts to the longest of their batch, and rows of members that ended, which the
    others still need."""

    prompt: int
    rows: int


class Padding:
    """Watches a scheduler of static batches, in which all members of a batch come in one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.members = 0  # sequences of the batch under way, those to be forked included

    def __call__(self, plan: StepPlan) -> Padded:
        """What is computed for nothing in the step that was just planned."""
        by_slot = self.scheduler.by_slot
        prompts = [birth.prompt_len for birth in plan.births if birth.parent < 0]
        branches = sum(seq.branches for _, seq in by_slot.values())
        if prompts:
            self.members = len(by_slot) + branches
        prompt = len(prompts) * max(prompts, default=0) - sum(prompts)
        return Padded(prompt, max(self.members - len(by_slot) - branches, 0))
