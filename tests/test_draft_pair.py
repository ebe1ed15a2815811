"""The bundled model with its draft model: the tokens are those without, whatever serves them; greedy ones are those of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quire
from quire import LLM, SamplingParams
from quire.core.speculation import Candidate, Speculator

FOLDER = Path(quire.__file__).parent / "assets" / "tiny"
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4096, "max_num_seqs": 8, "device": "cpu", "threads": 1}
TEXTS = ("Once upon a time there was a little girl who", "The cat sat on the", "Tom and Lily went to the", "One day, a")
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


@pytest.fixture(autouse=True)
def _all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are verified wherever there are some, at any cost."""

    def choose(self: Speculator, candidates: list[Candidate], *_: object) -> dict[int, tuple[int, ...]]:
        counts = {one.seq.id: min(one.most, self.max_tokens) for one in candidates}
        return {one.seq.id: one.tokens or self.markers[counts[one.seq.id]] for one in candidates}

    monkeypatch.setattr(Speculator, "_most_valuable", choose)


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
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with LLM("tiny", **SETTINGS, **DRAFT) as llm:
        for text in TEXTS:
            ids = llm.tokenizer.encode(text)
            output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0].outputs[0]
            given = torch.tensor([ids])
            theirs = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=60, do_sample=False, eos_token_id=None
            )
            assert output.token_ids == theirs[0, len(ids) :].tolist()


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
