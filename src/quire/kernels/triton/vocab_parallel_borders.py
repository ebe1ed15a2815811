"""Draws under top_k and top_p from logits that ranks have shared out: see `split_sampling`. A row's border, the least
key that is kept, is that of `sampling`, to the bit: all that it depends on are numbers of tokens and sums of their
weights, which are integers.

Ranks tell each other what is at and above 16 marks, and list their own keys between the two where the border must be.
Then all ask for more, of PLACES keys at a time and each time so many times closer: four times for the k-th token, by
counts, and four for top_p, by weights, since between two marks there are at most 2**24 + 1 keys. How often doesn't
depend on the logits, so that a graph can hold it. Of a row a rank tells 3,860 bytes, with `split_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sampling import (
    BLOCK,
    NUM_MARKS,
    key_weights,
    launch_config,
    launch_options,
    list_keys,
    load_params,
    mark_key,
    threshold_bracket,
    wait_predecessor,
    weigh_blocks,
    weigh_kept,
)
from quire.kernels.triton.vocab_parallel_sampling import RowMax, TokenWeights, VocabShard, sum_weights

OCTAVES = tl.constexpr(2)  # between two marks
PROBES = tl.constexpr(64)  # keys that are asked for at once
PROBE_STEPS = (
    1 << 18,
    1 << 12,
    1 << 6,
    1,
)  # between two of these; the first are all above a mark and up to the one before
SEARCH_KEYS = 128  # of a list, that are looked at together
ROW_WORDS = tl.constexpr(192)  # of 4 bytes, of a row whose sums and, behind them, counts are told


@triton.jit(do_not_specialize=["rows"])
def _together(every, ranks, rows, totals, held, RANKS: tl.constexpr, PDL: tl.constexpr):
    """The totals of all ranks take the place of this one's, and its list is empty."""
    wait_predecessor(PDL)
    row, rank, lanes = tl.program_id(0), tl.arange(0, RANKS), tl.arange(0, 2 * NUM_MARKS)
    at = (rank[:, None] * rows + row) * 2 * NUM_MARKS + lanes[None, :]
    told = tl.load(every + at, mask=rank[:, None] < ranks, other=0)
    tl.store(totals + row * 2 * NUM_MARKS + lanes, tl.sum(told, 0))
    tl.store(held + row, 0)


@triton.jit
def _sum_ranks(every, ranks, rows, row, width, first, RANKS: tl.constexpr):
    """By place, what all ranks have told of a row: `width` numbers each, of which the places' are from `first` on."""
    rank, places = tl.arange(0, RANKS), tl.arange(0, PROBES)
    at = (rank[:, None] * rows + row) * width + first + places[None, :]
    return tl.sum(tl.load(every + at, mask=rank[:, None] < ranks, other=0), 0)


@triton.jit
def _count_enough(sums, need):
    """How many places have enough above them; sums fall from place to place."""
    return tl.sum((sums >= need).to(tl.int32), 0)


@triton.jit
def _probe_list(keys, held, low, step, WEIGH: tl.constexpr, KEYS: tl.constexpr):
    """By place, what this rank has listed from low + (place + 1) * step up: its number, int32, or weight, int64."""
    places = low + (tl.arange(0, PROBES) + 1) * step
    sums = tl.zeros([KEYS, PROBES], tl.int64 if WEIGH else tl.int32)
    for start in range(0, held, KEYS):
        ids = start + tl.arange(0, KEYS)
        key = tl.load(keys + ids, mask=ids < held, other=0)
        above = key[:, None] >= places[None, :]
        if WEIGH:
            sums += tl.where(above, key_weights(key)[:, None], 0)
        else:
            sums += above.to(tl.int32)
    return tl.sum(sums, 0)


@triton.jit
def _is_sampled(peaks, row, temperature):
    return (temperature > 0) & (tl.abs(tl.load(peaks + row)) < float("inf"))


@triton.jit(do_not_specialize=["rows", "before", "step"])
def _by_count(shapes, peaks, totals, held, lists, room, borders, every, ranks, rows, before, step, told, weighed,
              RANKS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """Towards the key of a row's k-th token, which is borders[row] or above: from what all have told of places `before`
    apart, unless this is the FIRST time, to what is told of places `step` apart; the LAST time with weights."""
    wait_predecessor(PDL)
    row = tl.program_id(0)
    temperature, _min_p, top_k, top_p, cut = load_params(shapes, row)
    if _is_sampled(peaks, row, temperature) & cut:
        low, _high, count, _mass, _total, bound = threshold_bracket(totals, row, top_k, top_p, OCTAVES)
        if bound:
            if not FIRST:
                low = tl.load(borders + row)
                low += before * _count_enough(_sum_ranks(every, ranks, rows, row, PROBES, 0, RANKS), top_k - count)
            tl.store(borders + row, low)
            keys, size, places = lists + row.to(tl.int64) * room, tl.load(held + row), tl.arange(0, PROBES)
            counts = _probe_list(keys, size, low, step, False, KEYS)
            if LAST:
                tl.store(told + row * ROW_WORDS + 2 * PROBES + places, counts)
                weights = _probe_list(keys, size, low, step, True, KEYS)
                tl.store(weighed + row * (ROW_WORDS // 2) + places, weights)
            else:
                tl.store(told + row * PROBES + places, counts)


@triton.jit(do_not_specialize=["rows", "before", "step"])
def _by_weight(shapes, peaks, totals, held, lists, room, borders, needs, counted, every, ranks, rows, before, step,
               told, RANKS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """The same towards the border, by weights. The FIRST time the k-th token's key follows from what was told, and from
    that what the first k weigh: of which needs[row] above the bracket's keys must be; the LAST time nothing is told."""
    wait_predecessor(PDL)
    row, places = tl.program_id(0), tl.arange(0, PROBES)
    temperature, _min_p, top_k, top_p, cut = load_params(shapes, row)
    if _is_sampled(peaks, row, temperature) & cut:
        if FIRST:
            low, _high, count, mass, total, bound = threshold_bracket(totals, row, top_k, top_p, OCTAVES)
            if bound:
                counts = _sum_ranks(counted, ranks, rows, row, ROW_WORDS, 2 * PROBES, RANKS)
                sums = _sum_ranks(every, ranks, rows, row, ROW_WORDS // 2, 0, RANKS)
                passed = _count_enough(counts, top_k - count)
                low = tl.load(borders + row) + passed
                above = tl.sum(tl.where(places == passed, counts, 0), 0)  # the next place is the next key
                more = tl.sum(tl.where(places == passed, sums, 0), 0)
                total = mass + more + (top_k - count - above) * key_weights(low)
            if top_p < 1:
                goal = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
                marks = tl.arange(0, NUM_MARKS)
                enough = tl.load(totals + row * 2 * NUM_MARKS + NUM_MARKS + marks) >= goal
                low = mark_key(tl.min(tl.where(enough, marks, NUM_MARKS - 1), 0), OCTAVES)
                tl.store(needs + row, goal - mass)
            tl.store(borders + row, low)
        else:
            low = tl.load(borders + row)
            if top_p < 1:
                sums = _sum_ranks(every, ranks, rows, row, PROBES, 0, RANKS)
                low += before * _count_enough(sums, tl.load(needs + row))
                tl.store(borders + row, low)
        if not LAST:  # noqa: SIM102
            if top_p < 1:
                keys, size = lists + row.to(tl.int64) * room, tl.load(held + row)
                tl.store(told + row * PROBES + places, _probe_list(keys, size, low, step, True, KEYS))


def find_thresholds(
    logits: Tensor,
    own: VocabShard,
    shapes: Tensor,
    found: RowMax,
    gather: Callable[[Tensor], Tensor],
    pdl: bool = False,
) -> TokenWeights:
    """As split_sampling.weigh, of rows that may have top_k and top_p. `gather`, an Exchange's, is called nine times."""
    (rows, _), blocks, device = logits.shape, max(triton.cdiv(own.count, BLOCK), 1), logits.device
    _, each, early, _ = launch_config(rows)
    options = launch_options(pdl and early)
    masses = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    totals = torch.zeros((rows, 2, NUM_MARKS.value), dtype=torch.int64, device=device)
    held, borders = torch.empty((2, rows), dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), own.count, shapes, found.peaks, found.peak_ids, 1, blocks, each)
    grid, tile = (triton.cdiv(blocks, each), rows), {"LANES": 1, "BLOCK": BLOCK, "num_warps": 4, **options}
    weigh_blocks[grid](*row, totals, masses, CUT=True, OCTAVES=OCTAVES, **tile)
    every = gather(totals)
    ranks, lanes = len(every), triton.next_power_of_2(len(every))
    _together[(rows,)](every, ranks, rows, totals, held, RANKS=lanes, num_warps=1, **options)
    lists = torch.empty((rows, max(own.count, 1)), dtype=torch.int32, device=device)
    list_keys[grid](*row, totals, held, lists, OCTAVES=OCTAVES, **tile)
    state = (shapes, found.peaks, totals, held, lists, own.count, borders)
    search = {"RANKS": lanes, "KEYS": SEARCH_KEYS, "num_warps": 8, **options}
    for before, step in pairwise((0, *PROBE_STEPS)):
        last = step == 1
        told = torch.empty((rows, ROW_WORDS.value if last else PROBES.value), dtype=torch.int32, device=device)
        _by_count[(rows,)](
            *state, every, ranks, rows, before, step, told, told.view(torch.int64), FIRST=not before, LAST=last,
            **search,
        )  # fmt: skip
        every = gather(told)
    counted, every = every, every.view(torch.int64)
    needs = torch.empty(rows, dtype=torch.int64, device=device)
    for before, step in pairwise((0, *PROBE_STEPS, 0)):
        told = torch.empty((rows, PROBES.value), dtype=torch.int64, device=device)
        _by_weight[(rows,)](
            *state, needs, counted, every, ranks, rows, before, step, told, FIRST=not before, LAST=not step, **search
        )  # fmt: skip
        if step:
            every = gather(told)
    weigh_kept[grid](*row, borders, masses, **tile)
    return TokenWeights(masses, sum_weights(masses, shapes, found, options), borders)
