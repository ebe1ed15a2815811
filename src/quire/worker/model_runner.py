"""The model runner: one step on one device. Replays births and journal, runs the model, draws the next tokens.

`submit` only enqueues work; on a GPU it returns before the step has run, and `collect` waits for its samples.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.contiguous import ContiguousBackend
from quire.kernels.cpu.library_loader import library
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.forward_batch import ForwardBatch, to_device
from quire.kernels.limits import MAX_GRAPH_ROWS
from quire.kernels.reference import ReferenceBackend
from quire.kernels.sdpa import SdpaBackend
from quire.layers.sharding import shard_vocab
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import ImageEncoding, MappingStats, SeqSlice, StepPlan, StepResult, TokenBitmask
from quire.weights.mapped_files import trim_memory
from quire.worker.cross_attention import CrossAttentionImages
from quire.worker.idle_timer import IdleTimer, StepEvents
from quire.worker.image_inputs import ImageInputs
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.logprobs import prompt_logprob_details, to_top_logprobs
from quire.worker.offloaded_weights import OffloadedWeights
from quire.worker.pending_samples import PendingSamples
from quire.worker.pooler import Pooler, pooled_result
from quire.worker.prompt_lengths import PromptLengths
from quire.worker.sampler import Sampler
from quire.worker.state_checker import StateChecker
from quire.worker.step_context import StepContext
from quire.worker.store import Store
from quire.worker.vocab_parallel_sampler import VocabParallelSampler, VocabParallelTritonSampler
from quire.worker.warmup import warm_up


class RunnerLifecycle:
    """The part of a ModelRunner that outlives its pages. `make_model` makes its model anew: None where nobody can."""

    model: Any
    device: torch.device
    image_inputs: Any
    prompt_lengths: Any
    state_checker: Any
    decode_graphs: Any
    mixed_graphs: Any
    make_model: Callable[[], Any] | None = None
    offloaded_weights: OffloadedWeights | None = None  # weights that are in host memory
    kv_config: KVCacheConfig | None = None  # of the pages that it had when it fell asleep
    warmup_args: tuple[int, int] | None = None  # what it was warmed up for

    def warm_up(self, tokens: int, max_len: int) -> None:
        """On a GPU, run every kind of step once, the largest of `tokens` tokens in sequences of up to `max_len`: then
        no request waits for a kernel to be compiled or a graph to be captured. After `bind`, before the first step."""
        self.warmup_args = tokens, max_len
        if self.device.type == "cuda":
            warm_up(self, tokens, max_len)  # type: ignore[arg-type]

    def sleep(self, level: int) -> None:
        """See control.runners.Sleeping. One that sleeps already sleeps deeper."""
        store = getattr(self, "store", None)
        if store is not None:
            self.kv_config = store.kv_config
            del store
        self._release_pages()
        if level == 2:
            assert self.make_model is not None, "a model that can be made again"
            self.model, self.offloaded_weights = None, None
        elif self.device.type == "cuda" and self.offloaded_weights is None and self.model is not None:
            self.offloaded_weights = OffloadedWeights(self.model, self.device)
        self._release_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """See control.runners.Sleeping. If there is no room, it sleeps on as before."""
        if "weights" in tags:
            if self.offloaded_weights is not None:
                self.offloaded_weights.restore()
                self.offloaded_weights = None
            if self.model is None:
                assert self.make_model is not None, "a model that can be made again"
                self.model = self.make_model()
        if "kv_cache" in tags:
            assert self.kv_config is not None, "it fell asleep"
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

    def bind(self, kv_config: KVCacheConfig) -> None:
        """See ModelRunner."""
        raise NotImplementedError

    def _release_pages(self) -> None:
        """Of the pages, once nothing moves them any more, and of all that was made over them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        store = getattr(self, "store", None)
        self.image_inputs = self.prompt_lengths = self.state_checker = self.decode_graphs = self.mixed_graphs = (
            None  # they hold the store too
        )
        for name in ("sampler", "last_sampled"):
            if hasattr(self, name):
                delattr(self, name)
        if store is not None:
            store.close()
            del self.store, store

    def _release_memory(self) -> None:
        """What nobody holds any more goes back to the system."""
        frozen = gc.get_freeze_count() > 0  # what was loaded is spared by the collector, in programs of our own
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
        """Let go of the pages."""
        self._release_pages()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another engine may follow

    def __del__(self) -> None:
        """Ordinary tensors go with whoever holds them; mapped pages are given back by somebody."""
        if hasattr(getattr(self, "store", None), "driver") and not sys.is_finalizing():
            with suppress(Exception):
                self.close()


TORCH_BACKENDS = {"reference": ReferenceBackend, "sdpa": SdpaBackend, "contiguous": ContiguousBackend}


class RunnableModel(Protocol):
    """What the runner needs of a model (see quire.models). One that sees has `eyes` too, an Encoder. A shard that
    was joined to others has their `exchange`, and its `logits` can be asked for its own alone."""

    def __call__(self, tokens: Tensor, ctx: Any) -> Tensor: ...
    def embed(self, tokens: Tensor, ctx: Any) -> tuple[Tensor, Tensor]: ...
    def finish_selected(self, x: Tensor, attended: Tensor) -> Tensor: ...
    def logits(self, hidden_states: Tensor) -> Tensor: ...


def _make_backend(name: str, deterministic: bool) -> Any:
    if name in TORCH_BACKENDS:
        return TORCH_BACKENDS[name]()
    if name == "native":
        from quire.kernels.cpu.backend import NativeBackend

        return NativeBackend(deterministic=deterministic)
    if name == "triton":
        from quire.kernels.triton.backend import TritonBackend

        return TritonBackend(deterministic=deterministic)
    from quire.kernels.triton.vendor_backend import VendorBackend

    return VendorBackend(name)


class Ticket(NamedTuple):
    """A step in flight."""

    pending_samples: PendingSamples | None
    prompt_logprobs: list[Tensor]
    plan: StepPlan
    submitted_at: float
    step_events: StepEvents | None  # on a GPU
    pooled: dict[int, Tensor]  # by slot
    sample_later: Callable[[], PendingSamples] | None = None  # draws that wait for masks


class ModelRunner(RunnerLifecycle):
    """Runs `model` in `dtype` on `device` with the attention backend of that name."""

    def __init__(
        self,
        model: RunnableModel,
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
    ) -> None:
        """`map_in_background`: a thread maps ahead of need, where memory is virtual. `shared_buffer`, "
        "`state_dtype`: see Store."""
        self.model, self.spec, self.dtype, self.device, self.eos_ids = model, spec, dtype, device, eos_ids
        self.attention, self.backend = attention, _make_backend(attention, deterministic)
        self.use_graphs, self.deterministic, self.debug, self.map_in_background = (
            use_graphs,
            deterministic,
            debug,
            map_in_background,
        )
        self.shared_buffer, self.state_dtype = shared_buffer, state_dtype
        self.exchange = getattr(model, "exchange", None)  # with other ranks
        self.depth = 1 if device.type == "cpu" else 2
        self.defers_sampling = False  # rows that are enqueued draw later
        self.last_collected_at = -math.inf  # when the last step was
        self.idle_timer = IdleTimer(device)
        self.store: Store
        self.sampler: Sampler
        self.prompt_lengths: PromptLengths | None = None  # where layers have budgets
        self.state_checker: StateChecker | None = None  # in debug mode, where layers have states
        self.image_inputs: ImageInputs | None = None  # where the model sees
        self.pooler = Pooler()
        # by slot, the length of a prompt whose tokens attend both ways
        self.bidirectional_lens: np.ndarray | None = None
        self.last_sampled: Tensor
        self.decode_graphs: Any = None  # of decode steps
        self.mixed_graphs: Any = None  # of steps with prompts

    def bind(self, kv_config: KVCacheConfig) -> None:
        """Allocate pages, tables and sampling state for a memory of this geometry. StartupError if the attention can't
        find its tokens."""
        if self.backend.layout is KVCacheLayout.CONTIGUOUS and kv_config.layout is not KVCacheLayout.CONTIGUOUS:
            raise StartupError(
                f"--attention is {self.attention}, whose kernels need a sequence's tokens one after another, and the "
                f"memory is {kv_config.layout.value}",
                "Use --attention auto",
            )
        self.store = self._make_store(kv_config)
        if self.exchange is not None:
            self.store.op_checksum = 0
        self.prompt_lengths = self.store.prompt_lengths
        self.state_checker = StateChecker(kv_config) if self.debug and self.store.state_caches else None
        for cache in self.store.caches.values():
            self.backend.check_cache(cache)
        if kv_config.has_images:
            assert self.spec.vision is not None, "a model without eyes has no pictures"
            kind = (
                partial(CrossAttentionImages, self.model)
                if self.store.cross_caches
                else partial(ImageInputs, self.model.vision_encoder)
            )
            self.image_inputs = kind(self.store, self.spec.vision.embed_dim)
            for cache in self.store.cross_caches.values():
                self.backend.check_cache(cache)
        if kv_config.both_ways:
            self.bidirectional_lens = np.zeros(kv_config.slots, dtype=np.int64)
        self.sampler = self._make_sampler(kv_config.slots)
        self.last_sampled = torch.zeros(kv_config.slots, dtype=torch.int64, device=self.device)
        if self.use_graphs:
            self._prepare_graphs(min(kv_config.slots - 1, MAX_GRAPH_ROWS))

    def _make_sampler(self, slots: int) -> Sampler:
        vocab = self.spec.vocab_size
        if not self.is_vocab_parallel:
            return Sampler(slots, vocab, self.device, self.eos_ids)
        if self.device.type == "cpu":
            return VocabParallelSampler(slots, vocab, self.eos_ids, self.exchange)
        return VocabParallelTritonSampler(slots, vocab, self.device, self.eos_ids, self.exchange)

    @property
    def is_vocab_parallel(self) -> bool:
        """Ranks share out the vocabulary."""
        return self.exchange is not None and self.exchange.shard.tp_size > 1

    def _make_store(self, kv_config: KVCacheConfig) -> Store:
        if kv_config.layout is not KVCacheLayout.CONTIGUOUS:
            return Store(
                kv_config,
                self.spec,
                self.dtype,
                self.device,
                self.debug,
                self.shared_buffer,
                state_dtype=self.state_dtype,
            )
        from quire.worker.virtual.store import open_store

        return open_store(
            kv_config,
            self.spec,
            self.dtype,
            self.device,
            self.debug,
            is_contiguous=self.backend.reads_contiguous,
            map_in_background=self.map_in_background,
        )

    def _prepare_graphs(self, max_rows: int) -> None:
        """For up to `max_rows` rows that sample. Nothing is captured yet."""
        if self.device.type == "cpu":
            from quire.worker.recorded_steps import RecordedDecodeSteps

            found = library()
            if found is not None and not self.store.cross_caches and self.exchange is None:  # a tape waits for nobody
                tails = self.sampler.epilogues(self.last_sampled, max_rows)
                self.decode_graphs = RecordedDecodeSteps(
                    self.model, self.store, self.backend, self.last_sampled, max_rows, tails, found
                )
            return
        from quire.worker.cuda_graphs import DecodeGraphs, GraphCapturer
        from quire.worker.mixed_graphs import MixedGraphs

        tails, recorder, logits = self._graph_epilogues(max_rows), GraphCapturer(self.device), self._logits_fn()
        model, store, backend, last = self.model, self.store, self.backend, self.last_sampled
        self.decode_graphs = DecodeGraphs(
            model, logits, store, backend, last, store.staging, max_rows, tails, recorder, self.image_inputs
        )
        self.mixed_graphs = MixedGraphs(
            model, logits, store, backend, last, self.spec.hidden, self.decode_graphs.sizes, tails, recorder
        )

    def _logits_fn(self) -> Callable[[Tensor], Tensor]:
        """What makes a graph's logits: this rank's, if a vocabulary is shared out."""
        return partial(self.model.logits, local=True) if self.is_vocab_parallel else self.model.logits  # type: ignore[no-any-return]

    def _graph_epilogues(self, max_rows: int) -> dict[str, Callable[[Tensor, Tensor], Any]]:
        """What may follow the logits of up to `max_rows` rows in a graph."""
        return {**self.sampler.epilogues(self.last_sampled, max_rows), "": self._make_logits_epilogue(max_rows)}

    def _make_logits_epilogue(self, max_rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        """What follows the logits of a graph that doesn't sample: they are kept, in one place for all graphs. Where the
        vocabulary is shared out they are a rank's own."""
        vocab = self.spec.vocab_size
        width = shard_vocab(self.exchange.shard, vocab).padded if self.is_vocab_parallel else vocab
        kept = torch.empty((max_rows, width), dtype=self.dtype, device=self.device)

        def tail(logits: Tensor, slots: Tensor) -> Tensor:
            return kept[: len(logits)].copy_(logits)

        return tail

    def add_image(self, pixels: ImagePixels) -> None:
        """Keep a picture: plans that are submitted from now on may encode it."""
        assert self.image_inputs is not None, "the model sees"
        self.image_inputs.add_image(pixels)

    def remove_image(self, key: bytes) -> None:
        """No plan that isn't submitted yet encodes this picture. Unknown ones pass."""
        if self.image_inputs is not None:
            self.image_inputs.remove_image(key)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Enqueue a step: births and journal, in order, and what it says of pictures; then the rows as one batch; then
        what is to be done ahead."""
        began, mark = time.perf_counter(), None
        for birth in plan.new_slots:
            self.sampler.init_slot(birth)
        self.pooler.init_slots(plan.new_slots)
        if self.prompt_lengths is not None:
            self.prompt_lengths.init_slots(plan.new_slots)
        if self.bidirectional_lens is not None:
            for birth in plan.new_slots:
                self.bidirectional_lens[birth.slot] = birth.prompt_len
        if self.image_inputs is None:
            self.store.apply_page_ops(plan.page_ops)
        else:
            self.image_inputs.init_slots(plan.new_slots)
            self.store.apply_page_ops(tuple(entry for entry in plan.page_ops if type(entry) is not ImageEncoding))
            if encodes := [entry for entry in plan.page_ops if type(entry) is ImageEncoding]:
                mark = self.idle_timer.start_step() if plan.slices else None  # the device isn't idle while it encodes
                self.image_inputs.encode(encodes)
        if self.state_checker is not None:
            self.state_checker.apply_page_ops(plan.page_ops)
            self.state_checker.check_and_advance(plan.slices, self.store.host_tables)
            self.state_checker.apply_page_ops(plan.overlapped_page_ops)
        ticket = self._run_slices(plan, began, mark)
        if self.image_inputs is not None:
            self.image_inputs.end_step()
        if plan.overlapped_page_ops:
            self.store.host_pool.record_writes()  # swaps wait for these rows, as copies do
            self.store.apply_overlapped_page_ops(plan.overlapped_page_ops)
        return ticket

    def submit_without_masks(self, plan: StepPlan) -> Ticket:
        """As `submit`, up to the logits: its rows draw at `submit_masks`."""
        self.defers_sampling = True
        try:
            return self.submit(plan)
        finally:
            self.defers_sampling = False

    @torch.inference_mode()
    def submit_masks(self, ticket: Ticket, masks: tuple[TokenBitmask, ...]) -> Ticket:
        """Draw, under these masks."""
        self.sampler.bitmasks.set_bitmasks(masks)
        return (
            ticket._replace(pending_samples=ticket.sample_later(), sample_later=None)
            if ticket.sample_later is not None
            else ticket
        )

    def _run_slices(self, plan: StepPlan, submitted_at: float, start: Any) -> Ticket:
        """Enqueue a plan's rows: as graphs where there are any for them. `start`: the step has begun already."""
        if not plan.slices:
            return Ticket(None, [], plan, submitted_at, None, {})
        rows, scores, pooled = SeqSlices.from_slices(plan.slices), [], {}
        self.sampler.bitmasks.set_bitmasks(plan.masks)
        start, replayed = start or self.idle_timer.start_step(), start is None
        drawn: PendingSamples | None
        sees = self.image_inputs is not None and self.image_inputs.attends_to_images(rows)
        if self._needs_eager(rows):
            replayed = False
            drawn, scores, pooled = self._run_eager(rows, FlatInputs.from_slices(rows))
        elif self.decode_graphs is not None and self.decode_graphs.can_run(rows):
            drawn = self._replay_and_sample(rows, partial(self.decode_graphs.run, rows, has_images=sees))
        else:
            flat = FlatInputs.from_slices(rows)
            sizes = self.mixed_graphs.choose_sizes(rows, flat) if self.mixed_graphs is not None and not sees else None
            if sizes is not None:
                drawn = self._replay_and_sample(rows.sampling_slices, partial(self.mixed_graphs.run, flat, sizes))
            else:
                replayed = False
                drawn, scores, pooled = self._run_eager(rows, flat)
        held, drawn = (drawn, None) if callable(drawn) else (None, drawn)
        return Ticket(drawn, scores, plan, submitted_at, self.idle_timer.end_step(start, replayed), pooled, held)

    def _needs_eager(self, slices: SeqSlices) -> bool:
        """Whether some rows need what graphs don't do: choose what is kept of a prompt, have a picture's rows among
        their embeddings, attend both ways, or give hidden states away."""
        if self.prompt_lengths is not None and self.prompt_lengths.ends_long_prompt(slices):
            return True
        if self.image_inputs is not None and self.image_inputs.overlaps_images(slices):
            return True
        if self.pooler.needs_hidden(slices):
            return True
        return self.bidirectional_lens is not None and any(
            start < self.bidirectional_lens[slot] for slot, start in zip(slices.slots, slices.starts)
        )

    def _run_eager(
        self, slices: SeqSlices, flat_inputs: FlatInputs
    ) -> tuple[PendingSamples | None, list[Tensor], dict[int, Tensor]]:
        """Enqueue rows launch by launch: what they draw, the log-probabilities of prompts, and what is pooled."""
        asked = self.pooler.needs_hidden(slices)
        batch, step = self._build_context(flat_inputs, sampled_only=not asked and not slices.has_score_tokens)
        hidden = self._forward(batch.tokens, step)
        scored = zip(slices, batch.offsets) if slices.has_score_tokens else ()
        scores = [self._score_prompt(row, int(offset), hidden) for row, offset in scored if row.score_tokens]
        pooled = self.pooler.pool(slices, batch.offsets, hidden) if asked else {}
        if not len(batch.sampled_rows):
            return None, scores, pooled
        ends = hidden if step.query_batch is not None else hidden.index_select(0, batch.logits_indices)
        logits = self.model.logits(ends, local=True) if self.is_vocab_parallel else self.model.logits(ends)
        return self._sample(slices.sampling_slices, logits), scores, pooled

    def _build_context(self, flat_inputs: FlatInputs, sampled_only: bool) -> tuple[ForwardBatch, StepContext]:
        """The batch of some rows and its step; with `sampled_only` of no more tokens than are asked for in the end."""
        whole = (
            None if self.bidirectional_lens is None else flat_inputs.starts < self.bidirectional_lens[flat_inputs.slots]
        )
        batch = build_flat_batch(flat_inputs, self.store, self.last_sampled, whole)
        shown = None if self.image_inputs is None else self.image_inputs.embedding_merger(flat_inputs)
        sampled_only = sampled_only and len(batch.sampled_rows) < len(batch.tokens)
        step = StepContext.from_batch(
            batch, self.store.caches, self.backend, sampled_only, self.store.state_caches, shown
        )
        step.cross_attention = (
            None if self.image_inputs is None else self.image_inputs.cross_attention_context(flat_inputs, self.backend)
        )
        return batch, step

    def _forward(self, tokens: Tensor, step: StepContext) -> Tensor:
        """[T, hidden], or of the tokens that the step wants."""
        return self.model(tokens, step)

    def _replay_and_sample(self, slices: SeqSlices, replay: Callable[[str], Any]) -> PendingSamples:
        """The next tokens of `slices`, whose logits are those of graphs: `replay` launches these, with a tail."""
        tail = "" if self.defers_sampling else self.sampler.epilogue_for(slices)
        if tail not in ("", "greedy"):
            self.sampler.fill_epilogue(slices)
        result = replay(tail)
        if tail:
            return self.sampler.from_graph(*result, slices)
        return self._sample(slices, result[: len(slices)])

    def _sample(self, sampling_slices: SeqSlices, logits: Tensor) -> PendingSamples:
        """The next tokens of `sampling_slices` rows; each slot's first becomes its LAST."""
        rows = list(zip(sampling_slices.slots, sampling_slices.ends, sampling_slices.num_samples))
        draw = partial(self.sampler.sample, logits, rows, self.last_sampled)
        return draw if self.defers_sampling else draw()

    def _score_prompt(self, seq_slice: SeqSlice, offset: int, hidden: Tensor) -> Tensor:
        """Log-probabilities of the prompt's tokens, as numbers that `collect` reads."""
        targets = to_device(np.array(seq_slice.score_tokens, dtype=np.int64), self.device)
        width = (
            min(MAX_LOGPROBS, self.spec.vocab_size)
            if self.sampler.sampling_of(seq_slice.slot).prompt_logprobs > 0
            else 0
        )
        return prompt_logprob_details(
            self.model.logits, hidden[offset : offset + len(seq_slice.score_tokens)], targets, width
        )

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step: its rows have run when this returns, so their pages may be moved by others. Its seconds run
        from its submission, or from the end of the step before if that was later: no second counts twice."""
        if ticket.pending_samples is None and ticket.step_events is not None:
            ticket.step_events.end.synchronize()
        finished = self.sampler.collect(ticket.pending_samples) if ticket.pending_samples is not None else []
        if self.exchange is not None:
            self.exchange.check_peers()
        if len(finished) == len(ticket.plan.slices) and not ticket.prompt_logprobs:
            return StepResult(tuple(finished), self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))
        drawn, scores, samples = iter(finished), iter(ticket.prompt_logprobs), []
        for row in ticket.plan.slices:
            sample = next(drawn) if row.num_samples else pooled_result(ticket.pooled.get(row.slot))
            if row.score_tokens:
                most = max(self.sampler.sampling_of(row.slot).prompt_logprobs, 0)
                scored = zip(row.score_tokens, next(scores).tolist())
                sample = sample._replace(
                    prompt_logprobs=tuple(to_top_logprobs(token, numbers, most) for token, numbers in scored)
                )
            samples.append(sample)
        return StepResult(tuple(samples), self._step_seconds(ticket), self.idle_timer.collect(ticket.step_events))

    @property
    def op_checksum(self) -> int:
        """Of a rank: a number that others have too if they applied the same journals."""
        return self.store.op_checksum or 0

    @property
    def mapping_stats(self) -> MappingStats | None:
        """What was mapped, where memory is virtual."""
        return getattr(getattr(self, "store", None), "mapping_stats", None)

    def _step_seconds(self, ticket: Ticket) -> float:
        began, self.last_collected_at = max(ticket.submitted_at, self.last_collected_at), time.perf_counter()
        return self.last_collected_at - began
