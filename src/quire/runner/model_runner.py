"""The model runner: one step on one device. Replays births and journal, runs the model, draws the next tokens.

`submit` only enqueues work; on a GPU it returns before the step has run, and `collect` waits for its samples.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import to_device
from quire.kernels.reference import ReferenceBackend
from quire.kernels.sdpa import SdpaBackend
from quire.plan import Row, Sampled, StepPlan, StepResult
from quire.request import MAX_LOGPROBS
from quire.runner.batch import build_batch
from quire.runner.context import StepContext
from quire.runner.sampler import Drawn, Sampler, details_of, top_of
from quire.runner.store import Store
from quire.specs import Geometry, ModelSpec

BACKENDS = {"reference": ReferenceBackend, "sdpa": SdpaBackend}
SCORED_AT_ONCE = 256  # prompt positions whose logits over the vocabulary are held together


class Model(Protocol):
    """What the runner needs of a model (see quire.models)."""

    def __call__(self, tokens: Tensor, ctx: Any) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Ticket(NamedTuple):
    """A step in flight."""

    drawn: Drawn | None
    scores: list[Tensor]
    plan: StepPlan
    began: float


class ModelRunner:
    """Runs `model` in `dtype` on `device` with the attention backend of that name."""

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "sdpa",
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self.model, self.spec, self.dtype, self.device, self.eos_ids = model, spec, dtype, device, eos_ids
        self.backend = BACKENDS[attention]()
        self.depth = 1 if device.type == "cpu" else 2
        self.store: Store
        self.sampler: Sampler
        self.last: Tensor

    def bind(self, geometry: Geometry) -> None:
        """Allocate pages, tables and sampling state for a memory of this geometry."""
        self.store = Store(geometry, self.spec, self.dtype, self.device)
        self.sampler = Sampler(geometry.slots, self.spec.vocab_size, self.device, self.eos_ids)
        self.last = torch.zeros(geometry.slots, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueue a step. Births and journal first, in order; then the rows as one batch."""
        began = time.perf_counter()
        for birth in plan.births:
            self.sampler.birth(birth)
        self.store.replay(plan.journal)
        if not plan.rows:
            return Ticket(None, [], plan, began)
        batch = build_batch(plan.rows, self.store, self.last)
        hidden = self.model(batch.tokens, StepContext(batch, self.store, self.backend))
        scores = [self._score(row, int(offset), hidden) for row, offset in zip(plan.rows, batch.offsets) if row.score]
        drawn = self._draw(plan.rows, hidden.index_select(0, batch.ends)) if len(batch.ends) else None
        return Ticket(drawn, scores, plan, began)

    def _draw(self, rows: tuple[Row, ...], ends: Tensor) -> Drawn:
        sampling = [row for row in rows if row.sample]
        logits = self.model.logits(ends)
        drawn = self.sampler.sample(logits, [(row.slot, row.start + len(row.tokens), row.sample) for row in sampling])
        draws = np.array([row.sample for row in sampling])
        tokens = drawn.tokens
        if len(tokens) > len(sampling):
            tokens = tokens.index_select(0, to_device(np.cumsum(draws) - draws, self.device))
        self.last.index_copy_(0, to_device(np.array([row.slot for row in sampling]), self.device), tokens)
        return drawn

    def _score(self, row: Row, offset: int, hidden: Tensor) -> Tensor:
        """Log-probabilities of the prompt's tokens, as numbers that `collect` reads."""
        targets = to_device(np.array(row.score, dtype=np.int64), self.device)
        width = min(MAX_LOGPROBS, self.spec.vocab_size) if self.sampler.params(row.slot).prompt_logprobs else 0
        parts = [
            details_of(self.model.logits(part).float(), wanted, width)
            for part, wanted in zip(
                hidden[offset : offset + len(row.score)].split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE)
            )
        ]
        return torch.cat(parts)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step's samples."""
        drawn = iter(self.sampler.finish(ticket.drawn) if ticket.drawn is not None else ())
        scores = iter(ticket.scores)
        samples = []
        for row in ticket.plan.rows:
            sample = next(drawn) if row.sample else Sampled(())
            if row.score:
                most = self.sampler.params(row.slot).prompt_logprobs or 0
                scored = zip(row.score, next(scores).tolist())
                sample = sample._replace(scores=tuple(top_of(token, numbers, most) for token, numbers in scored))
            samples.append(sample)
        return StepResult(tuple(samples), time.perf_counter() - ticket.began)

    def close(self) -> None:
        """Let go of the pages."""
        for name in ("store", "sampler", "last"):
            if hasattr(self, name):
                delattr(self, name)
