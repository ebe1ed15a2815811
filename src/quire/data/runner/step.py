"""A model's view of one step (quire.data.models.attending): positions, and attention over the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache
from quire.data.kernels.selection import compress, ends_of
from quire.data.kernels.states import StateCache, StatePlan
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rotary import Rotary, queries_keys_values
from quire.data.runner.crossing import Crossing
from quire.data.runner.store import Store

Planner = Callable[[LayerCache, Batch | None], Any]
"""A backend's plan of a step for a layer like this one: for queries of all tokens, or of those asked for."""
Behind = Callable[[Tensor, LayerCache], None]
Shown = Callable[[Tensor], Tensor]
StatePlanner = Callable[[StateCache], StatePlan]


class States:
    """The layers' running states in one step: `plan` is asked once for each kind of them."""

    def __init__(self, caches: Mapping[int, StateCache], plan: StatePlanner) -> None:
        self.caches, self.plan = caches, plan
        self.plans: dict[Any, StatePlan] = {}

    def of(self, layer: int) -> tuple[StateCache, StatePlan]:
        cache = self.caches[layer]
        plan = self.plans.get(cache.kind)
        if plan is None:
            plan = self.plans[cache.kind] = self.plan(cache)
        return cache, plan


class Step:
    """Attention by a backend, and running states, planned once for each kind of layers."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: Any, plan: Planner,
        asked: Batch | None = None, behind: Behind | None = None, states: States | None = None,
        shown: Shown | None = None,
    ) -> None:  # fmt: skip
        """With `asked`, the model's last layer, if it attends, has queries of its tokens alone. `behind` is told all
        queries of a layer once they were answered. `states`, where layers have some. `shown` puts the rows of pictures
        in their places."""
        self.states, self.shown = states, shown
        self.crossing: Crossing | None = None  # where tokens see pictures by layers of their own
        self.behind = behind
        self.positions, self.caches, self.backend, self.plan, self.asked = positions, caches, backend, plan, asked
        self.plans: dict[Any, Any] = {}
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}  # of each rotary embedding

    @classmethod
    def of(
        cls, batch: Batch, caches: Mapping[int, LayerCache], backend: Any, narrow: bool = False,
        states: Mapping[int, StateCache] | None = None, shown: Shown | None = None,
    ) -> Step:  # fmt: skip
        """The step of a batch. `narrow`: only the hidden states of tokens that end the rows that sample are wanted,
        `batch.narrowed()`'s. Of prompts that end here layers with budgets keep their part."""

        def plan(cache: LayerCache, asked: Batch | None) -> Any:
            return backend.plan(batch, cache, asked)

        def behind(q: Tensor, cache: LayerCache) -> None:
            compress(q, cache, batch.tables[cache.group], ends)

        ends = ends_of(batch)
        asked = batch.narrowed() if narrow else None
        held = States(states, partial(StatePlan.of, batch)) if states else None
        return cls(batch.positions, caches, backend, plan, asked, behind if ends else None, held, shown)

    def attend(
        self, layer: int, qkv: Tensor, rotary: Rotary | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        """See quire.data.models.attending."""
        cache = self.caches[layer]
        asked = self.asked if last else None
        plan = self.planned(cache) if asked is None else self.plan(cache, asked)
        if self.backend.rotates:
            out = self.backend.rotate_and_attend(qkv, rotary, norms, cache, plan)
            return self._answered(out, qkv[:, : cache.heads], cache)
        angles = self._angles(rotary, qkv.dtype) if rotary is not None else None
        q, k, v = queries_keys_values(qkv, cache.heads, angles, norms)
        asking = q if asked is None else q.index_select(0, asked.ends)
        return self._answered(self.backend.attend(asking, k, v, cache, plan), q, cache)

    def _answered(self, out: Tensor, q: Tensor, cache: LayerCache) -> Tensor:
        if self.behind is not None:
            self.behind(q, cache)
        return out

    def state(self, layer: int) -> tuple[StateCache, StatePlan]:
        """See quire.data.models.attending."""
        assert self.states is not None, "some layer has a state"
        return self.states.of(layer)

    @property
    def sees(self) -> Tensor | None:
        """See quire.data.models.attending."""
        return None if self.crossing is None else self.crossing.sees

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """See quire.data.models.attending."""
        assert self.crossing is not None, "some token sees a picture"
        return self.crossing.attend(layer, q)

    def pictures(self, x: Tensor) -> Tensor:
        """See quire.data.models.attending."""
        return x if self.shown is None else self.shown(x)

    def wanted(self, x: Tensor) -> Tensor:
        """See quire.data.models.attending."""
        return x if self.asked is None else x.index_select(0, self.asked.ends)

    def planned(self, cache: LayerCache) -> Any:
        """The plan for queries of all tokens."""
        plan = self.plans.get(cache.kind)
        if plan is None:
            plan = self.plans[cache.kind] = self.plan(cache, None)
        return plan

    def _angles(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles.get(id(rotary))
        if angles is None:
            angles = self.angles[id(rotary)] = rotary.at(self.positions, dtype)
        return angles


def token_step(store: Store, backend: Any, slots: Tensor, positions: Tensor, *more: Any) -> Step:
    """A step of one token a row, all of it on the device: a graph or a tape of it serves whatever both tensors hold at
    a replay. `more` is what the backend's plan_singles takes beside."""
    singles = backend.singles(slots, positions, None if store.prompts is None else store.prompts.device)

    def plan(cache: LayerCache, asked: Batch | None) -> Any:
        return backend.plan_singles(singles, store.tables[cache.group], cache, *more)

    def plan_states(cache: StateCache) -> StatePlan:
        return StatePlan.single(store.tables[cache.group], slots, positions, cache.run_tokens)

    states = States(store.states, plan_states) if store.states else None
    return Step(positions, store.caches, backend, plan, states=states)
