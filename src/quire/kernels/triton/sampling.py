"""Greedy and random sampling with temperature, min_p, top_k and top_p, as quire.worker.gumbel defines it; and
masks over logits.

A token's score is its logit, or for a random row logit / temperature - log E with noise E of the seed, the position and
the token's id. The token of the greatest score is chosen, of chunks first, then of the row.

For rows with top_k and top_p nothing is sorted. A row's vocabulary is split over programs. A token's likelihood,
relative to the best token's, which has 1, is represented by the bits of its float32, the *key*, which is monotonic in
it. One pass counts and weighs the tokens above 16 marks, a second one lists the tokens between the two marks that
bracket the row's threshold (the least key that top_k and top_p keep), and a search in that list finds it. Weights are
integers, so that sums do not depend on the order of their terms, and a row's result depends only on the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.fast_launch import fast_launch

KEY_ONE = tl.constexpr(0x3F800000)  # the key of likelihood 1
MIN_KEY = tl.constexpr(0x2F800000)  # the key of 2**-32, the least likelihood with a weight above 0
# Keys at which tokens are counted: 2**-1 to 2**-15 and MIN_KEY, or further apart, by OCTAVES.
NUM_MARKS = tl.constexpr(16)
BLOCK = 2048  # tokens that a program weighs together
MASK_BLOCK = 4096  # tokens that a program masks
SEARCH_BLOCK = 2048  # tokens of a list that a search reads together
FEW_ROWS = 128  # up to as many rows, each has a multiprocessor to itself
REPRESENTATIVE_ROWS = (8, 16, 64, FEW_ROWS, 2 * FEW_ROWS)  # numbers of rows that use every compiled kernel


class SamplingScratch(NamedTuple):
    """Buffers that the kernels of one step pass on, for any number of rows and samples up to those of `allocate`."""

    peaks: Tensor  # float32 [samples * chunks]: the greatest logit of each chunk of a row, then score of a sample
    peak_ids: Tensor  # int32 [samples * chunks]: its lowest id
    row_peaks: Tensor  # float32 [rows]: the greatest logit; this and the following are empty without truncation
    mark_totals: Tensor  # int64 [rows, 2, NUM_MARKS]: number and weight of the tokens at or above each mark
    list_sizes: Tensor  # int32 [rows]: tokens in each list
    key_lists: Tensor  # int32 [rows, vocab]: keys between two marks, unordered
    thresholds: Tensor  # int32 [rows]: the least key that top_k and top_p keep

    @classmethod
    def allocate(
        cls, rows: int, vocab: int, device: torch.device, has_truncation: bool = True, samples: int = 0
    ) -> SamplingScratch:
        """Allocate buffers for at most `rows` rows and as many samples, or `samples` if these are more;
        `has_truncation` if some rows may have min_p, top_k or top_p."""
        samples = max(rows, samples)
        parts = max(
            count * triton.cdiv(vocab, launch_config(count)[0])
            for count in {samples, min(samples, 64), min(samples, 8)}
        )
        truncated = rows * has_truncation
        return cls(
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.int32, device=device),
            torch.empty(truncated, dtype=torch.float32, device=device),
            torch.empty(truncated, 2, NUM_MARKS.value, dtype=torch.int64, device=device),
            torch.empty(truncated, dtype=torch.int32, device=device),
            torch.empty(truncated, vocab, dtype=torch.int32, device=device),
            torch.empty(truncated, dtype=torch.int32, device=device),
        )


def launch_config(rows: int) -> tuple[int, int, bool, bool]:
    """Return what the launches for `rows` rows depend on: the logits of a program that finds the maximum (few for few
    rows, to occupy the device), the blocks of a program, whether programs start early (pdl), and whether there are more
    than FEW_ROWS. With many rows, early programs only take room from those they wait for: 32 rows took 10 % longer."""
    chunk = 1024 if rows <= 8 else 4096 if rows <= 64 else 8192
    return chunk, 1 if rows <= 16 else 4 if rows <= FEW_ROWS else 16, rows <= 16, rows > FEW_ROWS


@triton.jit
def wait_predecessor(PDL: tl.constexpr):
    """Wait for the kernel before, if PDL: all kernels of this file read its logits or scratch."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _peaks(logits, stride, vocab, peaks, places, totals, held, chunks, CHUNK: tl.constexpr, CUT: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """Store the greatest logit of a chunk and its lowest id; a NaN counts as infinity. Clear the row's counters if
    CUT."""
    wait_predecessor(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    peak = tl.max(x, 0)
    place = tl.min(tl.where(x == peak, ids, vocab), 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(places + row * chunks + chunk, place)
    if CUT:
        marks = tl.arange(0, 2 * NUM_MARKS)
        tl.store(
            totals + row * 2 * NUM_MARKS + marks, tl.zeros([2 * NUM_MARKS], tl.int64), mask=(marks >= 0) & (chunk == 0)
        )
        tl.store(held + row, 0, mask=chunk == 0)


@triton.jit
def _log_noise(bits):
    """Return log E of noise bits, with an error of 1e-6. u = (bits + 0.5) / 2**32, and E = -log(1 - u)."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((4294967295 - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, above 0
    series = tl.fma(u, 0.33570898, 0.14670368)  # (-log(1 - u) - u) / u**2 for small u, where 1 - u would lose bits
    series = tl.fma(u, series, 0.25711015)
    series = tl.fma(u, series, 0.33293071)
    series = tl.fma(u, series, 0.50000727)
    return tl.log(tl.where(u < 0.25, tl.fma(u * series, u, u), -tl.log(rest)))


@triton.jit(do_not_specialize_on_alignment=["owners", "seeds", "positions"])
def _scores(logits, stride, first, count, shapes, owners, seeds, positions, row_peaks, borders, peaks, places, chunks,
            CHUNK: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Store the greatest score of a sample among a chunk's tokens that are kept, and its lowest id. The logits are of
    `count` tokens from the id `first` on, a multiple of 64. A NaN counts as infinity. Without CUT,
    min_p, top_k and top_p are ignored."""
    wait_predecessor(PDL)
    chunk, sample = tl.program_id(0), tl.program_id(1)
    row = tl.load(owners + sample).to(tl.int32)
    temperature, min_p, _k, _p, cut = load_params(shapes, row)
    random = temperature > 0
    scale = tl.where(random, 1.0 / tl.where(random, temperature, 1.0), 1.0)
    position = tl.load(positions + sample)
    lanes, begin = tl.arange(0, CHUNK // 4), chunk * CHUNK
    zero = tl.zeros([CHUNK // 4], tl.int32)
    words = tl.philox(
        tl.load(seeds + sample), (first + begin) // 4 + lanes, zero + position.to(tl.int32),
        zero + (position >> 32).to(tl.int32), zero,
    )  # fmt: skip
    best = tl.full([CHUNK // 4], float("-inf"), tl.float32)
    ids = begin + lanes // 16 * 64 + lanes % 16
    best_ids = ids
    for word in tl.static_range(4):
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < count, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        score = tl.fma(x, scale, tl.where(random, -_log_noise(words[word]), 0.0))
        if CUT:
            row_best = tl.load(row_peaks + row)
            if random & (cut | (min_p > 0)) & (tl.abs(row_best) < float("inf")):
                likelihood = _likelihood(x, row_best, temperature)
                border = tl.load(borders + row, mask=cut, other=MIN_KEY)
                kept = (likelihood >= min_p) & (likelihood.to(tl.int32, bitcast=True) >= border)
                score = tl.where(kept, score, float("-inf"))
        better = score > best
        best, best_ids = tl.where(better, score, best), tl.where(better, ids, best_ids)
        ids += 16
    peak = tl.max(best, 0)
    tl.store(peaks + sample * chunks + chunk, peak)
    tl.store(places + sample * chunks + chunk, first + tl.min(tl.where(best == peak, best_ids, count), 0))


@triton.jit
def row_peak(peaks, row, chunks, LANES: tl.constexpr):
    """Return a row's greatest logit, and whether it is finite."""
    lanes = tl.arange(0, LANES)
    best = tl.max(tl.load(peaks + row * chunks + lanes, mask=lanes < chunks, other=float("-inf")), 0)
    return best, tl.abs(best) < float("inf")


@triton.jit
def row_choice(peaks, places, row, chunks, LANES: tl.constexpr):
    """Return a row's greatest logit or score, and its lowest id."""
    lanes = tl.arange(0, LANES)
    some = lanes < chunks
    parts = tl.load(peaks + row * chunks + lanes, mask=some, other=float("-inf"))
    best = tl.max(parts, 0)
    ids = tl.load(places + row * chunks + lanes, mask=some, other=2147483647)
    return best, tl.min(tl.where(parts == best, ids, 2147483647), 0)


@triton.jit
def store_choice(best, token, sample, owners, slots, last, tokens, faults, SEVERAL: tl.constexpr):
    """Store the token of a sample to `tokens`, and that of a row's first sample to its slot in `last`; 0 and a fault of
    the row if the greatest score is not finite. Without SEVERAL each row has one sample, and `owners` is not read."""
    finite = tl.abs(best) < float("inf")
    token = tl.where(finite, token, 0)
    row = sample
    is_first = sample >= 0
    if SEVERAL:
        row = tl.load(owners + sample).to(tl.int32)
        is_first = row != tl.load(owners + sample - 1, mask=sample > 0, other=-1)
    tl.store(tokens + sample, token)
    tl.store(faults + row, 1 - finite.to(tl.int32))
    tl.store(last + tl.load(slots + row), token, mask=is_first)


@triton.jit(do_not_specialize_on_alignment=["owners", "slots", "last", "tokens", "faults"])
def _choose(peaks, places, chunks, owners, slots, last, tokens, faults, LANES: tl.constexpr, SEVERAL: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """Store the token of a sample."""
    wait_predecessor(PDL)
    sample = tl.program_id(0)
    best, token = row_choice(peaks, places, sample, chunks, LANES)
    store_choice(best, token, sample, owners, slots, last, tokens, faults, SEVERAL)


@triton.jit
def load_params(shapes, row):
    """Return a row's temperature (0: greedy), min_p, top_k (0: off), top_p, and whether the latter two may truncate."""
    at = shapes + row * 4
    top_k, top_p = tl.load(at + 2).to(tl.int32), tl.load(at + 3)
    return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32), top_k, top_p, (top_k > 0) | (top_p < 1)


@triton.jit
def _likelihood(x, best, temperature):
    return tl.exp((x - best) * (1.0 / temperature))


@triton.jit
def load_keys(logits, stride, vocab, row, block, best, temperature, min_p, BLOCK: tl.constexpr):
    """Return the keys of a block's tokens; 0 for those below min_p and those of weight 0."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    likelihood = _likelihood(x, best, temperature)
    keys = likelihood.to(tl.int32, bitcast=True)
    return tl.where((likelihood >= min_p) & (keys >= MIN_KEY), keys, 0)


@triton.jit
def key_weights(keys):
    """Return the tokens' weights, floor(likelihood * 2**32)."""
    return (keys.to(tl.float32, bitcast=True) * 4294967296.0).to(tl.int64)


@triton.jit
def mark_key(j, OCTAVES: tl.constexpr):
    """Return the key of mark j. From mark to mark the likelihood falls by 2**OCTAVES; the last is MIN_KEY, and mark -1
    is above all keys."""
    return tl.where(j < 0, KEY_ONE + 1, tl.where(j == NUM_MARKS - 1, MIN_KEY, KEY_ONE - ((j + 1) * OCTAVES << 23))).to(
        tl.int32
    )


@triton.jit
def _marked(keys, OCTAVES: tl.constexpr, BLOCK: tl.constexpr):
    """Return for each mark (number << 48) + weight of the keys at or above it; a block weighs less than 2**48."""
    marks = tl.arange(0, NUM_MARKS)
    sums = tl.zeros([NUM_MARKS], tl.int64)
    packed = tl.where(keys > 0, key_weights(keys) + 281474976710656, 0)
    most = tl.max(keys, 0)
    for j in range(tl.sum((mark_key(marks, OCTAVES) > most).to(tl.int32), 0), NUM_MARKS):
        sums = tl.where(marks == j, tl.sum(tl.where(keys >= mark_key(j, OCTAVES), packed, 0), 0), sums)
    return sums


@triton.jit
def add_totals(logits, stride, vocab, shapes, peaks, chunks, blocks, each, totals, LANES: tl.constexpr,
               BLOCK: tl.constexpr, OCTAVES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Add the tokens of `each` blocks to the totals of a row with top_k or top_p."""
    wait_predecessor(PDL)
    first, row = tl.program_id(0) * each, tl.program_id(1)
    temperature, min_p, _k, _p, cut = load_params(shapes, row)
    best, finite = row_peak(peaks, row, chunks, LANES)
    if finite & (temperature > 0) & cut:
        marks = tl.arange(0, NUM_MARKS)
        counts = tl.zeros([NUM_MARKS], tl.int64)
        sums = tl.zeros([NUM_MARKS], tl.int64)
        for block in range(first, tl.minimum(first + each, blocks)):
            keys = load_keys(logits, stride, vocab, row, block, best, temperature, min_p, BLOCK)
            packed = _marked(keys, OCTAVES, BLOCK)
            counts += packed >> 48
            sums += packed & 281474976710655
        tl.atomic_add(totals + row * 2 * NUM_MARKS + marks, counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(totals + row * 2 * NUM_MARKS + NUM_MARKS + marks, sums, mask=counts > 0, sem="relaxed")


@triton.jit
def threshold_bracket(totals, row, top_k, top_p, OCTAVES: tl.constexpr):
    """Return (low, high, count, mass, total, bound): keys [low, high) contain the row's threshold, and the k-th token's
    key if `bound`, which is true if top_k truncates: at least k tokens have a weight. `count` and `mass`: number and
    weight of the tokens from high up; `total`: the weight of all."""
    marks = tl.arange(0, NUM_MARKS)
    counts = tl.load(totals + row * 2 * NUM_MARKS + marks)
    sums = tl.load(totals + row * 2 * NUM_MARKS + NUM_MARKS + marks)
    total = tl.max(sums, 0)
    bound = (top_k > 0) & (tl.max(counts, 0) >= top_k)
    of_k = tl.min(tl.where(counts >= top_k, marks, NUM_MARKS - 1), 0)
    sure = tl.where(bound, tl.max(tl.where(marks < of_k, sums, 0), 0), total)  # the first k weigh no less
    of_p = tl.min(tl.where(sums.to(tl.float64) >= sure.to(tl.float64) * top_p, marks, NUM_MARKS - 1), 0)
    of_p = tl.where(top_p < 1, of_p, NUM_MARKS - 1)
    first = tl.where(bound, tl.minimum(of_k, of_p), of_p)
    count = tl.max(tl.where(marks < first, counts, 0), 0)
    mass = tl.max(tl.where(marks < first, sums, 0), 0)
    low = mark_key(tl.where(bound, of_k, of_p), OCTAVES)
    return low, mark_key(first - 1, OCTAVES), count, mass, total, bound


@triton.jit
def list_keys(logits, stride, vocab, shapes, peaks, chunks, blocks, each, totals, held, lists,
            LANES: tl.constexpr, BLOCK: tl.constexpr, OCTAVES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """List the keys of `each` blocks that are within the row's bracket."""
    wait_predecessor(PDL)
    first, row = tl.program_id(0) * each, tl.program_id(1)
    temperature, min_p, top_k, top_p, cut = load_params(shapes, row)
    best, finite = row_peak(peaks, row, chunks, LANES)
    if finite & (temperature > 0) & cut:
        low, high, _count, _mass, _total, _bound = threshold_bracket(totals, row, top_k, top_p, OCTAVES)
        for block in range(first, tl.minimum(first + each, blocks)):
            keys = load_keys(logits, stride, vocab, row, block, best, temperature, min_p, BLOCK)
            inside = ((keys >= low) & (keys < high)).to(tl.int32)
            size = tl.sum(inside, 0)
            if size > 0:
                start = tl.atomic_add(held + row, size, sem="relaxed")
                at = start + tl.cumsum(inside, 0) - 1
                tl.store(lists + row.to(tl.int64) * vocab + at, keys, mask=inside > 0)


@triton.jit
def _descend(keys, held, low, high, need, WEIGH: tl.constexpr, LISTED: tl.constexpr):
    """Return the greatest key u in [low, high) such that the number, or if WEIGH the weight, of the keys >= u is at
    least `need` >= 1. For low this must be true."""
    while high - low > 1:
        step = (high - low + 3) // 4
        first = tl.zeros([LISTED], tl.int64)
        second = tl.zeros([LISTED], tl.int64)
        third = tl.zeros([LISTED], tl.int64)
        least = tl.full([LISTED], KEY_ONE + 1, tl.int32)  # of the keys in [low, high)
        most = tl.zeros([LISTED], tl.int32)
        for start in range(0, held, LISTED):
            ids = start + tl.arange(0, LISTED)
            key = tl.load(keys + ids, mask=ids < held, other=0)
            value = tl.full([LISTED], 1, tl.int64)
            if WEIGH:
                value = key_weights(key)
            first += tl.where(key >= low + step, value, 0)
            second += tl.where(key >= low + 2 * step, value, 0)
            third += tl.where(key >= low + 3 * step, value, 0)
            least = tl.minimum(least, tl.where(key >= low, key, KEY_ONE + 1))
            most = tl.maximum(most, tl.where(key < high, key, 0))
        passed = (tl.sum(first, 0) >= need).to(tl.int32)
        passed += (tl.sum(second, 0) >= need).to(tl.int32) + (tl.sum(third, 0) >= need).to(tl.int32)
        low = low + passed * step
        high = tl.minimum(tl.minimum(high, low + step), tl.max(most, 0) + 1)
        low = tl.maximum(low, tl.min(least, 0))
    return low


@triton.jit
def _first_k(keys, held, border, top_k, count, mass, LISTED: tl.constexpr):
    """Return the weight of a row's first k tokens. The k-th has the key `border`; `count` tokens above the list weigh
    `mass`."""
    counts = tl.zeros([LISTED], tl.int64)
    sums = tl.zeros([LISTED], tl.int64)
    for start in range(0, held, LISTED):
        ids = start + tl.arange(0, LISTED)
        key = tl.load(keys + ids, mask=ids < held, other=0)
        counts += (key > border).to(tl.int64)
        sums += tl.where(key > border, key_weights(key), 0)
    return mass + tl.sum(sums, 0) + (top_k - count - tl.sum(counts, 0)) * key_weights(border)


@triton.jit
def _search(shapes, peaks, chunks, vocab, totals, held, lists, row_peaks, borders, LANES: tl.constexpr,
            LISTED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Store a row's greatest logit and, if it has top_k or top_p, its threshold: the key of the first token, in
    descending order and among the first k, at which the sum of weights reaches top_p of that of the first k."""
    wait_predecessor(PDL)
    row = tl.program_id(0)
    temperature, _min_p, top_k, top_p, cut = load_params(shapes, row)
    best, finite = row_peak(peaks, row, chunks, LANES)
    tl.store(row_peaks + row, best)
    if finite & (temperature > 0) & cut:
        low, high, count, mass, total, bound = threshold_bracket(totals, row, top_k, top_p, 1)
        keys, size = lists + row.to(tl.int64) * vocab, tl.load(held + row)
        if bound:
            low = _descend(keys, size, low, high, top_k - count, False, LISTED)
            total = _first_k(keys, size, low, top_k, count, mass, LISTED)
        if top_p < 1:
            goal = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            low = _descend(keys, size, low, high, goal - mass, True, LISTED)
        tl.store(borders + row, low)


def find_peaks(logits: Tensor, scratch: SamplingScratch, cut: bool, pdl: dict[str, bool]) -> tuple[int, int]:
    """Fill `scratch.peaks` and `peak_ids`. Return the chunks of a row, and that number rounded up to a power of two."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    chunk = launch_config(rows)[0]
    chunks = triton.cdiv(vocab, chunk)
    _peaks[(chunks, rows)](
        logits, logits.stride(0), vocab, scratch.peaks, scratch.peak_ids, scratch.mark_totals, scratch.list_sizes,
        chunks, CHUNK=chunk, CUT=cut, num_warps=4 if chunk == 1024 else 8, **pdl,
    )  # fmt: skip
    return chunks, triton.next_power_of_2(chunks)


def launch_options(pdl: bool) -> dict[str, bool]:
    return {"PDL": pdl, "launch_pdl": pdl}


def greedy(
    logits: Tensor, slots: Tensor, last_sampled: Tensor, tokens: Tensor, faults: Tensor, scratch: SamplingScratch,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Set tokens[r] and last_sampled[slots[r]] to the lowest id of the greatest of logits [R, V], and faults[r] to 0.

    A row with a logit that is NaN or +infinite, or with none above -infinity, gets token 0 and fault 1. Logits are of
    any float type; `slots`, `last_sampled`, `tokens` and `faults` of any integer type. Two launches, which a CUDA graph
    may capture.
    """
    options = launch_options(pdl)
    chunks, lanes = find_peaks(logits, scratch, False, options)
    _choose[(len(logits),)](
        scratch.peaks, scratch.peak_ids, chunks, slots, slots, last_sampled, tokens, faults, LANES=lanes, SEVERAL=False,
        num_warps=1, **options,
    )  # fmt: skip


def find_scores(
    logits: Tensor, first: int, params: Tensor, draw_rows: Tensor, seeds: Tensor, positions: Tensor,
    cut: tuple[Tensor, Tensor] | None, scratch: SamplingScratch, pdl: dict[str, bool],
) -> tuple[int, int]:  # fmt: skip
    """Fill `scratch.peaks` and `peak_ids` for samples of logits [R, V] of the tokens from the id `first` on, a multiple
    of 64. `cut`: the greatest logits [R] and the thresholds [R]; None if no row has min_p, top_k or top_p. Return the
    same as `find_peaks`."""
    vocab, samples = logits.shape[1], len(draw_rows)
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    chunk = launch_config(samples)[0]
    chunks = triton.cdiv(vocab, chunk)
    row_peaks, borders = cut or (scratch.row_peaks, scratch.thresholds)
    _scores[(chunks, samples)](
        logits, logits.stride(0), first, vocab, params, draw_rows, seeds, positions, row_peaks, borders, scratch.peaks,
        scratch.peak_ids, chunks, CHUNK=chunk, CUT=cut is not None, num_warps=4 if chunk == 1024 else 8, **pdl,
    )  # fmt: skip
    return chunks, triton.next_power_of_2(chunks)


def sample(
    logits: Tensor, params: Tensor, draw_rows: Tensor, seeds: Tensor, positions: Tensor, slots: Tensor,
    last_sampled: Tensor, tokens: Tensor, faults: Tensor, scratch: SamplingScratch, has_truncation: bool = True,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Draw tokens [D] from the rows draw_rows [D] (ascending) of logits [R, V], as `greedy` where the temperature is 0.

    params [R, 4] float64: temperature, min_p, top_k (0: off), top_p; seeds and positions [D] int64 define the noise.
    `has_truncation` False promises that no random row has min_p, top_k or top_p: two launches, else six. The tokens
    that are kept, given the likelihoods as Triton's exp computes them, are those of quire.worker.gumbel; scores differ
    from its in their rounding. faults [R] as in `greedy`; the first token of a row is also written to
    last_sampled[slots[r]].
    """
    (rows, vocab), blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    _, each, early, many = launch_config(rows)
    options = launch_options(pdl and early)
    cut = None
    if has_truncation:
        chunks, lanes = find_peaks(logits, scratch, True, options)
        row = (logits, logits.stride(0), vocab, params, scratch.peaks, chunks, blocks, each)
        grid, tile = (triton.cdiv(blocks, each), rows), {"LANES": lanes, "BLOCK": BLOCK, "num_warps": 4, **options}
        add_totals[grid](*row, scratch.mark_totals, OCTAVES=1, **tile)
        list_keys[grid](*row, scratch.mark_totals, scratch.list_sizes, scratch.key_lists, OCTAVES=1, **tile)
        cut = scratch.row_peaks, scratch.thresholds
        _search[(rows,)](
            params, scratch.peaks, chunks, vocab, scratch.mark_totals, scratch.list_sizes, scratch.key_lists, *cut,
            LANES=lanes, LISTED=SEARCH_BLOCK if many else 2 * SEARCH_BLOCK, num_warps=8 if many else 16, **options,
        )  # fmt: skip
    chunks, lanes = find_scores(logits, 0, params, draw_rows, seeds, positions, cut, scratch, options)
    _choose[(len(draw_rows),)](
        scratch.peaks, scratch.peak_ids, chunks, draw_rows, slots, last_sampled, tokens, faults, LANES=lanes,
        SEVERAL=True, num_warps=1, **options,
    )  # fmt: skip


@fast_launch
@triton.jit
def _mask(logits, places, bits, vocab, row_stride, words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = token < vocab
        word = tl.load(bits + place * words + (token >> 5), mask=there, other=0)
        barred = ((word >> (token & 31)) & 1) == 0
        least = tl.full((BLOCK,), float("-inf"), tl.float32)  # the store converts it to the logits' dtype
        tl.store(logits + row * row_stride + token, least, mask=there & barred)


def mask_logits(logits: Tensor, mask_rows: Tensor, bits: Tensor) -> None:
    """Set logits [R, V], whose rows are contiguous, to -inf where the row's mask has no bit. The mask of row r is
    bits[mask_rows[r]], int32 [M, ceil(V / 32)], the lowest bit of a word first. mask_rows [R] int64; -1: no mask."""
    rows, vocab = logits.shape
    if rows:
        grid = (rows, -(-vocab // MASK_BLOCK))
        _mask[grid](logits, mask_rows, bits, vocab, logits.stride(0), bits.shape[1], BLOCK=MASK_BLOCK)
