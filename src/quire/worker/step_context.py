"""A model's view of one step (quire.models.forward_context): positions, and attention over the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu import convolution
from quire.kernels.cpu.library_loader import library
from quire.kernels.forward_batch import ForwardBatch, HeadNorms, LayerCache
from quire.kernels.kv_selection import compress_prompts, prompt_ends
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.rotary import RotaryEmbedding, prepare_qkv
from quire.models.hidden_states import HiddenStates
from quire.worker.cross_attention import CrossAttentionContext
from quire.worker.image_inputs import EmbeddingMerger
from quire.worker.store import Store

AttentionPlanner = Callable[[LayerCache, ForwardBatch | None], Any]
"""Plans a backend's attention of a step for layers like this one, for queries of all tokens or of the batch given."""
AfterAttention = Callable[[Tensor, LayerCache], None]
StatePlanner = Callable[[StateCache], StatePlan]


class StepStates:
    """The layers' running states in one step. `make_plan` is called once for each kind of state."""

    def __init__(self, caches: Mapping[int, StateCache], make_plan: StatePlanner) -> None:
        self.caches, self.make_plan = caches, make_plan
        self.plans: dict[Any, StatePlan] = {}

    def get(self, layer: int) -> tuple[StateCache, StatePlan]:
        cache = self.caches[layer]
        plan = self.plans.get(cache.plan_key)
        if plan is None:
            plan = self.plans[cache.plan_key] = self.make_plan(cache)
        return cache, plan


class StepContext:
    """The ForwardContext (quire.models.forward_context) of a step: attention by a backend and running states, planned
    once for each kind of layer."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: Any, make_plan: AttentionPlanner,
        query_batch: ForwardBatch | None = None, after_attention: AfterAttention | None = None,
        states: StepStates | None = None, merge_images: EmbeddingMerger | None = None,
        cross_attention: CrossAttentionContext | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:  # fmt: skip
        """With `query_batch`, the last layer's attention has queries of its tokens only. `after_attention` gets the
        queries of every layer after its attention. `merge_images` replaces embeddings by those of images.
        `cross_attention` is set if tokens attend to images by cross-attention layers. `hidden_states` keeps those of
        all tokens."""
        self.positions, self.caches, self.backend, self.make_plan = positions, caches, backend, make_plan
        self.query_batch, self.after_attention = query_batch, after_attention
        self.states, self.merge_images, self.cross_attention = states, merge_images, cross_attention
        self.hidden_states = hidden_states
        self.plans: dict[Any, Any] = {}
        self.rotary_tables: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the rotary embedding

    @classmethod
    def from_batch(
        cls, batch: ForwardBatch, caches: Mapping[int, LayerCache], backend: Any, sampled_only: bool = False,
        states: Mapping[int, StateCache] | None = None, merge_images: EmbeddingMerger | None = None,
        cross_attention: CrossAttentionContext | None = None, hidden_states: HiddenStates | None = None,
    ) -> StepContext:  # fmt: skip
        """Return the step of a batch. With `sampled_only`, hidden states are returned only of the tokens of
        `batch.select_sampled()`, unless `hidden_states` keeps the final ones of all tokens. Layers with budgets prune
        prompts that end in this step."""

        def plan(cache: LayerCache, query_batch: ForwardBatch | None) -> Any:
            queries = None if query_batch is None else query_batch.for_attention(cache)
            return backend.plan(batch.for_attention(cache), cache, queries)

        def compress(q: Tensor, cache: LayerCache) -> None:
            compress_prompts(q, cache, batch.tables[cache.group], ends)

        ends = prompt_ends(batch)
        keeps_final = hidden_states is not None and hidden_states.has_final
        query_batch = batch.select_sampled() if sampled_only and not keeps_final else None
        step_states = StepStates(states, partial(StatePlan.from_batch, batch)) if states else None
        return cls(
            batch.positions, caches, backend, plan, query_batch, compress if ends else None, step_states, merge_images,
            cross_attention, hidden_states,
        )  # fmt: skip

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None, norms: HeadNorms | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        cache = self.caches[layer]
        query_batch = self.query_batch if last else None
        plan = self.plan_for(cache) if query_batch is None else self.make_plan(cache, query_batch)
        if self.backend.fuses_rope:
            out = self.backend.rotate_and_attend(qkv, rotary, norms, cache, plan)
            return self._after_attend(out, qkv[:, : cache.heads], cache)
        angles = self._rotary_tables(rotary, qkv.dtype) if rotary is not None else None
        q, k, v = prepare_qkv(qkv, cache.heads, cache.kv_heads, angles, norms)
        queries = q if query_batch is None else q.index_select(0, query_batch.logits_indices)
        return self._after_attend(self.backend.attend(queries, k, v, cache, plan), q, cache)

    def _after_attend(self, out: Tensor, q: Tensor, cache: LayerCache) -> Tensor:
        if self.after_attention is not None:
            self.after_attention(q, cache)
        return out

    def state(self, layer: int) -> tuple[StateCache, StatePlan]:
        assert self.states is not None, "a step without states was asked for one"
        return self.states.get(layer)

    @property
    def image_mask(self) -> Tensor | None:
        return None if self.cross_attention is None else self.cross_attention.image_mask

    def cross_attend(self, layer: int, q: Tensor) -> Tensor:
        assert self.cross_attention is not None, "a step without images was asked for cross-attention"
        return self.cross_attention.attend(layer, q)

    @property
    def image_tokens(self) -> Tensor | None:
        return None if self.merge_images is None else self.merge_images.tokens

    def merge_image_embeddings(self, x: Tensor) -> Tensor:
        return x if self.merge_images is None else self.merge_images(x)

    def select_logits_rows(self, x: Tensor) -> Tensor:
        return x if self.query_batch is None else x.index_select(0, self.query_batch.logits_indices)

    def plan_for(self, cache: LayerCache) -> Any:
        """Return the plan for queries of all tokens."""
        plan = self.plans.get(cache.plan_key)
        if plan is None:
            plan = self.plans[cache.plan_key] = self.make_plan(cache, None)
        return plan

    def _rotary_tables(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.rotary_tables.get(id(rotary))
        if angles is None:
            angles = self.rotary_tables[id(rotary)] = rotary.angles_at(self.positions, dtype)
        return angles


def make_decode_context(
    store: Store, backend: Any, slots: Tensor, positions: Tensor, *plan_args: Any,
    cross_attention: CrossAttentionContext | None = None, hidden_states: HiddenStates | None = None,
) -> StepContext:  # fmt: skip
    """Return a step of one token a row, all of it on the device: a graph or recorded step reads both tensors at every
    replay. `plan_args` are more arguments of the backend's `plan_captured`."""
    prompt_lens = None if store.prompt_lengths is None else store.prompt_lengths.device_lengths
    decode_batch = backend.decode_batch(slots, positions, prompt_lens)

    def plan(cache: LayerCache, query_batch: ForwardBatch | None) -> Any:
        return backend.plan_captured(decode_batch, store.tables[cache.group], cache, *plan_args)

    def plan_states(cache: StateCache) -> StatePlan:
        is_native = positions.device.type == "cpu" and library() is not None
        plan_decode = convolution.plan_decode if is_native else StatePlan.for_decode
        return plan_decode(store.tables[cache.group], slots, positions, cache.page_tokens)

    states = StepStates(store.state_caches, plan_states) if store.state_caches else None
    return StepContext(
        positions, store.caches, backend, plan, states=states, cross_attention=cross_attention,
        hidden_states=hidden_states,
    )  # fmt: skip
