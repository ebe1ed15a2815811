"""Beam search gives the sequences and scores of transformers' `num_beams`; best_of those of the likeliest samples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_equality import FAMILIES, engine_of, outputs_of, random_model

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams

VOCAB = 97
NEW = 14
TIE = 1e-5
PROMPTS = ([5], [1, 2, 3, 4, 5, 6], list(range(40, 61)))
PENALTIES = (-1.0, 0.0, 0.7, 1.0, 2.0)
STOPPING: tuple[bool | str, ...] = (True, False, "never")
SCALE = 0.12  # of weights: likelihoods neither flat nor certain


class Found(NamedTuple):
    """What a request brought: its branches' outputs, joined."""

    tokens: list[list[int]]
    logprobs: list[float]
    outputs: list[list[BranchOutput]]


class Reference:
    """A random model of a family in transformers, and an engine over the same weights. Its end tokens are some that
    likely continuations have, so that beams do end."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = random_model(FAMILIES[family](), SCALE, seed=3)
        self.eos_ids: list[int] = []
        for prompt in PROMPTS:
            beams, _ = self.beams(prompt, 4, max_new_tokens=7)
            likely = {token: None for beam in beams for token in beam[6:2:-1] if token not in beam[:2]}
            self.eos_ids += [token for token in likely if token not in self.eos_ids][:2]
        self.model.config.eos_token_id = self.eos_ids
        self.model.generation_config.eos_token_id = self.eos_ids
        self.folder = folder
        self.model.save_pretrained(folder)

    def engine(self, **settings: Any) -> Engine:
        return engine_of(self, **{"kv_tokens": 1024, "page_size": 4, "max_num_seqs": 64, **settings})

    @torch.inference_mode()
    def beams(self, prompt: list[int], width: int, **kinds: Any) -> tuple[list[list[int]], list[float]]:
        """transformers' sequences (without padding) and their scores."""
        ids, eos_ids = torch.tensor([prompt]), kinds.pop("eos_token_id", self.eos_ids)
        result = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, do_sample=False, output_scores=True,
            pad_token_id=0, return_dict_in_generate=True, num_return_sequences=width, eos_token_id=eos_ids or None,
            **{"max_new_tokens": NEW} | kinds,
        )  # fmt: skip
        rows = [cut(row, eos_ids) for row in result.sequences[:, len(prompt) :].tolist()]
        if width == 1:  # greedy search has no scores
            parts = self.model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)
            return rows, parts.sum(-1).tolist()
        return rows, result.sequences_scores.tolist()


def cut(tokens: list[int], eos_ids: list[int]) -> list[int]:
    """Up to the first end token, it included."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), len(tokens))]


def drive(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Found]:
    found, outputs = {}, outputs_of(engine, requests)
    assert engine.scheduler.memory.account().usage.used == 0
    for id, (_, params) in requests.items():
        branches = [[output for output in outputs[id] if output.branch == i] for i in range(params.n)]
        tokens = [[token for output in branch for token in output.tokens] for branch in branches]
        found[id] = Found(tokens, [branch[-1].cumulative_logprob for branch in branches], branches)
    return found


def scores_of(found: Found, length_penalty: float) -> list[float]:
    return [logprob / len(tokens) ** length_penalty for tokens, logprob in zip(found.tokens, found.logprobs)]


def same(found: Found, expected: tuple[list[list[int]], list[float]], length_penalty: float) -> bool:
    """Equal scores and equal sequences, but for the order of those whose scores lie within TIE of each other."""
    tokens, scores = expected
    # Beyond 100, which a negative penalty reaches, 1e-4 is finer than float32, in which transformers adds.
    mine = scores_of(found, length_penalty)
    assert mine == pytest.approx(scores, abs=1e-4, rel=1e-6)
    if found.tokens == tokens:
        return True
    close = any(abs(a - b) <= TIE for a, b in itertools.pairwise(mine))
    return close and sorted(found.tokens) == sorted(tokens)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda family: Reference(family, tmp_path_factory.mktemp(family)))


def kinds_of(width: int, length_penalty: float, stopping: bool | str, **more: Any) -> SamplingParams:
    kinds = {"n": width, "max_tokens": NEW, "temperature": 0.7} | more
    return SamplingParams(beam_width=width, length_penalty=length_penalty, early_stopping=stopping, **kinds)


@pytest.mark.share(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_beams_equal_transformers(reference: Callable[[str], Reference], family: str, width: int) -> None:
    model = reference(family)
    # One beam is greedy search if it stops at the first end token.
    stopping = STOPPING if width > 1 else (True,)
    cases = [(p, *kinds) for p, kinds in enumerate(itertools.product(PENALTIES, stopping))]
    requests = {str(i): (PROMPTS[i % 3], kinds_of(width, penalty, stopping)) for i, penalty, stopping in cases}
    found = drive(model.engine(), requests)
    ended = 0
    for i, penalty, stopping in cases:
        kinds = {} if width == 1 else {"length_penalty": penalty, "early_stopping": stopping}
        expected = model.beams(PROMPTS[i % 3], width, **kinds)
        mine = found[str(i)]
        ended += sum(tokens[-1] in model.eos_ids for tokens in mine.tokens)
        assert same(mine, expected, penalty if width > 1 else 0.0), (penalty, stopping)
    assert ended


@pytest.mark.share(8)
@pytest.mark.parametrize("ends", [0, 2, 9])
@pytest.mark.parametrize("least", [0, 3, NEW])
def test_end_tokens_and_least_lengths_equal_transformers(
    reference: Callable[[str], Reference], ends: int, least: int
) -> None:
    model = reference("opt")
    stops = [token for token in range(VOCAB) if token not in model.eos_ids][:ends]
    eos_ids = model.eos_ids + stops
    for prompt, early in itertools.product(PROMPTS, STOPPING):
        params = kinds_of(4, 0.7, early, stop_token_ids=stops, min_tokens=least)
        found = drive(model.engine(), {"a": (prompt, params)})["a"]
        kinds: dict[str, Any] = {"eos_token_id": eos_ids, "length_penalty": 0.7, "early_stopping": early}
        if least:
            kinds["min_new_tokens"] = least
        assert same(found, model.beams(prompt, 4, **kinds), 0.7)
        for branch, tokens in zip(found.outputs, found.tokens):
            ended = tokens[-1] in eos_ids
            assert branch[-1].finish_reason == ("stop" if ended else "length")
            assert branch[-1].stop_reason == (tokens[-1] if tokens[-1] in stops else None)
            assert not set(tokens[:-1]) & set(eos_ids)


def test_biases_and_bans_act_on_beams_as_in_transformers(reference: Callable[[str], Reference]) -> None:
    model = reference("llama")
    params = kinds_of(3, 1.0, False, ignore_eos=True)
    plain = drive(model.engine(), {"a": (PROMPTS[1], params)})["a"].tokens[0]
    pair, disliked, liked = tuple(plain[4:6]), plain[8], plain[10]
    biased = dataclasses.replace(params, logit_bias={liked: 1.0, disliked: -2.0})
    barred = dataclasses.replace(params, bad_word_ids=(pair,))
    found = drive(model.engine(), {"bias": (PROMPTS[1], biased), "words": (PROMPTS[1], barred)})
    bias = {(liked,): 1.0, (disliked,): -2.0}
    assert same(found["bias"], model.beams(PROMPTS[1], 3, sequence_bias=bias, eos_token_id=[]), 1.0)
    assert same(found["words"], model.beams(PROMPTS[1], 3, bad_words_ids=[list(pair)], eos_token_id=[]), 1.0)
    assert plain not in found["bias"].tokens
    assert not any(pair in itertools.pairwise(tokens) for tokens in found["words"].tokens)


def test_penalties_of_beams_see_the_beams_own_tokens(reference: Callable[[str], Reference]) -> None:
    params = kinds_of(4, 1.0, False, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0)
    plain = drive(reference("gpt2").engine(), {"a": (PROMPTS[1], kinds_of(4, 1.0, False, ignore_eos=True))})["a"]
    found = drive(reference("gpt2").engine(), {"a": (PROMPTS[1], params)})["a"]
    model = reference("gpt2").model
    assert min(len(set(tokens)) for tokens in found.tokens) > max(len(set(tokens)) for tokens in plain.tokens)
    for tokens, total in zip(found.tokens, found.logprobs):
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[1] + tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        exact = logits.double().log_softmax(-1)
        counts = [tokens[:at].count(token) for at, token in enumerate(tokens)]
        expected = sum(float(exact[at, t]) - 2 * counts[at] - 2 * (counts[at] > 0) for at, t in enumerate(tokens))
        assert total == pytest.approx(expected, abs=1e-4)


def test_log_probabilities_of_beams_are_the_models(reference: Callable[[str], Reference]) -> None:
    model = reference("mistral")
    requests = {
        "beams": (PROMPTS[2], kinds_of(4, 1.0, True, logprobs=3)),
        "best": (PROMPTS[2], SamplingParams(n=2, best_of=5, seed=1, logprobs=2, max_tokens=NEW)),
        "all": (PROMPTS[2], SamplingParams(n=5, seed=1, logprobs=0, max_tokens=NEW)),
    }
    found = drive(model.engine(), requests)
    for id, k in (("beams", 3), ("best", 2), ("all", 0)):
        for tokens, outputs, total in zip(found[id].tokens, found[id].outputs, found[id].logprobs):
            tops = [top for output in outputs for top in output.top_logprobs]
            assert [top.token for top in tops] == tokens
            assert total == pytest.approx(sum(top.logprob for top in tops), abs=1e-5)
            with torch.inference_mode():
                logits = model.model(torch.tensor([PROMPTS[2] + tokens])).logits[0, len(PROMPTS[2]) - 1 : -1]
            exact = logits.double().log_softmax(-1)
            for at, top in enumerate(tops):
                assert top.logprob == pytest.approx(float(exact[at, top.token]), abs=1e-4)
                assert top.rank == 1 + int((exact[at] > exact[at, top.token]).sum())
                assert list(top.ids) == exact[at].argsort(descending=True).tolist()[:k]
    # best_of: the likeliest of the samples that n alone would return, best first.
    ranked = sorted(zip(found["all"].logprobs, found["all"].tokens), reverse=True)[:2]
    assert found["best"].tokens == [tokens for _, tokens in ranked]
    assert found["best"].logprobs == [total for total, _ in ranked]


def test_fewer_candidates_than_results(reference: Callable[[str], Reference]) -> None:
    params = kinds_of(4, 1.0, False, allowed_token_ids=[50], max_tokens=3)
    found = drive(reference("llama").engine(), {"a": (PROMPTS[0], params)})["a"]
    assert found.tokens[0] == [50, 50, 50]
    assert [outputs[-1].finish_reason for outputs in found.outputs] == ["length", "error", "error", "error"]
    assert [outputs[-1].done for outputs in found.outputs] == [False, False, False, True]
