"""Sampling kernels: given the same likelihoods, the very tokens that quire.worker.gumbel keeps; of these the token of
the greatest score.

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
from quire.worker.gumbel import WEIGHT_SCALE, best_scores, exponential_noise, truncate
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
    """What the kernels make of logits [R, V] and shape [R, 4], with one sample for each of `owner`."""

    def __init__(
        self, logits: Tensor, shape: Any, owner: Any = None, seeds: Any = None, pdl: bool = False, cut: bool = True
    ) -> None:
        self.logits, self.shape = logits.to(DEVICE), np.array(shape, dtype=np.float64)
        rows, vocab = logits.shape
        self.owner = np.arange(rows) if owner is None else np.array(owner)
        self.seeds = np.arange(len(self.owner)) + 2**40 if seeds is None else np.array(seeds)
        self.positions = 2**33 + 5 * self.seeds
        self.tokens = torch.full((len(self.owner),), -1, device=DEVICE)
        self.faults = torch.full((rows,), -1, device=DEVICE)
        self.last = torch.full((rows + 5,), -1, device=DEVICE)
        self.scratch = SamplingScratch.allocate(rows, vocab, DEVICE, cut, len(self.owner))
        arrays = self.shape, self.owner, self.seeds, self.positions, np.arange(rows) + 5
        inputs = [torch.from_numpy(array).to(DEVICE) for array in arrays]
        sampling.sample(self.logits, *inputs, self.last, self.tokens, self.faults, self.scratch, cut, pdl)

    def check(self) -> None:
        """The kept tokens are those of `truncate`, the token is that of the greatest score up to rounding; no fault; a
        row's first token is in `last`."""
        random = self.shape[:, 0] > 0
        shape = np.where(random[:, None], self.shape, (1, 0, 0, 1))
        likelihood = likelihoods_of(self.logits, shape)
        kept = truncate(likelihood.clone(), shape) * WEIGHT_SCALE >= 1
        by_key = (shape[:, 2] > 0) | (shape[:, 3] < 1)
        for row in np.flatnonzero(by_key & random):
            above = likelihood[row].view(torch.int32) >= self.scratch.thresholds[row].item()
            above &= likelihood[row] >= np.float32(shape[row, 1])
            assert torch.equal(above & (likelihood[row] >= 2.0**-32), kept[row]), shape[row]
        cut = torch.from_numpy(random & (by_key | (shape[:, 1] > 0)))
        logits = self.logits.cpu().float().masked_fill(cut[:, None] & ~kept, -torch.inf)
        best, tokens = best_scores(logits, self.shape[:, 0], self.owner, self.seeds, self.positions)
        for d, token in enumerate(self.tokens.tolist()):
            row, temperature = self.owner[d], self.shape[self.owner[d], 0]
            if not random[row]:
                assert token == tokens[d]
                continue
            noise = exponential_noise(
                *(torch.from_numpy(x[d : d + 1]) for x in (self.seeds, self.positions)), 0, len(logits[0])
            )
            score = logits[row, token].double() / temperature - noise[0, token].log()
            assert score >= best[d] - 1e-6 * (1 + abs(logits[row]).where(logits[row].isfinite(), 0).max() / temperature)
        assert not self.faults.any()
        firsts = np.unique(self.owner, return_index=True)[1]
        assert self.last[5:].tolist() == self.tokens[firsts].tolist()


MIXED = [
    (1, 0, 0, 1), (0.7, 0, 0, 0.9), (1.3, 0.03, 0, 1), (0, 0, 0, 1), (1, 0, 20, 1), (0.9, 0.01, 45, 0.8),
    (2, 0, 3, 0.999), (1, 0.2, 30, 0.5),
]  # fmt: skip


@LAUNCHES
@pytest.mark.parametrize("vocab", [50, 2048, 3000])
def test_kept_and_chosen_tokens_equal_the_definition(vocab: int, dtype: torch.dtype, pdl: bool) -> None:
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


def test_several_samples_of_a_row() -> None:
    logits = some_logits(3, 2500, 4)
    logits[:, 2000:] = -torch.inf
    outcome = Outcome(logits, [(1, 0, 0, 1), (0.5, 0, 9, 0.9), (0, 0, 0, 1)], np.repeat(np.arange(3), 8))
    outcome.check()
    assert len(set(outcome.tokens[:8].tolist())) > 1


def test_noise_bits_that_round_to_1_leave_finite_scores() -> None:
    """A token that alone is kept is sampled, whatever its noise."""
    bits = torch.tensor([0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 2**7, 2**32 - 1])
    logs = torch.empty(8, device=DEVICE)
    log_noise_kernel[(1,)](torch.nn.functional.pad(bits, (0, 1)).to(DEVICE), logs, SIZE=8)
    expected = ((bits.double() + 0.5) * -(2.0**-32)).log1p().neg().log()
    torch.testing.assert_close(logs[:7].cpu().double(), expected, atol=2e-6, rtol=1e-6)


@triton.jit
def log_noise_kernel(bits, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, sampling._log_noise(tl.load(bits + places).to(tl.uint32)))


def test_rows_are_sampled_in_two_launches_if_nothing_cuts() -> None:
    Outcome(some_logits(3, 2100, 5), [(1, 0, 0, 1), (0, 0, 0, 1), (0.4, 0, 0, 1)], cut=False).check()


def test_a_row_is_the_same_in_every_batch_and_slot() -> None:
    """9 rows are split into other chunks than 8; a row's neighbours have faults."""
    logits, seeds = some_logits(9, 1500, 7), np.random.default_rng(8).integers(0, 2**60, 9)
    shape = np.array([*MIXED, (1, 0, 0, 0.7)], dtype=np.float64)
    whole = Outcome(logits, shape, seeds=seeds).tokens
    order = np.array([4, 1, 7, 8])
    part = Outcome(logits[order], shape[order], seeds=seeds[order])
    assert part.tokens.tolist() == whole[order].tolist()
    spoilt = logits.clone()
    spoilt[3, 5], spoilt[4, 1400], spoilt[7, 700], spoilt[8] = torch.nan, torch.inf, torch.nan, -torch.inf
    outcome = Outcome(spoilt, shape, seeds=seeds)
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
    scratch = SamplingScratch.allocate(12, vocab, DEVICE, has_truncation=False)

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
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"min_p": 0.2}, {"top_k": 4, "min_p": 0.1}]
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
        ways.append((args[0].dtype, len(args[0]), args[10], args[7].tolist(), args[8].tolist()))

    monkeypatch.setattr(sampling, "sample", sample)
    fused.warmup(9, dtype)
    assert ways == [(dtype, 9, cut, [0] * 9, [0] * 9) for cut in (False, True)]
