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
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, LayerCache
from quire.kernels.limits import MAX_GRAPH_TOKENS
from quire.kernels.mamba_states import CONV_TILE, StateCache, StatePlan, state_pages
from quire.kernels.mamba_states import make_state_tiles as make_state_tiles
from quire.kernels.triton.backend import PaddedMixedBatch, TritonAttentionPlan, TritonBackend
from quire.kernels.triton.decode import choose_splits, multiprocessors
from quire.kernels.triton.prefill import make_prefill_tiles
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED
from quire.worker.cuda_graphs import AnyEpilogue, CapturedGraph, GraphCapturer, allocate_split_scratch
from quire.worker.inputs import FlatInputs
from quire.worker.step_context import AttentionPlanner, StepContext, StepStates
from quire.worker.store import Store

TOKEN_SIZES = [
    32, 64, 96, 128, 160, 200, 256, 320, 352, 384, 432, 512, 544, 576, 624, 688, 736, 768, 816, 864, 928,
    MAX_GRAPH_TOKENS,
]  # fmt: skip
"""Tokens of a padded step; from 200 on the sizes behind which products' times rise (see graphs.sizes): of the multiples
of 16 those that take less time than every larger one that was measured (Llama-3-8B's shape, H200: 816 tokens 18.8 ms,
832 20.5). Of more tokens, launching a step's kernels one by one takes the host less time than they take."""
MAX_PROMPT_ROWS = 16
"""Rows of several tokens that a step has room for, however short they are: each may need a tile more than its tokens
fill."""
SMALL_DECODE_ROWS, MEDIUM_DECODE_ROWS = 32, 256
"""Rows of one token that a step has room for, where not for as many as it has tokens. Contexts of few are split."""


class PaddedSizes(NamedTuple):
    """What a step is padded to: its tokens, its rows of one token, and those that sample. A graph's own are the first
    two, or the last."""

    num_tokens: int
    num_decode_rows: int
    num_sampled: int


class MixedGraphInputs:
    """The numbers that graphs of mixed steps read, on the device. First, of rows that sample, their last tokens, their
    slots and positions [3, S]; they end, and all others begin, at one place for all sizes. Then each token, its
    position and its slot [3, T]; of rows of one token slot, length and place [3, D]; tiles [N, 4] int32, for each
    number of `tile_queries` that tiles have. With `has_states`, of all rows, padding among them, slot, tokens before,
    tokens and place [4, R], and their tiles for states [M, 2] int32.

    With `deterministic` rows of one token are in tiles too, and D is 0.
    """

    def __init__(
        self, sampled_row_sizes: list[int], tile_queries: tuple[int, ...], deterministic: bool, device: torch.device,
        has_states: bool = False,
    ) -> None:  # fmt: skip
        """`sampled_row_sizes`: sizes of the rows that sample, rising."""
        self.token_sizes, self.sampled_row_sizes, self.tile_queries, self.deterministic = (
            TOKEN_SIZES,
            sampled_row_sizes,
            tile_queries,
            deterministic,
        )
        self.has_states = has_states
        self.sampled_capacity = 3 * sampled_row_sizes[-1]
        largest = PaddedSizes(TOKEN_SIZES[-1], self.decode_row_sizes(TOKEN_SIZES[-1])[-1], sampled_row_sizes[-1])
        self.buffer = torch.zeros(self._part_ends(largest)[-1], dtype=torch.int64, device=device)

    def decode_row_sizes(self, tokens: int) -> list[int]:
        """Sizes of the rows of one token, beside so many tokens in all."""
        most = min(tokens, self.sampled_row_sizes[-1])
        return [*(size for size in (SMALL_DECODE_ROWS, MEDIUM_DECODE_ROWS) if size < most), most]

    def choose_sizes(self, flat_inputs: FlatInputs) -> PaddedSizes | None:
        """The least sizes that a step has room in, if there are any."""
        total, sampled = flat_inputs.token_columns.shape[1], len(flat_inputs.sampled_rows)
        if total > self.token_sizes[-1] or not 0 < sampled <= self.sampled_row_sizes[-1]:
            return None
        tokens = self.token_sizes[bisect_left(self.token_sizes, total)]
        singles = self.decode_row_sizes(tokens)
        single = int((flat_inputs.lengths == 1).sum())
        if single > singles[-1] or len(flat_inputs.slots) - single > MAX_PROMPT_ROWS:
            return None
        return PaddedSizes(
            tokens,
            singles[bisect_left(singles, single)],
            self.sampled_row_sizes[bisect_left(self.sampled_row_sizes, sampled)],
        )

    def build_array(self, flat_inputs: FlatInputs, padded_sizes: PaddedSizes) -> np.ndarray:
        """A step's numbers, for `region`."""
        ends = self._part_ends(padded_sizes)
        array = np.zeros(ends[-1], dtype=np.int64)
        _, tokens, singles, every, parts, *tiles = np.split(array, ends[:-1])
        sampled = array[self.sampled_capacity - 3 * padded_sizes.num_sampled : self.sampled_capacity]
        count, total = len(flat_inputs.logits_indices), flat_inputs.token_columns.shape[1]
        sampled.reshape(3, -1)[:, :count] = (
            flat_inputs.logits_indices,
            flat_inputs.slots[flat_inputs.sampled_rows],
            flat_inputs.token_columns[1, flat_inputs.logits_indices],
        )
        tokens.reshape(3, -1)[:, :total] = flat_inputs.token_columns
        single = np.zeros(len(flat_inputs.slots), np.bool_) if self.deterministic else flat_inputs.lengths == 1
        one, many = np.flatnonzero(single), np.flatnonzero(~single)
        if not self.deterministic:
            singles = singles.reshape(3, -1)
            singles[2] = -1
            singles[:, : len(one)] = flat_inputs.slots[one], flat_inputs.starts[one] + 1, flat_inputs.offsets[one]
        for part, queries in zip(tiles, self.tile_queries):
            own = part.view(np.int32).reshape(-1, 4)
            real = make_prefill_tiles(
                *(x[many] for x in (flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths, flat_inputs.offsets)),
                queries,
            )
            own[: len(real)] = real
            padding = np.arange(total, padded_sizes.num_tokens, queries)
            behind = own[len(real) : len(real) + len(padding)]
            behind[:, 1], behind[:, 2] = padding, np.minimum(padded_sizes.num_tokens - padding, queries)
        if self.has_states:
            self._fill_state_rows(
                flat_inputs, padded_sizes.num_tokens - total, every.reshape(4, -1), parts.view(np.int32).reshape(-1, 2)
            )
        return array[self.sampled_capacity - 3 * padded_sizes.num_sampled :]

    def _fill_state_rows(
        self, flat_inputs: FlatInputs, padding: int, state_rows: np.ndarray, tiles: np.ndarray
    ) -> None:
        """All that pads the step is one row, of slot 0, so that each token is somebody's; rows behind it have none."""
        count, total = len(flat_inputs.slots), flat_inputs.token_columns.shape[1]
        state_rows[:, :count] = flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths, flat_inputs.offsets
        state_rows[:, count] = 0, 0, padding, total
        real = make_state_tiles(state_rows[2, : count + 1])
        tiles[: len(real)] = real
        tiles[len(real) :, 0] = state_rows.shape[1] - 1

    def region(self, padded_sizes: PaddedSizes) -> Tensor:
        """Where `build_array` numbers go."""
        return self.buffer[self.sampled_capacity - 3 * padded_sizes.num_sampled : self._part_ends(padded_sizes)[-1]]

    def sampled_region(self, num_sampled: int) -> Tensor:
        """Last tokens, slots and positions [3, S], on the device."""
        return self.buffer[self.sampled_capacity - 3 * num_sampled : self.sampled_capacity].view(3, num_sampled)

    def padded_batch(self, tokens: int, num_decode_rows: int) -> tuple[Tensor, PaddedMixedBatch]:
        """Tokens [T], and all else of a step of these sizes, on the device."""
        ends = self._part_ends(PaddedSizes(tokens, num_decode_rows, 0))
        _, every, ones, _, _, *tiles = (self.buffer[a:b] for a, b in pairwise((0, *ends)))
        ids, positions, token_slots = every.view(3, -1)
        slots, lengths, rows = ones.view(3, -1)
        parts = {queries: part.view(torch.int32).view(-1, 4) for queries, part in zip(self.tile_queries, tiles)}
        return ids, PaddedMixedBatch(token_slots, positions, slots, lengths, rows, parts)

    def state_plan(self, tokens: int, num_decode_rows: int, table: Tensor, page_tokens: int) -> StatePlan:
        """What a step of these sizes reads and writes of states whose pages `table` names, all of it on the device."""
        ends = self._part_ends(PaddedSizes(tokens, num_decode_rows, 0))
        slots, starts, lengths, offsets = self.buffer[ends[2] : ends[3]].view(4, -1)
        tiles = self.buffer[ends[3] : ends[4]].view(torch.int32).view(-1, 2)
        width = (tokens - 2) // page_tokens + 2  # runs that one row's tokens may be of
        reads, writes = state_pages(table, slots, starts, lengths, page_tokens, width)
        return StatePlan(offsets, lengths, starts, reads, writes, page_tokens, tiles)

    def _part_ends(self, padded_sizes: PaddedSizes) -> list[int]:
        """Where its parts end, that of rows that sample first: it is as long as all of them."""
        singles = 0 if self.deterministic else 3 * padded_sizes.num_decode_rows
        # As many tiles as any step of these sizes needs, its padding included.
        alone = MAX_PROMPT_ROWS + 1 + (padded_sizes.num_decode_rows if self.deterministic else 0)
        tiles = [2 * (alone + -(-padded_sizes.num_tokens // queries)) for queries in self.tile_queries]
        # Rows, one of padding, and one without tokens, whose are the tiles that aren't needed.
        rows = self.has_states * (padded_sizes.num_decode_rows + MAX_PROMPT_ROWS + 2)
        parts = self.has_states * (rows + padded_sizes.num_tokens // CONV_TILE)
        return list(accumulate((self.sampled_capacity, 3 * padded_sizes.num_tokens, singles, 4 * rows, parts, *tiles)))


class FirstHalfContext(StepContext):
    """A step that ends in its last layer. If that attends, it only writes keys and values, and leaves its `queries`
    there."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: TritonBackend, make_plan: AttentionPlanner,
        queries: Tensor, states: StepStates | None,
    ) -> None:  # fmt: skip
        super().__init__(positions, caches, backend, make_plan, states=states)
        self.queries = queries

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None, norms: tuple[RMSNorm,
        RMSNorm] | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        if not last:
            return super().attend(layer, qkv, rotary, norms)
        cache = self.caches[layer]
        self.backend.write_kv(qkv, self.queries, rotary, norms, cache, self.plan_for(cache))
        return self.queries


class MixedGraphs:
    """Graphs for steps with rows of several tokens. `sampled_row_sizes` are the sizes of those that sample, `epilogues`
    and what they return are as for DecodeGraphs, whose memory they share by the same `capturer`."""

    def __init__(
        self, model: Any, logits: Callable[[Tensor], Tensor], store: Store, backend: TritonBackend,
        last_sampled: Tensor,
        hidden_size: int, sampled_row_sizes: list[int], epilogues: dict[str, AnyEpilogue], capturer: GraphCapturer,
    ) -> None:  # fmt: skip
        self.model, self.logits, self.store, self.backend, self.last_sampled = (
            model,
            logits,
            store,
            backend,
            last_sampled,
        )
        self.epilogues, self.capturer = epilogues, capturer
        self.prompt_lens = None if store.prompt_lengths is None else store.prompt_lengths.device_lengths
        self.first_graphs: dict[tuple[int, int], CapturedGraph] = {}  # by tokens and rows of one token
        self.second_graphs: dict[int, CapturedGraph] = {}  # by rows that sample
        self.epilogue_graphs: dict[tuple[int, str], CapturedGraph] = {}
        self.num_sms = multiprocessors(last_sampled.device)
        self.distinct_caches = list({cache.plan_key: cache for cache in store.caches.values()}.values())
        tiles = tuple(dict.fromkeys(backend.tile_queries(cache) for cache in self.distinct_caches))
        self.inputs = MixedGraphInputs(
            sampled_row_sizes, tiles, backend.deterministic, last_sampled.device, bool(store.state_caches)
        )
        # The last layer's, if it attends; what it leaves of each token.
        self.last_layer_cache = store.caches.get(max((*store.caches, *store.state_caches)))
        left = (
            (self.last_layer_cache.heads, self.last_layer_cache.head_dim)
            if self.last_layer_cache
            else store.state_caches[max(store.state_caches)].conv.shape[1:2]
        )
        most, dtype = self.inputs.token_sizes[-1], store.buffer.dtype
        self.hidden_states = torch.zeros((most, hidden_size), dtype=dtype, device=last_sampled.device)
        self.last_layer_inputs = torch.zeros((most, *left), dtype=dtype, device=last_sampled.device)
        self.split_scratch = allocate_split_scratch(store.caches.values(), self._split_launches)

    def half_sizes(self, max_tokens: int | None = None) -> tuple[list[tuple[int, int]], list[int]]:
        """The sizes of first and of second halves, of steps of up to `max_tokens` tokens; all if None. Largest "
        "first."""
        inputs = self.inputs
        most = inputs.token_sizes[-1] if max_tokens is None else max_tokens
        some = inputs.token_sizes[: bisect_left(inputs.token_sizes, most) + 1]
        firsts = [(size, singles) for size in some for singles in inputs.decode_row_sizes(size)]
        return firsts[::-1], [size for size in inputs.sampled_row_sizes if size <= some[-1]][::-1]

    def choose_sizes(self, slices: SeqSlices, flat_inputs: FlatInputs) -> PaddedSizes | None:
        """The sizes of the step's graphs; None if it must be launched kernel by kernel: if it is too large, samples
        nothing, scores tokens, or has prompts that are for another kernel."""
        sizes = self.inputs.choose_sizes(flat_inputs)
        if sizes is None or slices.has_score_tokens:
            return None
        many = flat_inputs.lengths > 1
        lengths, contexts = flat_inputs.lengths[many], (flat_inputs.starts + flat_inputs.lengths)[many]
        return (
            None
            if any(self.backend.use_long_kernel(cache, lengths, contexts) for cache in self.distinct_caches)
            else sizes
        )

    def run(self, flat_inputs: FlatInputs, padded_sizes: PaddedSizes, epilogue: str) -> Any:
        """Enqueue the step; what its tail leaves on the device, padding included."""
        first = padded_sizes.num_tokens, padded_sizes.num_decode_rows
        self.capture_first_half(*first)
        self.capture_second_half(padded_sizes.num_sampled)
        self.store.staging.upload(self.inputs.build_array(flat_inputs, padded_sizes), self.inputs.region(padded_sizes))
        self.store.record_graph_replay(*first, padded_sizes.num_sampled)
        self.first_graphs[first].graph.replay()
        self.second_graphs[padded_sizes.num_sampled].graph.replay()
        end = self.epilogue_graphs[padded_sizes.num_sampled, epilogue]
        end.graph.replay()
        return end.result

    def warmup(self, tokens: int, num_decode_rows: int) -> None:
        """Run a first half of padding, so that its kernels are compiled and loaded. As DecodeGraphs' `warmup`."""
        self._run_first_half(tokens, num_decode_rows)

    def capture_first_half(self, tokens: int, num_decode_rows: int) -> None:
        """Capture a first half, unless that is done."""
        if (tokens, num_decode_rows) not in self.first_graphs:
            self.inputs.buffer.zero_()
            self._run_first_half(tokens, num_decode_rows)  # in this thread: libraries keep handles for each
            self.first_graphs[tokens, num_decode_rows] = self.capturer.capture(
                partial(self._run_first_half, tokens, num_decode_rows)
            )
            self.store.clear_scratch()  # nothing attended for these tokens: what layers wrote there may not be finite

    def capture_second_half(self, num_sampled: int) -> None:
        """Capture a second half with its tails, unless that is done."""
        if num_sampled in self.second_graphs:
            return
        self.inputs.buffer.zero_()
        logits, slots = self._run_second_half(num_sampled), self.inputs.sampled_region(num_sampled)[1]
        for tail in self.epilogues.values():
            tail(logits, slots)
        second = self.capturer.capture(partial(self._run_second_half, num_sampled))
        self.epilogue_graphs |= {
            (num_sampled, name): self.capturer.capture(partial(tail, second.result, slots))
            for name, tail in self.epilogues.items()
        }
        self.second_graphs[num_sampled] = second._replace(result=None)  # room for other graphs

    def num_splits(self, cache: LayerCache, num_decode_rows: int) -> int:
        """Parts a context, for rows of one token that are padded to `num_decode_rows`: what suits a number between."""
        least = (
            1
            if num_decode_rows <= SMALL_DECODE_ROWS
            else SMALL_DECODE_ROWS
            if num_decode_rows <= MEDIUM_DECODE_ROWS
            else MEDIUM_DECODE_ROWS
        )
        return choose_splits(isqrt(least * num_decode_rows), cache.kv_heads, self.num_sms)

    def last_layer_splits(self, cache: LayerCache, rows: int) -> int:
        """The same in the last attention, for rows that sample: few of them are padding."""
        return choose_splits(rows, cache.kv_heads, self.num_sms)

    def _split_launches(self, cache: LayerCache) -> Iterator[tuple[int, int]]:
        """Rows and parts of all launches for rows of one token."""
        for singles in {singles for _, singles in self.half_sizes()[0]}:
            yield singles, self.num_splits(cache, singles)
        for rows in self.inputs.sampled_row_sizes:
            yield rows, self.last_layer_splits(cache, rows)

    def _run_first_half(self, tokens: int, num_decode_rows: int) -> None:
        """To `hidden_states` and `last_layer_inputs`."""
        ids, padded = self.inputs.padded_batch(tokens, num_decode_rows)
        padded = padded._replace(prompts=self.prompt_lens)
        ids = torch.where(ids == LAST_SAMPLED, self.last_sampled.index_select(0, padded.token_slots), ids)

        def plan(cache: LayerCache, asked: ForwardBatch | None) -> TritonAttentionPlan:
            tables, splits = self.store.tables[cache.group], self.num_splits(cache, num_decode_rows)
            return self.backend.plan_mixed(padded, tables, cache, self.split_scratch, splits)

        def plan_states(cache: StateCache) -> StatePlan:
            return self.inputs.state_plan(tokens, num_decode_rows, self.store.tables[cache.group], cache.page_tokens)

        states, left = (
            StepStates(self.store.state_caches, plan_states) if self.store.state_caches else None,
            self.last_layer_inputs[:tokens],
        )
        step = FirstHalfContext(padded.positions, self.store.caches, self.backend, plan, left, states)
        x, attended = self.model.embed(ids, step)
        self.hidden_states[:tokens].copy_(x)
        if self.last_layer_cache is None:
            left.copy_(attended)

    def _run_second_half(self, num_sampled: int) -> Tensor:
        """Logits of the rows that sample [S, V]."""
        ends, slots, positions = self.inputs.sampled_region(num_sampled)
        attended, cache = self.last_layer_inputs.index_select(0, ends), self.last_layer_cache
        if cache is not None:
            tables, splits = self.store.tables[cache.group], self.last_layer_splits(cache, num_sampled)
            singles = self.backend.decode_batch(slots, positions, self.prompt_lens)
            plan = self.backend.plan_decode(singles, tables, cache, self.split_scratch, splits)
            attended = self.backend.attend_cached(attended, cache, plan)
        return self.logits(self.model.finish_selected(self.hidden_states.index_select(0, ends), attended.flatten(1)))
