"""Steps with prompts as CUDA graphs: rows of one token and chunks of prompts, padded to a few sizes.

A step is cut in its last layer: in its attention, once all keys and values are written, or after its states, which
every token advances. After the cut only rows that sample go on. A graph of the first half has a size of tokens and of
rows of one token; one of the second half, up to the logits, a size of rows that sample; the epilogues are those of
decode steps. So there are as many graphs as there are sizes of each half, not as there are pairs. Between the halves,
fixed buffers hold all tokens' hidden states and the last layer's queries, or the outputs of its states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch, HeadNorms, LayerCache, StateRows
from quire.kernels.limits import MAX_GRAPH_TOKENS
from quire.kernels.mamba_states import CONV_TILE, StateCache, StatePlan, make_state_tiles
from quire.kernels.triton.backend import CapturedBatch, TritonAttentionPlan, TritonBackend
from quire.kernels.triton.prefill import make_prefill_tiles
from quire.layers.rotary import RotaryEmbedding
from quire.models.decoder import one_layer_of_each_kind
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.worker.cuda_graphs import AnyEpilogue, CapturedGraph, GraphCapturer, allocate_split_scratch
from quire.worker.inputs import FlatInputs, resolve_tokens
from quire.worker.step_context import AttentionPlanner, StepContext, StepStates
from quire.worker.store import Store

TOKEN_SIZES = [
    32, 64, 96, 128, 160, 200, 256, 320, 352, 384, 432, 512, 544, 576, 624, 688, 736, 768, 816, 864, 928,
    MAX_GRAPH_TOKENS,
]  # fmt: skip
"""Tokens of a padded step; from 200 on the sizes after which matrix products take longer (see
cuda_graphs.capture_sizes): the multiples of 16 that take less time than every larger one measured (shapes of
Llama-3-8B, H200: 816 tokens 18.8 ms, 832 20.5). With more tokens, launching kernels one by one takes the host less time
than the kernels run."""
VERIFIED_TOKEN_SIZES = [8, 16]
"""More of these sizes, where the draft tokens of layers with states are verified by these graphs."""
MAX_PROMPT_ROWS = 16
"""Rows of several tokens that a graph has room for, however short: each may need one tile more than its tokens fill."""
SMALL_DECODE_ROWS, MEDIUM_DECODE_ROWS = 32, 256
"""Rows of one token that a graph has room for, if fewer than its tokens. With few rows, contexts are split."""


class PaddedSizes(NamedTuple):
    """The padded sizes of a step: its tokens, rows of one token, and rows that sample. A graph of a first half has the
    first two, one of a second half the last."""

    num_tokens: int
    num_decode_rows: int
    num_sampled: int


class MixedGraphInputs:
    """The int64 inputs of the graphs of mixed steps, in one buffer on the device:

    - of rows that sample, their last tokens, slots and positions [3, S]; this part ends at the same index for all S
    - tokens, positions and slots of all tokens [3, T]
    - of rows of one token, slot, length and offset [3, D]; with `deterministic` D is 0 and these rows are in tiles too
    - with `has_states`, the columns [5, R] of StateRows, padding included, and tiles [M, 2] int32; and the tokens whose
      inputs are saved [D], at most `saved_tokens`
    - tiles [N, 4] int32, for each number in `tile_queries`
    """

    def __init__(
        self, sampled_row_sizes: list[int], tile_queries: tuple[int, ...], deterministic: bool, device: torch.device,
        has_states: bool = False, saved_tokens: int = 0,
    ) -> None:  # fmt: skip
        """`sampled_row_sizes`: the sizes of S, rising."""
        self.token_sizes, self.sampled_row_sizes, self.tile_queries = TOKEN_SIZES, sampled_row_sizes, tile_queries
        if saved_tokens:
            self.token_sizes = [*(size for size in VERIFIED_TOKEN_SIZES if size < TOKEN_SIZES[0]), *TOKEN_SIZES]
        self.deterministic, self.has_states, self.saved_tokens = deterministic, has_states, saved_tokens
        self.sampled_capacity = 3 * sampled_row_sizes[-1]
        largest = PaddedSizes(TOKEN_SIZES[-1], self.decode_row_sizes(TOKEN_SIZES[-1])[-1], sampled_row_sizes[-1])
        self.buffer = torch.zeros(self._part_ends(largest)[-1], dtype=torch.int64, device=device)

    def decode_row_sizes(self, tokens: int) -> list[int]:
        """Return the sizes of rows of one token in steps of `tokens` tokens."""
        most = min(tokens, self.sampled_row_sizes[-1])
        return [*(size for size in (SMALL_DECODE_ROWS, MEDIUM_DECODE_ROWS) if size < most), most]

    def choose_sizes(self, flat_inputs: FlatInputs) -> PaddedSizes | None:
        """Return the smallest sizes that hold a step, or None if it is too large."""
        total, sampled = flat_inputs.token_columns.shape[1], len(flat_inputs.sampled_rows)
        if total > self.token_sizes[-1] or not 0 < sampled <= self.sampled_row_sizes[-1]:
            return None
        tokens = self.token_sizes[bisect_left(self.token_sizes, total)]
        decode_sizes = self.decode_row_sizes(tokens)
        num_decode = int((flat_inputs.lengths == 1).sum())
        if num_decode > decode_sizes[-1] or len(flat_inputs.slots) - num_decode > MAX_PROMPT_ROWS:
            return None
        return PaddedSizes(
            tokens,
            decode_sizes[bisect_left(decode_sizes, num_decode)],
            self.sampled_row_sizes[bisect_left(self.sampled_row_sizes, sampled)],
        )

    def build_array(self, flat_inputs: FlatInputs, padded_sizes: PaddedSizes) -> np.ndarray:
        """Return a step's inputs, to be copied to `region`."""
        ends = self._part_ends(padded_sizes)
        array = np.zeros(ends[-1], dtype=np.int64)
        _, tokens, decode_rows, state_rows, state_tiles, saved_tokens, *tiles = np.split(array, ends[:-1])
        sampled = array[self.sampled_capacity - 3 * padded_sizes.num_sampled : self.sampled_capacity]
        count, total = len(flat_inputs.logits_indices), flat_inputs.token_columns.shape[1]
        sampled.reshape(3, -1)[:, :count] = (
            flat_inputs.logits_indices,
            flat_inputs.slots[flat_inputs.sampled_rows],
            flat_inputs.token_columns[1, flat_inputs.logits_indices],
        )
        tokens.reshape(3, -1)[:, :total] = flat_inputs.token_columns
        is_decode = np.zeros(len(flat_inputs.slots), np.bool_) if self.deterministic else flat_inputs.lengths == 1
        one, many = np.flatnonzero(is_decode), np.flatnonzero(~is_decode)
        if not self.deterministic:
            decode_rows = decode_rows.reshape(3, -1)
            decode_rows[2] = -1
            decode_rows[:, : len(one)] = flat_inputs.slots[one], flat_inputs.starts[one] + 1, flat_inputs.offsets[one]
        slots, starts, lengths = flat_inputs.slots[many], flat_inputs.starts[many], flat_inputs.lengths[many]
        for part, queries in zip(tiles, self.tile_queries):
            rows = part.view(np.int32).reshape(-1, 4)
            real = make_prefill_tiles(slots, starts, lengths, flat_inputs.offsets[many], queries)
            rows[: len(real)] = real
            padding = np.arange(total, padded_sizes.num_tokens, queries)
            padding_rows = rows[len(real) : len(real) + len(padding)]
            padding_rows[:, 1], padding_rows[:, 2] = padding, np.minimum(padded_sizes.num_tokens - padding, queries)
        if self.has_states:
            num_padding, int32_tiles = padded_sizes.num_tokens - total, state_tiles.view(np.int32).reshape(-1, 2)
            self._fill_state_rows(flat_inputs, num_padding, state_rows.reshape(5, -1), int32_tiles)
            if flat_inputs.state_rows is not None:
                saved_tokens[: len(flat_inputs.state_rows.saved_tokens)] = flat_inputs.state_rows.saved_tokens
        return array[self.sampled_capacity - 3 * padded_sizes.num_sampled :]

    def _fill_state_rows(
        self, flat_inputs: FlatInputs, padding: int, state_rows: np.ndarray, tiles: np.ndarray
    ) -> None:
        """Fill rows and tiles of states. All padding tokens are one row of slot 0; later rows have no tokens."""
        rows, total = flat_inputs.state_rows, flat_inputs.token_columns.shape[1]
        if rows is None:
            rows = StateRows.without_drafts(
                flat_inputs.slots, flat_inputs.starts, flat_inputs.lengths, flat_inputs.offsets
            )
        count = rows.columns.shape[1]
        state_rows[:, :count] = rows.columns
        state_rows[:, count] = 0, 0, padding, total, 0
        real = make_state_tiles(state_rows[2, : count + 1])
        tiles[: len(real)] = real
        tiles[len(real) :, 0] = state_rows.shape[1] - 1

    def region(self, padded_sizes: PaddedSizes) -> Tensor:
        """Return the part of the buffer that the result of `build_array` is copied to."""
        return self.buffer[self.sampled_capacity - 3 * padded_sizes.num_sampled : self._part_ends(padded_sizes)[-1]]

    def sampled_region(self, num_sampled: int) -> Tensor:
        """Return last tokens, slots and positions [3, S] on the device."""
        return self.buffer[self.sampled_capacity - 3 * num_sampled : self.sampled_capacity].view(3, num_sampled)

    def padded_batch(self, tokens: int, num_decode_rows: int) -> tuple[Tensor, CapturedBatch]:
        """Return tokens [T] and the batch of a step of these sizes, views of the buffer."""
        ends = self._part_ends(PaddedSizes(tokens, num_decode_rows, 0))
        _, token_columns, decode_rows, _, _, _, *tiles = (self.buffer[a:b] for a, b in pairwise((0, *ends)))
        ids, positions, token_slots = token_columns.view(3, -1)
        slots, lengths, rows = decode_rows.view(3, -1)
        tiles_by_size = {n: part.view(torch.int32).view(-1, 4) for n, part in zip(self.tile_queries, tiles)}
        return ids, CapturedBatch(token_slots, positions, slots, lengths, rows, tiles_by_size)

    def state_plan(self, tokens: int, num_decode_rows: int, table: Tensor, page_tokens: int) -> StatePlan:
        """Return the plan of states in the pages of `table` for a step of these sizes, on the device."""
        ends = self._part_ends(PaddedSizes(tokens, num_decode_rows, 0))
        columns, tiles, saved = (self.buffer[a:b] for a, b in pairwise(ends[2:6]))
        width = (tokens - 2) // page_tokens + 2  # pages that the tokens of one row may span
        return StatePlan.for_rows(
            table, columns.view(5, -1), page_tokens, width, tiles.view(torch.int32).view(-1, 2),
            saved if len(saved) else None,
        )  # fmt: skip

    def _part_ends(self, padded_sizes: PaddedSizes) -> list[int]:
        """Return the end index of each part of the buffer. The first has room for the largest S."""
        num_tokens, num_decode_rows, _ = padded_sizes
        decode = 0 if self.deterministic else 3 * num_decode_rows
        # The most tiles that a step of these sizes can need, padding included: each row may have a partial one.
        partial_tiles = MAX_PROMPT_ROWS + 1 + (num_decode_rows if self.deterministic else 0)
        tiles = [2 * (partial_tiles + -(-num_tokens // queries)) for queries in self.tile_queries]
        # All rows, one of padding, and one without tokens, to which unused tiles belong.
        rows = self.has_states * (num_decode_rows + MAX_PROMPT_ROWS + 2)
        state_tiles = self.has_states * (rows + num_tokens // CONV_TILE)
        saved = min(num_decode_rows, self.saved_tokens)
        return list(accumulate((self.sampled_capacity, 3 * num_tokens, decode, 5 * rows, state_tiles, saved, *tiles)))


class FirstHalfContext(StepContext):
    """A step that ends in its last layer. If that is an attention layer, keys and values are written and its queries
    are stored in `queries`."""

    def __init__(
        self, positions: Tensor, caches: Mapping[int, LayerCache], backend: TritonBackend, make_plan: AttentionPlanner,
        queries: Tensor, states: StepStates | None, hidden_states: HiddenStates | None = None,
    ) -> None:  # fmt: skip
        super().__init__(positions, caches, backend, make_plan, states=states, hidden_states=hidden_states)
        self.queries = queries

    def attend(
        self, layer: int, qkv: Tensor, rotary: RotaryEmbedding | None = None, norms: HeadNorms | None = None,
        last: bool = False,
    ) -> Tensor:  # fmt: skip
        if not last:
            return super().attend(layer, qkv, rotary, norms)
        cache = self.caches[layer]
        self.backend.write_kv(qkv, self.queries, rotary, norms, cache, self.plan_for(cache))
        return self.queries


class MixedGraphs:
    """Graphs for steps with rows of several tokens. `sampled_row_sizes` are the sizes of rows that sample. `logits`,
    `sampled_tokens` and `epilogues` are as for DecodeGraphs, which use the same memory if `capturer` is the same."""

    def __init__(
        self, model: Any, logits: Callable[[Tensor], Tensor], store: Store, backend: TritonBackend,
        sampled_tokens: Tensor, hidden_size: int, sampled_row_sizes: list[int], epilogues: dict[str, AnyEpilogue],
        capturer: GraphCapturer, kept_states: HiddenStates | None = None,
    ) -> None:  # fmt: skip
        """`kept_states` keeps the hidden states of all tokens. If these are the final ones, or the model can't be cut
        in its attention, a step is cut after the last norm instead."""
        keeps_final = kept_states is not None and kept_states.has_final
        self.kept_states, self.is_cut_at_end = kept_states, keeps_final or not model.can_cut_attention
        self.model, self.logits, self.epilogues, self.backend = model, logits, epilogues, backend
        self.store, self.sampled_tokens, self.capturer = store, sampled_tokens, capturer
        self.prompt_lens = None if store.prompt_lengths is None else store.prompt_lengths.device_lengths
        self.first_graphs: dict[tuple[int, int], CapturedGraph] = {}  # by tokens and rows of one token
        self.second_graphs: dict[int, CapturedGraph] = {}  # by rows that sample
        self.epilogue_graphs: dict[tuple[int, str], CapturedGraph] = {}
        self.distinct_caches = list({cache.plan_key: cache for cache in store.caches.values()}.values())
        tiles = tuple(dict.fromkeys(backend.tile_queries(cache) for cache in self.distinct_caches))
        self.inputs = MixedGraphInputs(
            sampled_row_sizes, tiles, backend.deterministic, sampled_tokens.device, bool(store.state_caches),
            store.saved_tokens,
        )  # fmt: skip
        # None if the last layer has states. Its input after the cut: queries, or the outputs of its states.
        self.last_layer_cache = store.caches.get(max((*store.caches, *store.state_caches)))
        shape: Sequence[int]
        if self.last_layer_cache is not None:
            shape = self.last_layer_cache.heads, self.last_layer_cache.head_dim
        else:
            shape = store.state_caches[max(store.state_caches)].conv.shape[1:2]
        most, dtype = self.inputs.token_sizes[-1], store.buffer.dtype
        self.hidden_states = torch.zeros((most, hidden_size), dtype=dtype, device=sampled_tokens.device)
        self.last_layer_inputs = torch.zeros((most, *shape), dtype=dtype, device=sampled_tokens.device)
        self.split_scratch = allocate_split_scratch(store.caches.values(), self._split_launches)

    def half_sizes(self, max_tokens: int | None = None) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the sizes of first and second halves for steps of up to `max_tokens` tokens, or of any size, largest
        first."""
        inputs = self.inputs
        most = inputs.token_sizes[-1] if max_tokens is None else max_tokens
        token_sizes = inputs.token_sizes[: bisect_left(inputs.token_sizes, most) + 1]
        first_sizes = [(size, decode_rows) for size in token_sizes for decode_rows in inputs.decode_row_sizes(size)]
        return first_sizes[::-1], [size for size in inputs.sampled_row_sizes if size <= token_sizes[-1]][::-1]

    def choose_sizes(self, slices: SeqSlices, flat_inputs: FlatInputs) -> PaddedSizes | None:
        """Return the sizes of the step's graphs, or None if it must run kernel by kernel: if it is too large, samples
        nothing, scores tokens, or has prompts for the long-prompt kernel."""
        sizes = self.inputs.choose_sizes(flat_inputs)
        if sizes is None or slices.has_score_tokens:
            return None
        many = flat_inputs.lengths > 1
        lengths, contexts = flat_inputs.lengths[many], (flat_inputs.starts + flat_inputs.lengths)[many]
        if any(self.backend.use_long_kernel(cache, lengths, contexts) for cache in self.distinct_caches):
            return None
        return sizes

    def run(self, flat_inputs: FlatInputs, padded_sizes: PaddedSizes, epilogue: str) -> Any:
        """Enqueue the step and return the result of its epilogue on the device, padding included."""
        first = padded_sizes.num_tokens, padded_sizes.num_decode_rows
        self.capture_first_half(*first)
        self.capture_second_half(padded_sizes.num_sampled)
        self.store.staging.upload(self.inputs.build_array(flat_inputs, padded_sizes), self.inputs.region(padded_sizes))
        self.store.record_graph_replay(*first, padded_sizes.num_sampled)
        self.first_graphs[first].graph.replay()
        self.second_graphs[padded_sizes.num_sampled].graph.replay()
        captured = self.epilogue_graphs[padded_sizes.num_sampled, epilogue]
        captured.graph.replay()
        return captured.result

    def warmup(self, tokens: int, num_decode_rows: int) -> None:
        """Run a first half of padding, so that its kernels are compiled and loaded. See DecodeGraphs.warmup."""
        self._run_first_half(tokens, num_decode_rows)

    def capture_first_half(self, tokens: int, num_decode_rows: int) -> None:
        """Capture a first half, unless it is captured."""
        if (tokens, num_decode_rows) not in self.first_graphs:
            self.inputs.buffer.zero_()
            with one_layer_of_each_kind(self.model):
                self._run_first_half(tokens, num_decode_rows)  # in this thread: libraries have handles per thread
            self.first_graphs[tokens, num_decode_rows] = self.capturer.capture(
                partial(self._run_first_half, tokens, num_decode_rows)
            )
            self.store.clear_scratch()  # results of padding may not be finite

    def capture_second_half(self, num_sampled: int) -> None:
        """Capture a second half with its epilogues, unless it is captured."""
        if num_sampled in self.second_graphs:
            return
        self.inputs.buffer.zero_()
        logits, slots = self._run_second_half(num_sampled), self.inputs.sampled_region(num_sampled)[1]
        for epilogue in self.epilogues.values():
            epilogue(logits, slots)
        second = self.capturer.capture(partial(self._run_second_half, num_sampled))
        self.epilogue_graphs |= {
            (num_sampled, name): self.capturer.capture(partial(epilogue, second.result, slots))
            for name, epilogue in self.epilogues.items()
        }
        self.second_graphs[num_sampled] = second._replace(result=None)  # other graphs reuse its memory

    def num_splits(self, cache: LayerCache, num_decode_rows: int) -> int:
        """Return the splits of a context for rows of one token that are padded to `num_decode_rows`: those of the
        geometric mean of this size and the next smaller one."""
        smaller = (
            1
            if num_decode_rows <= SMALL_DECODE_ROWS
            else SMALL_DECODE_ROWS
            if num_decode_rows <= MEDIUM_DECODE_ROWS
            else MEDIUM_DECODE_ROWS
        )
        return self.backend.num_splits(isqrt(smaller * num_decode_rows), cache)

    def _split_launches(self, cache: LayerCache) -> Iterator[tuple[int, int]]:
        """Yield (rows, splits) of all launches for rows of one token."""
        for decode_rows in {decode_rows for _, decode_rows in self.half_sizes()[0]}:
            yield decode_rows, self.num_splits(cache, decode_rows)
        for rows in self.inputs.sampled_row_sizes:
            yield rows, self.backend.num_splits(rows, cache)

    def _run_first_half(self, tokens: int, num_decode_rows: int) -> None:
        """Compute `hidden_states` and `last_layer_inputs`."""
        ids, padded = self.inputs.padded_batch(tokens, num_decode_rows)
        padded = padded._replace(prompts=self.prompt_lens)
        ids = resolve_tokens(ids, padded.token_slots, self.sampled_tokens)

        def plan(cache: LayerCache, query_batch: ForwardBatch | None) -> TritonAttentionPlan:
            tables, splits = self.store.tables[cache.group], self.num_splits(cache, num_decode_rows)
            assert self.split_scratch is not None, "a model without attention layers plans none"
            return self.backend.plan_captured(padded, tables, cache, self.split_scratch, splits)

        def plan_states(cache: StateCache) -> StatePlan:
            return self.inputs.state_plan(tokens, num_decode_rows, self.store.tables[cache.group], cache.page_tokens)

        states = StepStates(self.store.state_caches, plan_states) if self.store.state_caches else None
        if self.is_cut_at_end:
            step = StepContext(
                padded.positions, self.store.caches, self.backend, plan, states=states, hidden_states=self.kept_states
            )
            self.hidden_states[:tokens].copy_(self.model(ids, step))
            return
        last_inputs = self.last_layer_inputs[:tokens]
        step = FirstHalfContext(
            padded.positions, self.store.caches, self.backend, plan, last_inputs, states, self.kept_states
        )
        x, attended = self.model.embed(ids, step)
        self.hidden_states[:tokens].copy_(x)
        if self.last_layer_cache is None:
            last_inputs.copy_(attended)

    def _run_second_half(self, num_sampled: int) -> Tensor:
        """Return the logits of the rows that sample [S, V]."""
        ends, slots, positions = self.inputs.sampled_region(num_sampled)
        if self.is_cut_at_end:
            return self.logits(self.hidden_states.index_select(0, ends))
        attended, cache = self.last_layer_inputs.index_select(0, ends), self.last_layer_cache
        if cache is not None:
            batch = self.backend.decode_batch(slots, positions, self.prompt_lens)
            plan = self.backend.plan_captured(batch, self.store.tables[cache.group], cache, self.split_scratch)
            attended = self.backend.attend_cached(attended, cache, plan)
        return self.logits(self.model.finish_selected(self.hidden_states.index_select(0, ends), attended.flatten(1)))
