"""Greedy tokens equal transformers' whatever the chunks, the pages, the batch, the memory pressure or the attention."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from quire.build import build
from quire.config import EngineConfig
from quire.engine import Engine
from quire.request import SamplingParams

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    ),
    "mistral": lambda: transformers.MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=9, head_dim=8,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, dropout=0.0,
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}  # fmt: skip
LENGTHS = (1, 5, 16, 23, 37, 40)
NEW = 20
TIE = 1e-5


class Oracle:
    """A random model in transformers, saved as a checkpoint; its greedy tokens for prompts of several lengths."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = FAMILIES[family]()
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            parameter.data.normal_(0, 0.3)  # larger than the default, so that tokens differ and depend on context
        self.folder = folder
        self.model.save_pretrained(folder)
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]
        self.answers = [self.continued(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def continued(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def tied(self, prompt: list[int], answer: list[int]) -> bool:
        """The first token that differs from ours was chosen between two logits within TIE."""
        expected = self.answers[self.prompts.index(prompt)]
        first = next(i for i, (a, b) in enumerate(zip(answer, expected)) if a != b)
        best = self.model(torch.tensor([prompt + expected[:first]])).logits[0, -1].topk(2).values
        return bool(best[0] - best[1] <= TIE)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda family: Oracle(family, tmp_path_factory.mktemp(family)))


def engine_of(oracle: Oracle, **settings: object) -> Engine:
    options = {"kv_tokens": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "debug": True, "threads": 1}
    built = build(
        EngineConfig(model=str(oracle.folder), skip_tokenizer_init=True, dtype="float32", **(options | settings))
    )
    return built.engine


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.unfinished:
        for output in engine.step():
            answers[output.request] += output.tokens
        engine.scheduler.memory.check()
    return list(answers.values())


def assert_equal(oracle: Oracle, engine: Engine, prompts: list[list[int]]) -> None:
    differing = [
        prompt
        for prompt, answer in zip(prompts, answers_of(engine, prompts))
        if answer != oracle.answers[oracle.prompts.index(prompt)] and not oracle.tied(prompt, answer)
    ]
    assert not differing, f"{len(differing)} of {len(prompts)} answers differ from transformers'"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_chunk_sizes_do_not_change_tokens(oracle, family: str, budget: int) -> None:
    model = oracle(family)
    assert_equal(model, engine_of(model, max_num_batched_tokens=budget), model.prompts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_page_sizes_do_not_change_tokens(oracle, family: str, page_size: int) -> None:
    model = oracle(family)
    assert_equal(model, engine_of(model, page_size=page_size), model.prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_in_a_batch_tokens_are_the_same(oracle, family: str) -> None:
    model = oracle(family)
    for prompt in model.prompts:
        assert_equal(model, engine_of(model), [prompt])
    assert_equal(model, engine_of(model), model.prompts[::-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_change_tokens(oracle, family: str, caching: bool) -> None:
    model = oracle(family)
    # Room for one request of full length and one page.
    engine = engine_of(model, page_size=4, kv_tokens=64, enable_prefix_caching=caching, max_num_batched_tokens=16)
    assert_equal(model, engine, model.prompts)
    # A window bounds what each request ever needs, so that admission alone keeps them within the memory.
    assert engine.scheduler.preemptions > 0 or family == "mistral"
    assert engine.scheduler.memory.usage().used == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_run_hits_the_prefix_cache_and_gives_the_same_tokens(oracle, family: str) -> None:
    model = oracle(family)
    engine = engine_of(model, page_size=4, kv_tokens=1024)
    assert_equal(model, engine, model.prompts)
    assert_equal(model, engine, model.prompts)
    assert engine.scheduler.memory.hits > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_backends_and_table_scopes_give_the_same_tokens(oracle, family: str, scope: str, attention: str) -> None:
    model = oracle(family)
    engine = engine_of(model, table_scope=scope, attention=attention, page_size=4)
    assert_equal(model, engine, model.prompts)


@pytest.mark.parametrize("depth", [2, 3])
def test_overlapped_steps_give_the_same_tokens(oracle, depth: int) -> None:
    model = oracle("llama")
    assert_equal(model, engine_of(model, depth=depth, page_size=4, kv_tokens=96), model.prompts)


def test_branches_of_greedy_requests_agree(oracle) -> None:
    model = oracle("llama")
    engine = engine_of(model, page_size=4)
    engine.add("all", model.prompts[3], SamplingParams(temperature=0, max_tokens=NEW, n=3))
    answers: list[list[int]] = [[], [], []]
    while engine.unfinished:
        for output in engine.step():
            answers[output.branch] += output.tokens
    assert answers == [model.answers[3]] * 3
