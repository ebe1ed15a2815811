"""What the control plane asks of the data plane."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from quire.vocabulary.media import Pixels
from quire.vocabulary.plan import Mask, StepPlan, StepResult
from quire.vocabulary.specs import Geometry


class Runner(Protocol):
    """The data plane. `submit` only enqueues; up to `depth` plans may be in flight, collected in order."""

    depth: int

    def bind(self, geometry: Geometry) -> None:
        """Allocate the tensors of a memory."""
        ...

    def see(self, pixels: Pixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        ...

    def forget(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes this picture. Unknown ones pass."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Enqueue a step; returns a ticket."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for the step of a ticket. Steps in flight overlap, but the `seconds` of their results don't: they add up
        to no more than has passed."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@runtime_checkable
class Holding(Protocol):
    """A runner that can begin a step before it is known what its rows may draw, so that masks are made while the device
    computes."""

    def hold(self, plan: StepPlan) -> Any:
        """As `submit`, but for the draws; no plan follows before `release`."""
        ...

    def release(self, ticket: Any, masks: tuple[Mask, ...]) -> Any:
        """Go on with a step that is held; its ticket."""
        ...
