"""Sampling kernels: given the same likelihoods, the very tokens that quire.worker.inverse_cdf keeps and draws.

Also the sampler with these kernels against the sampler without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from grids import CUDA, DEVICE, LAUNCHES, TYPES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.triton import sampling
from quire.kernels.triton.sampling import SamplingScratch
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SeqSlice, SlotInit
from quire.worker.inverse_cdf import WEIGHT_SCALE, draw, truncate
from quire.worker.sampler import Sampler
from quire.worker.sampling_kernels import TritonSampling

SOME = settings(
    max_examples=200 if CUDA else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def some_logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@triton.jit
def likelihood_kernel(logits, best, temperatures, out, vocab, SIZE: tl.constexpr):
    ids, row = tl.arange(0, SIZE), tl.program_id(0)
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    value = sampling._likelihood(x, tl.load(best + row), tl.load(temperatures + row).to(tl.float32))
    tl.store(out + row * vocab + ids, value, mask=ids < vocab)


def likelihoods_of(logits: Tensor, shape: np.ndarray) -> Tensor:
    """[R, V] on the host, by the kernels' own exp."""
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, device=DEVICE)
    temperatures = torch.from_numpy(np.where(shape[:, 0] > 0, shape[:, 0], 1)).to(DEVICE)
    best = logits.float().amax(-1)
    likelihood_kernel[(rows,)](logits, best, temperatures, out, vocab, SIZE=triton.next_power_of_2(vocab))
    return out.cpu()


class Outcome:
    """What the kernels make of logits [R, V] and shape [R, 4], with one draw for each of `owner`."""

    def __init__(
        self, logits: Tensor, shape: Any, owner: Any = None, chance: Any = None, pdl: bool = False, cut: bool = True
    ) -> None:
        self.logits, self.shape = logits.to(DEVICE), np.array(shape, dtype=np.float64)
        rows, vocab = logits.shape
        self.owner = np.arange(rows) if owner is None else np.array(owner)
        generator = np.random.default_rng(3)
        self.chance = generator.random(len(self.owner)) if chance is None else np.array(chance)
        self.tokens = torch.full((len(self.owner),), -1, device=DEVICE)
        self.faults = torch.full((rows,), -1, device=DEVICE)
        self.last = torch.full((rows + 5,), -1, device=DEVICE)
        self.scratch = SamplingScratch.allocate(rows, vocab, DEVICE, has_truncation=cut)
        shapes, owners, chances, slots = (
            torch.from_numpy(array).to(DEVICE) for array in (self.shape, self.owner, self.chance, np.arange(rows) + 5)
        )
        sampling.sample(
            self.logits, shapes, owners, chances, slots, self.last, self.tokens, self.faults, self.scratch, cut, pdl
        )

    def check(self) -> None:
        """Sets, sums and draws are those of runner.draws; no fault; a row's first token is in `last`."""
        random = self.shape[:, 0] > 0
        shape = np.where(random[:, None], self.shape, (1, 0, 0, 1))
        likelihood = likelihoods_of(self.logits, shape)
        weights = truncate(likelihood.clone(), shape).mul_(WEIGHT_SCALE).floor_()
        borders, cut = self.scratch.thresholds.cpu(), (shape[:, 2] > 0) | (shape[:, 3] < 1)
        for row in np.flatnonzero(cut & random):
            kept = (likelihood[row].view(torch.int32) >= borders[row]) & (likelihood[row] >= np.float32(shape[row, 1]))
            assert torch.equal(kept & (likelihood[row] >= 2.0**-32), weights[row] > 0), shape[row]
        sums = self.scratch.block_weights.sum(-1).cpu()
        assert torch.equal(sums[random].double(), weights[random].double().sum(-1))
        expected = draw(weights, self.owner, self.chance)
        greedy = self.logits.float().cpu().argmax(-1)[self.owner]
        expected = torch.where(torch.from_numpy(random[self.owner]), expected, greedy)
        assert self.tokens.tolist() == expected.tolist()
        assert not self.faults.any()
        firsts = np.unique(self.owner, return_index=True)[1]
        assert self.last[5:].tolist() == expected[firsts].tolist()


MIXED = [
    (1, 0, 0, 1), (0.7, 0, 0, 0.9), (1.3, 0.03, 0, 1), (0, 0, 0, 1), (1, 0, 20, 1), (0.9, 0.01, 45, 0.8),
    (2, 0, 3, 0.999), (1, 0.2, 30, 0.5),
]  # fmt: skip


@LAUNCHES
@pytest.mark.parametrize("vocab", [50, 2048, 3000])
def test_sets_sums_and_draws_equal_the_definition(vocab: int, dtype: torch.dtype, pdl: bool) -> None:
    for seed in range(8 if CUDA else 1):
        logits = some_logits(8, vocab, seed).to(dtype)
        Outcome(logits, np.roll(MIXED, seed, 0), pdl=pdl).check()


@st.composite
def cases(draw: Any) -> tuple[Tensor, list[tuple[float, float, int, float]]]:
    """Rows with many equal logits, and settings at and beyond all edges."""
    vocab = draw(st.sampled_from([1, 3, 50, 130, 2049]))
    rows, seed = draw(st.integers(1, 3)), draw(st.integers(0, 999))
    logits = some_logits(rows, vocab, seed, draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0])))
    grain = draw(st.sampled_from([None, 0.25, 1.0, 5.0]))
    logits = logits if grain is None else (logits / grain).round() * grain
    if draw(st.booleans()):
        hidden = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < draw(st.floats(0, 1))
        hidden[:, vocab // 2] = False
        logits[hidden] = -torch.inf
    shape = st.tuples(
        st.sampled_from([1.0, 1.0, 0.3, 1e-5, 4.0, 1e30]),
        st.sampled_from([0.0, 0.0, 0.05, 1e-12, 1.0]),
        st.sampled_from([0, 0, 1, 2, 7, 40, vocab - 1]),
        st.one_of(st.sampled_from([1.0, 1.0, 0.5, 0.9, 1e-300, 1 - 2**-53, 2**-33]), st.floats(1e-6, 1)),
    )
    return logits, [draw(shape) for _ in range(rows)]


@SOME
@given(cases())
def test_ties_and_edges_equal_the_definition(case: tuple[Tensor, list[tuple[float, float, int, float]]]) -> None:
    Outcome(*case).check()


def test_extreme_chances_and_several_draws_of_a_row() -> None:
    edges = [0.0, 5e-324, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-52, 1 - 2.0**-53]
    shape = [(1, 0, 0, 1), (0.5, 0, 9, 0.9), (0, 0, 0, 1)]
    logits = some_logits(3, 2500, 4)
    logits[:, 2000:] = -torch.inf
    Outcome(logits, shape, np.repeat(np.arange(3), len(edges)), edges * 3).check()


def test_rows_are_drawn_without_the_search_if_nothing_cuts() -> None:
    Outcome(some_logits(3, 2100, 5), [(1, 0, 0, 1), (0, 0, 0, 1), (0.4, 0.1, 0, 1)], cut=False).check()


def test_a_row_is_the_same_in_every_batch_and_slot() -> None:
    """9 rows are split into other chunks than 8; a row's neighbours have faults."""
    logits, chance = some_logits(9, 1500, 7), np.random.default_rng(8).random(9)
    shape = np.array([*MIXED, (1, 0, 0, 0.7)], dtype=np.float64)
    whole = Outcome(logits, shape, chance=chance).tokens
    order = np.array([4, 1, 7, 8])
    part = Outcome(logits[order], shape[order], chance=chance[order])
    assert part.tokens.tolist() == whole[order].tolist()
    spoilt = logits.clone()
    spoilt[3, 5], spoilt[4, 1400], spoilt[7, 700], spoilt[8] = torch.nan, torch.inf, torch.nan, -torch.inf
    outcome = Outcome(spoilt, shape, chance=chance)
    bad = [3, 4, 7, 8]
    assert outcome.faults.tolist() == [int(row in bad) for row in range(9)]
    assert outcome.tokens.tolist() == [0 if row in bad else token for row, token in enumerate(whole.tolist())]


@LAUNCHES
@pytest.mark.parametrize("rows", [1, 9])
def test_greedy_takes_the_lowest_of_equals_and_names_faults(rows: int, dtype: torch.dtype, pdl: bool) -> None:
    vocab = 4500
    padded = torch.full((rows, vocab + 20), 1e4)  # the stride is not the vocabulary
    padded[:, :vocab] = some_logits(rows, vocab, 9)
    padded[:, [1023, 1024, 4499]] = 90.0
    logits = padded.to(DEVICE, dtype)[:, :vocab]
    slots, last = torch.arange(rows, device=DEVICE), torch.full((rows,), -1, device=DEVICE)
    tokens, faults = torch.full((2, rows), -1, device=DEVICE)
    scratch = SamplingScratch.allocate(12, vocab, DEVICE, has_random=False)

    def check(token: int, fault: int) -> None:
        """Of the last row."""
        sampling.greedy(logits, slots, last, tokens, faults, scratch, pdl)
        assert tokens.tolist() == last.tolist() == [1023] * (rows - 1) + [token]
        assert faults.tolist() == [0] * (rows - 1) + [fault]

    check(1023, 0)
    for bad in (torch.nan, torch.inf):
        logits[-1, 4400] = bad
        check(0, 1)
    logits[-1] = -torch.inf
    check(0, 1)
    logits[-1, 4300] = -5.0
    check(4300, 0)


def test_what_follows_the_logits_in_a_graph_equals_the_sampler() -> None:
    """With kernels and without; padded, with a fault, and with other parameters and noise at each replay."""
    sampler, plain = Sampler(9, 300, DEVICE, ()), Sampler(9, 300, torch.device("cpu"), ())
    sampler._kernels = TritonSampling(300, DEVICE)  # as on a GPU
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"top_p": 0.8}, {"top_k": 4, "min_p": 0.1}]
    for slot, values in enumerate(kinds, 1):
        for one in (sampler, plain):
            one.init_slot(SlotInit(slot, slot, -1, SamplingParams(**values).to_device_params(), slot * 7, 1, (1,)))
    last = torch.full((9,), -1, device=DEVICE)
    tails = sampler.epilogues(last, 6)
    logits = some_logits(6, 300, 13).to(DEVICE)
    logits[1, 3] = torch.nan
    for step, (name, slots) in enumerate([("cut", [3, 1, 4, 2]), ("random", [2, 1, 1]), ("greedy", [1, 1])], 5):
        rows = [SeqSlice(slot, (1,), step - 1, 1) for slot in slots]
        assert sampler.epilogue_for(rows) == name
        if name != "greedy":
            sampler.fill_epilogue(rows)
        padded = torch.tensor(slots + [0] * (6 - len(slots)), device=DEVICE)
        samples = sampler.collect(sampler.from_graph(*tails[name](logits, padded), rows))
        for one in (sampler, plain):
            drawn = one.sample(logits[: len(slots)].to(one.device), [(slot, step, 1) for slot in slots])
            assert samples == one.collect(drawn)
        assert ["not finite" in sampled.error for sampled in samples] == [row == 1 for row in range(len(slots))]
        for slot, sampled in zip(slots, samples):
            assert last[slot] == sampled.tokens[0] or slots.count(slot) > 1
    assert last[5:].tolist() == [-1] * 4


def test_representatives_need_all_kernels_that_any_number_of_rows_needs() -> None:
    assert {sampling.launch_config(rows) for rows in sampling.REPRESENTATIVE_ROWS} == {
        sampling.launch_config(rows) for rows in range(1, 2000)
    }


@TYPES
def test_a_rehearsal_leaves_nothing_out(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, samples, ways = TritonSampling(300, DEVICE), sampling.sample, []

    def sample(*args: Any) -> None:
        samples(*args)
        ways.append((args[0].dtype, len(args[0]), args[9], args[6].tolist(), args[7].tolist()))

    monkeypatch.setattr(sampling, "sample", sample)
    fused.warmup(9, dtype)
    assert ways == [(dtype, 9, cut, [0] * 9, [0] * 9) for cut in (False, True)]
