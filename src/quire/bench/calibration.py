"""Measure what a preemption costs on this machine by swapping and by recomputation, and fit PreemptionCosts.

Every sample moves pages between the engine's buffers, or computes a prompt (PagedAttention §7.3). The fastest of its
repeats counts, since disturbances only make a sample slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.bench.shapes import clock_of, local_runner, wait_for_device
from quire.core.engine import Engine
from quire.core.preemption_costs import PreemptionCosts
from quire.memory.interface import KVMemory
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence as Seq

if TYPE_CHECKING:
    from quire.worker.store import Store

REPEATS = 7
FIRST = 16  # tokens of the shortest sample
LONGEST = 16384
ROOM = 512  # tokens reserved for the sequence that decodes
TOKEN = 11


class Swap(NamedTuple):
    """One swap: tokens and bytes moved, seconds out and seconds in."""

    tokens: int
    bytes: int
    out: float
    back: float


class Fit(NamedTuple):
    """Coefficients, none below 0, with the maximum and the median relative error of the samples."""

    coefficients: list[float]
    worst_error: float
    median_error: float


def calibrate(engine: Engine, repeats: int = REPEATS) -> dict[str, Any]:
    """Return the costs, their fits and the samples. The engine must be idle, with host pages to swap to."""
    lengths = _lengths(engine)
    swaps = [swap_seconds(engine, length, repeats) for length in lengths]
    added = compute_seconds(engine, lengths, repeats)
    swap = fit([[1.0, float(s.bytes)] for s in swaps], [s.out + s.back for s in swaps])
    compute, free_tokens = fit_computed(lengths, added)
    costs = PreemptionCosts._make([*swap.coefficients, *compute.coefficients, free_tokens])
    return {
        "costs": costs._asdict(),
        "swap_fit": {"worst_error": swap.worst_error, "median_error": swap.median_error},
        "compute_fit": {"worst_error": compute.worst_error, "median_error": compute.median_error},
        "swaps": [s._asdict() for s in swaps],
        "computed": [{"tokens": n, "added": seconds} for n, seconds in zip(lengths, added)],
    }


def _lengths(engine: Engine) -> list[int]:
    """Return lengths from FIRST on, each 1.5 times the one before, that fit into the memory and the host pages."""
    memory = engine.scheduler.memory
    most = min(engine.limits.max_len - 2, LONGEST, host_tokens(memory.kv_config))
    lengths, length = [], FIRST
    while length <= most and memory.fits([length + 1, ROOM]):
        lengths.append(length)
        length += -(-length // 2)
    return lengths


def host_tokens(geometry: KVCacheConfig) -> int:
    """Return the tokens of the longest sequence that host memory holds."""
    if geometry.large_bytes:
        return geometry.tokens_in_large_pages(on_host=True)
    sharing = Counter(group.host_ids for group in geometry.groups)
    return min(group.tokens_in_pages(len(group.host_ids) // sharing[group.host_ids]) for group in geometry.groups)


def swap_seconds(engine: Engine, length: int, repeats: int) -> Swap:
    """Measure the seconds to swap a sequence of `length` tokens out and in: the memory's bookkeeping and the copies."""
    memory = engine.scheduler.memory
    store = local_runner(engine).store
    out: list[float] = []
    back: list[float] = []
    held = 0
    for _ in range(repeats):
        seq = Seq(engine.scheduler.new_seq_id(), [TOKEN] * length)
        assert memory.admit([seq], length) is not None, "a sequence doesn't fit into an idle memory"
        seq.computed = seq.planned = length
        held, _ = memory.count_held([seq])
        store.apply_page_ops(memory.take_page_ops()[0])
        for moments, move in ((out, memory.swap_out), (back, memory.swap_in)):
            moments.append(_timed(engine, partial(_moved, move, seq, memory, store)))
        memory.free(seq)
    memory.take_page_ops()
    return Swap(length, held, min(out), min(back))


def _moved(move: Callable[[list[Seq]], bool], seq: Seq, memory: KVMemory, store: Store) -> None:
    assert move([seq]), "the host pages are full"
    store.apply_page_ops(memory.take_page_ops()[0])


def compute_seconds(engine: Engine, lengths: Sequence[int], repeats: int) -> list[float]:
    """Return, for each length, the seconds that a prompt of that length adds to the steps of a decoding sequence: the
    running sequences need these steps in any case. No prompt hits the prefix cache."""
    budget, added = engine.scheduler.token_budget, []
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    for length in lengths:
        steps = engine.depth + 1 + -(-length // budget)
        many = SamplingParams(max_tokens=2 * (repeats + 1) * steps, temperature=0.0, ignore_eos=True, detokenize=False)
        engine.add("calibrate", [TOKEN] * FIRST, many)
        _steps(engine, steps)
        without, with_it = [], []
        for i in range(repeats):
            without.append(_timed(engine, partial(_steps, engine, steps)))
            engine.add(f"calibrate-{i}", [TOKEN] * length, one, salt=f"calibrate-{length}-{i}")
            with_it.append(_timed(engine, partial(_steps, engine, steps)))
        engine.abort("calibrate")
        while engine.has_unfinished_requests:
            engine.step()
        added.append(max(min(with_it) - min(without), 0.0))
    return added


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _timed(engine: Engine, work: Callable[[], None]) -> float:
    """Return the seconds of `work` by `clock_of`."""
    runner = local_runner(engine)
    clock = clock_of(runner)
    wait_for_device(runner.device)
    began = clock()
    work()
    wait_for_device(runner.device)
    return clock() - began


def fit_computed(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[Fit, float]:
    """Fit the costs of prompts of these lengths: fixed, of a token, and of a pair. Return them and the number of tokens
    that are free (see PreemptionCosts), with which the maximum error is least."""
    fits = [(fit([[1.0, max(n - free, 0.0), n * n / 2] for n in lengths], seconds), free) for free in (0.0, *lengths)]
    return min(fits, key=lambda found: found[0].worst_error)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], whole: Sequence[float] | None = None) -> Fit:
    """Fit coefficients, none below 0, that minimize the sum of squared relative errors, by trying all subsets of the
    few columns. Errors are relative to `whole`, of which `seconds` may be a part."""
    wanted = np.array(seconds)
    against = wanted if whole is None else np.array(whole)
    weight = 1 / np.maximum(against, 0.01 * against.max())
    matrix = np.array(rows) * weight[:, None]
    scale = np.abs(matrix).max(axis=0)  # columns differ by orders of magnitude
    scale[scale == 0] = 1.0
    best, least = np.zeros(matrix.shape[1]), float("inf")
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            chosen = list(columns)
            found = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], wanted * weight, rcond=None)[0] / scale[chosen]
            missed = float(((matrix[:, chosen] @ found - wanted * weight) ** 2).sum())
            if (found >= 0).all() and missed < least:
                best, least = np.zeros(matrix.shape[1]), missed
                best[chosen] = found
    errors = np.abs(matrix @ best - wanted * weight)
    return Fit(best.tolist(), float(errors.max()), float(np.median(errors)))
