"""A model's view of one step (quire.models.forward_context): positions, and attention over the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.kv_selection import compress_prompts, prompt_ends
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding, prepare_qkv
from quire.worker.cross_attention import CrossAttentionContext
from quire.worker.store import Store

AttentionPlanner = Callable[[LayerCache, ForwardBatch | None], Any]
"""A backend's plan of a step for a layer like this one: for queries of all tokens, or of those asked for."""
AfterAttention = Callable[[Tensor, LayerCache], None]
ImageMerger = Callable[[Tensor], Tensor]
StatePlanner = Callable[[StateCache], StatePlan]


class StepStates:
    """The layers' running states in one step: `make_plan` is asked once for each kind of them."""

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
    """Attention by a backend, and running states, planned once for each kind of layers."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: Any, make_plan: AttentionPlanner,
        query_batch: ForwardBatch | None = None, after_attention: AfterAttention | None = None,
        states: StepStates | None = None,
        merge_images: ImageMerger | None = None,
    ) -> None:  # fmt: skip
        """With `query_batch`, the model's last layer, if it attends, has queries of its tokens alone. `after_attention`
        is told all queries of a layer once they were answered. `states`, where layers have some. `merge_images` puts
        the rows of pictures in their places."""
        self.states, self.merge_images = states, merge_images
        self.cross_attention: CrossAttentionContext | None = None  # where tokens see pictures by layers of their own
        self.after_attention = after_attention
        self.positions, self.caches, self.backend, self.make_plan, self.query_batch = (
            positions,
            caches,
            backend,
            make_plan,
            query_batch,
        )
        self.plans: dict[Any, Any] = {}
        self.rotary_tables: dict[int, tuple[Tensor, Tensor]] = {}  # of each rotary embedding

    @classmethod
    def from_batch(
        cls, batch: ForwardBatch, caches: Mapping[int, LayerCache], backend: Any, sampled_only: bool = False,
        states: Mapping[int, StateCache] | None = None, merge_images: ImageMerger | None = None,
    ) -> StepContext:  # fmt: skip
        """The step of a batch. `sampled_only`: only the hidden states of tokens that end the rows that sample are
        wanted, `batch.narrowed()`'s. Of prompts that end here layers with budgets keep their part."""

        def plan(cache: LayerCache, asked: ForwardBatch | None) -> Any:
            return backend.plan(batch, cache, asked)

        def behind(q: Tensor, cache: LayerCache) -> None:
            compress_prompts(q, cache, batch.tables[cache.group], ends)

        ends = prompt_ends(batch)
        asked = batch.select_sampled() if sampled_only else None
        held = StepStates(states, partial(StatePlan.from_batch, batch)) if states else None
        return cls(batch.positions, caches, backend, plan, asked, behind if ends else None, held, merge_images)

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None, norms: tuple[RMSNorm,
        RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """See quire.models.forward_context."""
        cache = self.caches[layer]
        asked = self.query_batch if last else None
        plan = self.plan_for(cache) if asked is None else self.make_plan(cache, asked)
        if self.backend.fuses_rope:
            out = self.backend.rotate_and_attend(qkv, rotary, norms, cache, plan)
            return self._after_attend(out, qkv[:, : cache.heads], cache)
        angles = self._rotary_tables(rotary, qkv.dtype) if rotary is not None else None
        q, k, v = prepare_qkv(qkv, cache.heads, angles, norms)
        asking = q if asked is None else q.index_select(0, asked.logits_indices)
        return self._after_attend(self.backend.attend(asking, k, v, cache, plan), q, cache)

    def _after_attend(self, out: Tensor, q: Tensor, cache: LayerCache) -> Tensor:
        if self.after_attention is not None:
            self.after_attention(q, cache)
        return out

    def state(self, layer: int) -> tuple[StateCache, StatePlan]:
        """See quire.models.forward_context."""
        assert self.states is not None, "some layer has a state"
        return self.states.get(layer)

    @property
    def image_mask(self) -> Tensor | None:
        """See quire.models.forward_context."""
        return None if self.cross_attention is None else self.cross_attention.image_mask

    def cross_attend(self, layer: int, q: Tensor) -> Tensor:
        """See quire.models.forward_context."""
        assert self.cross_attention is not None, "some token sees a picture"
        return self.cross_attention.attend(layer, q)

    def merge_image_embeddings(self, x: Tensor) -> Tensor:
        """See quire.models.forward_context."""
        return x if self.merge_images is None else self.merge_images(x)

    def select_logits_rows(self, x: Tensor) -> Tensor:
        """See quire.models.forward_context."""
        return x if self.query_batch is None else x.index_select(0, self.query_batch.logits_indices)

    def plan_for(self, cache: LayerCache) -> Any:
        """The plan for queries of all tokens."""
        plan = self.plans.get(cache.plan_key)
        if plan is None:
            plan = self.plans[cache.plan_key] = self.make_plan(cache, None)
        return plan

    def _rotary_tables(self, rotary: RotaryEmbedding, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.rotary_tables.get(id(rotary))
        if angles is None:
            angles = self.rotary_tables[id(rotary)] = rotary.angles_at(self.positions, dtype)
        return angles


def make_decode_context(store: Store, backend: Any, slots: Tensor, positions: Tensor, *more: Any) -> StepContext:
    """A step of one token a row, all of it on the device: a graph or a tape of it serves whatever both tensors hold at
    a replay. `more` is what the backend's plan_singles takes beside."""
    singles = backend.decode_batch(
        slots, positions, None if store.prompt_lengths is None else store.prompt_lengths.device_lengths
    )

    def plan(cache: LayerCache, asked: ForwardBatch | None) -> Any:
        return backend.plan_decode(singles, store.tables[cache.group], cache, *more)

    def plan_states(cache: StateCache) -> StatePlan:
        return StatePlan.for_decode(store.tables[cache.group], slots, positions, cache.page_tokens)

    states = StepStates(store.state_caches, plan_states) if store.state_caches else None
    return StepContext(positions, store.caches, backend, plan, states=states)
