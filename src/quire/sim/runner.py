"""A Runner without a device: the cost model says how long each step takes, and the virtual clock shows it.

The host plans while the device computes (`depth` 2) or waits for it (1), as with a real runner; steps run one after
another. Tokens mean nothing, and none of them ends a sequence: lengths are what requests ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import MAX_N
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, StepPlan, StepResult
from quire.sim.clock import VirtualClock
from quire.sim.cost_model import CostModel, StepWork, add_padding, step_work

FIRST_TOKEN = 7
DrawFunction = Callable[[SeqSlice, SlotInit], SliceResult]


class InFlightStep(NamedTuple):
    """A step in flight: when the device will have done it, and how long it takes."""

    plan: StepPlan
    end: float
    seconds: float


class SimRunner:
    """See control.engine.Runner. Always the same token is drawn, none of the end tokens in `avoid`; branches of one row
    get different ones, so that they share no more than their prompt. Or `draw` says what a row of the sequence of a
    birth brings (beam search needs candidates). `on_step` is shown the work and the seconds of every step. `padding` is
    asked in each step for what a static batch computes for nothing in it."""

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        depth: int = 1,
        *,
        avoid: frozenset[int] = frozenset(),
        draw: DrawFunction | None = None,
        on_step: Callable[[StepWork, float], None] | None = None,
    ) -> None:
        self.cost, self.clock, self.depth, self.draw, self.on_step = cost, clock, depth, draw, on_step
        self.in_flight: deque[InFlightStep] = deque()
        self.padding: Callable[[StepPlan], PaddingCounts] | None = None
        self.device_free_at = 0.0  # when the device will have done all that it was given
        self.busy_seconds = 0.0  # seconds that it computed
        self.page_bytes: tuple[int, ...] = ()
        self.slot_inits: dict[int, SlotInit] = {}  # by slot; only where `draw` asks for them
        self.has_images = False
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # by slot; only where there are pictures among the prompts
        self.drawn_tokens = tuple(t for t in range(FIRST_TOKEN, FIRST_TOKEN + MAX_N + len(avoid)) if t not in avoid)
        self._one_sample, self._no_sample = SliceResult(self.drawn_tokens[:1]), SliceResult(())

    def bind(self, geometry: KVCacheConfig) -> None:
        """Nothing is allocated; pages have sizes."""
        self.page_bytes = tuple(group.page_bytes for group in geometry.groups)
        self.has_images = geometry.has_images

    def add_image(self, pixels: ImagePixels) -> None:
        """Nothing looks at it."""

    def remove_image(self, key: bytes) -> None:
        """As before."""

    def submit(self, plan: StepPlan) -> int:
        """The host takes its time to plan, then the device begins as soon as it is free."""
        assert len(self.in_flight) < self.depth, f"more than {self.depth} steps are in flight"
        if self.has_images:
            for birth in plan.new_slots:
                self.media[birth.slot] = birth.images
        work = step_work(plan, self.cost.shape, self.page_bytes, self.media)
        if self.padding is not None:
            work = add_padding(work, self.cost.shape, *self.padding(plan))
        self.clock.advance(self.cost.host_seconds(work))
        seconds = self.cost.device_seconds(work)
        self.device_free_at = max(self.device_free_at, self.clock.now) + seconds
        self.busy_seconds += seconds
        self.in_flight.append(InFlightStep(plan, self.device_free_at, seconds))
        if self.on_step is not None:
            self.on_step(work, seconds)
        return len(self.in_flight)

    def collect(self, ticket: int) -> StepResult:
        """Wait for the oldest step."""
        plan, end, seconds = self.in_flight.popleft()
        self.clock.advance_to(end)
        if self.draw is None:
            return StepResult(tuple(self._sample(row) for row in plan.slices), seconds)
        for birth in plan.new_slots:
            known = self.slot_inits.get(birth.parent_slot)
            sampling = birth.sampling if birth.sampling is not None or known is None else known.sampling
            self.slot_inits[birth.slot] = birth._replace(sampling=sampling)
        drawn = tuple(
            self.draw(row, self.slot_inits[row.slot]) if row.num_samples else self._no_sample for row in plan.slices
        )
        return StepResult(drawn, seconds)

    def _sample(self, row: SeqSlice) -> SliceResult:
        if row.num_samples == 1:
            return self._one_sample
        return SliceResult(self.drawn_tokens[: row.num_samples]) if row.num_samples else self._no_sample

    def close(self) -> None:
        """Forget what is in flight."""
        self.in_flight.clear()


class PaddingCounts(NamedTuple):
    """In one step: tokens that pad prompts to the longest of their batch, and rows of members that ended, which the
    others still need."""

    prompt: int
    rows: int
