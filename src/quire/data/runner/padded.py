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

from quire.data.kernels.limits import MOST_GRAPH_TOKENS
from quire.data.kernels.states import CONV_TILE, StatePlan, pages_of
from quire.data.kernels.states import make_tiles as make_state_tiles
from quire.data.kernels.triton.backend import Padded
from quire.data.kernels.triton.prompt import make_tiles
from quire.data.runner.inputs import Flat

TOKENS = [
    32, 64, 96, 128, 160, 200, 256, 320, 352, 384, 432, 512, 544, 576, 624, 688, 736, 768, 816, 864, 928,
    MOST_GRAPH_TOKENS,
]  # fmt: skip
"""Tokens of a padded step; from 200 on the sizes behind which products' times rise (see graphs.sizes): of the multiples
of 16 those that take less time than every larger one that was measured (Llama-3-8B's shape, H200: 816 tokens 18.8 ms,
832 20.5). Of more tokens, launching a step's kernels one by one takes the host less time than they take."""

PROMPTS = 16
"""Rows of several tokens that a step has room for, however short they are: each may need a tile more than its tokens
fill."""

FEW, SOME = 32, 256
"""Rows of one token that a step has room for, where not for as many as it has tokens. Contexts of few are split."""


class Sizes(NamedTuple):
    """What a step is padded to: its tokens, its rows of one token, and those that sample. A graph's own are the first
    two, or the last."""

    tokens: int
    singles: int
    sampled: int


class Inputs:
    """The numbers that graphs of mixed steps read, on the device. First, of rows that sample, their last tokens, their
    slots and positions [3, S]; they end, and all others begin, at one place for all sizes. Then each token, its
    position and its slot [3, T]; of rows of one token slot, length and place [3, D]; tiles [N, 4] int32, for each
    number of `queries` that tiles have. With `stateful`, of all rows, padding among them, slot, tokens before, tokens
    and place [4, R], and their tiles for states [M, 2] int32.

    With `deterministic` rows of one token are in tiles too, and D is 0.
    """

    def __init__(
        self, rows: list[int], queries: tuple[int, ...], deterministic: bool, device: torch.device,
        stateful: bool = False,
    ) -> None:  # fmt: skip
        """`rows`: sizes of the rows that sample, rising."""
        self.tokens, self.rows, self.queries, self.deterministic = TOKENS, rows, queries, deterministic
        self.stateful = stateful
        self.front = 3 * rows[-1]
        largest = Sizes(TOKENS[-1], self.singles(TOKENS[-1])[-1], rows[-1])
        self.buffer = torch.zeros(self._ends(largest)[-1], dtype=torch.int64, device=device)

    def singles(self, tokens: int) -> list[int]:
        """Sizes of the rows of one token, beside so many tokens in all."""
        most = min(tokens, self.rows[-1])
        return [*(size for size in (FEW, SOME) if size < most), most]

    def fit(self, flat: Flat) -> Sizes | None:
        """The least sizes that a step has room in, if there are any."""
        total, sampled = flat.inputs.shape[1], len(flat.asked)
        if total > self.tokens[-1] or not 0 < sampled <= self.rows[-1]:
            return None
        tokens = self.tokens[bisect_left(self.tokens, total)]
        singles = self.singles(tokens)
        single = int((flat.lengths == 1).sum())
        if single > singles[-1] or len(flat.slots) - single > PROMPTS:
            return None
        return Sizes(tokens, singles[bisect_left(singles, single)], self.rows[bisect_left(self.rows, sampled)])

    def filled(self, flat: Flat, sizes: Sizes) -> np.ndarray:
        """A step's numbers, for `region`."""
        ends = self._ends(sizes)
        array = np.zeros(ends[-1], dtype=np.int64)
        _, tokens, singles, every, parts, *tiles = np.split(array, ends[:-1])
        sampled = array[self.front - 3 * sizes.sampled : self.front]
        count, total = len(flat.ends), flat.inputs.shape[1]
        sampled.reshape(3, -1)[:, :count] = flat.ends, flat.slots[flat.asked], flat.inputs[1, flat.ends]
        tokens.reshape(3, -1)[:, :total] = flat.inputs
        single = np.zeros(len(flat.slots), np.bool_) if self.deterministic else flat.lengths == 1
        one, many = np.flatnonzero(single), np.flatnonzero(~single)
        if not self.deterministic:
            singles = singles.reshape(3, -1)
            singles[2] = -1
            singles[:, : len(one)] = flat.slots[one], flat.starts[one] + 1, flat.offsets[one]
        for part, queries in zip(tiles, self.queries):
            own = part.view(np.int32).reshape(-1, 4)
            real = make_tiles(*(x[many] for x in (flat.slots, flat.starts, flat.lengths, flat.offsets)), queries)
            own[: len(real)] = real
            padding = np.arange(total, sizes.tokens, queries)
            behind = own[len(real) : len(real) + len(padding)]
            behind[:, 1], behind[:, 2] = padding, np.minimum(sizes.tokens - padding, queries)
        if self.stateful:
            self._fill_rows(flat, sizes.tokens - total, every.reshape(4, -1), parts.view(np.int32).reshape(-1, 2))
        return array[self.front - 3 * sizes.sampled :]

    def _fill_rows(self, flat: Flat, padding: int, every: np.ndarray, tiles: np.ndarray) -> None:
        """All that pads the step is one row, of slot 0, so that each token is somebody's; rows behind it have none."""
        count, total = len(flat.slots), flat.inputs.shape[1]
        every[:, :count] = flat.slots, flat.starts, flat.lengths, flat.offsets
        every[:, count] = 0, 0, padding, total
        real = make_state_tiles(every[2, : count + 1])
        tiles[: len(real)] = real
        tiles[len(real) :, 0] = every.shape[1] - 1

    def region(self, sizes: Sizes) -> Tensor:
        """Where `filled` numbers go."""
        return self.buffer[self.front - 3 * sizes.sampled : self._ends(sizes)[-1]]

    def sampled(self, count: int) -> Tensor:
        """Last tokens, slots and positions [3, S], on the device."""
        return self.buffer[self.front - 3 * count : self.front].view(3, count)

    def step(self, tokens: int, singles: int) -> tuple[Tensor, Padded]:
        """Tokens [T], and all else of a step of these sizes, on the device."""
        ends = self._ends(Sizes(tokens, singles, 0))
        _, every, ones, _, _, *tiles = (self.buffer[a:b] for a, b in pairwise((0, *ends)))
        ids, positions, token_slots = every.view(3, -1)
        slots, lengths, rows = ones.view(3, -1)
        parts = {queries: part.view(torch.int32).view(-1, 4) for queries, part in zip(self.queries, tiles)}
        return ids, Padded(token_slots, positions, slots, lengths, rows, parts)

    def states(self, tokens: int, singles: int, table: Tensor, run_tokens: int) -> StatePlan:
        """What a step of these sizes reads and writes of states whose pages `table` names, all of it on the device."""
        ends = self._ends(Sizes(tokens, singles, 0))
        slots, starts, lengths, offsets = self.buffer[ends[2] : ends[3]].view(4, -1)
        tiles = self.buffer[ends[3] : ends[4]].view(torch.int32).view(-1, 2)
        width = (tokens - 2) // run_tokens + 2  # runs that one row's tokens may be of
        reads, writes = pages_of(table, slots, starts, lengths, run_tokens, width)
        return StatePlan(offsets, lengths, starts, reads, writes, run_tokens, tiles)

    def _ends(self, sizes: Sizes) -> list[int]:
        """Where its parts end, that of rows that sample first: it is as long as all of them."""
        singles = 0 if self.deterministic else 3 * sizes.singles
        # As many tiles as any step of these sizes needs, its padding included.
        alone = PROMPTS + 1 + (sizes.singles if self.deterministic else 0)
        tiles = [2 * (alone + -(-sizes.tokens // queries)) for queries in self.queries]
        # Rows, one of padding, and one without tokens, whose are the tiles that aren't needed.
        rows = self.stateful * (sizes.singles + PROMPTS + 2)
        parts = self.stateful * (rows + sizes.tokens // CONV_TILE)
        return list(accumulate((self.front, 3 * sizes.tokens, singles, 4 * rows, parts, *tiles)))
