"""Draws from logits that are split over ranks, threads of this process: the very tokens of the undivided sampler, and
how many bytes a rank sends for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from thread_ranks import Meeting, ThreadExchange
from torch import Tensor

from quire.protocol.parallel_layout import Shard
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, TokenBitmask
from quire.worker.gumbel import WEIGHT_SCALE, best_scores, keep_tokens
from quire.worker.sampler import FAULT_MESSAGES, Sampler
from quire.worker.vocab_parallel_sampler import VocabParallelSampler
from quire.worker.vocab_parallel_sampling import VocabParallelSampling

RANKS = (2, 3, 4, 8)
VOCABS = (50, 700, 1030, 5000)  # 50: all but one rank have padding alone
PLAIN, CUT = 64, 4096  # bytes that a rank may send of a row with one draw, without and with top_k or top_p
T = TypeVar("T")


class Counting(ThreadExchange):
    """One that counts its gathers and the bytes that it sends."""

    rounds = bytes = 0

    def all_gather(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "collectives take nothing else"
        assert x.stride(-1) == 1, "nor where there is one row"
        self.rounds, self.bytes = self.rounds + 1, self.bytes + x.nbytes
        return super().all_gather(x)


def on_ranks(ranks: int, run: Callable[[Counting], T]) -> list[tuple[T, Counting]]:
    """What `run` returns on each rank, and what the rank's exchange has counted."""

    def counted(exchange: ThreadExchange) -> tuple[T, Counting]:
        counting = Counting(exchange.meeting, exchange.shard)
        return run(counting), counting

    return Meeting(ranks).run(counted)


def part_of(logits: Tensor, part: Shard) -> Tensor:
    """A rank's part of logits, its padding the greatest of all."""
    own, width = part.vocab_range(logits.shape[1]), part.padded_vocab_rows(logits.shape[1])
    mine = torch.full((len(logits), width), 1e4, dtype=logits.dtype)
    mine[:, : len(own)] = logits[:, own.start : own.stop]
    return mine


class Rows(NamedTuple):
    """Logits [R, V], shape [R, 4], owner and seeds [D]."""

    logits: Tensor
    shape: np.ndarray
    owner: np.ndarray
    seeds: np.ndarray

    @property
    def most_bytes(self) -> int:
        """What a rank may send of them."""
        cut = (self.shape[:, 0] > 0) & ((self.shape[:, 2] > 0) | (self.shape[:, 3] < 1))
        return int(np.where(cut, CUT, PLAIN).sum()) + 8 * (len(self.owner) - len(cut))

    def undivided(self) -> tuple[list[int], list[int]]:
        """Tokens and faults, as the sampler has them from whole logits."""
        logits = self.logits.float()
        best = logits.amax(-1)
        faults = (~best.isfinite()).long()
        kept = keep_tokens(logits, best, self.shape)
        tokens = best_scores(kept, self.shape[:, 0], self.owner, self.seeds, self.seeds // 3)[1]
        return torch.where(faults[torch.from_numpy(self.owner)] == 0, tokens, 0).tolist(), faults.tolist()

    def split(self, ranks: int) -> list[tuple[tuple[list[int], list[int]], Counting]]:
        """The same, of each rank."""

        def run(exchange: Counting) -> tuple[list[int], list[int]]:
            draws = VocabParallelSampling(exchange, self.logits.shape[1])
            mine = part_of(self.logits, exchange.shard)
            tokens, faults = draws.draw(mine, self.shape, self.owner, self.seeds, self.seeds // 3)
            return tokens.tolist(), faults.tolist()

        return on_ranks(ranks, run)


def some_rows(count: int, vocab: int, seed: int) -> Rows:
    """Rows of all kinds: with ties, masks, faults; greedy, and cut by several at once."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab), dtype=np.float32) * rng.choice([0.01, 0.3, 2, 9], (count, 1))
    logits = np.where(rng.random((count, 1)) < 0.3, np.round(logits), logits)
    masks = rng.random((count, vocab)) < rng.choice([0.1, 0.999], (count, 1))
    logits = np.where(masks & (rng.random((count, 1)) < 0.3), -np.inf, logits)
    for bad in (np.nan, np.inf):
        logits[rng.random(count) < 0.02, rng.integers(0, vocab)] = bad
    logits[rng.random(count) < 0.02] = -np.inf
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    shape = np.empty((count, 4))
    shape[:, 0] = rng.choice([0, 0.2, 1, 1, 1.7, 100], count)
    shape[:, 1] = rng.choice([0, 0, 0, 0.01, 0.5, 1], count)
    shape[:, 2] = rng.choice([0, 0, 0, 1, 2, 40, 400, 3000, vocab - 1], count)
    shape[:, 3] = rng.choice([1, 1, 1e-6, 0.3, 0.9, 0.95, 0.9999], count)
    owner = np.repeat(np.arange(count), rng.choice([1, 1, 1, 3], count))
    seeds = rng.integers(0, 2**63, len(owner))
    return Rows(torch.from_numpy(logits.astype(np.float32)).to(dtype), shape, owner, seeds)


def compare(count: int, seed: int) -> None:
    """`count` rows of each vocabulary, over each number of ranks."""
    for vocab in VOCABS:
        rows = some_rows(count, vocab, seed)
        expected = rows.undivided()
        for ranks in RANKS:
            for answer, exchange in rows.split(ranks):
                assert answer == expected, (vocab, seed, ranks, exchange.shard.tp_rank)
                assert exchange.bytes <= rows.most_bytes


def alike(count: int, vocab: int, spread: float, *shape: float) -> Rows:
    """Rows of one draw each."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((count, vocab), dtype=np.float32) * np.float32(spread))
    return Rows(logits, np.array([shape] * count), np.arange(count), rng.integers(0, 2**63, count))


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_undivided_sampler(seed: int) -> None:
    compare(125, seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_rows_are_those_of_the_undivided_sampler() -> None:
    for seed in range(100, 300):
        compare(125, seed)


@pytest.mark.parametrize(
    ("shape", "spread", "each", "rounds"),
    [
        ((0, 0, 0, 1), 2, 16, 1),
        ((0.8, 0, 0, 1), 2, 16, 1),
        ((0.8, 0.1, 0, 1), 2, 20, 2),
        ((1, 0, 40, 0.9), 2, 20 + 8 + 4 * 40, 3),
        ((1, 0, 0, 0.9), 9, 20 + 8 + 4 * 512, 3),
        ((1, 0, 4000, 0.9), 300, 20 + 8 + 4 * 512, 3),
        ((1, 0, 0, 0.9999), 0.01, 20 + 8 + 4 * 512 + 7 * 128, 10),
        ((1, 0, 4000, 0.9), 0.01, 20 + 8 + 4 * 512 + 7 * 128 + 16 + 7 * 128, 18),
    ],
)
def test_a_rank_sends_few_bytes_of_a_row_and_few_times(
    shape: tuple[float, ...], spread: float, each: int, rounds: int
) -> None:
    """A whole row of this vocabulary has 600 KB, and a rank's part of it 150 KB."""
    for count in (1, 3):
        rows = alike(count, 150_000, spread, *shape)
        for answer, exchange in rows.split(4):
            assert answer == rows.undivided()
            assert (exchange.bytes, exchange.rounds) == (count * each, rounds)
            assert each <= (CUT if shape[2] or shape[3] < 1 else PLAIN)


@pytest.mark.parametrize("ranks", RANKS)
def test_borders_that_only_counting_finds(ranks: int) -> None:
    """One is the likelihood 1, beside which the next smaller float is; another lies where less than k tokens weigh
    anything, and what they weigh is next to nothing."""
    logits = torch.full((3, 9000), -torch.inf)
    logits[:2, ::2], logits[:2, 1::2] = 0.0, -6e-8
    logits[2, :4800], logits[2, 0] = -21.4, 0.0
    weights = ((logits - logits.amax(-1, keepdim=True)).exp() * WEIGHT_SCALE).floor()
    assert sorted(set(weights[0].tolist())) == [2.0**32 - 2**8, 2.0**32]
    assert sorted(set(weights[2].tolist())) == [0.0, 2.0, 2.0**32]
    shape = np.array([(1, 0, 4300, 1), (1, 0, 0, 0.4), (1, 0, 8500, 2.0**32 / (2**32 + 2 * 5500))])
    rows = Rows(logits, shape, np.arange(3), np.arange(3))
    kept = keep_tokens(logits, logits.amax(-1), shape) > -torch.inf
    assert kept.sum(-1).tolist() == [4500, 4500, 1]
    assert kept[:2, ::2].all()
    for answer, exchange in rows.split(ranks):
        assert answer == rows.undivided()
        assert exchange.rounds == 18


def padding_is_drawn(draws: VocabParallelSampling) -> None:
    draws.vocab_range = replace(
        draws.vocab_range,
        local=range(draws.vocab_range.local.start, draws.vocab_range.local.start + draws.vocab_range.padded),
    )


PLANTED: dict[str, Callable[[VocabParallelSampling], None]] = {
    "a padded vocabulary row drawn": padding_is_drawn,
    "a peak of each rank's own": lambda draws: setattr(draws, "_row_peaks", lambda own: own.amax(-1)),
    "a border of each rank's own": lambda draws: setattr(draws, "_find_threshold", None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = VocabParallelSampling.__init__

    def planted(draws: VocabParallelSampling, *args: Any) -> None:
        before(draws, *args)
        PLANTED[name](draws)

    rows = alike(50, 700, 2.0, 1, 0, 0, 0.9)
    expected = rows.undivided()
    assert all(answer == expected for answer, _ in rows.split(3))
    monkeypatch.setattr(VocabParallelSampling, "__init__", planted)
    for (tokens, faults), _ in rows.split(3):
        first = next(token for token, wanted in zip(tokens, expected[0]) if token != wanted)
        assert (first >= 700) == (name == "a padded vocabulary row drawn")
        assert faults == expected[1]


# The sampler

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.9999, "temperature": 3.0},
    {"n": 3, "min_p": 0.01},
    {"temperature": 0.7, "logprobs": 3},
    {"logit_bias": {5: 4.0, 17: -100.0}, "min_tokens": 3, "stop_token_ids": [40]},
    {"min_tokens": 3, "temperature": 0.0},
    {"repetition_penalty": 1.4, "temperature": 0.0, "logprobs": 0},
    {"allowed_token_ids": [1, 5, 77, 300], "temperature": 1.5},
    {"n": 2, "bad_word_ids": ((5,), (3, 6)), "top_k": 9},
    {"beam_width": 2},
    {"logprob_token_ids": [9, 600]},
)
ASKED_MORE = len(KINDS) - 5


def drawn_by(sampler: Sampler, parts: list[Tensor]) -> tuple[list[list[SliceResult]], list[int]]:
    """What each step of these logits samples, and what is the last of each slot then."""
    last = torch.zeros(len(KINDS) + 2, dtype=torch.int64)
    for slot, kind in enumerate(KINDS, 2):
        params = SamplingParams(max_tokens=20, **kind)
        top = 60 if params.beam_width else params.num_logprobs
        sampler.init_slot(SlotInit(slot, slot, -1, params.to_device_params(), 77 + slot, 2, (5, 6), top))
    samples = []
    for step, logits in enumerate(parts):
        rows = [(slot, 2 + step, kind.get("n", 1)) for slot, kind in enumerate(KINDS, 2)]
        samples.append(sampler.collect(sampler.sample(logits, rows, last)))
    return samples, last.tolist()


def test_the_sampler_gathers_rows_that_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.sampler.has_kernels", lambda device, dtype: False)  # the definition
    vocab, generator = 700, torch.Generator().manual_seed(5)
    steps = [torch.randn(len(KINDS), vocab, generator=generator) * 3 for _ in range(6)]
    steps[0][7, 2], steps[1][[0, 5]] = 99.0, torch.nan
    expected = drawn_by(Sampler(len(KINDS) + 2, vocab, torch.device("cpu"), (2, 7)), steps)
    assert [sampled.error for sampled in expected[0][1]].count(FAULT_MESSAGES[1]) == 2

    def run(exchange: Counting) -> tuple[list[list[SliceResult]], list[int]]:
        sampler = VocabParallelSampler(len(KINDS) + 2, vocab, (2, 7), exchange)
        return drawn_by(sampler, [part_of(logits, exchange.shard) for logits in steps])

    for ranks in (2, 8):
        for answer, exchange in on_ranks(ranks, run):
            assert answer == expected
            gathered = 4 * exchange.shard.padded_vocab_rows(vocab) * (ASKED_MORE * len(steps) - 3)
            assert gathered < exchange.bytes < gathered + len(steps) * 5 * CUT


def test_runs_of_rows_are_those_of_the_undivided_sampler() -> None:
    """As draft tokens have them: rows of a slot at one position after another, of which the first few count; masks."""
    kinds, vocab = [kind for kind in KINDS if "n" not in kind], 700
    starts = [(2, 3), (3, 4), (7, 4), (8, 3)]  # of each step's runs, and their rows
    generator = torch.Generator().manual_seed(7)
    steps = [torch.randn(rows * len(kinds), vocab, generator=generator) * 3 for _, rows in starts]
    masks = [[TokenBitmask(2, np.random.default_rng(i).bytes(88)) for i in range(rows)] for _, rows in starts]

    def run(sampler: Sampler, parts: list[Tensor]) -> list[list[SliceResult]]:
        for slot, kind in enumerate(kinds, 2):
            params = SamplingParams(max_tokens=20, **kind)
            top = 60 if params.beam_width else params.num_logprobs
            sampler.init_slot(SlotInit(slot, slot, -1, params.to_device_params(), 77 + slot, 2, (5, 6), top))
        results = []
        for logits, (start, count), of_step in zip(parts, starts, masks):
            slices = [SeqSlice(slot, (1,), start - 1, 1) for slot, _ in enumerate(kinds, 2)]
            sampler.set_bitmasks(of_step, slices)
            rows = [(slot, start + i, 1) for slot, _ in enumerate(kinds, 2) for i in range(count)]
            results.append(sampler.collect(sampler.sample(logits, rows, torch.zeros(40, dtype=torch.int64))))
        return results

    expected = run(Sampler(40, vocab, torch.device("cpu"), (2, 7), 4), [logits.clone() for logits in steps])
    for answer, _ in on_ranks(
        3,
        lambda exchange: run(
            VocabParallelSampler(40, vocab, (2, 7), exchange, 4), [part_of(one, exchange.shard) for one in steps]
        ),
    ):
        assert answer == expected


@pytest.mark.parametrize("which", [[0, 1, 4], [5, 8]])
def test_a_step_of_one_sort_of_rows(which: list[int]) -> None:
    """Draws alone, or rows that are gathered alone."""
    logits = torch.randn(len(which), 700, generator=torch.Generator().manual_seed(6))

    def run(exchange: Counting) -> list[SliceResult]:
        sampler = VocabParallelSampler(len(KINDS), 700, (2,), exchange)
        for slot in which:
            params = SamplingParams(**KINDS[slot])
            sampler.init_slot(SlotInit(slot, slot, -1, params.to_device_params(), slot, 1, (5,), params.num_logprobs))
        mine = part_of(logits, exchange.shard)
        return sampler.collect(sampler.sample(mine, [(slot, 1, KINDS[slot].get("n", 1)) for slot in which]))

    (alone, _), *_ = on_ranks(1, run)
    assert all(answer == alone for answer, _ in on_ranks(3, run))
