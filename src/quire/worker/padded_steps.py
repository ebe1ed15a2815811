"""Steps with prompts, padded to a few sizes: which a step gets, and what a graph of these sizes reads, as one array
that is uploaded at once. Padding is of slot 0, whose pages are scratch.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.limits import MAX_GRAPH_TOKENS
from quire.kernels.mamba_states import CONV_TILE, StatePlan, state_pages
from quire.kernels.mamba_states import make_state_tiles as make_state_tiles
from quire.kernels.triton.backend import PaddedMixedBatch
from quire.kernels.triton.prefill import make_prefill_tiles
from quire.worker.inputs import FlatInputs

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
    tokens
    and place [4, R], and their tiles for states [M, 2] int32.

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
