"""The runner of a stage, which has some of the model's layers (pipeline parallelism). The first knows tokens, the last
draws; each gives the next what its layers make of a step's tokens.

Stages are given the same plans. While one computes a step the stage before may compute the next, of other sequences:
the scheduler plans no sequence whose sample it waits for, so a row's tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.data.runner.drawn import Drawn
from quire.data.runner.inputs import Flat
from quire.data.runner.model_runner import ModelRunner, Ticket
from quire.data.runner.step import Step
from quire.vocabulary.layout import Part
from quire.vocabulary.media import Pixels
from quire.vocabulary.plan import Birth, Encode, Mask, Sampled, StepPlan, StepResult
from quire.vocabulary.rows import Rows
from quire.vocabulary.specs import Geometry
from quire.vocabulary.stages import of_stage


class Neighbours(Protocol):
    """A stage's way to those before and behind it."""

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        """x [T, hidden], and what is to be added to it before the next layer (of several ranks a part of that)."""
        ...

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The same of the stage before's next step, which has so many rows."""
        ...


class Undrawn:
    """In the place of a sampler where nothing is drawn."""

    def __init__(self) -> None:
        self.masks = self

    def birth(self, birth: Birth) -> None:
        """Whoever draws knows how."""

    def take(self, masks: Sequence[Mask]) -> None:
        """And under which masks."""

    def rehearsals(self, dtypes: Iterable[torch.dtype], most: int) -> Iterable[Callable[[], None]]:
        """No kernels are needed for it."""
        return ()


class StageRunner(ModelRunner):
    """Runs the stage of `part`, whose spec is the whole model's; `pipes` are its neighbours'."""

    def __init__(self, *args: Any, part: Part, pipes: Neighbours, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part, self.pipes = part, pipes
        self.bound: Geometry | None = None  # that of all stages

    def bind(self, geometry: Geometry) -> None:
        """See ModelRunner; the geometry is one for all stages."""
        self.bound = geometry
        super().bind(of_stage(geometry, self.spec, self.part))
        self.store.applied = 0

    def sleep(self, level: int) -> None:
        """See Lifetime."""
        super().sleep(level)
        self.geometry = self.bound

    def see(self, pixels: Pixels) -> None:
        """See ModelRunner. Whose layers need no picture keeps none."""
        if self.pictures is not None:
            super().see(pixels)

    def submit(self, plan: StepPlan) -> Ticket:
        """See ModelRunner."""
        if self.pictures is None and self.spec.vision is not None:
            plan = plan._replace(journal=tuple(entry for entry in plan.journal if type(entry) is not Encode))
        return super().submit(plan)

    def _sampler(self, slots: int) -> Any:
        return super()._sampler(slots) if self.part.ends else Undrawn()

    def _prepare_graphs(self, largest: int) -> None:
        """Of steps in which every sequence computes one token; others are launched one by one."""
        from quire.data.runner.recorder import Recorder
        from quire.data.runner.stage_graphs import StageGraphs

        ends, store = self.part.ends, self.store
        self.graphs = StageGraphs(
            self.part, self.pipes, self.spec.hidden, self.dtype, self.model, self._logits() if ends else None, store,
            self.backend, self.last, store.staging, largest, self._tails(largest) if ends else {},
            Recorder(self.device), self.pictures,
        )  # fmt: skip

    def _sampled(self, rows: Rows, replay: Callable[[str], Any]) -> Any:
        return super()._sampled(rows, replay) if self.part.ends else replay("")

    def _eager(self, rows: Rows, flat: Flat) -> tuple[Drawn | None, list[Tensor], dict[int, Tensor]]:
        if self.part.ends:
            return super()._eager(rows, flat)
        batch, step = self._planned(flat, narrow=False)
        self.pipes.send(*self._through(batch.tokens, step))
        return None, [], {}

    def _hidden(self, tokens: Tensor, step: Step) -> Tensor:
        return self.model.behind(*self._through(tokens, step), step)  # type: ignore[attr-defined]

    def _through(self, tokens: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Up to the last of its layers; of the whole model's last layer, up to what it attends to."""
        if self.part.starts:
            return self.model.begin(tokens, step)
        x, delta = self.pipes.receive(len(tokens), self.spec.hidden, self.dtype)
        return self.model.through(x, step, delta)  # type: ignore[attr-defined]

    def collect(self, ticket: Ticket) -> StepResult:
        """See ModelRunner; but for the last stage nothing was drawn."""
        if self.part.ends:
            return super().collect(ticket)
        if ticket.span is not None:  # of a GPU: the stage before may write over what this step has read
            ticket.span.end.synchronize()
        if self.exchange is not None:
            self.exchange.check()
        nothing = (Sampled(()),) * len(ticket.plan.rows)
        return StepResult(nothing, self._seconds(ticket), self.idle.collected(ticket.span))
