"""A Runner without a device: the cost model says how long each step takes, and the virtual clock shows it.

The host plans while the device computes (`depth` 2) or waits for it (1), as with a real runner; steps run one after
another. Tokens mean nothing, and none of them ends a sequence: lengths are what requests ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.sim.clock import VirtualClock
from quire.sim.cost import Cost, Work, padded, work_of
from quire.sim.padding import Padded
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import MAX_N
from quire.vocabulary.plan import Birth, Row, Sampled, StepPlan, StepResult
from quire.vocabulary.specs import Geometry

TOKEN = 7
Draw = Callable[[Row, Birth], Sampled]


class Flight(NamedTuple):
    """A step in flight: when the device will have done it, and how long it takes."""

    plan: StepPlan
    end: float
    seconds: float


class SimRunner:
    """See control.engine.Runner. Always the same token is drawn, none of the end tokens in `avoid`; branches of one row
    get different ones, so that they share no more than their prompt. Or `draw` says what a row of the sequence of a
    birth brings (beam search needs candidates). `watch` is shown the work and the seconds of every step. `padding` is
    asked in each step for what a static batch computes for nothing in it."""

    def __init__(
        self,
        cost: Cost,
        clock: VirtualClock,
        depth: int = 1,
        *,
        avoid: frozenset[int] = frozenset(),
        draw: Draw | None = None,
        watch: Callable[[Work, float], None] | None = None,
    ) -> None:
        self.cost, self.clock, self.depth, self.draw, self.watch = cost, clock, depth, draw, watch
        self.flight: deque[Flight] = deque()
        self.padding: Callable[[StepPlan], Padded] | None = None
        self.free = 0.0  # when the device will have done all that it was given
        self.busy = 0.0  # seconds that it computed
        self.page_bytes: tuple[int, ...] = ()
        self.births: dict[int, Birth] = {}  # by slot; only where `draw` asks for them
        self.sees = False
        self.media: dict[int, tuple[Medium, ...]] = {}  # by slot; only where there are pictures among the prompts
        self.tokens = tuple(t for t in range(TOKEN, TOKEN + MAX_N + len(avoid)) if t not in avoid)
        self._one, self._none = Sampled(self.tokens[:1]), Sampled(())

    def bind(self, geometry: Geometry) -> None:
        """Nothing is allocated; pages have sizes."""
        self.page_bytes = tuple(group.page_bytes for group in geometry.groups)
        self.sees = geometry.sees

    def see(self, pixels: Pixels) -> None:
        """Nothing looks at it."""

    def forget(self, key: bytes) -> None:
        """As before."""

    def submit(self, plan: StepPlan) -> int:
        """The host takes its time to plan, then the device begins as soon as it is free."""
        assert len(self.flight) < self.depth, f"more than {self.depth} steps are in flight"
        if self.sees:
            for birth in plan.births:
                self.media[birth.slot] = birth.media
        work = work_of(plan, self.cost.shape, self.page_bytes, self.media)
        if self.padding is not None:
            work = padded(work, self.cost.shape, *self.padding(plan))
        self.clock.pass_by(self.cost.host(work))
        seconds = self.cost.device(work)
        self.free = max(self.free, self.clock.now) + seconds
        self.busy += seconds
        self.flight.append(Flight(plan, self.free, seconds))
        if self.watch is not None:
            self.watch(work, seconds)
        return len(self.flight)

    def collect(self, ticket: int) -> StepResult:
        """Wait for the oldest step."""
        plan, end, seconds = self.flight.popleft()
        self.clock.reach(end)
        if self.draw is None:
            return StepResult(tuple(self._sampled(row) for row in plan.rows), seconds)
        for birth in plan.births:
            known = self.births.get(birth.parent)
            sampling = birth.sampling if birth.sampling is not None or known is None else known.sampling
            self.births[birth.slot] = birth._replace(sampling=sampling)
        drawn = tuple(self.draw(row, self.births[row.slot]) if row.sample else self._none for row in plan.rows)
        return StepResult(drawn, seconds)

    def _sampled(self, row: Row) -> Sampled:
        if row.sample == 1:
            return self._one
        return Sampled(self.tokens[: row.sample]) if row.sample else self._none

    def close(self) -> None:
        """Forget what is in flight."""
        self.flight.clear()
