"""Embeddings equal transformers' hidden states, pooled, whatever the chunks, pages, prefix hits, the memory pressure
or what runs beside them; and nobody beside them notices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_equality import FAMILIES, engine_of, outputs_of, random_model

from quire import LLM
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.errors import InputError
from quire.protocol.sampling_params import SamplingParams
from quire.text.embedding import embedding_vector

LENGTHS = (1, 5, 16, 23, 37, 40)
PROMPTS = [[(7 * i + j * j) % 97 for j in range(n)] for i, n in enumerate(LENGTHS)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FEW = {"kv_tokens": 72, "max_num_seqs": 12, "page_size": 4, "swap_gib": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "single": {"max_num_batched_tokens": 1, "page_size": 4},
    "chunks": {"max_num_batched_tokens": 7},
    "whole": {"max_num_batched_tokens": 512, "page_size": 1, "depth": 2},
    "virtual": {"memory": "virtual", "kv_tokens": 2048, "max_num_batched_tokens": 7},
    "recompute": {**FEW, "preemption": "recompute", "max_num_batched_tokens": 7},
    "swap": {**FEW, "preemption": "swap", "max_num_batched_tokens": 7},
}


class Reference:
    """A random model in transformers, saved as a checkpoint: its hidden states, pooled, and its greedy tokens."""

    def __init__(self, family: str, folder: Path) -> None:
        model = random_model(FAMILIES[family]())
        self.folder = folder
        model.save_pretrained(folder)
        self.model = model.base_model

    @torch.inference_mode()
    def pooled(self, prompt: list[int], kind: str) -> torch.Tensor:
        hidden = self.model(torch.tensor([prompt])).last_hidden_state[0].double()
        found = hidden.mean(0) if kind == "mean" else hidden[-1]
        return found / found.norm()

    def engine(self, **settings: Any) -> Engine:
        return engine_of(self, device="cpu", **settings)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda family: Reference(family, tmp_path_factory.mktemp(family)))


def embed(kind: str) -> SamplingParams:
    return SamplingParams(pooling=kind, temperature=0)


def difference(output: BranchOutput, wanted: torch.Tensor) -> float:
    return float((torch.from_numpy(embedding_vector(output)).double() - wanted).abs().max())


def tokens_of(outputs: list[BranchOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if family == "llama" or case in ("chunks", "swap") else pytest.mark.soak)
        for family in ("llama", "gemma3", "gpt2", "opt")
        for case in CASES
    ],
)
def test_embeddings_equal_transformers(reference: Callable[[str], Reference], family: str, case: str) -> None:
    """Two of each prompt, and between them as many that write; those write as they do alone."""
    oracle = reference(family)
    less = {"kv_tokens": 40} if family == "gemma3" and case in ("recompute", "swap") else {}  # windows take less
    engine = oracle.engine(**CASES[case] | less)
    try:
        alone = [tokens_of(outputs_of(engine, {"a": (prompt, GREEDY)})["a"]) for prompt in PROMPTS]
        asked: dict[str, tuple[list[int], SamplingParams]] = {}
        for at, prompt in enumerate(PROMPTS):
            asked |= {f"write {at}": (prompt, GREEDY)}
            asked |= {f"{kind} {at}": (prompt, embed(kind)) for kind in ("mean", "last")}
        found = outputs_of(engine, asked)
        for at, prompt in enumerate(PROMPTS):
            assert tokens_of(found[f"write {at}"]) == alone[at]
            for kind in ("mean", "last"):
                [output] = found[f"{kind} {at}"]
                assert (output.tokens, output.finish_reason, output.done) == ((), "stop", True)
                assert difference(output, oracle.pooled(prompt, kind)) < 1e-4
        if case in ("recompute", "swap"):
            assert engine.scheduler.preemption_counts[case] > 0
        assert not engine.scheduler.by_slot
    finally:
        engine.close()


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_preempted_prompt_goes_on(reference: Callable[[str], Reference], way: str) -> None:
    """Embeddings alone, each preempted between its chunks, as older ones need the memory."""
    oracle = reference("llama")
    engine = oracle.engine(**FEW | {"preemption": way, "max_num_batched_tokens": 7, "kv_tokens": 44})
    preempt, victims = engine.scheduler._preempt, []
    engine.scheduler._preempt = lambda victim: (
        victims.append((victim.id, victim.live_seqs[0].computed)),
        preempt(victim),
    )
    try:
        engine.add("first", PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        engine.step()
        found = outputs_of(engine, {f"{kind}": (PROMPTS[4], embed(kind)) for kind in ("mean", "last")} | {
            "write": (PROMPTS[0], GREEDY)})  # fmt: skip
        assert any(id in ("mean", "last") and computed for id, computed in victims), victims
        for kind in ("mean", "last"):
            assert difference(found[kind][-1], oracle.pooled(PROMPTS[4], kind)) < 1e-4
    finally:
        engine.close()


def test_prefix_hits(reference: Callable[[str], Reference]) -> None:
    """The last token's hidden state may come from a prefix that was found; a mean needs all of them."""
    oracle = reference("llama")
    engine = oracle.engine(page_size=4)
    try:
        for kind, cached in (("last", 0), ("last", 36), ("mean", 0)):
            [output] = outputs_of(engine, {"a": (PROMPTS[5], embed(kind))})["a"]
            assert output.cached_tokens == cached
            assert difference(output, oracle.pooled(PROMPTS[5], kind)) < 1e-4
        [first, *_] = outputs_of(engine, {"b": (PROMPTS[5], GREEDY)})["b"]
        assert first.cached_tokens == 36  # what an embedding computed, others find
    finally:
        engine.close()


def test_what_the_checkpoint_says(reference: Callable[[str], Reference]) -> None:
    oracle = reference("gpt2")
    where = oracle.folder / "1_Pooling"
    where.mkdir()
    (where / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    for setting, kind in ((None, "mean"), ("last", "last")):
        settings = {} if setting is None else {"pooling": setting}
        with LLM(
            str(oracle.folder), skip_tokenizer_init=True, dtype="float32", device="cpu", kv_tokens=512, **settings
        ) as llm:
            [found] = llm.embed(PROMPTS[3])
            assert torch.allclose(torch.tensor(found).double(), oracle.pooled(PROMPTS[3], kind), atol=1e-4)
            [short] = llm.embed([PROMPTS[3]], dimensions=8)
            wanted = oracle.pooled(PROMPTS[3], kind)[:8]
            assert torch.allclose(torch.tensor(short).double(), wanted / wanted.norm(), atol=1e-4)
            for dimensions in (0, 33):
                with pytest.raises(InputError, match="dimensions must be between 1 and 32"):
                    llm.embed([PROMPTS[3]], dimensions=dimensions)
            for bad in ([[]], [[97]], [[1] * 200]):
                with pytest.raises(InputError):
                    llm.embed(bad)


@pytest.mark.parametrize(
    "clash", [{"n": 2}, {"best_of": 2}, {"beam_width": 2}, {"logprobs": 1}, {"prompt_logprobs": 1}]
)
def test_pooling_generates_nothing(clash: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="can't be combined with pooling"):
        SamplingParams(pooling="mean", **clash)
    with pytest.raises(InputError, match="pooling must be one of"):
        SamplingParams(pooling="max")


def test_an_engine_elsewhere(reference: Callable[[str], Reference]) -> None:
    """Vectors cross to another process as they are; two ranks have what one has."""
    oracle = reference("llama")
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kv_tokens": 512, "threads": 1}
    with LLM(str(oracle.folder), tp=2, **settings) as llm:
        for found, prompt in zip(llm.embed(PROMPTS), PROMPTS):
            assert torch.allclose(torch.tensor(found).double(), oracle.pooled(prompt, "last"), atol=1e-4)
