"""Greedy tokens of 1,000 prompts of the bundled model's own kinds of text are the same with and without speculation."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))  # scripts, not a part of the package

from tiny_story import TRAIN, tell_story  # noqa: E402
from tiny_text import render_chat  # noqa: E402

SMALL = 192  # tokens of a memory that preempts
SETTINGS: tuple[dict[str, Any], ...] = (
    {"page_size": 1},
    {"page_size": 1, "kv_tokens": SMALL, "preemption": "recompute", "max_num_batched_tokens": 24, "depth": 2},
    {"page_size": 2, "kv_tokens": SMALL, "preemption": "swap", "depth": 3},
    {"page_size": 3, "max_num_batched_tokens": 32, "num_speculative_tokens": 3},
    {"page_size": 4, "num_speculative_tokens": 8, "depth": 2},
    {"page_size": 5, "kv_tokens": SMALL, "preemption": "swap", "num_speculative_tokens": 2},
    {"page_size": 7, "max_num_batched_tokens": 50, "depth": 3},
    {"page_size": 8, "kv_tokens": SMALL, "preemption": "recompute", "num_speculative_tokens": 1, "depth": 3},
    {"page_size": 13, "num_speculative_tokens": 16},
    {"page_size": 16, "kv_tokens": SMALL, "preemption": "swap", "max_num_batched_tokens": 40},
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "draft": {"speculative_model": "tiny-draft"},
    "ngram": {"speculative_method": "ngram", "prompt_lookup_min": 1},
    "both": {"speculative_model": "tiny-draft", "speculative_method": "both"},
}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def serve(prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], int, Any]:
    """Return the output tokens, the number of prompt tokens that were found in the cache, and the engine."""
    with LLM(
        "tiny", dtype="float32", device="cpu", threads=1, deterministic=True, adaptive_speculation=False,
        **{"kv_tokens": 4096, "max_num_seqs": 16, "debug": True, **settings},
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        hits = sum(output.num_cached_tokens for output in outputs)
        return [output.outputs[0].token_ids for output in outputs], hits, llm.engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 100 questions, 600 beginnings of 300 stories, and 300 stories that are told again."""
    rng = random.Random(0)
    questions = json.loads((TOOLS / "chat_questions.json").read_text(encoding="utf-8"))
    with LLM("tiny", kv_tokens=64) as llm:
        encode = llm.tokenizer.encode
        stories = [encode(tell_story(rng, TRAIN).text) for _ in range(600)]
        asked = [
            encode(render_chat(system, [(question["turns"][-1], "")], prompt=True))[-100:]
            for question in questions
            for system in ("", "You are a helpful assistant.")
        ]
    begun = [story[: rng.randint(2, 80)] for story in stories[:300] for _ in range(2)]
    again = [story[:50] + story[: rng.randint(2, 40)] for story in stories[300:]]
    prompts = [*asked, *begun, *again]
    assert len(prompts) == 1000
    rng.shuffle(prompts)
    return prompts


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return serve(prompts)[0]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_without_drafts(
    method: str, number: int, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Each setting serves a tenth of the prompts by each method."""
    settings = SETTINGS[number]
    tokens, hits, engine = serve(prompts[number :: len(SETTINGS)], **METHODS[method], **settings)
    assert tokens == expected[number :: len(SETTINGS)]
    assert engine.stats.accepted_tokens > 50
    if "preemption" in settings:
        assert engine.scheduler.preemption_counts[settings["preemption"]] > 0
    else:
        assert hits > 0
