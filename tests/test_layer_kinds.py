"""Layers that share keys and values, in windows and in chunks, against a dense reference: log-probabilities to 1e-4
whatever the chunks, the pages, hits, preemptions and forks, at lengths beyond twice the window; and the same greedy
tokens in every memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_equality
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from test_equality import NEW
from torch import Tensor

from quire.core.engine import Engine
from quire.models.decoder import Attention
from quire.protocol.sampling_params import SamplingParams

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
TOP = 20


class DenseLlama:
    """A Llama of unlike layers as one reads it off its config.json: a whole sequence at once, a mask for each layer,
    and where a layer shares the other one's own keys and values. Plain torch in fp32; nothing of it is the engine's."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        layers = self.config["num_hidden_layers"]
        self.types = self.config.get("layer_types") or ["full_attention"] * layers
        self.owners = self.config.get("kv_sharing") or [None] * layers

    def _weight(self, name: str, layer: int | None = None) -> Tensor:
        where = "model." if layer is None else f"model.layers.{layer}."
        return self.weights[f"{where}{name}.weight"]

    def mask(self, layer: int, length: int) -> Tensor:
        """[length, length]: true where a token (row) sees another (column)."""
        seen = torch.zeros(length, length, dtype=torch.bool)
        for at in range(length):
            first = 0
            if self.types[layer] == "sliding_attention":
                first = max(0, at + 1 - self.config["sliding_window"])
            elif self.types[layer] == "chunked_attention":
                first = at // self.config["attention_chunk_size"] * self.config["attention_chunk_size"]
            seen[at, first : at + 1] = True
        return seen

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _turned(self, x: Tensor) -> Tensor:
        """x [length, heads, dim], each at its position."""
        length, _, dim = x.shape
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        angles = torch.outer(torch.arange(length), theta ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)[:, None]
        low, high = x.split(dim // 2, dim=-1)
        return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()

    def _heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        heads = self.config["num_attention_heads" if name == "q" else "num_key_value_heads"]
        return (x @ self._weight(f"self_attn.{name}_proj", layer).T).view(len(x), heads, -1)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[length, vocabulary]."""
        x = self._weight("embed_tokens")[tokens]
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        for layer, owner in enumerate(self.owners):
            inner = self._norm(x, self._weight("input_layernorm", layer))
            q = self._turned(self._heads(inner, layer, "q"))
            if owner is None:
                kept[layer] = self._turned(self._heads(inner, layer, "k")), self._heads(inner, layer, "v")
            k, v = (one.repeat_interleave(group, 1) for one in kept[layer if owner is None else owner])
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~self.mask(layer, len(tokens)), -torch.inf).softmax(-1)
            found = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + found @ self._weight("self_attn.o_proj", layer).T
            inner = self._norm(x, self._weight("post_attention_layernorm", layer))
            gate, up = (inner @ self._weight(f"mlp.{name}_proj", layer).T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self._weight("mlp.down_proj", layer).T
        return self._norm(x, self._weight("norm")) @ self.weights["lm_head.weight"].T


def saved(folder: Path, more: dict[str, Any]) -> None:
    """A checkpoint of transformers' Llama with random weights, and in its config.json what only we know."""
    layers = len(more.get("layer_types", "two"))
    config = transformers.LlamaConfig(**{**test_equality.SIZES, "num_hidden_layers": layers})
    test_equality.random_model(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


class Oracle(test_equality.Oracle):
    """The dense reference's greedy answers to random prompts."""

    def __init__(self, folder: Path, more: dict[str, Any]) -> None:
        saved(folder, more)
        self.folder, self.dense = folder, DenseLlama(folder)
        self.ask()

    def logits(self, tokens: list[int]) -> Tensor:
        return self.dense.logits(tokens)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(tmp_path_factory.mktemp("kinds"), MODELS[name]))


def engine_of(oracle: Oracle, **settings: Any) -> Engine:
    return test_equality.engine_of(oracle, **{"kv_tokens": 1024, **settings})


def run(oracle: Oracle, engine: Engine, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    """All prompts at once: the answers of their branches, whose log-probabilities are the reference's."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "logprobs": TOP, **more})
    asked = {str(i): (prompt, params) for i, prompt in enumerate(prompts)}
    answers: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}
    for output in chain(*test_equality.outputs_of(engine, asked).values()):
        tokens, tops = answers.setdefault((int(output.request_id), output.branch), ([], []))
        tokens += output.tokens
        tops += output.top_logprobs
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
def test_chunks_pages_and_hits(oracle: Callable[[str], Oracle], name: str, budget: int, page_size: int) -> None:
    """Twice: the second time there are hits."""
    model = oracle(name)
    engine = engine_of(model, max_num_batched_tokens=budget, page_size=page_size)
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
    assert engine.scheduler.preemption_counts[way] > 0


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


@pytest.mark.parametrize("bug", ["keeps its own", "writes to its owner's pages"])
def test_a_layer_that_does_not_really_share_is_caught(
    oracle: Callable[[str], Oracle], bug: str, tmp_path: Path
) -> None:
    model = oracle("shared")
    config = json.loads((model.folder / "config.json").read_text())
    shutil.copy(model.folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_sharing": None}))
    wrong: Any = test_equality.engine_of(SimpleNamespace(folder=tmp_path), kv_tokens=1024)
    if bug != "keeps its own":
        caches = wrong.runner.store.caches
        for layer, owner in enumerate(config["kv_sharing"]):
            if owner is not None:
                caches[layer] = caches[owner]
    with pytest.raises(AssertionError):
        assert_equal(model, wrong)


def test_a_sharer_has_a_product_for_queries_alone(oracle: Callable[[str], Oracle]) -> None:
    engine = engine_of(oracle("shared"))
    runner: Any = engine.runner
    attentions = [module for module in runner.model.modules() if isinstance(module, Attention)]
    assert [len(attention.qkv.row_shards) for attention in attentions] == [3, 1, 3, 3, 1, 1, 3]
    assert [cache.writes_kv for cache in runner.store.caches.values()] == [True, False, True, True, False, False, True]
    assert runner.store.caches[4].keys.data_ptr() == runner.store.caches[3].keys.data_ptr()
    assert [group.layers for group in engine.scheduler.memory.kv_config.groups] == [(0, 3, 6), (2,)]
