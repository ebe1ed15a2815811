"""The interface between the engine and its runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import StepPlan, StepResult, TokenBitmask


class Runner(Protocol):
    """Executes plans. `submit` only enqueues; up to `depth` plans may be in flight. They are collected in order."""

    depth: int

    def bind(self, kv_config: KVCacheConfig) -> None:
        """Allocate the tensors of a memory."""
        ...

    def add_image(self, pixels: ImagePixels) -> None:
        """Store an image. Plans that are submitted from now on may encode it."""
        ...

    def remove_image(self, key: bytes) -> None:
        """Forget an image: no later plan encodes it. Ignore unknown keys."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Enqueue a step. Return its ticket."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for the step of a ticket and return its result. Steps in flight overlap, but the `seconds` of their
        results don't: their sum is at most the elapsed time."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@runtime_checkable
class SleepableRunner(Protocol):
    """A runner that can release its memory and take it back. Both are called without a step in flight."""

    def sleep(self, level: int) -> None:
        """Release pages, host pages and everything made over them. At level 1 weights move to host memory, at 2 they
        are dropped. May be called for level 2 while asleep at level 1."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take back what `tags` name, "weights" before "kv_cache"; pages and page tables are empty. If it raises, the
        runner stays asleep, except for weights that were taken back."""
        ...


@runtime_checkable
class DeferredMaskRunner(Protocol):
    """A runner that can start a step without its grammar masks, which are made while the device computes."""

    def submit_without_masks(self, plan: StepPlan) -> Any:
        """As `submit`, without sampling; no plan follows before `submit_masks`."""
        ...

    def proposed_tokens(self, ticket: Any) -> Mapping[int, Sequence[int]]:
        """Wait for what the draft model proposes in a step that was submitted without masks, by slot. The model goes on
        with the step meanwhile."""
        ...

    def submit_masks(self, ticket: Any, masks: tuple[TokenBitmask, ...]) -> Any:
        """Finish a step that was submitted without masks. Return its ticket."""
        ...


class SharingRunner(Protocol):
    """A runner whose host pages other engines read, too (quire.protocol.shared_host)."""

    def wait_for_swaps(self) -> None:
        """Wait until the swaps of all submitted plans are done."""
        ...


class MonitoredRunner(Protocol):
    """A runner that can be lost while no step is in flight, as it is in other processes."""

    def check(self) -> None:
        """Raise RanksLost if the runner is lost."""
        ...


def can_defer_masks(runner: Runner, depth: int) -> bool:
    """Return True if an engine with `depth` steps in flight submits masks after the step's start."""
    return depth > 1 and isinstance(runner, DeferredMaskRunner)
