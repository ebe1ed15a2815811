"""Layers that share keys and values, in windows and in chunks, against a dense reference: log-probabilities to 1e-4
whatever the chunks, the pages, hits, preemptions and forks, at lengths beyond twice the window; and the same greedy
tokens in every memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_equality
import torch
import transformers
from dense_llama import DenseLlama

from quire.build import build
from quire.config import EngineConfig
from quire.control.engine import Engine
from quire.data.models.llama import Attention
from quire.vocabulary.params import SamplingParams

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
MODELS: dict[str, dict[str, Any]] = {
    # As character.ai's: neighbours in a run of local layers share, and so do the global ones.
    "shared": {
        "layer_types": [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL, WINDOW], "sliding_window": 9,
        "kv_sharing": [None, 0, None, None, 3, 2, None],
    },
    "the last one shares": {
        "layer_types": [FULL, WINDOW, WINDOW], "sliding_window": 6, "kv_sharing": [None, None, 1],
    },
    "chunked": {"layer_types": [CHUNK, FULL, CHUNK], "attention_chunk_size": 12},
    "every kind": {
        "layer_types": [CHUNK, CHUNK, WINDOW, CHUNK, FULL, WINDOW], "attention_chunk_size": 10, "sliding_window": 7,
        "kv_sharing": [None, 0, None, 0, None, 2],
    },
}  # fmt: skip
LENGTHS = (1, 5, 16, 23, 37, 40)
NEW = 20
TOP = 20


def saved(folder: Path, more: dict[str, Any]) -> None:
    """A checkpoint of transformers' Llama with random weights, and in its config.json what only we know."""
    layers = len(more.get("layer_types", "two"))
    config = transformers.LlamaConfig(**{**test_equality.SIZES, "num_hidden_layers": layers})
    test_equality.random_model(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


class Oracle:
    """The dense reference's greedy answers to random prompts."""

    def __init__(self, folder: Path, more: dict[str, Any]) -> None:
        saved(folder, more)
        self.folder, self.dense = folder, DenseLlama(folder)
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]
        self.answers = [self.continued(prompt) for prompt in self.prompts]

    def continued(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self.dense.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(tmp_path_factory.mktemp("kinds"), MODELS[name]))


def engine_of(oracle: Oracle, **settings: Any) -> Engine:
    return test_equality.engine_of(oracle, **{"kv_tokens": 1024, **settings})


def run(oracle: Oracle, engine: Engine, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    """All prompts at once: the answers of their branches, whose log-probabilities are the reference's."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": TOP, **more})
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    answers: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}
    while engine.unfinished:
        for output in engine.step():
            tokens, tops = answers.setdefault((int(output.request), output.branch), ([], []))
            tokens += output.tokens
            tops += output.tops
        engine.scheduler.memory.check()
    for (i, _), (tokens, tops) in answers.items():
        assert len(tokens) == len(tops) == NEW
        expected = oracle.dense.logits(prompts[i] + tokens)[len(prompts[i]) - 1 : -1].log_softmax(-1)
        for top, row in zip(tops, expected):
            assert len(top.ids) == TOP
            torch.testing.assert_close(torch.tensor(top.logprobs), row[list(top.ids)], atol=1e-4, rtol=0)
    return [tokens for _, (tokens, _) in sorted(answers.items())]


def assert_equal(oracle: Oracle, engine: Engine) -> None:
    assert run(oracle, engine, oracle.prompts) == oracle.answers


every_model = pytest.mark.parametrize("name", MODELS)


def test_the_reference_is_transformers_llama_where_both_know_the_layers(tmp_path: Path) -> None:
    saved(tmp_path, {})
    tokens = list(range(3, 60))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).float().eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(DenseLlama(tmp_path).logits(tokens), expected, atol=1e-4, rtol=0)


def test_the_references_chunks_are_those_of_transformers_llama_4(oracle: Callable[[str], Oracle]) -> None:
    from transformers.masking_utils import create_chunked_causal_mask

    config = transformers.Llama4TextConfig(attention_chunk_size=12, attn_implementation="eager")
    embeds = torch.zeros(1, 50, 8)
    # By place: what the cache is called depends on the version.
    theirs = create_chunked_causal_mask(config, embeds, None, None, torch.arange(50)[None])
    assert torch.equal(theirs[0, 0] == 0, oracle("chunked").dense.mask(0, 50))


@pytest.mark.share(8)
@every_model
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_and_pages(oracle: Callable[[str], Oracle], name: str, budget: int, page_size: int) -> None:
    model = oracle(name)
    assert_equal(model, engine_of(model, max_num_batched_tokens=budget, page_size=page_size))


@pytest.mark.share(6)
@every_model
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hits(oracle: Callable[[str], Oracle], name: str, page_size: int) -> None:
    model = oracle(name)
    engine = engine_of(model, page_size=page_size)
    assert_equal(model, engine)
    before = engine.scheduler.memory.account().sharing.hits
    assert_equal(model, engine)
    assert engine.scheduler.memory.account().sharing.hits > before


@pytest.mark.share(8)
@every_model
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_preemptions(oracle: Callable[[str], Oracle], name: str, way: str, page_size: int) -> None:
    model = oracle(name)
    engine = engine_of(
        model, page_size=page_size, kv_tokens=128 if page_size == 16 else 96, preemption=way, swap_gib=0.01,
        max_num_batched_tokens=16, page_sizes="lcm" if page_size == 4 else "own",
    )  # fmt: skip
    # A window bounds what a request holds, and a long prompt holds it from the start: only short ones grow afterwards.
    prompts = model.prompts[:2] * 4
    assert run(model, engine, prompts) == model.answers[:2] * 4
    assert_equal(model, engine)
    assert engine.scheduler.preempted[way] > 0


@pytest.mark.share(6)
@every_model
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_forks(oracle: Callable[[str], Oracle], name: str, page_size: int) -> None:
    model = oracle(name)
    engine = engine_of(model, page_size=page_size, max_num_batched_tokens=16)
    answers = run(model, engine, model.prompts[2:], n=3, temperature=0.9, seed=7)
    assert len(set(map(tuple, answers))) == len(answers) == 12


@pytest.mark.share(8)
@every_model
@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "reference"}, {"table_scope": "layer"}, {"page_sizes": "own"}, {"page_sizes": "max"},
        {"page_sizes": "gcd"}, {"memory": "uniform"}, {"memory": "uniform", "page_size": 4}, {"memory": "virtual"},
        {"memory": "orca-pow2"}, {"memory": "ft"}, {"kv_tokens": 192, "page_size": 4}, {"depth": 2},
    ],
    ids=str,
)  # fmt: skip
def test_memories_and_backends(oracle: Callable[[str], Oracle], name: str, settings: dict[str, Any]) -> None:
    model = oracle(name)
    assert_equal(model, engine_of(model, **settings))


@every_model
def test_beams_are_those_of_a_roomy_memory(oracle: Callable[[str], Oracle], name: str) -> None:
    model, found = oracle(name), []
    for settings in ({"enable_prefix_caching": False}, {"kv_tokens": 320, "page_size": 4, "preemption": "swap"}):
        engine = engine_of(model, max_num_batched_tokens=16, **settings)
        found.append(run(model, engine, model.prompts[3:5], beam_width=3, n=3, temperature=1.0))
    assert found[0] == found[1]


@pytest.mark.parametrize("bug", ["keeps its own", "writes to its owner's pages"])
def test_a_layer_that_does_not_really_share_is_caught(oracle: Callable[[str], Oracle], bug: str) -> None:
    model = oracle("shared")
    config = json.loads((model.folder / "config.json").read_text())
    alone = model.folder / bug.split()[0]
    alone.mkdir()
    shutil.copy(model.folder / "model.safetensors", alone)
    (alone / "config.json").write_text(json.dumps({**config, "kv_sharing": None}))
    wrong = build(
        EngineConfig(model=str(alone), skip_tokenizer_init=True, dtype="float32", kv_tokens=1024, threads=1)
    ).engine
    if bug != "keeps its own":
        store: Any = wrong.runner.store  # type: ignore[attr-defined]
        for layer, owner in enumerate(config["kv_sharing"]):
            if owner is not None:
                store.caches[layer] = store.caches[owner]
    with pytest.raises(AssertionError):
        assert_equal(model, wrong)


def test_a_sharer_has_a_product_for_queries_alone(oracle: Callable[[str], Oracle]) -> None:
    engine = engine_of(oracle("shared"))
    runner: Any = engine.runner
    attentions = [module for module in runner.model.modules() if isinstance(module, Attention)]
    assert [attention.qkv is None for attention in attentions] == [False, True, False, False, True, True, False]
    assert [cache.writes for cache in runner.store.caches.values()] == [True, False, True, True, False, False, True]
    assert runner.store.caches[4].keys.data_ptr() == runner.store.caches[3].keys.data_ptr()
    assert [group.layers for group in engine.scheduler.memory.geometry.groups] == [(0, 3, 6), (2,)]
