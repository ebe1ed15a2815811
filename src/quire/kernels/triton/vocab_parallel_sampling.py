"""Greedy and random sampling from vocab-parallel logits: each rank has a part of the vocabulary. For each sample ranks
exchange their greatest score and its token: 8 bytes; for rows with min_p, top_k or top_p more (`find_thresholds`). The
tokens are those of `kernels.triton.sampling` over all logits, because the score of a token depends only on its logit
and its noise, and weights are integers, whose partial sums are exact.

Between these launches the results of all ranks are gathered, in rank order. No kernel is specialized for the number of
rows: while one rank compiled it, the others would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sampling import (
    BLOCK,
    NUM_MARKS,
    SamplingScratch,
    add_totals,
    find_peaks,
    find_scores,
    key_weights,
    launch_config,
    launch_options,
    list_keys,
    load_params,
    mark_key,
    row_choice,
    store_choice,
    threshold_bracket,
    wait_predecessor,
)

OCTAVES = tl.constexpr(2)  # from mark to mark the likelihood falls by 2**OCTAVES
PROBES = tl.constexpr(64)  # keys that a search probes at once
PROBE_STEPS = (1 << 18, 1 << 12, 1 << 6, 1)  # between two probes; with the first, they cover the bracket of two marks
SEARCH_KEYS = 128  # keys of a list that a search reads together
ROW_WORDS = tl.constexpr(192)  # words of 4 bytes of a row's results, if sums are followed by counts


class VocabShard(NamedTuple):
    """A rank's part of the vocabulary: `count` tokens from `first` on, a multiple of 64. Further columns of its logits
    are padding."""

    first: int
    count: int


@triton.jit
def _best(peaks, places, chunks, first, outgoing, LANES: tl.constexpr, PDL: tl.constexpr):
    """Store the greatest logit or score of this rank, as bits, and its lowest id. Places count from `first` on."""
    wait_predecessor(PDL)
    row = tl.program_id(0)
    best, token = row_choice(peaks, places, row, chunks, LANES)
    tl.store(outgoing + 2 * row, best.to(tl.int32, bitcast=True))
    tl.store(outgoing + 2 * row + 1, token + first)


@triton.jit(
    do_not_specialize=["samples"], do_not_specialize_on_alignment=["owners", "slots", "last", "tokens", "faults"]
)
def _merge(every, ranks, samples, vocab, owners, slots, last, tokens, faults, RANKS: tl.constexpr,
           SEVERAL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Store the token of a sample, as `sampling._choose`; it is limited to `vocab` whatever ranks send."""
    wait_predecessor(PDL)
    sample, rank = tl.program_id(0), tl.arange(0, RANKS)
    at = every + (rank * samples + sample) * 2
    best = tl.load(at, mask=rank < ranks, other=-8388608).to(tl.float32, bitcast=True)  # -infinity
    ids = tl.load(at + 1, mask=rank < ranks, other=2147483647)
    peak = tl.max(best, 0)
    token = tl.minimum(tl.maximum(tl.min(tl.where(best == peak, ids, 2147483647), 0), 0), vocab - 1)
    store_choice(peak, token, sample, owners, slots, last, tokens, faults, SEVERAL)


@triton.jit(do_not_specialize=["rows"])
def _together(every, ranks, rows, totals, held, RANKS: tl.constexpr, PDL: tl.constexpr):
    """Replace this rank's totals by those of all ranks, and clear its list."""
    wait_predecessor(PDL)
    row, rank, lanes = tl.program_id(0), tl.arange(0, RANKS), tl.arange(0, 2 * NUM_MARKS)
    at = (rank[:, None] * rows + row) * 2 * NUM_MARKS + lanes[None, :]
    ranks_totals = tl.load(every + at, mask=rank[:, None] < ranks, other=0)
    tl.store(totals + row * 2 * NUM_MARKS + lanes, tl.sum(ranks_totals, 0))
    tl.store(held + row, 0)


@triton.jit
def _sum_ranks(every, ranks, rows, row, width, first, RANKS: tl.constexpr):
    """Return for each probe the sum over ranks of a row's numbers: a rank has `width`, those of probes from `first`
    on."""
    rank, places = tl.arange(0, RANKS), tl.arange(0, PROBES)
    at = (rank[:, None] * rows + row) * width + first + places[None, :]
    return tl.sum(tl.load(every + at, mask=rank[:, None] < ranks, other=0), 0)


@triton.jit
def _count_enough(sums, need):
    """Return the number of probes whose sum is at least `need`; sums descend from probe to probe."""
    return tl.sum((sums >= need).to(tl.int32), 0)


@triton.jit
def _probe_list(keys, held, low, step, WEIGH: tl.constexpr, KEYS: tl.constexpr):
    """Return for each probe the number, int32, or weight, int64, of this rank's listed keys >= low + (probe + 1) *
    step."""
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
def _by_count(shapes, peaks, totals, held, lists, room, borders, every, ranks, rows, before, step, outgoing, weighed,
              RANKS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """Do one step of the search for the key of a row's k-th token, which is at least borders[row]. Unless FIRST, narrow
    it by the ranks' results for probes `before` apart. Store this rank's results for probes `step` apart to `outgoing`,
    if LAST with weights."""
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
                tl.store(outgoing + row * ROW_WORDS + 2 * PROBES + places, counts)
                weights = _probe_list(keys, size, low, step, True, KEYS)
                tl.store(weighed + row * (ROW_WORDS // 2) + places, weights)
            else:
                tl.store(outgoing + row * PROBES + places, counts)


@triton.jit(do_not_specialize=["rows", "before", "step"])
def _by_weight(shapes, peaks, totals, held, lists, room, borders, needs, counted, every, ranks, rows, before, step,
               outgoing, RANKS: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Do one step of the search for the threshold, by weights. If FIRST, compute the k-th token's key from the ranks'
    results, and from it the weight of the first k tokens and needs[row], the weight that the bracket's keys from the
    threshold up must have. If LAST, store no results."""
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
                above = tl.sum(tl.where(places == passed, counts, 0), 0)  # the next probe is the next key
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
                tl.store(outgoing + row * PROBES + places, _probe_list(keys, size, low, step, True, KEYS))


def _own_logits(logits: Tensor, own: VocabShard) -> Tensor:
    """Return the logits [R, own.count] without padding; of a rank without tokens one column of the lowest logit."""
    return logits[:, : own.count] if own.count else torch.full_like(logits[:, :1], -torch.inf)


def local_max(logits: Tensor, own: VocabShard, pdl: bool = False) -> Tensor:
    """Return this rank's greatest logit of each row, as bits, and its id, int32 [R, 2], for `merge`; logits [R, at
    least own.count]."""
    logits, rows = _own_logits(logits, own), len(logits)
    scratch = SamplingScratch.allocate(rows, logits.shape[1], logits.device, has_truncation=False)
    options = launch_options(pdl)
    return _local_best(scratch, rows, own.first, find_peaks(logits, scratch, False, options), options)


def local_scores(
    logits: Tensor, own: VocabShard, params: Tensor, draw_rows: Tensor, seeds: Tensor, positions: Tensor,
    cut: tuple[Tensor, Tensor] | None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return the same with the greatest score of each sample, int32 [D, 2]. `cut`: the greatest logits of all ranks [R]
    and their `find_thresholds` [R]; None if no row has min_p, top_k or top_p."""
    logits, samples = _own_logits(logits, own), len(draw_rows)
    scratch = SamplingScratch.allocate(samples, logits.shape[1], logits.device, has_truncation=False)
    options = launch_options(pdl and launch_config(samples)[2])
    shape = find_scores(logits, own.first, params, draw_rows, seeds, positions, cut, scratch, options)
    return _local_best(scratch, samples, 0, shape, options)


def _local_best(
    scratch: SamplingScratch, count: int, first: int, shape: tuple[int, int], options: dict[str, bool]
) -> Tensor:
    local = torch.empty((count, 2), dtype=torch.int32, device=scratch.peaks.device)
    chunks, lanes = shape
    _best[(count,)](scratch.peaks, scratch.peak_ids, chunks, first, local, LANES=lanes, num_warps=1, **options)
    return local


def merge(
    every: Tensor, vocab: int, draw_rows: Tensor | None, slots: Tensor, last_sampled: Tensor, tokens: Tensor,
    faults: Tensor, pdl: bool = False,
) -> None:  # fmt: skip
    """Write the tokens and faults, as `sampling.sample`, from the ranks' results of `local_scores`, or without
    `draw_rows` of `local_max`: [ranks, D, 2]."""
    ranks, samples, _ = every.shape
    _merge[(samples,)](
        every, ranks, samples, vocab, slots if draw_rows is None else draw_rows, slots, last_sampled, tokens, faults,
        RANKS=triton.next_power_of_2(ranks), SEVERAL=draw_rows is not None, num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def find_thresholds(
    logits: Tensor, own: VocabShard, params: Tensor, row_peaks: Tensor, gather: Callable[[Tensor], Tensor],
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return the least keys [R] that top_k and top_p keep; undefined for rows with neither. `row_peaks` [R] are the
    greatest logits of all ranks. `gather` returns a tensor of all ranks, stacked in rank order; it is called eight
    times."""
    (rows, _), blocks, device = logits.shape, max(triton.cdiv(own.count, BLOCK), 1), logits.device
    _, each, early, _ = launch_config(rows)
    options = launch_options(pdl and early)
    totals = torch.zeros((rows, 2, NUM_MARKS.value), dtype=torch.int64, device=device)
    held, borders = torch.empty((2, rows), dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), own.count, params, row_peaks, 1, blocks, each)
    grid, tile = (triton.cdiv(blocks, each), rows), {"LANES": 1, "BLOCK": BLOCK, "num_warps": 4, **options}
    add_totals[grid](*row, totals, OCTAVES=OCTAVES, **tile)
    every = gather(totals)
    ranks, lanes = len(every), triton.next_power_of_2(len(every))
    _together[(rows,)](every, ranks, rows, totals, held, RANKS=lanes, num_warps=1, **options)
    lists = torch.empty((rows, max(own.count, 1)), dtype=torch.int32, device=device)
    list_keys[grid](*row, totals, held, lists, OCTAVES=OCTAVES, **tile)
    state = (params, row_peaks, totals, held, lists, own.count, borders)
    search = {"RANKS": lanes, "KEYS": SEARCH_KEYS, "num_warps": 8, **options}
    for before, step in pairwise((0, *PROBE_STEPS)):
        last = step == 1
        local = torch.empty((rows, ROW_WORDS.value if last else PROBES.value), dtype=torch.int32, device=device)
        _by_count[(rows,)](
            *state, every, ranks, rows, before, step, local, local.view(torch.int64), FIRST=not before, LAST=last,
            **search,
        )  # fmt: skip
        every = gather(local)
    counted, every = every, every.view(torch.int64)
    needs = torch.empty(rows, dtype=torch.int64, device=device)
    for before, step in pairwise((0, *PROBE_STEPS, 0)):
        local = torch.empty((rows, PROBES.value), dtype=torch.int64, device=device)
        _by_weight[(rows,)](
            *state, needs, counted, every, ranks, rows, before, step, local, FIRST=not before, LAST=not step, **search
        )  # fmt: skip
        if step:
            every = gather(local)
    return borders
