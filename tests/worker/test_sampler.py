"""The sampler against transformers' logits processors, brute force and statistics; a row against its batch mates."""

from __future__ import annotations

import dataclasses
import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, TokenBitmask
from quire.worker import penalties
from quire.worker.gumbel import best_scores, exponential_noise, keep_tokens, philox
from quire.worker.sampler import LogitRules, PendingSamples, Sampler
from quire.worker.token_bitmasks import TokenBitmasks

VOCAB = 500  # not a multiple of the block that draws are searched in
EOS = (2, 7)
WARPERS = {
    "temperature": TemperatureLogitsWarper, "min_p": MinPLogitsWarper, "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 1.5) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def history_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


class OnDevice:
    """A sampler on the GPU if there is one, for logits on the host."""

    def __init__(self, slots: int = 40, vocab: int = VOCAB) -> None:
        self.inner = Sampler(slots, vocab, DEVICE, EOS)
        self.birth, self.finish = self.inner.init_slot, self.inner.collect
        self.tail_of = self.inner.epilogue_for

    def sample(self, logits: Tensor, rows: list[tuple[int, int, int]]) -> PendingSamples:
        return self.inner.sample(logits.to(DEVICE), rows)

    def process(self, logits: Tensor, rows: list[tuple[int, int, int]]) -> Tensor:
        there = logits.to(DEVICE)
        before = there.clone()
        result = self.inner.process_logits(there, rows).cpu()
        assert torch.equal(there, before), "the caller's logits were changed"
        return result


a_sampler = OnDevice


def born(
    sampler: OnDevice, slot: int, params: SamplingParams, history: tuple[int, ...], prompt: int, seed: int
) -> None:
    top = params.num_logprobs if params.beam_width is None else 30 * params.beam_width
    sampler.birth(SlotInit(slot, slot, -1, params.to_device_params(), seed, prompt, history, top))


def kept_of(logits: Tensor, **kinds: float) -> Tensor:
    settings = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | kinds
    shape = np.array([list(settings.values())] * len(logits), dtype=np.float64)
    return keep_tokens(logits, logits.amax(-1), shape)


def processed(params: SamplingParams, logits: Tensor, history: tuple[int, ...], prompt: int) -> Tensor:
    sampler = a_sampler()
    born(sampler, 3, params, history, prompt, 0)
    return sampler.process(logits, [(3, len(history), 1)])


# Distributions


@pytest.mark.parametrize(
    "kinds",
    [
        *({"temperature": temperature} for temperature in (0.6, 1.7)),
        *({"top_k": top_k} for top_k in (1, 17, VOCAB)),
        *({"top_p": top_p} for top_p in (1e-6, 0.3, 0.9, 0.9999)),
        *({"min_p": min_p} for min_p in (0.08, 1.0)),
        {"top_k": 300, "top_p": 0.97},
        {"temperature": 0.8, "min_p": 0.01, "top_k": 50, "top_p": 0.9},
    ],
)
def test_kept_tokens_and_their_probabilities_equal_transformers(kinds: dict[str, Any]) -> None:
    for vocab, spread in ((VOCAB, 1.5), (3, 1.0), (257, 1.0), (5000, 0.1)):
        logits = expected = some_logits(16, seed=1, vocab=vocab, spread=spread)
        for kind, warper in WARPERS.items():
            if kind in kinds:
                expected = warper(kinds[kind])(None, expected)
        kept = kept_of(logits, **kinds)
        assert torch.equal(kept > -torch.inf, expected > -torch.inf)
        probabilities = (kept.double() / kinds.get("temperature", 1.0)).softmax(-1)
        torch.testing.assert_close(probabilities, expected.double().softmax(-1), atol=1e-7, rtol=1e-5)


def test_equally_likely_tokens_stand_or_fall_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    together = [False, True, True, True, True, False]
    assert (kept_of(logits, top_k=2) > -torch.inf).tolist() == [together]
    assert (kept_of(logits, top_p=0.6) > -torch.inf).tolist() == [together]
    assert (kept_of(logits, top_k=2, top_p=0.99) > -torch.inf).tolist() == [together]


# Draws


@pytest.mark.parametrize("across", ["positions", "seeds", "branches"])
def test_drawn_frequencies_follow_the_distribution(across: str) -> None:
    logits, params = some_logits(1, seed=3, vocab=40, spread=1.0), SamplingParams(temperature=0.8)
    expected = (logits[0] / 0.8).double().softmax(-1).numpy()
    sampler, slots, rounds = a_sampler(vocab=40), range(32), 200
    observed = np.zeros(40)
    for step in range(rounds):
        for slot in slots:
            if step == 0 or across != "positions":
                born(sampler, slot, params, (1,), 1, seed=step * 32 + slot)
        position = 1 + (step if across == "positions" else 0)
        rows = [(0, 1, 32)] if across == "branches" else [(slot, position, 1) for slot in slots]
        drawn = sampler.sample(logits.expand(len(rows), -1), rows)
        observed += np.bincount(drawn.tokens.cpu().numpy(), minlength=40)
    total = rounds * len(slots)
    chi_square = ((observed - expected * total) ** 2 / (expected * total)).sum()
    assert 15 < chi_square < 75, chi_square  # 39 degrees of freedom: beyond either end with probability 0.0005


def test_philox_equals_published_vectors() -> None:
    """kat_vectors of Random123, the authors' library: counter, key, result of philox4x32-10."""
    vectors = (
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    )  # fmt: skip
    for counter, key, known in vectors:
        (c0, c1, c2, c3), (k0, k1) = torch.tensor(counter), torch.tensor(key)
        assert " ".join(f"{int(word):08x}" for word in philox((c0, c1, c2, c3), (k0, k1))) == known


def test_noise_is_of_the_seed_position_and_id_that_philox_gets() -> None:
    seeds, positions = torch.tensor([0, 0xA4093822 | 0x299F31D0 << 32]), torch.tensor([0, 0x13198A2E << 32 | 7])
    noise = exponential_noise(seeds, positions, 64, 200)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    first = exponential_noise(seeds[:1], positions[:1], 0, 64)[0, ::16]
    torch.testing.assert_close(first, -torch.log1p(-(torch.tensor(words).double() + 0.5) / 2**32), atol=0, rtol=1e-15)
    for token in (64, 70, 79, 80, 127, 128, 263):
        counter = torch.tensor([token // 64 * 16 + token % 16, 7, 0x13198A2E, 0])
        word = philox(tuple(counter), (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))[token // 16 % 4]
        assert noise[1, token - 64].item() == pytest.approx(-np.log1p(-(int(word) + 0.5) / 2**32), rel=1e-14)


def test_noise_is_exponential_and_independent_of_neighbours() -> None:
    """Neighbours are the next seed, position and token."""
    seeds, positions = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="ij")
    noise = exponential_noise(seeds.reshape(-1), positions.reshape(-1), 0, 192).view(60, 60, 192)
    uniform = (-noise).exp().numpy()
    count = uniform.size
    assert len(np.unique(uniform)) > count * (1 - 2 * count / 2**32), "no more equal numbers than of 32 random bits"
    observed = np.bincount((uniform * 100).astype(int).ravel(), minlength=100)
    assert 55 < ((observed - count / 100) ** 2 / (count / 100)).sum() < 155  # 99 degrees of freedom
    for shift in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 16), (1, -1, 0), (0, 1, -1), (1, 0, 1)):
        neighbours = np.roll(uniform, shift, (0, 1, 2))
        assert abs(np.corrcoef(uniform.ravel(), neighbours.ravel())[0, 1]) < 5 / count**0.5
        pairs = np.bincount(((uniform * 8).astype(int) * 8 + (neighbours * 8).astype(int)).ravel(), minlength=64)
        assert 30 < ((pairs - count / 64) ** 2 / (count / 64)).sum() < 115  # 63 degrees of freedom


def test_a_token_of_small_probability_is_sampled_as_often_as_it_should() -> None:
    """Its probability is that of the smallest noise among 100,000 tokens."""
    vocab, samples = 100_000, 400
    logits = torch.zeros(1, vocab)
    tokens = best_scores(logits, np.ones(1), np.zeros(samples, dtype=np.int64), np.arange(samples), np.arange(samples))[
        1
    ]
    assert len(tokens.unique()) > samples - 10
    quarters = np.bincount(tokens.numpy() * 4 // vocab, minlength=4)
    assert ((quarters - samples / 4) ** 2 / (samples / 4)).sum() < 18  # 3 degrees of freedom: probability 0.0005


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_common_noise_makes_similar_distributions_agree(spread: float) -> None:
    """As often as Daliri et al. (2024, theorem 2) prove: at least (1 - TV) / (1 + TV)."""
    pairs, positions = 8, 800
    model, draft = some_logits(pairs, 5), some_logits(pairs, 5) + some_logits(pairs, 6, spread=spread)
    distance = (model.double().softmax(-1) - draft.double().softmax(-1)).abs().sum(-1) / 2
    rows, seeds = np.repeat(np.arange(pairs), positions), np.repeat(np.arange(pairs), positions)
    where = np.tile(np.arange(positions), pairs)
    sampled = [best_scores(logits, np.ones(pairs), rows, seeds, where)[1] for logits in (model, draft)]
    accepted = (sampled[0] == sampled[1]).double().view(pairs, positions).mean(-1)
    proven = (1 - distance) / (1 + distance)
    assert accepted.mean() >= proven.mean() - 3 * 0.5 / (pairs * positions) ** 0.5
    assert accepted.mean() <= (1 - distance).mean() + 3 * 0.5 / (pairs * positions) ** 0.5, "the most of any coupling"


def test_rows_are_plain_while_greedy_is_all_they_ask() -> None:
    sampler = a_sampler()
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 3}, {"min_tokens": 4}, {"ignore_eos": True, "max_tokens": 9}, {"logprobs": 1},
        {"logprob_token_ids": [4]}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [4]}, {"bad_word_ids": ((4,),)},
        {"bad_word_ids": ((4, 5),)}, {"presence_penalty": 0.1}, {"beam_width": 2}, {"temperature": 1.0}, {"n": 2},
    ]  # fmt: skip
    for slot, values in enumerate(kinds):
        born(sampler, slot, SamplingParams(**({"temperature": 0.0} | values)), (1, 2, 3), 3, slot)
    plain = [
        sampler.tail_of([SeqSlice(slot, (7,), 6, kinds[slot].get("n", 1))]) == "greedy" for slot in range(len(kinds))
    ]
    assert plain == [True, True, True, True] + [False] * 10
    assert sampler.tail_of([SeqSlice(2, (7,), 5, 1)]) != "greedy", "its end tokens are masked still"
    assert sampler.tail_of([SeqSlice(slot, (7,), 6, 1) for slot in (3, 0, 2, 1)]) == "greedy"
    assert sampler.tail_of([SeqSlice(slot, (7,), 6, 1) for slot in (3, 0, 5, 1)]) != "greedy"
    assert sampler.tail_of([SeqSlice(2, (5, 6, 7), 4, 1)]) == "greedy"
    for slot, (values, tail) in enumerate(
        [({"min_p": 0.1}, "cut"), ({"top_k": 3}, "cut"), ({"top_p": 0.9}, "cut"), ({}, "random")]
    ):
        born(sampler, slot, SamplingParams(**values), (1,), 1, slot)
        assert [sampler.tail_of([SeqSlice(other, (7,), 6, 1) for other in (3, slot)])] == [tail]


# Masks, biases, penalties


def test_penalties_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = penalties.TokenHistory(VOCAB, torch.device("cpu"))
    for slot, length in enumerate((3, 40, 7, 300)):
        statistics.init_slot(slot, history_of(slot, length), 2)
    logits, factors = some_logits(4), np.array([[1.3, 0.2, 0.1]] * 4)
    whole = statistics.apply_penalties(logits, range(4), factors)
    monkeypatch.setattr(penalties, "PENALTY_BATCH_TOKENS", 700)
    assert torch.equal(statistics.apply_penalties(logits, range(4), factors), whole)


def test_a_long_sequence_leaves_no_room_behind() -> None:
    statistics = penalties.TokenHistory(VOCAB, torch.device("cpu"))
    statistics.init_slot(1, history_of(1, 5000), 4990)
    statistics.init_slot(2, history_of(2, 5), 1)
    statistics.drop(1)
    assert statistics.tokens.shape[1] >= 5000, "another one's tokens are there"
    statistics.drop(2)
    assert statistics.tokens.shape[1] == penalties.INITIAL_CAPACITY


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_all_penalties_follow_tokens_that_only_the_device_has_seen(factor: float) -> None:
    """Repetition is transformers', of all tokens; frequency and presence count output tokens only."""
    likely = some_logits(1, seed=8)[0].topk(3).indices.tolist()
    words = ((9,), *permutations(likely, 2), (likely[2], likely[2], likely[2]))
    params = SamplingParams(
        temperature=0, repetition_penalty=factor, frequency_penalty=0.3, presence_penalty=0.6, bad_word_ids=words
    )
    without = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=torch.tensor([499]))
    sampler, tokens = a_sampler(), list(history_of(8, 240))  # grows past the first table of tokens
    prompt, banned = len(tokens), 0
    born(sampler, 1, params, tuple(tokens), prompt, 0)
    for step in range(60):
        logits = some_logits(1, seed=8, spread=2.5) + 0.1 * some_logits(1, seed=step)
        expected = without(torch.tensor([tokens]), logits)
        banned += int((expected == -torch.inf).sum()) - 1
        expected = RepetitionPenaltyLogitsProcessor(factor)(torch.tensor([tokens]), expected)[0]
        counts = torch.bincount(torch.tensor(tokens[prompt:], dtype=torch.int64), minlength=VOCAB)
        expected = expected - 0.3 * counts - 0.6 * (counts > 0)
        torch.testing.assert_close(sampler.process(logits, [(1, len(tokens), 1)])[0], expected, atol=1e-5, rtol=0)
        drawn = sampler.sample(logits, [(1, len(tokens), 1)])
        assert drawn.tokens.tolist() == [int(expected.argmax())]
        tokens += drawn.tokens.tolist()
    assert max(tokens[prompt:].count(token) for token in tokens[prompt:]) > 1
    assert banned > 10, "words of several tokens would have been completed"


def test_bad_words_equal_transformers() -> None:
    logits, history = some_logits(1, seed=9), history_of(9, 30)
    words = ((5,), (*history[-1:], 6), (*history[-3:], 7), (history[-2], history[-1] + 1, 8))
    words += ((1, *history, 10), (*history[1:], 11))  # longer than the text, and almost all of it
    reference = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=torch.tensor([499]))
    result = processed(SamplingParams(bad_word_ids=words), logits, history, 29)
    assert torch.equal(result, reference(torch.tensor([history]), logits))
    assert (result == -torch.inf).nonzero()[:, 1].tolist() == [5, 6, 7, 11]


def test_min_tokens_equals_transformers_and_ends() -> None:
    logits, history = some_logits(1, seed=10), history_of(10, 20)
    params = SamplingParams(min_tokens=5, stop_token_ids=[30], ignore_eos=True)
    reference = MinNewTokensLengthLogitsProcessor(14, 5, [*EOS, 30])
    for length in range(14, 20):
        expected = reference(torch.zeros(1, length, dtype=torch.int64), logits)
        assert torch.equal(processed(params, logits, history[:length], 14), expected)
        assert (expected[0, 30] == -torch.inf) == (length < 19)


def test_bias_and_allowed_tokens() -> None:
    logits = some_logits(1, seed=11)
    expected = SequenceBiasLogitsProcessor([[[4], 3.5], [[8], -100.0]])(torch.tensor([[1]]), logits)
    assert torch.equal(processed(SamplingParams(logit_bias={4: 3.5, 8: -100.0}), logits, (1,), 1), expected)
    result = processed(SamplingParams(allowed_token_ids=[3, 4, 9], logit_bias={4: 3.5}), logits, (1,), 1)
    assert (result > -torch.inf).nonzero()[:, 1].tolist() == [3, 4, 9]
    assert torch.equal(result[0, [3, 4, 9]], expected[0, [3, 4, 9]])


# A row and its batch mates

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 3},
    {"top_k": 20},
    {"top_k": 400, "top_p": 0.99},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.05, "logprobs": 20},
    {"repetition_penalty": 1.4, "temperature": 0.0, "logprobs": 0},
    {"frequency_penalty": 0.5, "presence_penalty": -0.5, "top_p": 0.8},
    {"logit_bias": {5: 4.0, 17: -100.0}, "min_tokens": 3, "stop_token_ids": [40]},
    {"allowed_token_ids": [1, 5, 77, 300], "temperature": 1.5},
    {"bad_word_ids": ((5,), (3, 6), (1, 2, 3, 4))},
    {"n": 3, "temperature": 1.2},
    {"n": 2, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 1, "repetition_penalty": 1.1},
    {"temperature": 0.0, "bad_word_ids": ((8, 9), (9,))},
    {"beam_width": 2},
    {"beam_width": 2, "logit_bias": {5: 4.0, 17: -100.0}, "allowed_token_ids": [1, 2, 5, 17]},
    {"beam_width": 20, "repetition_penalty": 1.4, "logprobs": 3},
    {"logprob_token_ids": [9]},
    {"n": 3, "logprob_token_ids": [17, 3, 5], "logit_bias": {17: -100.0}, "repetition_penalty": 1.4},
    {"logprob_token_ids": list(range(128)), "temperature": 0.0},
)


def run_batch(picks: list[int], slots: list[int], logits: Tensor) -> list[list[SliceResult]]:
    """Per pick: what each step of logits [steps, kinds, V] sampled, when the picked kinds run in the given slots."""
    sampler = a_sampler(vocab=logits.shape[-1])
    for kind, slot in zip(picks, slots):
        born(sampler, slot, SamplingParams(**KINDS[kind]), history_of(kind, 20 + kind), 10 + kind, kind * 99)
    samples: list[list[SliceResult]] = [[] for _ in picks]
    for step in range(len(logits)):
        rows = [(slot, 20 + kind + step, KINDS[kind].get("n", 1)) for kind, slot in zip(picks, slots)]
        finished = sampler.finish(sampler.sample(logits[step, picks], rows))
        for mine, sampled in zip(samples, finished):
            mine.append(sampled)
    return samples


@pytest.mark.parametrize(("threads", "vocab"), [(1, VOCAB), (2, 20_000)])
def test_a_row_alone_equals_the_row_in_any_batch(threads: int, vocab: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = some_logits(5 * len(KINDS), seed=12, vocab=vocab, spread=2.0).view(5, len(KINDS), vocab)
        alone = [run_batch([kind], [0], logits)[0] for kind in range(len(KINDS))]
        rng = np.random.default_rng(13)
        for size in (16, 16, 9, 5, 2, 2):
            picks = rng.permutation(len(KINDS))[:size].tolist()
            slots = rng.permutation(40)[:size].tolist()
            assert run_batch(picks, slots, logits) == [alone[kind] for kind in picks]
    finally:
        torch.set_num_threads(before)


def test_a_sequence_born_again_with_its_history_goes_on_as_before() -> None:
    for kind, values in enumerate(KINDS):
        params = dataclasses.replace(SamplingParams(**values), n=1)
        logits = some_logits(12, seed=14 + kind, spread=2.0)
        whole, again = a_sampler(), a_sampler()
        tokens = list(history_of(kind, 9))
        born(whole, 4, params, tuple(tokens), 9, kind)
        for step in range(12):
            if step == 6:
                born(again, 5, SamplingParams(repetition_penalty=2.0), (1, 2, 3), 1, 1)  # who had the slot before
                born(again, 5, params, tuple(tokens) if params.needs_history else (), 9, kind)
            row = logits[step : step + 1]
            expected = whole.finish(whole.sample(row, [(4, len(tokens), 1)]))
            if step >= 6:
                assert again.finish(again.sample(row, [(5, len(tokens), 1)])) == expected
            tokens += expected[0].tokens


def test_rows_of_one_slot_see_the_samples_before_them() -> None:
    """Runs of rows, of which the first few count: each row samples what a slot that is born with its tokens does."""
    kinds = (
        SamplingParams(temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.8, logprobs=2),
        SamplingParams(temperature=0, presence_penalty=2.0, bad_word_ids=((5, 7), (9,))),
        SamplingParams(temperature=2.0, min_tokens=7, logprobs=0),
        SamplingParams(temperature=0.9),
    )
    sampler, rng, narrow = Sampler(8, VOCAB, DEVICE, EOS, 4), np.random.default_rng(3), 60
    tokens = {slot: list(history_of(slot, 4 + slot)) for slot in range(1, 1 + len(kinds))}

    def init(slot: int) -> SlotInit:
        params = kinds[slot - 1]
        return SlotInit(
            slot, slot, -1, params.to_device_params(), 7 * slot, 4 + slot, tuple(tokens[slot]), params.num_logprobs
        )

    for slot in tokens:
        sampler.init_slot(init(slot))
    for step in range(12):
        rows = [(slot, len(tokens[slot]) + i, 1) for slot in tokens for i in range(rng.integers(1, 5))]
        logits = some_logits(len(rows), seed=step)
        logits[:, narrow:] = -30.0  # so that tokens come again
        logits = logits.to(DEVICE)
        results = sampler.collect(sampler.sample(logits.clone(), rows))
        for slot, before in tokens.items():
            of_slot = [i for i, row in enumerate(rows) if row[0] == slot]
            for i in of_slot:
                alone = Sampler(8, VOCAB, DEVICE, EOS)
                alone.init_slot(init(slot))
                assert alone.collect(alone.sample(logits[i : i + 1].clone(), [rows[i]])) == [results[i]]
                before.extend(results[i].tokens)
            del before[len(before) - int(rng.integers(0, len(of_slot))) :]


def test_a_fork_starts_with_its_parents_tokens_and_its_own_seed() -> None:
    params = SamplingParams(repetition_penalty=1.8, frequency_penalty=0.7, bad_word_ids=((3, 4),))
    logits, history = some_logits(8, seed=15, spread=1.0), history_of(15, 12)
    sampler, fresh = a_sampler(), a_sampler()
    born(sampler, 1, params, history, 6, 100)
    tokens = list(history)
    for step in range(4):
        tokens += sampler.sample(logits[step : step + 1], [(1, len(tokens), 1)]).tokens.tolist()
    sampler.birth(SlotInit(2, 2, 1, None, 555, 6))
    born(fresh, 9, params, tuple(tokens), 6, 555)
    child, parent = list(tokens), list(tokens)
    for step in range(4, 8):
        pair = logits[[step, step]]
        assert torch.equal(
            sampler.process(pair[:1], [(2, len(child), 1)]), fresh.process(pair[:1], [(9, len(child), 1)])
        )
        expected = fresh.sample(pair[:1], [(9, len(child), 1)]).tokens.tolist()
        both = sampler.sample(pair, [(1, len(parent), 1), (2, len(child), 1)]).tokens.tolist()
        assert both[1:] == expected
        parent, child = parent + both[:1], child + expected
    assert parent != child


def test_a_fork_of_a_row_of_several_draws_takes_its_own_history() -> None:
    params = SamplingParams(n=3, frequency_penalty=2.0)
    sampler, history = a_sampler(), history_of(16, 5)
    born(sampler, 0, params, history, 5, 20)
    drawn = sampler.sample(some_logits(1, seed=16), [(0, 5, 3)]).tokens.tolist()
    for i in (1, 2):
        sampler.birth(SlotInit(i, i, 0, None, 20 + i, 5, (*history, drawn[i])))
    changed = sampler.process(torch.zeros(3, VOCAB), [(i, 6, 1) for i in range(3)])
    assert len(set(drawn)) == 3
    assert [row.nonzero()[:, 0].tolist() for row in changed] == [[token] for token in drawn]


def test_a_branch_draws_with_its_own_seed() -> None:
    logits = some_logits(1, seed=17)
    for seed in (41, -3, 2**63 - 2, -(2**63)):
        sampler = a_sampler()
        born(sampler, 0, SamplingParams(n=5), (1,), 1, seed)
        several = sampler.sample(logits, [(0, 1, 5)]).tokens.tolist()
        single = []
        for i in range(5):
            born(sampler, 1, SamplingParams(), (1,), 1, branch_seed(seed, i))
            single += sampler.sample(logits, [(1, 1, 1)]).tokens.tolist()
        assert several == single
        assert len(set(several)) > 1


# Faults


def finish_batch(logits: Tensor) -> tuple[PendingSamples, list[SliceResult]]:
    sampler = a_sampler()
    for kind, values in enumerate(KINDS):
        born(sampler, kind, SamplingParams(**values), history_of(kind, 20 + kind), 10, kind)
    drawn = sampler.sample(logits, [(kind, 20 + kind, values.get("n", 1)) for kind, values in enumerate(KINDS)])
    return drawn, sampler.finish(drawn)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_named_and_its_mates_are_unharmed(bad: float) -> None:
    logits = some_logits(len(KINDS), seed=18)
    _, expected = finish_batch(logits)
    assert not any(sampled.error for sampled in expected)
    for victim in range(len(KINDS)):
        spoilt = logits.clone()
        if bad == -torch.inf:
            spoilt[victim] = bad
        else:
            spoilt[victim, 450] = bad
        drawn, samples = finish_batch(spoilt)
        assert "not finite" in samples[victim].error
        assert samples[victim].top_logprobs == ()
        assert all(0 <= token < VOCAB for token in drawn.tokens.tolist())
        assert samples[:victim] + samples[victim + 1 :] == expected[:victim] + expected[victim + 1 :]


def test_masks_that_leave_nothing_are_named() -> None:
    sampler = a_sampler()
    born(sampler, 0, SamplingParams(allowed_token_ids=[5], bad_word_ids=((5,),), temperature=0), (1,), 1, 0)
    born(sampler, 1, SamplingParams(allowed_token_ids=[5], bad_word_ids=((5,),), top_p=0.5), (1,), 1, 0)
    born(sampler, 2, SamplingParams(allowed_token_ids=[5]), (1,), 1, 0)
    samples = sampler.finish(sampler.sample(some_logits(3), [(0, 1, 1), (1, 1, 1), (2, 1, 1)]))
    assert ["leave no token" in sampled.error for sampled in samples] == [True, True, False]
    assert samples[2].tokens == (5,)


# Log-probabilities


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    sampler, logits = a_sampler(), some_logits(6, seed=20).to(torch.bfloat16)  # bfloat16: with equal logits
    asked: list[dict[str, Any]] = [{"n": 4, "logprobs": 5}, {"top_p": 0.9}, {"logprobs": 0, "repetition_penalty": 2.0}]
    for slot, values in enumerate(asked):
        born(sampler, slot, SamplingParams(temperature=0.5, **values), history_of(20, 30), 20, slot)
    many = (20, 450, VOCAB + 70)
    for slot, top in enumerate(many, 3):
        sampler.birth(SlotInit(slot, slot, -1, SamplingParams(temperature=0).to_device_params(), slot, 20, (), top))
    samples = sampler.finish(sampler.sample(logits, [(0, 30, 4), *((slot, 30, 1) for slot in range(1, 6))]))
    assert [len(sampled.top_logprobs) for sampled in samples] == [4, 0, 1, 1, 1, 1]
    for row, k in ((0, 5), (2, 0), *enumerate(many, 3)):
        exact = logits[row].float().log_softmax(-1)
        order = sorted(range(VOCAB), key=lambda token: (-float(exact[token]), token))[:k]
        for token, top in zip(samples[row].tokens, samples[row].top_logprobs):
            assert top.token == token
            assert top.logprob == pytest.approx(float(exact[token]), abs=1e-6)
            assert top.rank == 1 + sum(float(other) > float(exact[token]) for other in exact)
            assert list(top.ids) == order
            assert list(top.logprobs) == pytest.approx([float(exact[i]) for i in order], abs=1e-6)


def test_named_tokens_come_in_their_order_from_the_unchanged_logits() -> None:
    logits, sampler = some_logits(4, seed=25), a_sampler()
    logits[0, 9] = -torch.inf
    order = logits[0].argsort(descending=True).tolist()
    kinds: list[dict[str, Any]] = [
        {"logprob_token_ids": [VOCAB - 1, order[0], 0, order[-2], 9], "n": 2},
        {"logprob_token_ids": [7], "allowed_token_ids": [3, 4], "logit_bias": {7: 5.0}, "frequency_penalty": 1.0},
        {"logprob_token_ids": list(range(128)), "logprobs": None, "temperature": 0.3},
        {"logprobs": 3},
    ]
    for slot, values in enumerate(kinds):
        born(sampler, slot, SamplingParams(**values), (7, 7, 1), 1, slot)
    samples = sampler.finish(sampler.sample(logits, [(slot, 3, kinds[slot].get("n", 1)) for slot in range(4)]))
    for row in range(3):
        exact, ids = logits[row].double().log_softmax(-1), kinds[row]["logprob_token_ids"]
        assert len(samples[row].top_logprobs) == len(samples[row].tokens) == kinds[row].get("n", 1)
        for token, top in zip(samples[row].tokens, samples[row].top_logprobs):
            assert (top.token, list(top.ids)) == (token, ids)
            assert top.rank == 1 + sum(float(other) > float(exact[token]) for other in exact)
            assert [top.logprob, *top.logprobs] == pytest.approx(exact[[token, *ids]].tolist(), abs=1e-5)
    assert samples[0].top_logprobs[0].logprobs[4] == -torch.inf, "a token that can't be is not left out"
    assert list(samples[3].top_logprobs[0].ids) == logits[3].argsort(descending=True).tolist()[:3]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("what nobody asked for was computed")


def test_nothing_is_looked_up_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything sorted for named tokens."""
    monkeypatch.setattr(torch.Tensor, "topk", refuse)
    sampler = a_sampler()
    born(sampler, 0, SamplingParams(logprob_token_ids=[5, 6]), (1,), 1, 0)
    born(sampler, 1, SamplingParams(logprobs=0), (1,), 1, 0)
    samples = sampler.finish(sampler.sample(some_logits(2), [(0, 1, 1), (1, 1, 1)]))
    assert [len(sampled.top_logprobs[0].ids) for sampled in samples] == [2, 0]
    monkeypatch.setattr(torch.Tensor, "log_softmax", refuse)
    for slot, values in enumerate(({}, {"temperature": 0}, {"best_of": 2}, {"logprobs": 2})):
        sampler.birth(SlotInit(slot, slot, -1, SamplingParams(**values).to_device_params(), slot, 1))
    sampler.finish(sampler.sample(some_logits(4), [(slot, 1, 1) for slot in range(4)]))


# Phrases that tokens end with, and masks of one step after another

SLOTS, NARROW = 8, 100


def test_endings_of_several_slots_equal_brute_force() -> None:
    chance, device = random.Random(5), torch.device("cpu")
    statistics = penalties.TokenHistory(4, device)
    texts = [[chance.randrange(3) for _ in range(length)] for length in (1, 2, 5, 300)]
    for slot, text in enumerate(texts):
        statistics.init_slot(slot, text, 1)
    some = [[tuple(chance.randrange(3) for _ in range(chance.choice((1, 2, 3, 6)))) for _ in range(40)] for _ in "ab"]
    some[0] += [tuple(texts[3]), tuple(texts[3][1:]), (0, *texts[3])]
    phrases = [penalties.PhraseTable.from_phrases(each) for each in some]
    slots, which = [3, 0, 2, 1, 3], [0, 0, 1, 1, 1]
    found = statistics.ends_with(slots, [phrases[i] for i in which])
    wanted = [tuple(texts[slot][-len(p) :]) == p for slot, i in zip(slots, which) for p in some[i]]
    assert found.tolist() == wanted
    assert {True, False} == set(wanted)


def test_a_long_word_costs_its_own_tokens_only() -> None:
    words = ((1,) * 401, *((2, 3),) * 100)
    rules = LogitRules.from_sampling(DeviceSamplingParams(bad_word_ids=words), 10, (0,), torch.device("cpu"))
    assert len(rules.bad_word_prefixes.tokens) == 400 + 100


def a_mask(rng: np.random.Generator) -> bytes:
    bits = np.zeros(128, dtype=np.uint8)
    bits[:NARROW] = rng.integers(0, 2, NARROW)
    return np.packbits(bits, bitorder="little").tobytes()


def test_each_step_has_its_own_masks() -> None:
    masks, rng = TokenBitmasks(SLOTS, NARROW, torch.device("cpu")), np.random.default_rng(0)
    given = [a_mask(rng) for _ in range(4)]
    for _ in range(40):
        some = rng.permutation(SLOTS)[: rng.integers(0, SLOTS)]
        step = {int(slot): given[rng.integers(4)] if rng.random() < 0.7 else a_mask(rng) for slot in some}
        masks.set_bitmasks([TokenBitmask(slot, bits) for slot, bits in step.items()])
        slots = rng.permutation(SLOTS)
        logits = torch.zeros(SLOTS, NARROW)
        masks.apply(logits, slots, slots)
        for slot, row in zip(slots.tolist(), logits):
            bits = np.frombuffer(step.get(slot, b"\xff" * 16), np.uint8)
            assert ((row == 0).numpy() == np.unpackbits(bits, bitorder="little")[:NARROW]).all()


def test_a_mask_that_a_row_keeps_is_copied_once() -> None:
    masks, rng = TokenBitmasks(SLOTS, NARROW, torch.device("cpu")), np.random.default_rng(0)
    kept, other = a_mask(rng), a_mask(rng)
    masks.set_bitmasks([TokenBitmask(3, kept), TokenBitmask(5, kept)])
    masks._bits[3] = 0
    masks.set_bitmasks([TokenBitmask(3, kept), TokenBitmask(5, other)])
    assert not masks._bits[3].any()
    assert masks._bits[5].tobytes() == other
    masks.set_bitmasks([TokenBitmask(3, other)])
    assert masks._bits[3].tobytes() == other
