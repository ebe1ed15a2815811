"""A Runner without a device: each step takes the time of the cost model, on a virtual clock.

The host plans while the device computes (`depth` 2) or waits for it (1), as with a real runner. Steps run one after
another, in each stage if there are several. Tokens are constants that end no sequence: lengths are those of the
requests. A draft token that is proposed is accepted with a given probability if those before it are, decided by its
sequence and position alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import MAX_N
from quire.protocol.seeds import WORD_MASK, splitmix64
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, StepPlan, StepResult
from quire.sim.cost_model import CostModel, StepWork, add_padding, step_work

FIRST_TOKEN = 7
DrawFunction = Callable[[SeqSlice, SlotInit], SliceResult]


class VirtualClock:
    """A time in seconds, which never decreases."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`."""
        assert seconds >= 0, f"{seconds} seconds can't pass"
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Advance to `time`, if it is later than now."""
        self.now = max(self.now, time)


class InFlightStep(NamedTuple):
    """A step in flight: its end on the device, and its duration."""

    plan: StepPlan
    end: float
    seconds: float


class PaddingCounts(NamedTuple):
    """The padding of a step of a static batch."""

    prompt: int  # tokens that pad prompts to the longest of their batch
    rows: int  # rows of finished members


class SimRunner:
    """See core.runner.Runner. All samples are one token that is not in `avoid`; branches of one row get different ones,
    so that they share only their prompt. `draw` replaces this: it returns the result of a slice of the sequence of a
    SlotInit (beam search needs candidates). `acceptance` is the probability that a draft token is accepted if those
    before it are; the same tokens are, whatever the batch and the number of draft tokens. `on_step` is called with the
    work and the seconds of every step."""

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        depth: int = 1,
        *,
        avoid: frozenset[int] = frozenset(),
        draw: DrawFunction | None = None,
        acceptance: float = 0.0,
        on_step: Callable[[StepWork, float], None] | None = None,
    ) -> None:
        self.cost, self.clock, self.depth, self.draw, self.on_step = cost, clock, depth, draw, on_step
        self.acceptance = acceptance
        self.in_flight: deque[InFlightStep] = deque()
        self.padding: Callable[[StepPlan], PaddingCounts] | None = None
        division = cost.division
        self.stages_free_at = [0.0] * (1 if division is None else division.layout.pp)  # ends of all submitted steps
        self.busy_seconds = 0.0  # of a device
        self.page_bytes: tuple[int, ...] = ()
        self.slot_inits: dict[int, SlotInit] = {}  # by slot
        self.has_images = False
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # by slot; only with images
        self.drawn_tokens = tuple(t for t in range(FIRST_TOKEN, FIRST_TOKEN + MAX_N + len(avoid)) if t not in avoid)
        self._one_sample, self._no_sample = SliceResult(self.drawn_tokens[:1]), SliceResult(())

    def set_padding(self, padding: Callable[[StepPlan], PaddingCounts] | None) -> None:
        """Add the padding that `padding` counts to the work of each step; None: no padding."""
        self.padding = padding

    def bind(self, geometry: KVCacheConfig) -> None:
        """Record page sizes. Nothing is allocated."""
        self.page_bytes = tuple(group.page_bytes for group in geometry.groups)
        self.has_images = geometry.has_images

    def add_image(self, pixels: ImagePixels) -> None:
        """Do nothing."""

    def remove_image(self, key: bytes) -> None:
        """Do nothing; see `add_image`."""

    def submit(self, plan: StepPlan) -> int:
        """Advance the clock by the host's planning time; the device begins as soon as it is free."""
        assert len(self.in_flight) < self.depth, f"more than {self.depth} steps are in flight"
        if self.has_images:
            for init in plan.new_slots:
                self.media[init.slot] = init.images
        work = step_work(plan, self.cost.shape, self.page_bytes, self.media)
        if self.padding is not None:
            work = add_padding(work, self.cost.shape, *self.padding(plan))
        self.clock.advance(self.cost.host_seconds(work))
        seconds, draft_seconds = self.cost.device_seconds(work), self.cost.draft_seconds(plan)
        end = self._pass_stages(work, seconds)
        self.stages_free_at[-1] += draft_seconds  # the host has the samples before
        self.busy_seconds += (seconds + draft_seconds) / len(self.stages_free_at)
        self.in_flight.append(InFlightStep(plan, end, seconds))
        if self.on_step is not None:
            self.on_step(work, seconds)
        return len(self.in_flight)

    def _pass_stages(self, work: StepWork, seconds: float) -> float:
        """Let a step of that many seconds pass all stages, which have equal parts, and return its end."""
        stages, at = self.stages_free_at, self.clock.now
        for stage, free_at in enumerate(stages):
            at = stages[stage] = max(at, free_at) + seconds / len(stages)
            if self.cost.division is not None and stage < len(stages) - 1:
                at += self.cost.division.transfer_seconds(work.tokens)
        return at

    def collect(self, ticket: int) -> StepResult:
        """Advance the clock to the end of the oldest step and return its result."""
        plan, end, seconds = self.in_flight.popleft()
        self.clock.advance_to(end)
        for init in plan.new_slots:
            parent = self.slot_inits.get(init.parent_slot)
            sampling = init.sampling if init.sampling is not None or parent is None else parent.sampling
            self.slot_inits[init.slot] = init._replace(sampling=sampling)
        return StepResult(tuple([self._sample(row) for row in plan.slices]), seconds)

    def _sample(self, row: SeqSlice) -> SliceResult:
        if row.draft_tokens:
            return SliceResult(self.drawn_tokens[:1] * (self._count_accepted(row) + 1))
        if row.num_samples and self.draw is not None:
            return self.draw(row, self.slot_inits[row.slot])
        if row.num_samples == 1:
            return self._one_sample
        return SliceResult(self.drawn_tokens[: row.num_samples]) if row.num_samples else self._no_sample

    def _count_accepted(self, row: SeqSlice) -> int:
        """Return the number of leading draft tokens that are accepted."""
        seed, first = splitmix64(self.slot_inits[row.slot].seq_id), row.start + len(row.tokens)
        for i in range(len(row.draft_tokens)):
            if splitmix64(seed + first + i & WORD_MASK) >= self.acceptance * 2**64:
                return i
        return len(row.draft_tokens)

    def close(self) -> None:
        """Drop the steps in flight."""
        self.in_flight.clear()
