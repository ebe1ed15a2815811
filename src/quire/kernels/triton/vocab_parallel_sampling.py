"""Greedy and random sampling from vocab-parallel logits: each rank has a part of the vocabulary. For each row ranks
exchange the greatest logit, the weight of their tokens, and a token: 20 bytes; for rows with top_k or top_p more
(`find_thresholds`). The tokens are those of `kernels.triton.sampling` over all logits, because weights are integers,
whose partial sums are exact.

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
    find_peaks,
    key_weights,
    launch_config,
    launch_options,
    list_keys,
    load_keys,
    load_params,
    mark_key,
    row_max,
    threshold_bracket,
    wait_predecessor,
    weigh_blocks,
    weigh_kept,
)

OCTAVES = tl.constexpr(2)  # from mark to mark the likelihood falls by 2**OCTAVES
PROBES = tl.constexpr(64)  # keys that a search probes at once
PROBE_STEPS = (1 << 18, 1 << 12, 1 << 6, 1)  # between two probes; with the first, they cover the bracket of two marks
SEARCH_KEYS = 128  # keys of a list that a search reads together
ROW_WORDS = tl.constexpr(192)  # words of 4 bytes of a row's results, if sums are followed by counts


class VocabShard(NamedTuple):
    """A rank's part of the vocabulary: `count` tokens from `first` on. Further columns of its logits are padding."""

    rank: int
    first: int
    count: int


class RowMax(NamedTuple):
    """The greatest logit of each row over all ranks, fp32 [R], and its lowest id, int32 [R]."""

    peaks: Tensor
    peak_ids: Tensor


class TokenWeights(NamedTuple):
    """Weights of this rank's tokens that may be drawn: by block, int64 [R, blocks], and by row [R]; if rows may have
    top_k or top_p, also the least key that these keep, int32 [R]."""

    block_weights: Tensor
    row_weights: Tensor
    thresholds: Tensor | None = None


@triton.jit
def _best(peaks, places, chunks, first, outgoing, LANES: tl.constexpr, PDL: tl.constexpr):
    """Store a row's greatest logit of this rank, as bits, and its lowest id."""
    wait_predecessor(PDL)
    row = tl.program_id(0)
    best, token, _finite = row_max(peaks, places, row, chunks, LANES)
    tl.store(outgoing + 2 * row, best.to(tl.int32, bitcast=True))
    tl.store(outgoing + 2 * row + 1, token + first)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "last", "tokens", "faults"])
def _merge(every, ranks, rows, vocab, peaks, places, slots, last, tokens, faults,
           RANKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Store the greatest logit of all ranks and, as `sampling._choose`, the row's greedy token, which is limited to
    `vocab` whatever ranks send."""
    wait_predecessor(PDL)
    row, rank = tl.program_id(0), tl.arange(0, RANKS)
    at = every + (rank * rows + row) * 2
    best = tl.load(at, mask=rank < ranks, other=-8388608).to(tl.float32, bitcast=True)  # -infinity
    ids = tl.load(at + 1, mask=rank < ranks, other=2147483647)
    peak = tl.max(best, 0)
    token = tl.minimum(tl.maximum(tl.min(tl.where(best == peak, ids, 2147483647), 0), 0), vocab - 1)
    finite = tl.abs(peak) < float("inf")
    tl.store(peaks + row, peak)
    tl.store(places + row, token)
    token = tl.where(finite, token, 0)
    tl.store(tokens + row, token)
    tl.store(faults + row, 1 - finite.to(tl.int32))
    tl.store(last + tl.load(slots + row), token)


@triton.jit
def _sum(peaks, shapes, masses, blocks, totals, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Store the weight of a row's tokens on this rank; 0 for a row that is not drawn at random."""
    wait_predecessor(PDL)
    row, lanes = tl.program_id(0), tl.arange(0, BLOCKS)
    temperature, _min_p, _k, _p, _cut = load_params(shapes, row)
    drawn = (temperature > 0) & (tl.abs(tl.load(peaks + row)) < float("inf"))
    parts = tl.load(masses + row * blocks + lanes, mask=lanes < blocks, other=0)
    tl.store(totals + row, tl.where(drawn, tl.sum(parts, 0), 0))


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


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["owners", "chances"])
def _draw(logits, stride, count, first, rank, ranks, rows, shapes, peaks, masses, blocks, borders, every, owners,
          chances, outgoing, RANKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    """Store the token of one draw, as `sampling._draw`, if it is this rank's; else -1."""
    wait_predecessor(PDL)
    draw, others = tl.program_id(0), tl.arange(0, RANKS)
    row = tl.load(owners + draw).to(tl.int32)
    totals = tl.load(every + others * rows + row, mask=others < ranks, other=0)
    goal = (tl.sum(totals, 0).to(tl.float64) * tl.load(chances + draw)).to(tl.int64)
    goal -= tl.sum(tl.where(others < rank, totals, 0), 0)
    token = -1
    if (goal >= 0) & (goal < tl.sum(tl.where(others == rank, totals, 0), 0)):
        temperature, min_p, _k, _p, cut = load_params(shapes, row)
        lanes = tl.arange(0, BLOCKS)
        parts = tl.load(masses + row * blocks + lanes, mask=lanes < blocks, other=0)
        block = tl.minimum(tl.sum((tl.cumsum(parts, 0) <= goal).to(tl.int32), 0), blocks - 1)
        goal -= tl.sum(tl.where(lanes < block, parts, 0), 0)
        keys = load_keys(logits, stride, count, row, block, tl.load(peaks + row), temperature, min_p, BLOCK)
        if CUT:
            keys = tl.where(keys >= tl.load(borders + row, mask=cut, other=0), keys, 0)
        sums = tl.cumsum(key_weights(keys), 0)
        token = first + block * BLOCK + tl.minimum(tl.sum((sums <= goal).to(tl.int32), 0), BLOCK - 1)
    tl.store(outgoing + draw, token)


@triton.jit(do_not_specialize=["draws"], do_not_specialize_on_alignment=["owners", "slots", "last", "tokens"])
def _tell(every, ranks, draws, vocab, owners, slots, last, tokens, RANKS: tl.constexpr, PDL: tl.constexpr):
    """Replace the greedy token by the token that a rank has drawn, if any; for the row's first draw in `last` too."""
    wait_predecessor(PDL)
    draw, rank = tl.program_id(0), tl.arange(0, RANKS)
    token = tl.max(tl.load(every + rank * draws + draw, mask=rank < ranks, other=-1), 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(tokens + draw, token, mask=token >= 0)
    row, former = tl.load(owners + draw), tl.load(owners + draw - 1, mask=draw > 0, other=-1)
    tl.store(last + tl.load(slots + row), token, mask=(token >= 0) & (former != row))


def local_max(logits: Tensor, own: VocabShard, pdl: bool = False) -> Tensor:
    """Return this rank's greatest logit of each row and its id, int32 [R, 2], for `merge_max`; logits [R, at least
    own.count]."""
    logits = logits[:, : max(own.count, 1)]
    if not own.count:  # one token of the lowest logit
        logits = torch.full_like(logits, -torch.inf)
    rows = len(logits)
    scratch = SamplingScratch.allocate(rows, logits.shape[1], logits.device, has_random=False)
    local = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
    options = launch_options(pdl)
    chunks, lanes = find_peaks(logits, scratch, False, options)
    _best[(rows,)](
        scratch.peaks, scratch.peak_ids, chunks, own.first, local, LANES=lanes, num_warps=1, **options
    )  # fmt: skip
    return local


def merge_max(
    every: Tensor, vocab: int, slots: Tensor, last: Tensor, tokens: Tensor, faults: Tensor, pdl: bool = False
) -> RowMax:
    """Merge the ranks' results of `local_max` [ranks, R, 2]: write the greedy tokens, as sampling.greedy, and return
    the greatest logits."""
    ranks, rows, _ = every.shape
    maxima = RowMax(
        torch.empty(rows, dtype=torch.float32, device=every.device),
        torch.empty(rows, dtype=torch.int32, device=every.device),
    )
    _merge[(rows,)](
        every, ranks, rows, vocab, *maxima, slots, last, tokens, faults,
        RANKS=triton.next_power_of_2(ranks), num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return maxima


def weigh_tokens(logits: Tensor, own: VocabShard, shapes: Tensor, found: RowMax, pdl: bool = False) -> TokenWeights:
    """Return the weights of this rank's tokens, relative to the greatest logits `found`. shapes [R, 4] float64 are the
    params of sampling.sample; no row has top_k or top_p."""
    rows, blocks = len(logits), max(triton.cdiv(own.count, BLOCK), 1)
    _, each, early, _ = launch_config(rows)
    options = launch_options(pdl and early)
    masses = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    weigh_blocks[(triton.cdiv(blocks, each), rows)](
        logits, logits.stride(0), own.count, shapes, found.peaks, found.peak_ids, 1, blocks, each, masses, masses,
        LANES=1, BLOCK=BLOCK, CUT=False, OCTAVES=1, num_warps=4, **options,
    )  # fmt: skip
    return TokenWeights(masses, sum_weights(masses, shapes, found, options))


def find_thresholds(
    logits: Tensor, own: VocabShard, shapes: Tensor, found: RowMax, gather: Callable[[Tensor], Tensor],
    pdl: bool = False,
) -> TokenWeights:  # fmt: skip
    """Return the same as `weigh_tokens` for rows that may have top_k and top_p. `gather` returns a tensor of all ranks,
    stacked in rank order; it is called nine times."""
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
    weigh_kept[grid](*row, borders, masses, **tile)
    return TokenWeights(masses, sum_weights(masses, shapes, found, options), borders)


def sum_weights(masses: Tensor, shapes: Tensor, found: RowMax, options: dict[str, bool]) -> Tensor:
    """Return the row sums of masses [R, blocks], int64 [R]; 0 for rows that are not drawn at random."""
    rows, blocks = masses.shape
    totals = torch.empty(rows, dtype=torch.int64, device=masses.device)
    _sum[(rows,)](
        found.peaks, shapes, masses, blocks, totals, BLOCKS=triton.next_power_of_2(blocks), num_warps=1, **options
    )
    return totals


def draw_local(
    logits: Tensor, own: VocabShard, shapes: Tensor, owners: Tensor, chances: Tensor, found: RowMax,
    kept: TokenWeights, every: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Return the tokens of the draws from rows owners [D] (ascending) that are this rank's, int32 [D]; -1 for others
    and for rows that are not drawn at random. `every` [ranks, R] are the ranks' kept.row_weights; chances [D] float64
    in [0, 1)."""
    (ranks, rows), blocks = every.shape, kept.block_weights.shape[1]
    drawn = torch.empty(len(owners), dtype=torch.int32, device=logits.device)
    _draw[(len(owners),)](
        logits, logits.stride(0), own.count, own.first, own.rank, ranks, rows, shapes, found.peaks,
        kept.block_weights, blocks, kept.thresholds, every, owners, chances, drawn,
        RANKS=triton.next_power_of_2(ranks), BLOCKS=triton.next_power_of_2(blocks), BLOCK=BLOCK,
        CUT=kept.thresholds is not None, num_warps=4, **launch_options(pdl and launch_config(rows)[2]),
    )  # fmt: skip
    return drawn


def merge_draws(
    every: Tensor, vocab: int, owners: Tensor, slots: Tensor, last: Tensor, tokens: Tensor, pdl: bool = False
) -> None:
    """Merge the ranks' results of `draw_local` [ranks, D]: write the drawn tokens to tokens [D] and, for a row's first
    draw, to last[slots]."""
    ranks, draws = every.shape
    _tell[(draws,)](
        every, ranks, draws, vocab, owners, slots, last, tokens, RANKS=triton.next_power_of_2(ranks), num_warps=1,
        **launch_options(pdl and launch_config(draws)[2]),
    )  # fmt: skip
