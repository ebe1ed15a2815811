"""The runner of a stage, which has some of the model's layers (pipeline parallelism). The first knows tokens, the last
draws; each gives the next what its layers make of a step's tokens.

Stages are given the same plans. While one computes a step the stage before may compute the next, of other sequences:
the scheduler plans no sequence whose sample it waits for, so a row's tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.layers.exchange import StageNeighbours
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.parallel_layout import Shard
from quire.protocol.pipeline_stages import kv_config_of_stage
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import ImageEncoding, SliceResult, SlotInit, StepPlan, StepResult, TokenBitmask
from quire.worker.inputs import FlatInputs
from quire.worker.model_runner import ModelRunner, Ticket
from quire.worker.pending_samples import PendingSamples
from quire.worker.step_context import StepContext


class NullSampler:
    """In the place of a sampler where nothing is drawn."""

    def __init__(self) -> None:
        self.bitmasks = self

    def init_slot(self, init: SlotInit) -> None:
        """Whoever draws knows how."""

    def set_bitmasks(self, masks: Sequence[TokenBitmask]) -> None:
        """And under which masks."""

    def warmup_tasks(self, dtypes: Iterable[torch.dtype], max_rows: int) -> Iterable[Callable[[], None]]:
        """No kernels are needed for it."""
        return ()


class StageRunner(ModelRunner):
    """Runs the stage of `shard`, whose spec is the whole model's; `pipes` are its neighbours'."""

    def __init__(self, *args: Any, shard: Shard, pipes: StageNeighbours, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shard, self.pipes = shard, pipes
        self.full_kv_cache_config: KVCacheConfig | None = None  # that of all stages

    def bind(self, kv_config: KVCacheConfig) -> None:
        """See ModelRunner; the geometry is one for all stages."""
        self.full_kv_cache_config = kv_config
        super().bind(kv_config_of_stage(kv_config, self.spec, self.shard))
        self.store.op_checksum = 0

    def sleep(self, level: int) -> None:
        """See Lifetime."""
        super().sleep(level)
        self.kv_config = self.full_kv_cache_config

    def add_image(self, pixels: ImagePixels) -> None:
        """See ModelRunner. Whose layers need no picture keeps none."""
        if self.image_inputs is not None:
            super().add_image(pixels)

    def submit(self, plan: StepPlan) -> Ticket:
        """See ModelRunner."""
        if self.image_inputs is None and self.spec.vision is not None:
            plan = plan._replace(page_ops=tuple(entry for entry in plan.page_ops if type(entry) is not ImageEncoding))
        return super().submit(plan)

    def _make_sampler(self, slots: int) -> Any:
        return super()._make_sampler(slots) if self.shard.is_last_stage else NullSampler()

    def _prepare_graphs(self, max_rows: int) -> None:
        """Of steps in which every sequence computes one token; others are launched one by one."""
        from quire.worker.cuda_graphs import GraphCapturer
        from quire.worker.stage_graphs import StageGraphs

        ends, store = self.shard.is_last_stage, self.store
        self.decode_graphs = StageGraphs(
            self.shard, self.pipes, self.spec.hidden, self.dtype, self.model, self._logits_fn() if ends else None,
            store,
            self.backend, self.last_sampled, store.staging, max_rows, self._graph_epilogues(max_rows) if ends else {},
            GraphCapturer(self.device), self.image_inputs,
        )  # fmt: skip

    def _replay_and_sample(self, slices: SeqSlices, replay: Callable[[str], Any]) -> Any:
        return super()._replay_and_sample(slices, replay) if self.shard.is_last_stage else replay("")

    def _run_eager(
        self, slices: SeqSlices, flat_inputs: FlatInputs
    ) -> tuple[PendingSamples | None, list[Tensor], dict[int, Tensor]]:
        if self.shard.is_last_stage:
            return super()._run_eager(slices, flat_inputs)
        batch, step = self._build_context(flat_inputs, sampled_only=False)
        self.pipes.send(*self._run_layers(batch.tokens, step))
        return None, [], {}

    def _forward(self, tokens: Tensor, step: StepContext) -> Tensor:
        return self.model.finish(*self._run_layers(tokens, step), step)  # type: ignore[attr-defined]

    def _run_layers(self, tokens: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """Up to the last of its layers; of the whole model's last layer, up to what it attends to."""
        if self.shard.is_first_stage:
            return self.model.embed(tokens, step)
        x, delta = self.pipes.receive(len(tokens), self.spec.hidden, self.dtype)
        return self.model.run_layers(x, step, delta)  # type: ignore[attr-defined]

    def collect(self, ticket: Ticket) -> StepResult:
        """See ModelRunner; but for the last stage nothing was drawn."""
        if self.shard.is_last_stage:
            return super().collect(ticket)
        if ticket.step_events is not None:  # of a GPU: the stage before may write over what this step has read
            ticket.step_events.end.synchronize()
        if self.exchange is not None:
            self.exchange.check_peers()
        nothing = (SliceResult(()),) * len(ticket.plan.slices)
        return StepResult(nothing, self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))
