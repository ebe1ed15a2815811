"""Sampling on a CPU: given the same likelihoods, the very tokens that quire.worker.gumbel keeps and chooses; and the
sampler with these kernels beside the sampler without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import NONE, VARIANTS, served_by
from torch import Tensor

from quire.kernels.cpu.library_loader import library
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SliceResult, SlotInit
from quire.worker.gumbel import best_scores, keep_tokens
from quire.worker.sampler import Sampler
from quire.worker.sampling_kernels import NativeSampling

pytestmark = pytest.mark.skipif(not VARIANTS, reason=NONE)
SHAPES = [
    (0.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 1.0), (0.6, 0.0, 0.0, 1.0), (1.3, 0.1, 0.0, 1.0), (1.0, 0.0, 7.0, 1.0),
    (1.0, 0.0, 0.0, 0.7), (0.8, 0.01, 40.0, 0.9), (2.0, 0.0, 1e6, 0.999),
]  # fmt: skip


def some_logits(rows: int, vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sampled(
    logits: Tensor, shape: Any, owner: Any = None, seeds: Any = None, positions: Any = None
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, faults, and what became of `last`, one slot a row."""
    shape = np.array(shape, dtype=np.float64)
    owner = np.arange(len(shape)) if owner is None else np.array(owner)
    seeds = np.arange(len(owner)) if seeds is None else np.array(seeds)
    positions = np.full(len(owner), 7) if positions is None else np.array(positions)
    last = torch.full((len(shape) + 2,), -1)
    tokens, faults = NativeSampling().draw(logits, shape, owner, seeds, positions, np.arange(len(shape)) + 2, last)
    return tokens.tolist(), faults.tolist(), last[2:].tolist()


def expected(logits: Tensor, shape: Any, owner: np.ndarray, seeds: np.ndarray, positions: np.ndarray) -> list[int]:
    shape, logits = np.array(shape, dtype=np.float64), logits.float()
    kept = keep_tokens(logits, logits.amax(-1), shape)
    tokens: list[int] = best_scores(kept, shape[:, 0], owner, seeds, positions)[1].tolist()
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 64, 1000, 1025, 49152])
@pytest.mark.usefixtures("variant")
def test_tokens_equal_those_of_torch(vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for seed in range(3):
        logits = some_logits(len(SHAPES), vocab, seed).to(dtype)
        owner = np.repeat(np.arange(len(SHAPES)), 3)
        seeds, positions = rng.integers(0, 2**63, len(owner)), rng.integers(0, 2**40, len(owner))
        tokens, faults, last = sampled(logits, SHAPES, owner, seeds, positions)
        assert not any(faults)
        assert last == tokens[::3], "a row's first sample is its slot's last"
        assert tokens == expected(logits, SHAPES, owner, seeds, positions)


@pytest.mark.usefixtures("variant")
def test_bounds_exclude_no_token_that_torch_chooses() -> None:
    """Logits at which rounding is coarse, temperatures at both ends, and vocabularies that are flat or have a peak."""
    for scale in (1e-3, 1.0, 30.0, 1e4):
        for temperature in (1e-5, 0.01, 0.3, 5.0, 100.0):
            for offset in (-3e4, 0.0, 500.0):
                logits, owner = some_logits(2, 700, 5, scale) + offset, np.repeat([0, 1], 10)
                shape, seeds, positions = [(temperature, 0, 0, 1.0)] * 2, np.arange(20), np.full(20, 3)
                tokens = sampled(logits, shape, owner, seeds, positions)[0]
                assert tokens == expected(logits, shape, owner, seeds, positions), (scale, temperature, offset)


@pytest.mark.skipif(library() is None, reason=NONE)
@given(
    st.integers(1, 300), st.integers(0, 2**16), st.floats(0.05, 30), st.sampled_from([0, 1, 2, 5, 50, 400]),
    st.sampled_from([0.0001, 0.3, 0.9, 0.9999, 1.0]), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.floats(0.2, 3),
)  # fmt: skip
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_kept_tokens_are_those_of_torch(
    vocab: int, seed: int, spread: float, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Logits are few integers, so that many tokens tie, and borders fall on ties."""
    logits = some_logits(1, vocab, seed, spread).round()
    shape = [(temperature, min_p, top_k, top_p)]
    owner, seeds, positions = np.zeros(64, dtype=np.int64), np.arange(64), np.full(64, seed)
    tokens, _, _ = sampled(logits, shape, owner, seeds, positions)
    assert tokens == expected(logits, shape, owner, seeds, positions)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.usefixtures("variant")
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    for vocab in (3, 16, 50, 1000):
        for place in (0, vocab // 2, vocab - 1):
            for shape in ((0.0, 0, 0, 1.0), (1.0, 0, 5, 0.9)):
                logits = some_logits(3, vocab, 0)
                logits[1, place] = bad
                tokens, faults, last = sampled(logits, [shape] * 3)
                assert faults == [0, 1, 0]
                assert tokens[1] == last[1] == 0
    assert sampled(torch.full((1, 40), -torch.inf), [(0.0, 0, 0, 1.0)])[1] == [1]
    masked = torch.full((1, 40), -torch.inf)
    masked[0, 33] = -5.0
    assert sampled(masked, [(1.0, 0, 0, 1.0)])[:2] == ([33], [0]), "masked logits are no fault"


@pytest.mark.usefixtures("variant")
def test_the_lowest_of_equal_tokens_is_greedy() -> None:
    for vocab in (1, 7, 40, 1001):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.zeros(2, vocab, dtype=dtype)
            logits[1, vocab // 3 :: 2] = 3.0
            assert sampled(logits, [(0.0, 0, 0, 1.0)] * 2)[0] == [0, vocab // 3]


@pytest.mark.usefixtures("variant")
def test_tails_give_what_draws_give() -> None:
    logits, last = some_logits(5, 700, 4), torch.zeros(9, dtype=torch.int64)
    shape, seeds, positions = np.array(SHAPES[1:4]), np.array([8, 2, 5]), np.array([1, 2**35, 3])
    native = NativeSampling()
    tails = native.epilogues(last, 8)
    native.fill_epilogue(np.array(SHAPES[1:6]), np.arange(5), np.arange(5))
    native.fill_epilogue(shape, seeds, positions)  # fewer rows: what they leave is greedy
    tokens, faults = tails["random"](logits, torch.tensor([1, 2, 3, 0, 0]))
    want, _, _ = sampled(logits[:3], shape, None, seeds, positions)
    assert tokens.tolist() == [*want, *logits[3:].argmax(-1).tolist()]
    assert not faults.any()
    assert last[1:4].tolist() == want
    assert tails["greedy"](logits, torch.arange(5))[0].tolist() == logits.argmax(-1).tolist()


def test_the_sampler_draws_as_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of rows at once, rules and penalties among them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.5, "logprobs": 3},
        {"temperature": 0, "logit_bias": {4: 9.0}}, {"allowed_token_ids": [3, 8, 44]}, {"repetition_penalty": 1.5},
    ]  # fmt: skip

    def finished(kernels: str) -> list[list[SliceResult]]:
        monkeypatch.setenv("QUIRE_CPU_KERNELS", kernels)
        sampler = Sampler(len(kinds) + 1, 500, torch.device("cpu"), (2,))
        for slot, kind in enumerate(kinds, 1):
            params = SamplingParams(max_tokens=9, **kind)
            sampler.init_slot(
                SlotInit(slot, slot, -1, params.to_device_params(), 77 + slot, 2, (5, 6), params.num_logprobs)
            )
        rows = [(slot, 2, 1 + slot % 2) for slot in range(1, len(kinds) + 1)]
        found = []
        for seed in range(20):
            found.append(sampler.collect(sampler.sample(some_logits(len(kinds), 500, seed), rows)))
        return found

    with served_by(VARIANTS[0], 2, monkeypatch):
        ours = finished(VARIANTS[0])
        library.cache_clear()
        theirs = finished("off")
        library.cache_clear()
    assert ours == theirs
