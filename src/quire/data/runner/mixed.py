"""Steps with prompts as CUDA graphs: rows of one token and chunks of prompts, padded to a few sizes.

Such a step is cut in its last layer: in its attention, once all keys and values are written, or behind its states,
which every token advances; since behind that only rows that sample go on. In front of the cut, a graph's sizes are
those of the step's tokens and rows of one token; behind it, up to the logits, the number of rows that sample; what
follows the logits are the tails of decode steps. So there are as many graphs as there are sizes of each half, not as
there are pairs. Between the halves all tokens' hidden states and queries of the last layer, or what its states gave
them, lie at fixed places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache
from quire.data.kernels.states import StateCache, StatePlan
from quire.data.kernels.triton.attention import choose_splits, multiprocessors
from quire.data.kernels.triton.backend import Launches, TritonBackend
from quire.data.layers.norm import RMSNorm
from quire.data.layers.rotary import Rotary
from quire.data.runner.graphs import AnyTail, split_scratch
from quire.data.runner.inputs import Flat
from quire.data.runner.padded import FEW, SOME, Inputs, Sizes
from quire.data.runner.recorder import Graph, Recorder
from quire.data.runner.step import Planner, States, Step
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST
from quire.vocabulary.rows import Rows


class FirstHalf(Step):
    """A step that ends in its last layer. If that attends, it only writes keys and values, and leaves its `queries`
    there."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: TritonBackend, plan: Planner,
        queries: Tensor, states: States | None,
    ) -> None:  # fmt: skip
        super().__init__(positions, caches, backend, plan, states=states)
        self.queries = queries

    def attend(
        self, layer: int, qkv: Tensor, rotary: Rotary | None = None, norms: tuple[RMSNorm, RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        if not last:
            return super().attend(layer, qkv, rotary, norms)
        cache = self.caches[layer]
        self.backend.write(qkv, self.queries, rotary, norms, cache, self.planned(cache))
        return self.queries


class MixedGraphs:
    """Graphs for steps with rows of several tokens. `rows` are the sizes of those that sample, `tails` and what they
    return are as for DecodeGraphs, whose memory they share by the same `recorder`."""

    def __init__(
        self, model: Any, logits: Callable[[Tensor], Tensor], store: Store, backend: TritonBackend, last: Tensor,
        hidden: int, rows: list[int], tails: dict[str, AnyTail], recorder: Recorder,
    ) -> None:  # fmt: skip
        self.model, self.logits, self.store, self.backend, self.last = model, logits, store, backend, last
        self.tails, self.recorder = tails, recorder
        self.prompts = None if store.prompts is None else store.prompts.device
        self.firsts: dict[tuple[int, int], Graph] = {}  # by tokens and rows of one token
        self.seconds: dict[int, Graph] = {}  # by rows that sample
        self.ends: dict[tuple[int, str], Graph] = {}
        self.count = multiprocessors(last.device)
        self.kinds = list({cache.kind: cache for cache in store.caches.values()}.values())
        tiles = tuple(dict.fromkeys(backend.queries(cache) for cache in self.kinds))
        self.inputs = Inputs(rows, tiles, backend.deterministic, last.device, bool(store.states))
        # The last layer's, if it attends; what it leaves of each token.
        self.cache = store.caches.get(max((*store.caches, *store.states)))
        left = (
            (self.cache.heads, self.cache.head_dim) if self.cache else store.states[max(store.states)].conv.shape[1:2]
        )
        most, dtype = self.inputs.tokens[-1], store.buffer.dtype
        self.x = torch.zeros((most, hidden), dtype=dtype, device=last.device)
        self.left = torch.zeros((most, *left), dtype=dtype, device=last.device)
        self.scratch = split_scratch(store.caches.values(), self._launches)

    def halves(self, tokens: int | None = None) -> tuple[list[tuple[int, int]], list[int]]:
        """The sizes of first and of second halves, of steps of up to `tokens` tokens; all if None. Largest first."""
        inputs = self.inputs
        most = inputs.tokens[-1] if tokens is None else tokens
        some = inputs.tokens[: bisect_left(inputs.tokens, most) + 1]
        firsts = [(size, singles) for size in some for singles in inputs.singles(size)]
        return firsts[::-1], [size for size in inputs.rows if size <= some[-1]][::-1]

    def fit(self, rows: Rows, flat: Flat) -> Sizes | None:
        """The sizes of the step's graphs; None if it must be launched kernel by kernel: if it is too large, samples
        nothing, scores tokens, or has prompts that are for another kernel."""
        sizes = self.inputs.fit(flat)
        if sizes is None or rows.scored:
            return None
        many = flat.lengths > 1
        lengths, contexts = flat.lengths[many], (flat.starts + flat.lengths)[many]
        return None if any(self.backend.is_long(cache, lengths, contexts) for cache in self.kinds) else sizes

    def run(self, flat: Flat, sizes: Sizes, tail: str) -> Any:
        """Enqueue the step; what its tail leaves on the device, padding included."""
        first = sizes.tokens, sizes.singles
        self.capture_first(*first)
        self.capture_second(sizes.sampled)
        self.store.staging.upload(self.inputs.filled(flat, sizes), self.inputs.region(sizes))
        self.store.replayed(*first, sizes.sampled)
        self.firsts[first].graph.replay()
        self.seconds[sizes.sampled].graph.replay()
        end = self.ends[sizes.sampled, tail]
        end.graph.replay()
        return end.result

    def rehearse(self, tokens: int, singles: int) -> None:
        """Run a first half of padding, so that its kernels are compiled and loaded. As DecodeGraphs' `rehearse`."""
        self._first(tokens, singles)

    def capture_first(self, tokens: int, singles: int) -> None:
        """Capture a first half, unless that is done."""
        if (tokens, singles) not in self.firsts:
            self.inputs.buffer.zero_()
            self._first(tokens, singles)  # in this thread: libraries keep handles for each
            self.firsts[tokens, singles] = self.recorder.record(partial(self._first, tokens, singles))
            self.store.clear_scratch()  # nothing attended for these tokens: what layers wrote there may not be finite

    def capture_second(self, count: int) -> None:
        """Capture a second half with its tails, unless that is done."""
        if count in self.seconds:
            return
        self.inputs.buffer.zero_()
        logits, slots = self._second(count), self.inputs.sampled(count)[1]
        for tail in self.tails.values():
            tail(logits, slots)
        second = self.recorder.record(partial(self._second, count))
        self.ends |= {
            (count, name): self.recorder.record(partial(tail, second.result, slots))
            for name, tail in self.tails.items()
        }
        self.seconds[count] = second._replace(result=None)  # room for other graphs

    def splits(self, cache: LayerCache, singles: int) -> int:
        """Parts a context, for rows of one token that are padded to `singles`: what suits a number between."""
        least = 1 if singles <= FEW else FEW if singles <= SOME else SOME
        return choose_splits(isqrt(least * singles), cache.kv_heads, self.count)

    def last_splits(self, cache: LayerCache, rows: int) -> int:
        """The same in the last attention, for rows that sample: few of them are padding."""
        return choose_splits(rows, cache.kv_heads, self.count)

    def _launches(self, cache: LayerCache) -> Iterator[tuple[int, int]]:
        """Rows and parts of all launches for rows of one token."""
        for singles in {singles for _, singles in self.halves()[0]}:
            yield singles, self.splits(cache, singles)
        for rows in self.inputs.rows:
            yield rows, self.last_splits(cache, rows)

    def _first(self, tokens: int, singles: int) -> None:
        """To `x` and `left`."""
        ids, padded = self.inputs.step(tokens, singles)
        padded = padded._replace(prompts=self.prompts)
        ids = torch.where(ids == LAST, self.last.index_select(0, padded.token_slots), ids)

        def plan(cache: LayerCache, asked: Batch | None) -> Launches:
            tables, splits = self.store.tables[cache.group], self.splits(cache, singles)
            return self.backend.plan_padded(padded, tables, cache, self.scratch, splits)

        def plan_states(cache: StateCache) -> StatePlan:
            return self.inputs.states(tokens, singles, self.store.tables[cache.group], cache.run_tokens)

        states, left = States(self.store.states, plan_states) if self.store.states else None, self.left[:tokens]
        step = FirstHalf(padded.positions, self.store.caches, self.backend, plan, left, states)
        x, attended = self.model.begin(ids, step)
        self.x[:tokens].copy_(x)
        if self.cache is None:
            left.copy_(attended)

    def _second(self, count: int) -> Tensor:
        """Logits of the rows that sample [S, V]."""
        ends, slots, positions = self.inputs.sampled(count)
        attended, cache = self.left.index_select(0, ends), self.cache
        if cache is not None:
            tables, splits = self.store.tables[cache.group], self.last_splits(cache, count)
            singles = self.backend.singles(slots, positions, self.prompts)
            plan = self.backend.plan_singles(singles, tables, cache, self.scratch, splits)
            attended = self.backend.read(attended, cache, plan)
        return self.logits(self.model.end(self.x.index_select(0, ends), attended.flatten(1)))
