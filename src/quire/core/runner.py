"""What the control plane asks of the data plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import StepPlan, StepResult, TokenBitmask


class Runner(Protocol):
    """The data plane. `submit` only enqueues; up to `depth` plans may be in flight, collected in order."""

    depth: int

    def bind(self, kv_config: KVCacheConfig) -> None:
        """Allocate the tensors of a memory."""
        ...

    def add_image(self, pixels: ImagePixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        ...

    def remove_image(self, key: bytes) -> None:
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
class SleepableRunner(Protocol):
    """A runner that can let go of its memory and take it back. No step is in flight when it is asked to."""

    def sleep(self, level: int) -> None:
        """Let go of pages, host pages and all that was made over them; with level 1 weights move to host memory, with
        2 they are dropped. One that sleeps at level 1 may be asked for 2."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take back what is named, "weights" before "kv_cache": pages hold nothing, and their tables name nothing. What
        it raises leaves it asleep, but for the weights if these came back."""
        ...


@runtime_checkable
class DeferredMaskRunner(Protocol):
    """A runner that can begin a step before it is known what its rows may draw, so that masks are made while the device
    computes."""

    def submit_without_masks(self, plan: StepPlan) -> Any:
        """As `submit`, but for the draws; no plan follows before `submit_masks`."""
        ...

    def submit_masks(self, ticket: Any, masks: tuple[TokenBitmask, ...]) -> Any:
        """Go on with a step that is held; its ticket."""
        ...
