"""Speculative decoding of models whose layers keep a running state: the tokens are those of transformers and of steps
without draft tokens, whatever the chunks, pages, hits, preemptions and memory. Draft tokens are right up to a random
one, so that runs of every length are accepted and rejected, across the ends of pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_state_logits import CASES, COMMON, SHORT, VOCAB, Saved
from test_unlike_logits import assert_said, run, serving

from quire import SamplingParams
from quire.config import EngineConfig
from quire.core.speculation import NgramIndex
from quire.errors import StartupError
from quire.startup.build import build

NEW = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
DRAWN = SamplingParams(n=2, temperature=0.9, seed=3, max_tokens=NEW, ignore_eos=True, logprobs=20)
DRAFTS: dict[str, Any] = {
    "speculative_method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive_speculation": False,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": 24}
STEPS = {6, 9, 13, 17, 22, 26}


class Long(Saved):
    """With the tokens that follow each prompt."""

    def __init__(self, case: str, folder: Path) -> None:
        super().__init__(case, folder)
        self.greedy = [[*prompt, *self.continued(prompt)] for prompt in SHORT]

    @torch.inference_mode()
    def continued(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(ids, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Long(case, tmp_path_factory.mktemp("saved")))


def foresee(patch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Propose the next tokens of these texts, but for a wrong one at a place that depends on the length."""

    def propose(self: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        text = next(text for text in texts if text[: len(tokens)] == tokens)
        drafts, wrong = text[len(tokens) :][:count], len(tokens) * 7 % 6
        return tuple((token + (i == wrong)) % VOCAB for i, token in enumerate(drafts))

    patch.setattr(NgramIndex, "propose", propose)


def check_greedy(model: Long, preemption: str | None = None, **settings: Any) -> None:
    """Twice; then requests that go on where most of these tokens are in memory."""
    with serving(model, preemption, STEPS, **{**SETTINGS, **DRAFTS, **settings}) as engine:
        for _ in range(2):
            answers = [[*prompt, *tokens] for prompt, tokens, _ in run(engine, SHORT, GREEDY)]
            assert sorted(answers) == sorted(model.greedy)
        stats, hits = engine.stats.copy(), engine.scheduler.memory.account().sharing.hits
        known = [text[:-8] for text in model.greedy]
        answers = [[*text, *tokens] for text, tokens, _ in run(engine, known, replace(GREEDY, max_tokens=8))]
        assert sorted(answers) == sorted(model.greedy)
        more_hits = engine.scheduler.memory.account().sharing.hits - hits
    assert stats.draft_tokens > stats.accepted_tokens > 60
    assert min(stats.accepted_per_pos[:3]) > 0, "runs of several lengths are accepted"
    if "kv_tokens" not in settings:
        found = settings.get("enable_prefix_caching", True)
        assert (hits > 0, more_hits > sum(map(len, SHORT))) == (found, found), "states of drafted tokens are found"


@pytest.mark.share(30)
@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 20), (4, 64)])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    saved: Any, case: str, page_size: int, chunk: int, preemption: str | None, hit: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    foresee(monkeypatch, saved(case).greedy)
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "enable_prefix_caching": hit}
    check_greedy(saved(case), preemption, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"state_tokens": 4},
        {"state_tokens": 4, "kv_tokens": 160, "max_num_seqs": 3, "preemption": "recompute"},
        {"state_tokens": 4, "kv_tokens": 160, "max_num_seqs": 3, "preemption": "swap", "swap_gib": 0.01},
        {"state_tokens": 1, "page_size": 1, "num_speculative_tokens": 8},
        {"state_tokens": 512},
        {"page_sizes": "max"},
        {"table_scope": "layer"},
        {"tp": 2, "device": "cpu"},
        {"cuda_graphs": False},
    ],
    ids=str,
)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "case", ["jamba, attention last", "mamba", "mamba2", "granite hybrid, experts", "nemotron_h", "lfm2"]
)
def test_other_memories(saved: Any, case: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that end within runs of draft tokens, several at once, and pages that are short."""
    foresee(monkeypatch, saved(case).greedy)
    if settings.get("page_sizes", settings.get("table_scope")) and case in ("mamba", "mamba2"):
        pytest.skip("all layers are of one type")
    check_greedy(saved(case), **{"enable_prefix_caching": settings.get("state_tokens") != 512, **settings})


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("case", ["jamba", "falcon_mamba"])
def test_drawn_tokens_are_those_of_single_steps(
    saved: Any, case: str, preemption: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two branches, with the log-probabilities of transformers."""
    model = saved(case)
    with serving(model, **SETTINGS) as engine:
        expected = [[*prompt, *tokens] for prompt, tokens, _ in run(engine, SHORT, DRAWN)]
    foresee(monkeypatch, expected)
    with serving(model, preemption, STEPS, **SETTINGS, **DRAFTS) as engine:
        answers = list(run(engine, SHORT, DRAWN))
        assert engine.stats.accepted_tokens > 60
    assert sorted([*prompt, *tokens] for prompt, tokens, _ in answers) == sorted(expected)
    for prompt, tokens, tops in answers:
        assert_said(tops, model.following(prompt, tokens))


@pytest.mark.parametrize("case", CASES)
def test_ngrams_of_the_request_itself(saved: Any, case: str) -> None:
    """What it has written is proposed, right or wrong."""
    with serving(saved(case), **SETTINGS, **DRAFTS) as engine:
        answers = [[*prompt, *tokens] for prompt, tokens, _ in run(engine, SHORT, GREEDY)]
        assert engine.stats.draft_tokens > 100
    assert sorted(answers) == sorted(saved(case).greedy)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model that only attends to tokens."""
    folder = tmp_path_factory.mktemp("draft")
    shape = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.AutoConfig.for_model("llama", **{**COMMON, **shape}, max_position_embeddings=2048)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("case", ["jamba", "mamba"])
def test_a_draft_model_that_attends(saved: Any, draft: str, case: str, preemption: str | None) -> None:
    settings = {**SETTINGS, "speculative_model": draft, "num_speculative_tokens": 3, "adaptive_speculation": False}
    with serving(saved(case), preemption, STEPS, **settings) as engine:
        answers = [[*prompt, *tokens] for prompt, tokens, _ in run(engine, SHORT, GREEDY)]
        assert engine.stats.draft_tokens > 100
    assert sorted(answers) == sorted(saved(case).greedy)


def test_a_draft_model_with_states_is_refused(saved: Any) -> None:
    folders = {"model": str(saved("jamba").folder), "speculative_model": str(saved("mamba").folder)}
    config = EngineConfig(**folders, skip_tokenizer_init=True)
    with pytest.raises(StartupError, match=r"the draft model .* keeps running states"):
        build(config)
