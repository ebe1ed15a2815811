"""The bundled model with its draft model: the tokens are those without, whatever serves them; greedy ones are those of
transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quire
from quire import LLM, SamplingParams

ASSETS = Path(quire.__file__).parent / "assets"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "kv_tokens": 4096, "max_num_seqs": 8, "device": "cpu", "threads": 1,
    "adaptive_speculation": False,
}  # fmt: skip
TEXTS = ("Once upon a time there was a little girl who", "The cat sat on the", "Tom and Lily went to the", "One day, a")
MORE_TEXTS = tuple(
    f"{opening} {rest}"
    for opening in ("There was a", "This is the story of Eric, a", "One evening, the", '"Oh no!" said the')
    for rest in ("quiet boy", "fox who", "black key was", "very big")
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 2}, {"temperature": 1.0, "min_tokens": 30},
    {"temperature": 1.0, "bad_words": [" the girl", " was"]}, {"temperature": 0.9, "n": 2}, {"beam_width": 2},
)  # fmt: skip
PARAMS = [SamplingParams(max_tokens=40, ignore_eos=i % 2 == 0, seed=i, **kind) for i, kind in enumerate(KINDS)]


def served(**settings: Any) -> tuple[list[Any], Any]:
    """Return the tokens and the text of each request's branches, and the statistics."""
    with LLM("tiny", **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate([TEXTS[i % len(TEXTS)] for i in range(len(PARAMS))], PARAMS)
        return [[(one.token_ids, one.text) for one in output.outputs] for output in outputs], llm.engine.stats


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return served()[0]


DRAFT = {"speculative_model": "tiny-draft"}


@pytest.mark.parametrize(
    "settings",
    [
        DRAFT,
        {"speculative_method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1},
        {**DRAFT, "speculative_method": "both", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
        {**DRAFT, "attention": "sdpa", "page_size": 4, "max_num_batched_tokens": 16},
        {**DRAFT, "cuda_graphs": False, "kv_cache_dtype": "auto", "debug": True},
        {**DRAFT, "kv_tokens": 256, "preemption": "recompute", "debug": True},
        {**DRAFT, "kv_tokens": 256, "preemption": "swap", "swap_gib": 0.1, "debug": True},
        {**DRAFT, "tp": 2},
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(expected: list[Any], settings: dict[str, Any]) -> None:
    tokens, stats = served(**settings)
    assert tokens == expected
    assert stats.accepted_tokens > 0


def test_greedy_tokens_are_those_of_transformers() -> None:
    """Those of its plain generation and of its own assisted generation."""
    model, draft = (
        transformers.AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32)
        for name in ("tiny", "tiny-draft")
    )
    with LLM("tiny", **SETTINGS, **DRAFT) as llm:
        prompts = [llm.tokenizer.encode(text) for text in (*TEXTS, *MORE_TEXTS)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        assert llm.engine.stats.accepted_tokens > 100
    assert len(prompts) == 20
    for ids, output in zip(prompts, outputs):
        for how in ({}, {"assistant_model": draft}):
            given = torch.tensor([ids])
            theirs = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False, eos_token_id=None,
                **how,
            )  # fmt: skip
            assert output.outputs[0].token_ids == theirs[0, len(ids) :].tolist()


def test_sampled_tokens_have_the_models_distribution() -> None:
    """A chi-square test of the tokens at positions 0 to 4 after a prompt, given those before them. The first one comes
    from the prompt's step, two thirds of the others are accepted draft tokens: the draft model's probabilities differ
    enough for the test to fail if a wrong token is accepted."""
    positions, samples, top_k = 5, 2048, 3
    given = {"top_k": top_k, "max_tokens": positions + 1, "ignore_eos": True}
    with LLM("tiny", **{**SETTINGS, "max_num_seqs": 64}, **DRAFT) as llm:
        prompt = llm.tokenizer.encode("The cat sat on the")
        outputs = llm.generate([prompt] * samples, [SamplingParams(seed=seed, **given) for seed in range(samples)])
        assert llm.engine.stats.accepted_tokens > 0.6 * samples * (positions - 2)
    sampled = [tuple(output.outputs[0].token_ids) for output in outputs]
    counts = Counter(tokens[:length] for tokens in sampled for length in range(positions + 1))
    prefixes = [prefix for prefix in counts if len(prefix) < positions]
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(
            torch.tensor([[*prompt, *prefix, *[0] * (positions - len(prefix))] for prefix in prefixes])
        ).logits
    statistics, freedoms, cut = [0.0] * positions, [0] * positions, 0
    for prefix, rows in zip(prefixes, logits):
        likely = rows[len(prompt) - 1 + len(prefix)].topk(top_k)
        observed = torch.tensor([float(counts[*prefix, token]) for token in likely.indices.tolist()])
        expected = counts[prefix] * likely.values.softmax(0)
        cut += counts[prefix] - int(observed.sum())
        if expected.min() >= 5:
            statistics[len(prefix)] += float(((observed - expected) ** 2 / expected).sum())
            freedoms[len(prefix)] += top_k - 1
    for position, (statistic, freedom) in enumerate(zip(statistics, freedoms)):
        # Wilson and Hilferty: the cube root is nearly normal. 4 deviations: a probability of 3e-5.
        deviations = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5
        assert deviations < 4, f"position {position}: chi-square {statistic:.1f} with {freedom} degrees of freedom"
    assert cut == 0, f"{cut} tokens are sampled that top_k cuts"


def test_both_models_sleep_and_wake() -> None:
    with LLM("tiny", **SETTINGS, **DRAFT) as llm:
        params = SamplingParams(temperature=0, max_tokens=30)
        expected = llm.generate(list(TEXTS), params)
        for level in (1, 2):
            llm.engine.sleep(level)
            llm.engine.wake()
            again = llm.generate(list(TEXTS), params)
            assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in expected]
        assert llm.engine.stats.accepted_tokens > 0
