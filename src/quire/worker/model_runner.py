"""The model runner executes steps on one device: it applies page operations, runs the model and samples tokens.

`submit` only enqueues work; on a GPU it returns before the step has run, and `collect` waits for its samples.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.contiguous import ContiguousBackend
from quire.kernels.cpu.library_loader import library
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.forward_batch import ForwardBatch, StateRows, to_device
from quire.kernels.limits import MAX_GRAPH_ROWS, max_hidden_rows
from quire.kernels.reference import ReferenceBackend
from quire.kernels.sdpa import SdpaBackend
from quire.kernels.triton.compile_process import running_compiler, stop_compiler
from quire.layers.exchange import Exchange
from quire.layers.sharding import shard_vocab
from quire.models.decoder import attention_sinks
from quire.models.hidden_states import HiddenStates
from quire.models.speculation_heads import SpeculationHead
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.shared_host import SharedHostMemory
from quire.protocol.step_plan import (
    FIRST_DRAFT,
    ImageEncoding,
    MappingStats,
    SeqSlice,
    StepPlan,
    StepResult,
    TokenBitmask,
    max_sampled_rows,
    max_verified_tokens,
)
from quire.weights.mapped_files import trim_memory
from quire.worker.cross_attention import CrossAttentionImages
from quire.worker.drafter import Drafter, HeadDrafter, HostDrafts
from quire.worker.idle_timer import IdleTimer, StepEvents, StepStart
from quire.worker.image_inputs import ImageInputs
from quire.worker.inputs import FlatInputs, build_flat_batch, resolve_positions
from quire.worker.logprobs import prompt_logprob_details, to_top_logprobs
from quire.worker.offloaded_weights import OffloadedWeights
from quire.worker.pending_samples import PendingSamples
from quire.worker.pooler import Pooler, pooled_result
from quire.worker.prompt_lengths import PromptLengths
from quire.worker.sampler import Sampler
from quire.worker.state_checker import StateChecker
from quire.worker.state_replay import StateReplay
from quire.worker.step_context import StepContext
from quire.worker.store import Store
from quire.worker.verification import Verification
from quire.worker.vocab_parallel_sampler import VocabParallelSampler, VocabParallelTritonSampler
from quire.worker.warmup import TOKEN_COUNTS, warm_up

if TYPE_CHECKING:
    from quire.models import Model
    from quire.models.transformers_model import TransformersModel
    from quire.worker.cuda_graphs import DecodeGraphs, GraphCapturer
    from quire.worker.mixed_graphs import MixedGraphs
    from quire.worker.recorded_steps import RecordedDecodeSteps

TORCH_BACKENDS = {"reference": ReferenceBackend, "sdpa": SdpaBackend, "contiguous": ContiguousBackend}

DeferredSampling = Callable[[], PendingSamples]
"""Samples rows whose masks arrived after their logits."""


class Ticket(NamedTuple):
    """A step in flight."""

    pending_samples: PendingSamples | None
    prompt_logprobs: Sequence[Tensor]
    plan: StepPlan
    submitted_at: float
    step_events: StepEvents | None  # on a GPU
    pooled: Mapping[int, Tensor]  # by slot
    sample_later: DeferredSampling | None = None  # set until `submit_masks`
    verification: Verification | None = None  # if slices have draft tokens
    host_drafts: HostDrafts | None = None  # of `submit_without_masks`, if there are draft slices


class LaunchedRows(NamedTuple):
    """The results of a batch that was enqueued: samples, log-probabilities of prompts, and pooled states by slot."""

    samples: PendingSamples | DeferredSampling | None
    prompt_logprobs: Sequence[Tensor] = ()
    pooled: Mapping[int, Tensor] = MappingProxyType({})
    replayed: bool = False  # by graphs


class ModelRunner:
    """Runs `model` in `dtype` on `device` with the attention backend named `attention`."""

    def __init__(
        self,
        model: Model | TransformersModel,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "sdpa",
        eos_ids: tuple[int, ...] = (),
        *,
        use_graphs: bool = False,
        deterministic: bool = False,
        debug: bool = False,
        map_in_background: bool = False,
        shared_buffer: Tensor | None = None,
        state_dtype: torch.dtype = torch.float32,
        make_model: Callable[[], Model | TransformersModel] | None = None,
        notices: tuple[str, ...] = (),
        max_drafts: int = 0,
        synthetic_acceptance: float | None = None,
        draft_model: Model | TransformersModel | None = None,
        draft_spec: ModelSpec | None = None,
        make_draft_model: Callable[[], Model | TransformersModel] | None = None,
        max_step_tokens: int = 0,
        shared_host: SharedHostMemory | None = None,
    ) -> None:
        """`map_in_background`: with virtual memory, a thread maps pages ahead of need. `shared_buffer`, `state_dtype`,
        `shared_host`: see Store. `make_model` loads the model again after a sleep of level 2, and `make_draft_model`
        the draft model. `notices` are reported at start. `max_drafts`: the most draft tokens of a slice. `draft_model`
        of `draft_spec` proposes them; its vocabulary is that of the model, and the memory is that of
        `spec.with_draft(draft_spec)`. If it is a SpeculationHead, steps have at most `max_step_tokens` tokens, whose
        hidden states are kept."""
        self.model: Any = model  # None in a sleep of level 2
        self.make_model, self.notices = make_model, notices
        self.spec, self.dtype, self.device, self.eos_ids = spec, dtype, device, eos_ids
        self.attention, self.backend = attention, _make_backend(attention, deterministic, max_drafts)
        self.use_graphs, self.deterministic, self.debug = use_graphs, deterministic, debug
        self.map_in_background, self.shared_buffer, self.state_dtype = map_in_background, shared_buffer, state_dtype
        self.shared_host = shared_host
        self.exchange: Exchange | None = getattr(model, "exchange", None)  # with other ranks
        self.depth = 1 if device.type == "cpu" else 2
        self.max_drafts, self.synthetic_acceptance = max_drafts, synthetic_acceptance
        self.max_step_tokens = max_step_tokens
        self.hidden_states: HiddenStates | None = None  # of each step, if a head reads them
        self.draft_runner: DraftModelRunner | None = None
        if draft_model is not None:
            assert draft_spec is not None, "a draft model needs its spec"
            assert max_drafts > 0, "a draft model needs `max_drafts`"
            assert draft_spec.vocab_size == spec.vocab_size, (
                f"the draft model has {draft_spec.vocab_size} tokens, and the model {spec.vocab_size}"
            )
            self.draft_runner = DraftModelRunner(
                draft_model, draft_spec, dtype, device, attention, eos_ids, use_graphs=use_graphs,
                deterministic=deterministic, make_model=make_draft_model, max_drafts=max_drafts,
                max_step_tokens=max_step_tokens,
            )  # fmt: skip
        self.defers_sampling = False  # True in `submit_without_masks`
        self.last_collected_at = -math.inf
        self.idle_timer = IdleTimer(device)
        self.pooler = Pooler()
        # `bind` sets what follows; `_release_pages` deletes the first four.
        self.store: Store
        self.sampler: Sampler
        self.sampled_tokens: Tensor  # see inputs.resolve_tokens
        self.last_sampled: Tensor  # by slot, the latest token: the first row of these
        self.base_positions: Tensor | None = None  # see inputs.resolve_positions
        self.drafter: Drafter | None = None
        self.prompt_lengths: PromptLengths | None = None  # if layers have budgets
        self.state_checker: StateChecker | None = None  # in debug mode, if layers have states
        self.state_replay: StateReplay | None = None  # if layers have states, and steps draft tokens
        self.image_inputs: ImageInputs | None = None  # if the model has images
        self.image_spans: dict[int, tuple[tuple[int, int], ...]] | None = None  # by slot, if one sees all of itself
        self.bidirectional_lens: np.ndarray | None = None  # by slot, the length of a prompt that is attended both ways
        self.decode_graphs: DecodeGraphs | RecordedDecodeSteps | None = None
        self.mixed_graphs: MixedGraphs | None = None  # of steps with prompts
        self.capturer: GraphCapturer | None = None  # of all these graphs
        # For sleep and wake-up.
        self.offloaded_weights: OffloadedWeights | None = None  # weights in host memory
        self.kv_config: KVCacheConfig | None = None  # that of `bind`, once asleep
        self.warmup_args: tuple[int, int] | None = None

    # Start: memory, graphs and warm-up

    def bind(self, kv_config: KVCacheConfig) -> None:
        """Allocate pages, tables and sampling state for `kv_config`. Raise StartupError if the attention backend cannot
        read its layout."""
        if self.backend.layout is KVCacheLayout.CONTIGUOUS and kv_config.layout is not KVCacheLayout.CONTIGUOUS:
            raise StartupError(
                f"--attention is {self.attention}, whose kernels need a sequence's tokens one after another, and the "
                f"memory is {kv_config.layout.value}",
                "Use --attention auto",
            )
        spec = self.spec if self.draft_runner is None else self.spec.with_draft(self.draft_runner.spec)
        store, draft = self._make_store(kv_config, spec), self.draft_runner
        if draft is not None and isinstance(draft.model, SpeculationHead):
            head = draft.model.config
            rows = max_hidden_rows(self.max_step_tokens)
            self.hidden_states = HiddenStates(head.captured_layers, rows, head.target_hidden, self.dtype, self.device)
            draft.model.allocate(rows)
        self._bind_store(store)
        if draft is not None:
            draft.bind_draft(self.store.draft_view(), self.sampled_tokens, self.capturer)
            assert draft.base_positions is not None, "`bind_draft` makes them"
            if self.hidden_states is None:
                self.drafter = Drafter(draft, self.sampled_tokens, draft.base_positions)
            else:
                self.drafter = HeadDrafter(draft, self.sampled_tokens, draft.base_positions, self.hidden_states)

    def _bind_store(self, store: Store) -> None:
        """Use the pages and tables of `store`."""
        self.store, kv_config = store, store.kv_config
        self.prompt_lengths = self.store.prompt_lengths
        self.state_checker = StateChecker(kv_config) if self.debug and self.store.state_caches else None
        self.state_replay = StateReplay(self.model, store, self.max_drafts) if store.saved_tokens else None
        self._attach_sinks(store)
        for cache in self.store.caches.values():
            self.backend.check_cache(cache)
        if kv_config.has_images:
            assert self.spec.vision is not None, "the geometry has images, and the model has no vision encoder"
            embed_dim = self.spec.vision.embed_dim
            if self.store.cross_caches:
                self.image_inputs = CrossAttentionImages(self.model, self.store, embed_dim)
            else:
                self.image_inputs = ImageInputs(self.model.vision_encoder, self.store, embed_dim)
            for cache in self.store.cross_caches.values():
                self.backend.check_cache(cache)
        if kv_config.both_ways:
            self.bidirectional_lens = np.zeros(kv_config.slots, dtype=np.int64)
        self.image_spans = {} if kv_config.whole_images else None
        self.sampler = self._make_sampler(kv_config.slots)
        self._make_sampled_tokens(kv_config.slots)
        if self.use_graphs:
            self._prepare_graphs(min(self.max_rows, MAX_GRAPH_ROWS))

    def _attach_sinks(self, store: Store) -> None:
        """Give the caches of layers with sinks these weights of the model."""
        sinks = attention_sinks(self.model) if isinstance(self.model, torch.nn.Module) else {}
        assert all(self.spec.layers[layer].has_sinks for layer in sinks), "the spec says which layers have sinks"
        for layer, weights in sinks.items():
            store.caches[layer] = replace(store.caches[layer], sinks=weights)

    def _make_sampled_tokens(self, slots: int) -> None:
        rows = 1 if self.draft_runner is None else 1 + self.max_drafts
        self.sampled_tokens = torch.zeros((rows, slots), dtype=torch.int64, device=self.device)
        self.last_sampled = self.sampled_tokens[0]

    @property
    def max_rows(self) -> int:
        """The most rows of a step that sample: each sequence has one, and one for each draft token."""
        return max_sampled_rows(self.store.kv_config.slots - 1, self.max_drafts)

    def _make_store(self, kv_config: KVCacheConfig, spec: ModelSpec) -> Store:
        if kv_config.layout is not KVCacheLayout.CONTIGUOUS:
            return Store(
                kv_config, spec, self.dtype, self.device, self.debug, self.shared_buffer, self.state_dtype,
                has_checksum=self.has_checksum, saved_tokens=max_verified_tokens(kv_config.slots - 1, self.max_drafts),
                shared_host=self.shared_host,
            )  # fmt: skip
        from quire.worker.virtual.store import open_store

        return open_store(
            kv_config, spec, self.dtype, self.device, self.debug, is_contiguous=self.backend.reads_contiguous,
            map_in_background=self.map_in_background, has_checksum=self.has_checksum,
        )  # fmt: skip

    def _make_sampler(self, slots: int) -> Sampler:
        vocab, exchange, rows = self.spec.vocab_size, self.exchange, 1 + self.max_drafts
        if exchange is None or exchange.shard.tp_size == 1:
            return Sampler(slots, vocab, self.device, self.eos_ids, rows)
        if self.device.type == "cpu":
            return VocabParallelSampler(slots, vocab, self.eos_ids, exchange, rows)
        return VocabParallelTritonSampler(slots, vocab, self.device, self.eos_ids, exchange, rows)

    @property
    def has_checksum(self) -> bool:
        """True if other ranks must apply the same page operations."""
        return self.exchange is not None

    @property
    def is_vocab_parallel(self) -> bool:
        """True if the vocabulary is sharded over ranks."""
        return self.exchange is not None and self.exchange.shard.tp_size > 1

    def _prepare_graphs(self, max_rows: int) -> None:
        """Prepare graphs for up to `max_rows` rows that sample. Nothing is captured yet."""
        if self.device.type == "cpu":
            from quire.worker.recorded_steps import RecordedDecodeSteps

            native = library()
            # A recorded step cannot exchange with other ranks.
            if native is not None and not self.store.cross_caches and self.exchange is None:
                epilogues = self.sampler.epilogues(self.last_sampled, max_rows)
                self.decode_graphs = RecordedDecodeSteps(
                    self.model, self.store, self.backend, self.sampled_tokens, max_rows, epilogues, native,
                    self.hidden_states,
                )  # fmt: skip
            return
        from quire.worker.cuda_graphs import DecodeGraphs
        from quire.worker.mixed_graphs import MixedGraphs

        epilogues, capturer, logits = self._graph_epilogues(max_rows), self._graph_capturer(), self._logits_fn()
        model, store, backend, sampled = self.model, self.store, self.backend, self.sampled_tokens
        self.decode_graphs = DecodeGraphs(
            model, logits, store, backend, sampled, store.staging, max_rows, epilogues, capturer, self.image_inputs,
            self.base_positions, self.hidden_states,
        )  # fmt: skip
        row_width = getattr(model, "row_width", self.spec.hidden)
        self.mixed_graphs = MixedGraphs(
            model, logits, store, backend, sampled, row_width, self.decode_graphs.capture_sizes, epilogues,
            capturer, self.hidden_states,
        )  # fmt: skip

    def _graph_capturer(self) -> GraphCapturer:
        """Return what captures the graphs on a GPU."""
        if self.capturer is None:
            from quire.worker.cuda_graphs import GraphCapturer

            self.capturer = GraphCapturer(self.device)
        return self.capturer

    def _logits_fn(self) -> Callable[[Tensor], Tensor]:
        """Return the function that computes a graph's logits: only this rank's if the vocabulary is sharded."""
        logits: Callable[[Tensor], Tensor] = self.model.logits
        return partial(self.model.logits, local=True) if self.is_vocab_parallel else logits

    def _graph_epilogues(self, max_rows: int) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        """Return the functions that may follow the logits of up to `max_rows` rows in a graph, by name."""
        return {**self.sampler.epilogues(self.last_sampled, max_rows), "": self._make_logits_epilogue(max_rows)}

    def _make_logits_epilogue(self, max_rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the epilogue of graphs that do not sample: it copies the logits to one buffer for all graphs. If the
        vocabulary is sharded they are this rank's."""
        width = self.spec.vocab_size
        if self.exchange is not None and self.is_vocab_parallel:
            width = shard_vocab(self.exchange.shard, width).padded
        buffer = torch.empty((max_rows, width), dtype=self.dtype, device=self.device)

        def copy_logits(logits: Tensor, slots: Tensor) -> Tensor:
            return buffer[: len(logits)].copy_(logits)

        return copy_logits

    def warm_up(self, tokens: int, max_len: int) -> None:
        """On a GPU, run every kind of step once, the largest of `tokens` tokens in sequences of up to `max_len`: no
        request then waits for a compilation or a capture. Call it between `bind` and the first step."""
        self.warmup_args = tokens, max_len
        if self.device.type != "cuda":
            return
        from quire.kernels.triton.compile_locks import compile_once

        with compile_once(running_compiler()):
            warm_up(self, tokens, max_len)
            if self.draft_runner is not None:
                warm_up(self.draft_runner, tokens, max_len)
            if isinstance(self.drafter, HeadDrafter):
                with torch.inference_mode():
                    self.drafter.warm_up(TOKEN_COUNTS)
            if count := min(self.max_drafts, max_len - 1):
                padding = SeqSlice(0, (0,), 0, 1, (), (0,) * count)
                proposing = (SeqSlice(0, (), 1, count),) if self.drafter is not None else ()
                self.run_without_mixed_graphs(StepPlan((), (), (padding,), draft_slices=proposing))
                self.store.clear_scratch()
        stop_compiler()

    def run_without_mixed_graphs(self, plan: StepPlan) -> None:
        """Run a step to its end, with prompts launched kernel by kernel."""
        graphs, self.mixed_graphs = self.mixed_graphs, None
        try:
            self.collect(self.submit(plan))
        finally:
            self.mixed_graphs = graphs

    # Steps

    def add_image(self, pixels: ImagePixels) -> None:
        """Add an image that plans submitted from now on may encode."""
        assert self.image_inputs is not None, "an image was sent to a model without images"
        self.image_inputs.add_image(pixels)

    def remove_image(self, key: bytes) -> None:
        """Remove an image that no later plan encodes. Unknown keys are ignored."""
        if self.image_inputs is not None:
            self.image_inputs.remove_image(key)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueue a step: new slots, page operations and image encodings, in order; then the slices as one batch; then
        the draft slices and the overlapped page operations."""
        submitted_at, start = time.perf_counter(), None
        for init in plan.new_slots:
            self.sampler.init_slot(init)
        if self.drafter is not None:
            self.drafter.init_slots(plan.new_slots)
        self.pooler.init_slots(plan.new_slots)
        if self.prompt_lengths is not None:
            self.prompt_lengths.init_slots(plan.new_slots)
        if self.bidirectional_lens is not None:
            for init in plan.new_slots:
                self.bidirectional_lens[init.slot] = init.prompt_len
        if self.image_spans is not None:
            for init in plan.new_slots:
                self.image_spans[init.slot] = tuple((image.start, image.end) for image in init.images)
        if self.image_inputs is None:
            self.store.apply_page_ops(plan.page_ops)
        else:
            self.image_inputs.init_slots(plan.new_slots)
            self.store.apply_page_ops(tuple(op for op in plan.page_ops if type(op) is not ImageEncoding))
            if encodings := [op for op in plan.page_ops if type(op) is ImageEncoding]:
                start = self.idle_timer.start_step() if plan.slices else None  # the device isn't idle while it encodes
                self.image_inputs.encode(encodings)
        if self.state_checker is not None:
            self.state_checker.apply_page_ops(plan.page_ops)
            self.state_checker.check_and_advance(plan.slices, self.store.host_tables)
            self.state_checker.apply_page_ops(plan.overlapped_page_ops)
        host_drafts = None
        if self.defers_sampling and self.drafter is not None:
            host_drafts = self.drafter.copy_to_host()
        ticket = self._run_slices(plan, submitted_at, start)._replace(host_drafts=host_drafts)
        if self.image_inputs is not None:
            self.image_inputs.end_step()
        if plan.overlapped_page_ops:
            self.store.host_pool.record_writes()  # swaps must wait for these slices, as for copies
            self.store.apply_overlapped_page_ops(plan.overlapped_page_ops)
        return ticket

    def submit_without_masks(self, plan: StepPlan) -> Ticket:
        """Enqueue a step up to its logits; `submit_masks` samples."""
        self.defers_sampling = True
        try:
            return self.submit(plan)
        finally:
            self.defers_sampling = False

    def proposed_tokens(self, ticket: Ticket) -> dict[int, list[int]]:
        """Return the draft tokens of a step of `submit_without_masks` that the draft model has proposed, by slot."""
        if ticket.host_drafts is None:
            return {}
        tokens, ready = ticket.host_drafts
        if ready is not None:
            ready.synchronize()
        by_slot = tokens.numpy().T
        return {
            row.slot: by_slot[row.slot, : len(row.draft_tokens)].tolist()
            for row in ticket.plan.slices
            if row.draft_tokens and row.draft_tokens[0] <= FIRST_DRAFT
        }

    @torch.inference_mode()
    def submit_masks(self, ticket: Ticket, masks: tuple[TokenBitmask, ...]) -> Ticket:
        """Sample a step of `submit_without_masks` under these masks."""
        self.sampler.set_bitmasks(masks, ticket.plan.slices)
        samples = None if ticket.sample_later is None else ticket.sample_later()
        pending = self._end_step(ticket.plan, samples, ticket.verification)
        return ticket._replace(pending_samples=pending, sample_later=None)

    def _run_slices(self, plan: StepPlan, submitted_at: float, start: StepStart | None) -> Ticket:
        """Enqueue a plan's slices, as graphs if possible. `start` is set if the step has begun already."""
        if not plan.slices:
            return Ticket(None, [], plan, submitted_at, None, {})
        rows, verification = SeqSlices.from_slices(plan.slices), None
        self.sampler.set_bitmasks(plan.masks, rows)
        if rows.has_draft_tokens:
            verification = Verification.from_slices(rows)
            rows = verification.rows
        start, is_first = start or self.idle_timer.start_step(), start is None
        state_rows = None if verification is None or self.state_replay is None else verification.state_rows()
        samples, prompt_logprobs, pooled, replayed = self.launch(rows, state_rows)
        pending, sample_later = None, None
        if isinstance(samples, PendingSamples) or not self.defers_sampling:
            assert samples is None or isinstance(samples, PendingSamples), "samples are not deferred"
            pending = self._end_step(plan, samples, verification)
        else:
            sample_later = samples
        events = self.idle_timer.end_step(start, replayed and is_first)
        return Ticket(pending, prompt_logprobs, plan, submitted_at, events, pooled, sample_later, verification)

    def launch(self, rows: SeqSlices, state_rows: StateRows | None = None) -> LaunchedRows:
        """Enqueue slices without draft tokens as one batch, as graphs if possible. `state_rows` are the rows of layers
        with states, if these have others."""
        has_images = self.image_inputs is not None and self.image_inputs.attends_to_images(rows)
        if self._needs_eager(rows):
            return self._run_eager(rows, FlatInputs.from_slices(rows)._replace(state_rows=state_rows))
        if self.decode_graphs is not None and state_rows is None and self.decode_graphs.can_run(rows):
            samples = self._replay_and_sample(
                rows, partial(self.decode_graphs.run, rows.decode_columns, has_images=has_images)
            )
            return LaunchedRows(samples, replayed=True)
        flat = FlatInputs.from_slices(rows)._replace(state_rows=state_rows)
        mixed_graphs = None if has_images else self.mixed_graphs
        sizes = None if mixed_graphs is None else mixed_graphs.choose_sizes(rows, flat)
        if mixed_graphs is not None and sizes is not None:
            samples = self._replay_and_sample(rows.sampling_slices, partial(mixed_graphs.run, flat, sizes))
            return LaunchedRows(samples, replayed=True)
        return self._run_eager(rows, flat)

    def _end_step(
        self, plan: StepPlan, samples: PendingSamples | None, verification: Verification | None
    ) -> PendingSamples | None:
        """Enqueue the verification of a step's draft tokens, if any, the copy of its result to the host, and then the
        draft slices."""
        accepted: Tensor | np.ndarray | None = None
        if verification is not None and samples is not None:  # other stages have none
            accepted = self._accept_drafts(samples, verification)
            samples = samples._replace(accepted=accepted)
            if isinstance(accepted, Tensor):
                pinned = torch.empty(accepted.shape, dtype=accepted.dtype, pin_memory=True)
                ready = torch.cuda.Event()
                pinned.copy_(accepted, non_blocking=True)
                ready.record()
                samples = samples._replace(accepted=pinned, ready_event=ready)
            if self.state_replay is not None:
                self.state_replay.run(verification, accepted)
        if plan.draft_slices:
            assert self.drafter is not None, "a plan has draft slices, and there is no draft model"
            self.drafter.propose(plan, verification, accepted)
        return samples

    def _accept_drafts(self, samples: PendingSamples, verification: Verification) -> Tensor | np.ndarray:
        """Return the numbers of accepted draft tokens, on the device."""
        if self.device.type == "cpu":
            host_tokens, sampled = np.asarray(samples.tokens), self.sampled_tokens.numpy()
            return verification.accept_on_host(host_tokens, sampled, self.synthetic_acceptance)
        tokens = torch.as_tensor(samples.tokens)
        return verification.accept(tokens, self.sampled_tokens, self.store.staging, self.synthetic_acceptance)

    def _needs_eager(self, slices: SeqSlices) -> bool:
        """Return True if some slices need what graphs lack: pruning of a prompt, image embeddings, attention both ways,
        or hidden states as results."""
        if self.prompt_lengths is not None and self.prompt_lengths.ends_long_prompt(slices):
            return True
        if self.image_inputs is not None and self.image_inputs.overlaps_images(slices):
            return True
        if self.pooler.needs_hidden(slices):
            return True
        if self.image_spans is not None and any(
            first < end and start < stop
            for slot, start, end in zip(slices.slots, slices.starts, slices.ends)
            for first, stop in self.image_spans.get(slot, ())
        ):
            return True
        return self.bidirectional_lens is not None and any(
            start < self.bidirectional_lens[slot] for slot, start in zip(slices.slots, slices.starts)
        )

    def _run_eager(self, slices: SeqSlices, flat_inputs: FlatInputs) -> LaunchedRows:
        """Enqueue slices kernel by kernel."""
        pools = self.pooler.needs_hidden(slices)
        batch, step = self._build_context(flat_inputs, sampled_only=not pools and not slices.has_score_tokens)
        hidden = self._forward(batch.tokens, step)
        scored = zip(slices, batch.offsets) if slices.has_score_tokens else ()
        prompt_logprobs = [self._score_prompt(row, int(offset), hidden) for row, offset in scored if row.score_tokens]
        pooled = self.pooler.pool(slices, batch.offsets, hidden) if pools else {}
        if not len(batch.sampled_rows):
            return LaunchedRows(None, prompt_logprobs, pooled)
        ends = hidden if step.query_batch is not None else hidden.index_select(0, batch.logits_indices)
        logits = self.model.logits(ends, local=True) if self.is_vocab_parallel else self.model.logits(ends)
        return LaunchedRows(self._sample(slices.sampling_slices, logits), prompt_logprobs, pooled)

    def _build_context(self, flat_inputs: FlatInputs, sampled_only: bool) -> tuple[ForwardBatch, StepContext]:
        """Return the batch of some slices and its step. With `sampled_only`, hidden states are returned only of tokens
        whose logits are needed."""
        bidirectional, merger, cross_attention = None, None, None
        if self.bidirectional_lens is not None:
            bidirectional = flat_inputs.starts < self.bidirectional_lens[flat_inputs.slots]
        batch = build_flat_batch(flat_inputs, self.store, self.sampled_tokens, bidirectional)
        if self.image_spans is not None:
            vision = self.spec.vision
            batch = batch.split_at_images(self.image_spans, vision is not None and vision.causal_full_layers)
        if self.image_inputs is not None:
            merger = self.image_inputs.embedding_merger(flat_inputs)
            cross_attention = self.image_inputs.cross_attention_context(flat_inputs, self.backend)
        sampled_only = sampled_only and len(batch.sampled_rows) < len(batch.tokens)
        step = StepContext.from_batch(
            batch, self.store.caches, self.backend, sampled_only, self.store.state_caches, merger, cross_attention,
            self.hidden_states,
        )  # fmt: skip
        return batch, step

    def _forward(self, tokens: Tensor, step: StepContext) -> Tensor:
        """Return hidden states [T, hidden], or those of the step's selected tokens."""
        hidden: Tensor = self.model(tokens, step)
        return hidden

    def _replay_and_sample(
        self, slices: SeqSlices, replay: Callable[[str], Any]
    ) -> PendingSamples | DeferredSampling | None:
        """Return the samples of `slices`, whose logits come from graphs: `replay` launches these with the epilogue that
        it is given."""
        epilogue = "" if self.defers_sampling else self.sampler.epilogue_for(slices)
        if epilogue not in ("", "greedy"):
            self.sampler.fill_epilogue(slices)
        result = replay(epilogue)
        if epilogue:
            tokens, faults = result
            return self.sampler.from_graph(tokens, faults, slices)
        return self._sample(slices, result[: len(slices)])

    def _sample(self, sampling_slices: SeqSlices, logits: Tensor) -> PendingSamples | DeferredSampling:
        """Sample `sampling_slices`, now or later; the first sample of each slot becomes its LAST_SAMPLED."""
        rows = list(zip(sampling_slices.slots, sampling_slices.ends, sampling_slices.num_samples))
        sample = partial(self.sampler.sample, logits, rows, self.last_sampled)
        return sample if self.defers_sampling else sample()

    def _score_prompt(self, seq_slice: SeqSlice, offset: int, hidden: Tensor) -> Tensor:
        """Return log-probabilities of the prompt's tokens, in the format that `collect` reads."""
        targets = to_device(np.array(seq_slice.score_tokens, dtype=np.int64), self.device)
        has_alternatives = self.sampler.sampling_of(seq_slice.slot).prompt_logprobs > 0
        width = min(MAX_LOGPROBS, self.spec.vocab_size) if has_alternatives else 0
        return prompt_logprob_details(
            self.model.logits, hidden[offset : offset + len(seq_slice.score_tokens)], targets, width
        )

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and return its result. Its slices have run then, so their pages may be moved. Its seconds
        count from its submission, or from the end of the step before if that was later: no second counts twice."""
        if ticket.pending_samples is None and ticket.step_events is not None:
            ticket.step_events.end.synchronize()
        pending = ticket.pending_samples
        sampled = self.sampler.collect(pending) if pending is not None else []
        if pending is not None and pending.accepted is not None and ticket.verification is not None:
            sampled = ticket.verification.merge(sampled, pending.accepted.tolist())
            if self.state_checker is not None:
                self._check_advanced_states(ticket.plan, pending.accepted.tolist())
        if self.exchange is not None:
            self.exchange.check_peers()
        if len(sampled) == len(ticket.plan.slices) and not ticket.prompt_logprobs:
            return StepResult(tuple(sampled), self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))
        next_sampled, next_scores, results = iter(sampled), iter(ticket.prompt_logprobs), []
        for row in ticket.plan.slices:
            result = next(next_sampled) if row.num_samples else pooled_result(ticket.pooled.get(row.slot))
            if row.score_tokens:
                num_logprobs = max(self.sampler.sampling_of(row.slot).prompt_logprobs, 0)
                scored = zip(row.score_tokens, next(next_scores).tolist())
                result = result._replace(
                    prompt_logprobs=tuple(to_top_logprobs(token, details, num_logprobs) for token, details in scored)
                )
            results.append(result)
        return StepResult(tuple(results), self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))

    def wait_for_swaps(self) -> None:
        """See core.runner.SharingRunner."""
        self.store.host_pool.synchronize()

    def _check_advanced_states(self, plan: StepPlan, accepted: list[int]) -> None:
        """Record how many tokens the states cover after a verification, given the accepted tokens of each slice."""
        assert self.state_checker is not None, "states are counted in debug mode"
        for row, count in zip((row for row in plan.slices if row.draft_tokens), accepted):
            self.state_checker.advance(row.slot, row.start, row.start + len(row.tokens) + count, self.store.host_tables)

    def _step_seconds(self, ticket: Ticket) -> float:
        began, self.last_collected_at = max(ticket.submitted_at, self.last_collected_at), time.perf_counter()
        return self.last_collected_at - began

    @property
    def op_checksum(self) -> int:
        """A checksum of the page operations applied: ranks that applied the same ones have the same."""
        return self.store.op_checksum or 0

    @property
    def mapping_stats(self) -> MappingStats | None:
        """The numbers of maps and unmaps, if memory is virtual."""
        return getattr(getattr(self, "store", None), "mapping_stats", None)

    # Sleep, wake-up and end

    def sleep(self, level: int) -> None:
        """See core.runner.SleepableRunner. A sleeping runner may be put to sleep at a deeper level."""
        if hasattr(self, "store"):
            self.kv_config = self.store.kv_config
        self._release_pages()
        for runner in self._runners:
            runner._release_weights(level)
        self._release_memory()

    @property
    def _runners(self) -> tuple[ModelRunner, ...]:
        """This runner and the draft model's, if there is one."""
        return (self,) if self.draft_runner is None else (self, self.draft_runner)

    def _release_weights(self, level: int) -> None:
        """Move the weights to host memory, or drop them (level 2)."""
        if level == 2:
            assert self.make_model is not None, "a sleep of level 2 needs `make_model`"
            self.model, self.offloaded_weights = None, None
        elif self.device.type == "cuda" and self.offloaded_weights is None and self.model is not None:
            self.offloaded_weights = OffloadedWeights(self.model, self.device)

    def _restore_weights(self) -> None:
        """Undo `_release_weights`."""
        if self.offloaded_weights is not None:
            self.offloaded_weights.restore()
            self.offloaded_weights = None
        if self.model is None:
            assert self.make_model is not None, "a wake-up from level 2 needs `make_model`"
            self.model = self.make_model()

    def wake(self, tags: Sequence[str]) -> None:
        """See core.runner.SleepableRunner. If memory does not suffice, the runner stays asleep."""
        if "weights" in tags:
            for runner in self._runners:
                runner._restore_weights()
        if "kv_cache" in tags:
            assert self.kv_config is not None, "wake without sleep"
            try:
                self.bind(self.kv_config)
                if self.warmup_args is not None:
                    self.warm_up(*self.warmup_args)
            except BaseException:
                self._release_pages()
                self._release_memory()
                raise
        if self.device.type == "cpu":
            trim_memory()

    def _release_pages(self) -> None:
        """Release the pages, once no page is being moved, and everything that refers to them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.draft_runner is not None:
            self.draft_runner._release_pages()
            if isinstance(self.draft_runner.model, SpeculationHead):
                self.draft_runner.model.allocate(0)
        self.drafter = self.capturer = self.hidden_states = None
        self.image_inputs = self.prompt_lengths = self.state_checker = self.state_replay = None  # they refer to it
        self.decode_graphs = self.mixed_graphs = self.base_positions = None
        for name in ("sampler", "sampled_tokens", "last_sampled"):
            if hasattr(self, name):
                delattr(self, name)
        if hasattr(self, "store"):
            self.store.close()
            del self.store

    def _release_memory(self) -> None:
        """Return unreferenced memory to the system."""
        frozen = gc.get_freeze_count() > 0  # quire's own programs exempt loaded objects from collection
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        weight_arena().drop_block()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_memory()

    def close(self) -> None:
        """Release the pages."""
        self._release_pages()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another engine may follow

    def __del__(self) -> None:
        """Release mapped pages. Ordinary tensors are released with their last reference."""
        if hasattr(getattr(self, "store", None), "driver") and not sys.is_finalizing():
            with suppress(Exception):
                self.close()


class DraftModelRunner(ModelRunner):
    """Runs the draft model of a runner in the draft layers of its memory. Its samples stay on the device. All of its
    rows are sampled by epilogues, so its graphs have none that returns logits.

    The sample of a row at position p is that of position p + 1, or with a speculation head of p + 2."""

    @property
    def lookahead(self) -> int:
        """How many positions after its row a sample is."""
        return 2 if isinstance(self.model, SpeculationHead) else 1

    def bind_draft(self, store: Store, sampled_tokens: Tensor, capturer: GraphCapturer | None) -> None:
        """Use the pages and tables of `store`, and the tokens of the model. Graphs share the memory of `capturer`'s
        other graphs, if given."""
        self.sampled_tokens, self.capturer = sampled_tokens, capturer
        self._bind_store(store)

    def _make_sampled_tokens(self, slots: int) -> None:
        self.last_sampled, self.base_positions = torch.zeros((2, slots), dtype=torch.int64, device=self.device)

    def can_replay(self, rows: int) -> bool:
        """Return True if graphs on a GPU can run `rows` rows, at positions that the host does not know yet."""
        graphs = self.decode_graphs
        return self.device.type == "cuda" and graphs is not None and graphs.has_room(rows)

    def _graph_epilogues(self, max_rows: int) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        epilogues = self.sampler.epilogues(self.last_sampled, max_rows)
        noise_positions = self.sampler.epilogue_positions(max_rows)

        def resolving(epilogue: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
            def resolve_and_sample(logits: Tensor, slots: Tensor) -> Any:
                positions = noise_positions[: len(slots)]
                positions.copy_(resolve_positions(positions, slots, self.base_positions))
                return epilogue(logits, slots)

            return resolve_and_sample

        return {name: epilogue if name == "greedy" else resolving(epilogue) for name, epilogue in epilogues.items()}

    def _replay_and_sample(self, slices: SeqSlices, replay: Callable[[str], Any]) -> PendingSamples:
        slots, ends = np.array((slices.slots, slices.ends), dtype=np.int64)
        return PendingSamples.on_device(self._replay_rows(slots, ends + self.lookahead - 1, replay))

    def _sample(self, sampling_slices: SeqSlices, logits: Tensor) -> PendingSamples:
        ends = [end + self.lookahead - 1 for end in sampling_slices.ends]
        rows = list(zip(sampling_slices.slots, ends, sampling_slices.num_samples))
        return self.sampler.sample(logits, rows, self.last_sampled)

    def _replay_rows(self, slots: np.ndarray, ends: np.ndarray, replay: Callable[[str], Any]) -> Tensor | np.ndarray:
        epilogue = self.sampler.epilogue_of(slots.tolist(), ends.tolist())
        if epilogue != "greedy":
            self.sampler.fill_rows(slots, ends)
        tokens: Tensor | np.ndarray = replay(epilogue)[0]
        return tokens[: len(slots)]

    def decode(self, columns: np.ndarray) -> Tensor | np.ndarray:
        """Enqueue rows of one token, `columns` [3, R] of which are their slots, positions and tokens. Return their
        samples [R]."""
        graphs, (slots, positions, tokens) = self.decode_graphs, columns
        if graphs is not None and graphs.has_room(len(slots)):
            if self.device.type == "cuda":  # a capture runs epilogues, which resolve the positions of noise
                cast("DecodeGraphs", graphs).ensure_captured(len(slots), has_images=False)
            more = self.lookahead
            ends = np.where(positions < 0, positions - more, positions + more)  # see resolve_positions
            return self._replay_rows(slots, ends, partial(graphs.run, columns))
        ones, none = np.ones(len(slots), dtype=np.int64), np.zeros(len(slots), dtype=np.int64)
        rows = SeqSlices.from_arrays(np.stack((ones, slots, positions)), ones, tokens, none, none[:0])
        samples = self.launch(rows).samples
        assert isinstance(samples, PendingSamples), "a draft model's samples are not deferred"
        return samples.tokens

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step of the warm-up. It has no results."""
        torch.cuda.synchronize(self.device)
        return StepResult((), self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))


def _make_backend(name: str, deterministic: bool, max_drafts: int) -> Any:
    if name in TORCH_BACKENDS:
        return TORCH_BACKENDS[name]()
    if name == "native":
        from quire.kernels.cpu.backend import NativeBackend

        return NativeBackend(deterministic=deterministic)
    if name == "triton":
        from quire.kernels.triton.backend import TritonBackend

        return TritonBackend(deterministic=deterministic, max_drafts=max_drafts)
    from quire.kernels.triton.vendor_backend import VendorBackend

    return VendorBackend(name, max_drafts)
