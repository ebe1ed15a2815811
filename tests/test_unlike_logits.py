"""Models of layers with and without windows, from transformers' checkpoints: what the engine says of tokens, drawn and
scored, is what transformers' logits say to 1e-4, whatever the chunks, pages, hits, preemptions and forks; and greedy
tokens are those of transformers' `generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.build import build
from quire.config import EngineConfig
from quire.control.engine import Engine
from quire.vocabulary.plan import StepPlan, Top

WINDOW, NEW = 7, 9
SHAPE: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "sliding_window": WINDOW,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral, layer_types": ("ministral", {"layer_types": MIXED}),
    "ministral": ("ministral", {"layer_types": MIXED[::-1]}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"sliding_window_pattern": 2}),
}
PROMPTS = [[(7 * i * i + 3 * k) % 89 for i in range(length)] for k, length in enumerate((31, 4, 18))]


class Saved:
    """A random model of transformers', its folder, and what it says of tokens."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder, (kind, options) = folder, CASES[case]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **options})
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, parameter in self.model.named_parameters():
            parameter.data.normal_(0, 0.05 if "embed" in name and kind.startswith("gemma") else 0.3)
        self.model.save_pretrained(folder)
        if case == "mistral, layer_types":  # as a checkpoint has it that came before there was a class for it
            path = folder / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}))

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]: of what follows each of them."""
        return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(ids, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Saved(case, tmp_path_factory.mktemp("saved")))


def engine_of(model: Saved, **settings: Any) -> Engine:
    config = {"kv_tokens": 1024, "max_num_seqs": 8, "threads": 1, "debug": True, **settings}
    return build(EngineConfig(model=str(model.folder), skip_tokenizer_init=True, dtype="float32", **config)).engine


def preempting(engine: Engine, steps: set[int]) -> None:
    """Preempt the youngest request before the steps of these numbers."""
    scheduler, inner, count = engine.scheduler, engine.scheduler.schedule, iter(range(1, 10**6))

    def schedule() -> StepPlan | None:
        if next(count) in steps and scheduler.running and not scheduler.flight:
            scheduler._preempt(next(reversed(scheduler.running)))
        return inner()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def run(engine: Engine, params: SamplingParams) -> Iterator[tuple[list[int], list[int], list[Top]]]:
    """Each branch's prompt and tokens, and what was said of these."""
    found: dict[tuple[str, int], tuple[list[int], list[Top]]] = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params)
    while engine.unfinished:
        for output in engine.step():
            tokens, tops = found.setdefault((output.request, output.branch), ([], []))
            tokens += output.tokens
            tops += output.tops
        engine.scheduler.memory.check()
    for (request, _), (tokens, tops) in found.items():
        yield PROMPTS[int(request)], tokens, tops


def assert_said(tops: list[Top], logprobs: torch.Tensor, within: float = 1e-4) -> None:
    for top, row in zip(tops, logprobs, strict=True):
        assert len(top.ids) == 20
        torch.testing.assert_close(torch.tensor(top.logprobs), row[list(top.ids)], atol=within, rtol=0)
        assert abs(top.logprob - row[top.token]) < within


@pytest.mark.share(8)
@pytest.mark.parametrize("preemption", ["none", "swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_branches(saved: Any, case: str, page_size: int, preemption: str) -> None:
    """Twice: the second time prompts are found in memory."""
    model, settings = saved(case), {} if preemption == "none" else {"preemption": preemption, "depth": 1}
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=NEW, ignore_eos=True, logprobs=20)
    for chunk in (3, 16, 64):
        engine = engine_of(model, page_size=page_size, max_num_batched_tokens=chunk, **settings)
        if preemption != "none":
            preempting(engine, {3, 5, 8, 14, 22})
        for _ in range(2):
            answers = list(run(engine, params))
            assert len({tuple(tokens) for _, tokens, _ in answers}) == 2 * len(PROMPTS), "branches part"
            for prompt, tokens, tops in answers:
                assert_said(tops, model.logprobs(prompt + tokens)[len(prompt) - 1 : -1])
        assert preemption == "none" or engine.scheduler.preempted[preemption] > 0
        assert engine.scheduler.memory.account().sharing.hits > 0


@pytest.mark.parametrize("case", CASES)
def test_logits_of_scored_prompts(saved: Any, case: str) -> None:
    model, engine = saved(case), engine_of(saved(case), max_num_batched_tokens=8, page_size=4)
    engine.add("0", PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    (tops,) = [output.prompt_tops for output in outputs if output.prompt_tops]
    assert [top.token for top in tops] == PROMPTS[0][1:]
    assert_said(list(tops), model.logprobs(PROMPTS[0])[:-1])


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_from_a_folder(saved: Any, case: str) -> None:
    model = saved(case)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with LLM(str(model.folder), skip_tokenizer_init=True, dtype="float32", threads=1, kv_tokens=512) as llm:
        layers = llm.engine.scheduler.memory.geometry.groups
        assert {group.window for group in layers} == ({WINDOW} if case == "mistral" else {WINDOW, None})
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    answers = [model.greedy(prompt) for prompt in PROMPTS]
    assert [result.outputs[0].token_ids for result in results] == answers
    assert len({token for answer in answers for token in answer}) > 5
