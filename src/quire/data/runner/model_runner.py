"""The model runner: one step on one device. Replays births and journal, runs the model, draws the next tokens.

`submit` only enqueues work; on a GPU it returns before the step has run, and `collect` waits for its samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, to_device
from quire.data.kernels.contiguous import ContiguousBackend
from quire.data.kernels.cpu.loading import library
from quire.data.kernels.limits import MOST_GRAPH_ROWS
from quire.data.kernels.reference import ReferenceBackend
from quire.data.kernels.sdpa import SdpaBackend
from quire.data.layers.cut import vocabulary
from quire.data.runner.crossing import CrossPictures
from quire.data.runner.drawn import Drawn
from quire.data.runner.idle import Idle, Span
from quire.data.runner.inputs import Flat, batch_of
from quire.data.runner.lifetime import Lifetime
from quire.data.runner.logprobs import scores_of, top_of
from quire.data.runner.pictures import Pictures
from quire.data.runner.pooling import Pooling, sampled
from quire.data.runner.prompts import Prompts
from quire.data.runner.sampler import Sampler
from quire.data.runner.seen import SeenTokens
from quire.data.runner.split_sampler import FusedSplitSampler, SplitSampler
from quire.data.runner.step import Step
from quire.data.runner.store import Store
from quire.errors import StartupError
from quire.vocabulary.media import Pixels
from quire.vocabulary.params import MAX_LOGPROBS
from quire.vocabulary.plan import Encode, Mapped, Mask, Row, StepPlan, StepResult
from quire.vocabulary.rows import Rows
from quire.vocabulary.specs import Geometry, Layout, ModelSpec

BACKENDS = {"reference": ReferenceBackend, "sdpa": SdpaBackend, "contiguous": ContiguousBackend}


class Model(Protocol):
    """What the runner needs of a model (see quire.data.models). One that sees has `eyes` too, an Encoder. A shard that
    was joined to others has their `exchange`, and its `logits` can be asked for its own alone."""

    def __call__(self, tokens: Tensor, ctx: Any) -> Tensor: ...
    def begin(self, tokens: Tensor, ctx: Any) -> tuple[Tensor, Tensor]: ...
    def end(self, x: Tensor, attended: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def _backend(name: str, deterministic: bool) -> Any:
    if name in BACKENDS:
        return BACKENDS[name]()
    if name == "native":
        from quire.data.kernels.cpu.backend import NativeBackend

        return NativeBackend(deterministic=deterministic)
    if name == "triton":
        from quire.data.kernels.triton.backend import TritonBackend

        return TritonBackend(deterministic=deterministic)
    from quire.data.kernels.triton.vendor_backend import VendorBackend

    return VendorBackend(name)


class Ticket(NamedTuple):
    """A step in flight."""

    drawn: Drawn | None
    scores: list[Tensor]
    plan: StepPlan
    began: float
    span: Span | None  # on a GPU
    pooled: dict[int, Tensor]  # by slot
    held: Callable[[], Drawn] | None = None  # draws that wait for masks


class ModelRunner(Lifetime):
    """Runs `model` in `dtype` on `device` with the attention backend of that name."""

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "sdpa",
        eos_ids: tuple[int, ...] = (),
        *,
        graphs: bool = False,
        deterministic: bool = False,
        debug: bool = False,
        background: bool = False,
        common: Tensor | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`background`: a thread maps ahead of need, where memory is virtual. `common`, `state_dtype`: see Store."""
        self.model, self.spec, self.dtype, self.device, self.eos_ids = model, spec, dtype, device, eos_ids
        self.attention, self.backend = attention, _backend(attention, deterministic)
        self.replays, self.deterministic, self.debug, self.background = graphs, deterministic, debug, background
        self.common, self.state_dtype = common, state_dtype
        self.exchange = getattr(model, "exchange", None)  # with other ranks
        self.depth = 1 if device.type == "cpu" else 2
        self.holding = False  # rows that are enqueued draw later
        self.collected = -math.inf  # when the last step was
        self.idle = Idle(device)
        self.store: Store
        self.sampler: Sampler
        self.prompts: Prompts | None = None  # where layers have budgets
        self.seen: SeenTokens | None = None  # in debug mode, where layers have states
        self.pictures: Pictures | None = None  # where the model sees
        self.pooling = Pooling()
        self.whole: np.ndarray | None = None  # by slot, the length of a prompt whose tokens attend both ways
        self.last: Tensor
        self.graphs: Any = None  # of decode steps
        self.mixed: Any = None  # of steps with prompts

    def bind(self, geometry: Geometry) -> None:
        """Allocate pages, tables and sampling state for a memory of this geometry. StartupError if the attention can't
        find its tokens."""
        if self.backend.needs is Layout.CONTIGUOUS and geometry.layout is not Layout.CONTIGUOUS:
            raise StartupError(
                f"--attention is {self.attention}, whose kernels need a sequence's tokens one after another, and the "
                f"memory is {geometry.layout.value}",
                "Use --attention auto",
            )
        self.store = self._store(geometry)
        if self.exchange is not None:
            self.store.applied = 0
        self.prompts = self.store.prompts
        self.seen = SeenTokens(geometry) if self.debug and self.store.states else None
        for cache in self.store.caches.values():
            self.backend.check(cache)
        if geometry.sees:
            assert self.spec.vision is not None, "a model without eyes has no pictures"
            kind = partial(CrossPictures, self.model) if self.store.cross else partial(Pictures, self.model.eyes)
            self.pictures = kind(self.store, self.spec.vision.width)
            for cache in self.store.cross.values():
                self.backend.check(cache)
        if geometry.both_ways:
            self.whole = np.zeros(geometry.slots, dtype=np.int64)
        self.sampler = self._sampler(geometry.slots)
        self.last = torch.zeros(geometry.slots, dtype=torch.int64, device=self.device)
        if self.replays:
            self._prepare_graphs(min(geometry.slots - 1, MOST_GRAPH_ROWS))

    def _sampler(self, slots: int) -> Sampler:
        vocab = self.spec.vocab_size
        if not self.divided:
            return Sampler(slots, vocab, self.device, self.eos_ids)
        if self.device.type == "cpu":
            return SplitSampler(slots, vocab, self.eos_ids, self.exchange)
        return FusedSplitSampler(slots, vocab, self.device, self.eos_ids, self.exchange)

    @property
    def divided(self) -> bool:
        """Ranks share out the vocabulary."""
        return self.exchange is not None and self.exchange.part.ranks > 1

    def _store(self, geometry: Geometry) -> Store:
        if geometry.layout is not Layout.CONTIGUOUS:
            return Store(
                geometry, self.spec, self.dtype, self.device, self.debug, self.common, state_dtype=self.state_dtype
            )
        from quire.data.runner.virtual.opening import open_store

        return open_store(
            geometry,
            self.spec,
            self.dtype,
            self.device,
            self.debug,
            views=self.backend.views,
            background=self.background,
        )

    def _prepare_graphs(self, largest: int) -> None:
        """For up to `largest` rows that sample. Nothing is captured yet."""
        if self.device.type == "cpu":
            from quire.data.runner.tapes import DecodeTapes

            found = library()
            if found is not None and not self.store.cross and self.exchange is None:  # a tape waits for nobody
                tails = self.sampler.tails(self.last, largest)
                self.graphs = DecodeTapes(self.model, self.store, self.backend, self.last, largest, tails, found)
            return
        from quire.data.runner.graphs import DecodeGraphs
        from quire.data.runner.mixed import MixedGraphs
        from quire.data.runner.recorder import Recorder

        tails, recorder, logits = self._tails(largest), Recorder(self.device), self._logits()
        model, store, backend, last = self.model, self.store, self.backend, self.last
        self.graphs = DecodeGraphs(
            model, logits, store, backend, last, store.staging, largest, tails, recorder, self.pictures
        )
        self.mixed = MixedGraphs(
            model, logits, store, backend, last, self.spec.hidden, self.graphs.sizes, tails, recorder
        )

    def _logits(self) -> Callable[[Tensor], Tensor]:
        """What makes a graph's logits: this rank's, if a vocabulary is shared out."""
        return partial(self.model.logits, own=True) if self.divided else self.model.logits  # type: ignore[no-any-return]

    def _tails(self, largest: int) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        """What may follow the logits of up to `largest` rows in a graph."""
        return {**self.sampler.tails(self.last, largest), "": self._keep(largest)}

    def _keep(self, largest: int) -> Callable[[Tensor, Tensor], Tensor]:
        """What follows the logits of a graph that doesn't sample: they are kept, in one place for all graphs. Where the
        vocabulary is shared out they are a rank's own."""
        vocab = self.spec.vocab_size
        width = vocabulary(self.exchange.part, vocab).room if self.divided else vocab
        kept = torch.empty((largest, width), dtype=self.dtype, device=self.device)

        def tail(logits: Tensor, slots: Tensor) -> Tensor:
            return kept[: len(logits)].copy_(logits)

        return tail

    def see(self, pixels: Pixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        assert self.pictures is not None, "the model sees"
        self.pictures.see(pixels)

    def forget(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes this picture. Unknown ones pass."""
        if self.pictures is not None:
            self.pictures.forget(key)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueue a step: births and journal, in order, and what it says of pictures; then the rows as one batch; then
        what is to be done ahead."""
        began, mark = time.perf_counter(), None
        for birth in plan.births:
            self.sampler.birth(birth)
        self.pooling.born(plan.births)
        if self.prompts is not None:
            self.prompts.born(plan.births)
        if self.whole is not None:
            for birth in plan.births:
                self.whole[birth.slot] = birth.prompt_len
        if self.pictures is None:
            self.store.replay(plan.journal)
        else:
            self.pictures.born(plan.births)
            self.store.replay(tuple(entry for entry in plan.journal if type(entry) is not Encode))
            if encodes := [entry for entry in plan.journal if type(entry) is Encode]:
                mark = self.idle.begin() if plan.rows else None  # the device isn't idle while it encodes
                self.pictures.encode(encodes)
        if self.seen is not None:
            self.seen.replay(plan.journal)
            self.seen.advance(plan.rows, self.store.host_tables)
            self.seen.replay(plan.ahead)
        ticket = self._rows(plan, began, mark)
        if self.pictures is not None:
            self.pictures.passed()
        if plan.ahead:
            self.store.pool.settle()  # swaps wait for these rows, as copies do
            self.store.replay_ahead(plan.ahead)
        return ticket

    def hold(self, plan: StepPlan) -> Ticket:
        """As `submit`, up to the logits: its rows draw at `release`."""
        self.holding = True
        try:
            return self.submit(plan)
        finally:
            self.holding = False

    @torch.inference_mode()
    def release(self, ticket: Ticket, masks: tuple[Mask, ...]) -> Ticket:
        """Draw, under these masks."""
        self.sampler.masks.take(masks)
        return ticket._replace(drawn=ticket.held(), held=None) if ticket.held is not None else ticket

    def _rows(self, plan: StepPlan, began: float, mark: Any) -> Ticket:
        """Enqueue a plan's rows: as graphs where there are any for them. `mark`: the step has begun already."""
        if not plan.rows:
            return Ticket(None, [], plan, began, None, {})
        rows, scores, pooled = Rows.of(plan.rows), [], {}
        self.sampler.masks.take(plan.masks)
        mark, replayed = mark or self.idle.begin(), mark is None
        drawn: Drawn | None
        sees = self.pictures is not None and self.pictures.sees(rows)
        if self._for_no_graph(rows):
            replayed = False
            drawn, scores, pooled = self._eager(rows, Flat.of(rows))
        elif self.graphs is not None and self.graphs.fits(rows):
            drawn = self._sampled(rows, partial(self.graphs.run, rows, sees=sees))
        else:
            flat = Flat.of(rows)
            sizes = self.mixed.fit(rows, flat) if self.mixed is not None and not sees else None
            if sizes is not None:
                drawn = self._sampled(rows.sampling, partial(self.mixed.run, flat, sizes))
            else:
                replayed = False
                drawn, scores, pooled = self._eager(rows, flat)
        held, drawn = (drawn, None) if callable(drawn) else (None, drawn)
        return Ticket(drawn, scores, plan, began, self.idle.end(mark, replayed), pooled, held)

    def _for_no_graph(self, rows: Rows) -> bool:
        """Whether some rows need what graphs don't do: choose what is kept of a prompt, have a picture's rows among
        their embeddings, attend both ways, or give hidden states away."""
        if self.prompts is not None and self.prompts.end(rows):
            return True
        if self.pictures is not None and self.pictures.touch(rows):
            return True
        if self.pooling.asked(rows):
            return True
        return self.whole is not None and any(start < self.whole[slot] for slot, start in zip(rows.slots, rows.starts))

    def _eager(self, rows: Rows, flat: Flat) -> tuple[Drawn | None, list[Tensor], dict[int, Tensor]]:
        """Enqueue rows launch by launch: what they draw, the log-probabilities of prompts, and what is pooled."""
        asked = self.pooling.asked(rows)
        batch, step = self._planned(flat, narrow=not asked and not rows.scored)
        hidden = self._hidden(batch.tokens, step)
        scored = zip(rows, batch.offsets) if rows.scored else ()
        scores = [self._score(row, int(offset), hidden) for row, offset in scored if row.score]
        pooled = self.pooling.of(rows, batch.offsets, hidden) if asked else {}
        if not len(batch.asked):
            return None, scores, pooled
        ends = hidden if step.asked is not None else hidden.index_select(0, batch.ends)
        logits = self.model.logits(ends, own=True) if self.divided else self.model.logits(ends)
        return self._draw(rows.sampling, logits), scores, pooled

    def _planned(self, flat: Flat, narrow: bool) -> tuple[Batch, Step]:
        """The batch of some rows and its step; with `narrow` of no more tokens than are asked for in the end."""
        whole = None if self.whole is None else flat.starts < self.whole[flat.slots]
        batch = batch_of(flat, self.store, self.last, whole)
        shown = None if self.pictures is None else self.pictures.of(flat)
        narrow = narrow and len(batch.asked) < len(batch.tokens)
        step = Step.of(batch, self.store.caches, self.backend, narrow, self.store.states, shown)
        step.crossing = None if self.pictures is None else self.pictures.crossing(flat, self.backend)
        return batch, step

    def _hidden(self, tokens: Tensor, step: Step) -> Tensor:
        """[T, hidden], or of the tokens that the step wants."""
        return self.model(tokens, step)

    def _sampled(self, rows: Rows, replay: Callable[[str], Any]) -> Drawn:
        """The next tokens of `rows`, whose logits are those of graphs: `replay` launches these, with a tail."""
        tail = "" if self.holding else self.sampler.tail_of(rows)
        if tail not in ("", "greedy"):
            self.sampler.fill(rows)
        result = replay(tail)
        if tail:
            return self.sampler.from_graph(*result, rows)
        return self._draw(rows, result[: len(rows)])

    def _draw(self, sampling: Rows, logits: Tensor) -> Drawn:
        """The next tokens of `sampling` rows; each slot's first becomes its LAST."""
        rows = list(zip(sampling.slots, sampling.ends, sampling.samples))
        draw = partial(self.sampler.sample, logits, rows, self.last)
        return draw if self.holding else draw()

    def _score(self, row: Row, offset: int, hidden: Tensor) -> Tensor:
        """Log-probabilities of the prompt's tokens, as numbers that `collect` reads."""
        targets = to_device(np.array(row.score, dtype=np.int64), self.device)
        width = min(MAX_LOGPROBS, self.spec.vocab_size) if self.sampler.sampling(row.slot).prompt_logprobs > 0 else 0
        return scores_of(self.model.logits, hidden[offset : offset + len(row.score)], targets, width)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step: its rows have run when this returns, so their pages may be moved by others. Its seconds run
        from its submission, or from the end of the step before if that was later: no second counts twice."""
        if ticket.drawn is None and ticket.span is not None:
            ticket.span.end.synchronize()
        finished = self.sampler.finish(ticket.drawn) if ticket.drawn is not None else []
        if self.exchange is not None:
            self.exchange.check()
        if len(finished) == len(ticket.plan.rows) and not ticket.scores:
            return StepResult(tuple(finished), self._seconds(ticket), self.idle.collected(ticket.span))
        drawn, scores, samples = iter(finished), iter(ticket.scores), []
        for row in ticket.plan.rows:
            sample = next(drawn) if row.sample else sampled(ticket.pooled.get(row.slot))
            if row.score:
                most = max(self.sampler.sampling(row.slot).prompt_logprobs, 0)
                scored = zip(row.score, next(scores).tolist())
                sample = sample._replace(scores=tuple(top_of(token, numbers, most) for token, numbers in scored))
            samples.append(sample)
        return StepResult(tuple(samples), self._seconds(ticket), self.idle.collected(ticket.span))

    @property
    def applied(self) -> int:
        """Of a rank: a number that others have too if they applied the same journals."""
        return self.store.applied or 0

    @property
    def mapped(self) -> Mapped | None:
        """What was mapped, where memory is virtual."""
        return getattr(getattr(self, "store", None), "mapped", None)

    def _seconds(self, ticket: Ticket) -> float:
        began, self.collected = max(ticket.began, self.collected), time.perf_counter()
        return self.collected - began
