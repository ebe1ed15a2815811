"""The runner of a pipeline stage, which has some of the model's layers. The first stage embeds tokens, the last one
samples; each sends its hidden states to the next.

All stages get the same plans. While one computes a step, the stage before may compute the next, of other sequences: the
scheduler plans no sequence whose sample is not collected, so a slice's tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.layers.exchange import StageNeighbours
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.parallel_layout import Shard
from quire.protocol.pipeline_stages import kv_config_of_stage
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import ImageEncoding, SeqSlice, SliceResult, SlotInit, StepPlan, StepResult, TokenBitmask
from quire.worker.cuda_graphs import DecodeGraphs
from quire.worker.inputs import FlatInputs
from quire.worker.model_runner import DeferredSampling, LaunchedRows, ModelRunner, Ticket
from quire.worker.pending_samples import PendingSamples
from quire.worker.sampler import Sampler
from quire.worker.step_context import StepContext


class StageGraphs(DecodeGraphs):
    """Decode steps of stage `shard` as CUDA graphs; `pipes` connect it to its neighbours. Hidden states of the stage
    before are received and copied to the graphs' input buffer; those for the next stage are sent from the graphs'
    output buffer. Only the last stage has logits and epilogues."""

    def __init__(
        self, shard: Shard, pipes: StageNeighbours, hidden_size: int, dtype: torch.dtype, model: Any,
        logits: Callable[[Any], Any] | None, *args: Any,
    ) -> None:  # fmt: skip
        super().__init__(self._run_layers, self._store_output if logits is None else logits, *args)
        self.shard, self.pipes, self.stage_model, self.dtype = shard, pipes, model, dtype
        shape, device = (2, self.max_rows, hidden_size), self.inputs.device  # x, and delta that is added to it
        self.received = None if shard.is_first_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.output = None if shard.is_last_stage else torch.zeros(shape, dtype=dtype, device=device)
        self.has_delta: dict[tuple[int, bool], bool] = {}  # by size and has_images: the output has a delta

    def run(self, columns: np.ndarray, epilogue: str, has_images: bool = False) -> Any:
        """See DecodeGraphs; only the last stage returns a result."""
        # Capture before receiving: the run before a capture uses the input buffer too.
        count = columns.shape[1]
        size = self.ensure_captured(count, has_images)
        if self.received is not None:
            x, delta = self.pipes.receive(count, self.received.shape[2], self.dtype)
            self.received[0, :count].copy_(x)
            self.received[1, :count].zero_() if delta is None else self.received[1, :count].copy_(delta)
        self.replay(columns, size, has_images)
        if self.output is None:
            end = self.epilogue_graphs[size, has_images, epilogue]
            end.graph.replay()
            return end.result
        x, delta = self.output[:, :count].unbind()
        self.pipes.send(x, delta if self.has_delta[size, has_images] else None)
        return None

    def _run_layers(self, tokens: Tensor, step: StepContext) -> Any:
        """Run the stage's layers. Return hidden states on the last stage, else (x, delta, has_images)."""
        if self.received is None:
            x, delta = self.stage_model.embed(tokens, step)
        else:
            x, delta = self.stage_model.run_layers(
                self.received[0, : len(tokens)], step, self.received[1, : len(tokens)]
            )
        return (
            self.stage_model.finish(x, delta, step)
            if self.output is None
            else (x, delta, step.cross_attention is not None)
        )

    def _store_output(self, output: tuple[Tensor, Tensor | None, bool]) -> None:
        """Copy x and delta to the output buffer, in the place of computing logits."""
        x, delta, has_images = output
        assert self.output is not None, "the last stage has logits"
        self.output[0, : len(x)].copy_(x)
        if delta is not None:
            self.output[1, : len(x)].copy_(delta)
        self.has_delta[len(x), has_images] = delta is not None


class NullSampler(Sampler):
    """The sampler of a stage that does not sample: it ignores parameters and masks, and its other methods fail."""

    def __init__(self) -> None:
        """Allocate nothing."""

    def init_slot(self, init: SlotInit) -> None:
        """Do nothing."""

    def set_bitmasks(self, bitmasks: Sequence[TokenBitmask], slices: Sequence[SeqSlice]) -> None:
        """Do nothing."""

    def warmup_tasks(self, dtypes: Iterable[torch.dtype], max_rows: int) -> Iterator[Callable[[], None]]:
        """Return no tasks."""
        return iter(())


class StageRunner(ModelRunner):
    """Runs the stage of `shard`; its spec is the whole model's. `pipes` connect it to its neighbours."""

    def __init__(self, *args: Any, shard: Shard, pipes: StageNeighbours, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shard, self.pipes = shard, pipes
        self.full_kv_cache_config: KVCacheConfig | None = None  # of all stages

    def bind(self, kv_config: KVCacheConfig) -> None:
        """See ModelRunner; `kv_config` is that of all stages."""
        self.full_kv_cache_config = kv_config
        super().bind(kv_config_of_stage(kv_config, self.spec, self.shard))

    @property
    def has_checksum(self) -> bool:
        """True: all stages must apply the same page operations."""
        return True

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.kv_config = self.full_kv_cache_config

    def add_image(self, pixels: ImagePixels) -> None:
        """See ModelRunner. A stage whose layers need no image ignores it."""
        if self.image_inputs is not None:
            super().add_image(pixels)

    def submit(self, plan: StepPlan) -> Ticket:
        if self.image_inputs is None and self.spec.vision is not None:
            plan = plan._replace(page_ops=tuple(op for op in plan.page_ops if type(op) is not ImageEncoding))
        return super().submit(plan)

    def _make_sampler(self, slots: int) -> Sampler:
        return super()._make_sampler(slots) if self.shard.is_last_stage else NullSampler()

    def _prepare_graphs(self, max_rows: int) -> None:
        """Prepare graphs of decode steps only; other steps run kernel by kernel."""
        is_last, store = self.shard.is_last_stage, self.store
        logits, epilogues = (self._logits_fn(), self._graph_epilogues(max_rows)) if is_last else (None, {})
        self.decode_graphs = StageGraphs(
            self.shard, self.pipes, self.spec.hidden, self.dtype, self.model, logits, store, self.backend,
            self.sampled_tokens, store.staging, max_rows, epilogues, self._graph_capturer(), self.image_inputs,
        )  # fmt: skip

    def _replay_and_sample(
        self, slices: SeqSlices, replay: Callable[[str], Any]
    ) -> PendingSamples | DeferredSampling | None:
        return super()._replay_and_sample(slices, replay) if self.shard.is_last_stage else replay("")

    def _run_eager(self, slices: SeqSlices, flat_inputs: FlatInputs) -> LaunchedRows:
        if self.shard.is_last_stage:
            return super()._run_eager(slices, flat_inputs)
        batch, step = self._build_context(flat_inputs, sampled_only=False)
        self.pipes.send(*self._run_layers(batch.tokens, step))
        return LaunchedRows(None)

    def _forward(self, tokens: Tensor, step: StepContext) -> Tensor:
        hidden: Tensor = self.model.finish(*self._run_layers(tokens, step), step)
        return hidden

    def _run_layers(self, tokens: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """Run this stage's layers; the whole model's last layer, up to its attention. Return x and what is to be added
        to it."""
        output: tuple[Tensor, Tensor | None]
        if self.shard.is_first_stage:
            output = self.model.embed(tokens, step)
        else:
            x, delta = self.pipes.receive(len(tokens), self.spec.hidden, self.dtype)
            output = self.model.run_layers(x, step, delta)
        return output

    def collect(self, ticket: Ticket) -> StepResult:
        """See ModelRunner; only the last stage has samples."""
        if self.shard.is_last_stage:
            return super().collect(ticket)
        if ticket.step_events is not None:  # on a GPU: the stage before may overwrite this step's input
            ticket.step_events.end.synchronize()
        if self.exchange is not None:
            self.exchange.check_peers()
        empty = (SliceResult(()),) * len(ticket.plan.slices)
        return StepResult(empty, self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))
