"""Llama 3.2 Vision from transformers' checkpoints: what the engine says of tokens is what transformers' logits say to
1e-4, whatever the chunks, pages, hits, preemptions, forks and beams, beside neighbours without pictures; and greedy
tokens are those of transformers' `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mllama_models import PICTURE, PROMPTS, VOCAB, Mixed, Saved, engine_of, pictures_in, run, shown, text, tokens_of
from safetensors.torch import load_file, save_file
from test_unlike_logits import assert_said, preempting

from quire import SamplingParams
from quire.data.models import read_spec, resolve
from quire.data.weights.checkpoint import read_config
from quire.vocabulary.media import Medium

NEW = 9
LONG: list[Mixed] = [
    [*text(300, 0), "3", *text(350, 1), "1", "0", *text(400, 2)],
    text(600, 3),
    ["3", *text(513, 4)],
    [*text(7, 5), "3"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("mllama"))


def check(
    model: Saved, prompts: list[Mixed], branches: int, hit: bool = True, within: float = 1e-4, **settings: Any
) -> None:
    """Twice, or in a memory without prefixes once: the second time prompts and pictures are found in memory."""
    how = settings.get("preemption")
    if how is not None:
        settings["depth"] = 1
    engine = engine_of(model, prefix_caching=hit, **settings)
    if how is not None:
        preempting(engine, {3, 5, 8, 14, 22})
    params = SamplingParams(temperature=0.9, seed=3, n=branches, max_tokens=NEW, ignore_eos=True, logprobs=20)
    for _ in range(1 + hit):
        answers = list(run(engine, prompts, params))
        assert len({tuple(tokens) for _, tokens, _ in answers}) == branches * len(prompts), "branches part"
        for prompt, tokens, tops in answers:
            assert_said(tops, model.logprobs(prompt, tokens), within)
    assert how is None or engine.scheduler.preempted[how] > 0
    assert (engine.scheduler.memory.account().sharing.hits > 0) == hit or how is not None
    engine.close()


def options(preemption: str | None) -> dict[str, Any]:
    return {} if preemption is None else {"preemption": preemption}


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, 1), (16, 3), (16, 64)])
def test_logits_of_branches(model: Saved, page_size: int, chunk: int, preemption: str | None) -> None:
    check(model, PROMPTS, 2, page_size=page_size, max_num_batched_tokens=max(chunk, 16), long_prefill_token_threshold=chunk, **options(preemption))


@pytest.mark.soak
@pytest.mark.parametrize("memory", ["paged", "uniform"])
@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 512, 1024])
def test_all_logits(
    model: Saved, chunk: int, page_size: int, preemption: str | None, hit: bool, memory: str
) -> None:
    some = LONG if chunk > 100 else PROMPTS
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "memory": memory, **options(preemption)}
    check(model, some, 2, hit, **settings)
