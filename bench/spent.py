"""Measure where the time of an engine's steps goes on a CPU, with a clock around each operation.

On a CPU a call returns when its work is done, so that clocks around the layers' modules and the runner's parts account
for all time. Each costs about a microsecond; torch's profiler costs as much as a small operation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import quire.worker.model_runner as running
import quire.worker.step_context as stepping
from quire.bench.shapes import clock_of
from quire.core.engine import Engine
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.worker.inputs import build_flat_batch

CONTROL, RUNNER, MODEL = "control plane", "runner, the rest", "model, the rest"
ATTENTION, PRODUCT = "attention", "product "
KINDS: dict[type, str] = {
    RMSNorm: "norms and sums", LayerNorm: "norms and sums", GatedMLP: "activation", MLP: "activation",
    Embedding: "embedding",
}  # fmt: skip
# The calls of the runner that are timed: operation, place of the call, name. Those that a version lacks are skipped.
RUNNERS = (
    (RUNNER, "", "submit"), (RUNNER, "", "collect"), ("journal and tables", "store", "apply_page_ops"),
    ("attention, planned", "backend", "plan"), (ATTENTION, "backend", "attend"),
    (ATTENTION, "backend", "rotate_and_attend"), ("pages, gathered", "backend", "_gather_kv"),
    ("cache writes", "backend", "_write"), ("cache writes", "backend", "_write_kv"), ("sampling", "sampler", "sample"),
    ("sampling", "sampler", "collect"), (MODEL, "model", "forward"),
)  # fmt: skip


class Work(NamedTuple):
    """An operation's own seconds, without those of operations within it; its calls; and for products the bytes of
    weights and the operations."""

    seconds: float = 0.0
    calls: int = 0
    bytes: float = 0.0
    operations: float = 0.0


class Spent:
    """A clock for each operation. One clock runs at a time: that of the innermost call."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._stack: list[str] = []
        self._since = 0.0
        self._clear()

    def _clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.operations: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)

    def take(self) -> dict[str, Work]:
        """Return the seconds spent since the last call."""
        found = {
            name: Work(seconds, self.calls[name], self.bytes[name], self.operations[name])
            for name, seconds in self.seconds.items()
        }
        self._clear()
        return found

    def timed(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed as `operation`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            now = self.clock()
            if self._stack:
                self.seconds[self._stack[-1]] += now - self._since
            self._stack.append(operation)
            self.calls[operation] += 1
            self._since = now
            try:
                return call(*args, **kwargs)
            finally:
                now = self.clock()
                self.seconds[self._stack.pop()] += now - self._since
                self._since = now

        return wrapped

    def product(self, name: str, layer: Linear) -> Callable[..., Any]:
        """Return the layer's `forward`, timed and with its work counted. A layer may have `weight_bytes` if its weights
        have another dtype than its input."""
        timed, rows = self.timed(name, layer.forward), sum(layer.output_sizes)

        def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
            weights = rows * x.shape[-1]
            self.operations[name] += 2 * weights * (x.numel() // x.shape[-1])
            self.bytes[name] += getattr(layer, "weight_bytes", weights * x.element_size())
            return timed(x, *args, **kwargs)

        return wrapped


@contextmanager
def watched(engine: Engine) -> Iterator[Spent]:
    """Time all that a step of the engine calls while this context is open."""
    spent = Spent(clock_of(engine.runner))
    runner: Any = engine.runner
    with ExitStack() as patches:

        def patch(owner: Any, name: str, call: Any) -> None:
            had, before = name in vars(owner), getattr(owner, name)
            setattr(owner, name, call)
            patches.callback(*((setattr, owner, name, before) if had else (delattr, owner, name)))

        patch(engine, "step", spent.timed(CONTROL, engine.step))
        for operation, part, name in RUNNERS:
            owner = getattr(runner, part) if part else runner
            if hasattr(owner, name):
                patch(owner, name, spent.timed(operation, getattr(owner, name)))
        patch(running, "build_flat_batch", spent.timed("inputs", build_flat_batch))
        if hasattr(stepping, "prepare_qkv"):
            patch(stepping, "prepare_qkv", spent.timed("rotation", stepping.prepare_qkv))
        patch(stepping.StepContext, "_rotary_tables", spent.timed("rotation", stepping.StepContext._rotary_tables))
        patch(runner.model, "logits", spent.timed(MODEL, runner.model.logits))
        for name, module in runner.model.named_modules():
            if isinstance(module, Linear):
                patch(module, "forward", spent.product(PRODUCT + name.rpartition(".")[2], module))
            elif type(module) in KINDS:
                patch(module, "forward", spent.timed(KINDS[type(module)], module.forward))
        yield spent
