"""Models of layers with and without windows, from transformers' checkpoints: what the engine says of tokens, drawn and
scored, is what transformers' logits say to 1e-4, whatever the chunks, pages, hits, preemptions and forks; and greedy
tokens are those of transformers' `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.step_plan import StepPlan, TopLogprobs
from quire.startup.build import build

WINDOW, NEW = 7, 9
SHAPE: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "sliding_window": WINDOW,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", SHAPE),
    "mistral, layer_types": ("ministral", {**SHAPE, "layer_types": MIXED}),
    "ministral": ("ministral", {**SHAPE, "layer_types": MIXED[::-1]}),
    "gemma2": ("gemma2", {**SHAPE, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**SHAPE, "sliding_window_pattern": 2}),
    "gpt_oss": ("gpt_oss", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
PROMPTS = [[(7 * i * i + 3 * k) % 89 for i in range(length)] for k, length in enumerate((31, 4, 18))]


class Saved:
    """A random model of transformers', its folder, and what it says of tokens; and how engines of it are set."""

    cases = CASES
    settings: ClassVar[dict[str, Any]] = {"kv_tokens": 1024}

    def __init__(self, case: str, folder: Path) -> None:
        self.folder, (kind, options) = folder, self.cases[case]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **options)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, parameter in self.model.named_parameters():
            self.draw(kind, name, parameter.data)
        self.model.save_pretrained(folder)
        self.logprobs_by_tokens: dict[tuple[int, ...], torch.Tensor] = {}
        if case == "mistral, layer_types":  # as a checkpoint has it that came before there was a class for it
            path = folder / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}))

    def draw(self, kind: str, name: str, weights: torch.Tensor) -> None:
        scales = {"gemma2": 0.05, "gemma3_text": 0.05, "gpt_oss": 3.0}
        weights.normal_(0, scales.get(kind, 0.3) if "embed" in name else 0.3)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]: of what follows each of them."""
        key = tuple(tokens)
        if key not in self.logprobs_by_tokens:
            self.logprobs_by_tokens[key] = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return self.logprobs_by_tokens[key]

    def following(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[len(tokens), V]: of each of these tokens behind a prompt."""
        return self.logprobs(prompt + tokens)[len(prompt) - 1 : -1]

    @torch.inference_mode()
    def generate(self, prompt: list[int], **options: Any) -> list[list[int]]:
        """What follows the prompt: of each beam, or of the only row."""
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return self.model.generate(ids, **limits, **options)[:, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Saved(case, tmp_path_factory.mktemp("saved")))


def engine_of(model: Any, **settings: Any) -> Engine:
    config = {"max_num_seqs": 8, "threads": 1, "debug": True, "dtype": "float32", **model.settings, **settings}
    return build(EngineConfig.of(model=str(model.folder), skip_tokenizer_init=True, **config)).engine


@contextmanager
def serving(
    model: Any, preemption: str | None = None, steps: Set[int] = frozenset({3, 5, 8, 14, 22}), **settings: Any
) -> Iterator[Engine]:
    """An engine, which with `preemption` preempts the youngest request before these steps."""
    engine = engine_of(model, **settings, **({} if preemption is None else {"preemption": preemption, "depth": 1}))
    if preemption is not None:
        preempting(engine, steps)
    yield engine
    assert preemption is None or engine.scheduler.preemption_counts[preemption] > 0
    engine.close()


def preempting(engine: Engine, steps: Set[int]) -> None:
    """Preempt the youngest request before the steps of these numbers."""
    scheduler, inner, count = engine.scheduler, engine.scheduler.schedule, iter(range(1, 10**6))

    def schedule() -> StepPlan | None:
        if next(count) in steps and scheduler.running and not scheduler.num_in_flight:
            scheduler._preempt(next(reversed(scheduler.running)))
        return inner()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def run(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams,
    request: Callable[[Any], tuple[list[int], dict[str, Any]]] = lambda prompt: (prompt, {}),
) -> Iterator[tuple[Any, list[int], list[TopLogprobs]]]:  # fmt: skip
    """Each branch's prompt and tokens, and their log-probabilities. `request`: a prompt's tokens and images."""
    for i, prompt in enumerate(prompts):
        tokens, images = request(prompt)
        engine.add(str(i), tokens, params, **images)
    for name, tokens, tops in finished(engine):
        yield prompts[int(name)], tokens, tops


def finished(engine: Engine) -> Iterator[tuple[str, list[int], list[TopLogprobs]]]:
    """Each branch's request and tokens, and their log-probabilities."""
    found: dict[tuple[str, int], tuple[list[int], list[TopLogprobs]]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens, tops = found.setdefault((output.request_id, output.branch), ([], []))
            tokens += output.tokens
            tops += output.top_logprobs
        engine.scheduler.memory.check()
    for (request, _), (tokens, tops) in found.items():
        yield request, tokens, tops


def assert_said(tops: list[TopLogprobs], logprobs: torch.Tensor, within: float = 1e-4) -> None:
    for top, row in zip(tops, logprobs, strict=True):
        assert len(top.ids) == 20
        torch.testing.assert_close(torch.tensor(top.logprobs), row[list(top.ids)], atol=within, rtol=0)
        assert abs(top.logprob - row[top.token]) < within


def check_branches(
    engine: Engine, model: Any, prompts: Sequence[Any], branches: int = 2, within: float = 1e-4, run: Any = run,
    least: int | None = None, **params: Any,
) -> None:  # fmt: skip
    """Twice: the second time prompts may be found in memory. `least` answers differ, by default all."""
    drawn = {"temperature": 0.9, "seed": 3, "max_tokens": NEW, "ignore_eos": True, "logprobs": 20, **params}
    for _ in range(2):
        answers = list(run(engine, prompts, SamplingParams(n=branches, **drawn)))
        different = len({tuple(tokens) for _, tokens, _ in answers})
        assert different >= (branches * len(prompts) if least is None else least), "branches part"
        for prompt, tokens, tops in answers:
            assert_said(tops, model.following(prompt, tokens), within)


def check(
    model: Saved, prompts: Sequence[list[int]], branches: int, within: float = 1e-4, preemption: str | None = None,
    **settings: Any,
) -> None:  # fmt: skip
    """Prompts are found in memory, but without caching, and where pages keep no state."""
    found = settings.get("enable_prefix_caching", True) and settings.get("memory") != "uniform"
    with serving(model, preemption, **settings) as engine:
        check_branches(engine, model, prompts, branches, within)
        assert (engine.scheduler.memory.account().sharing.hits > 0) == found


def check_scored(model: Saved, prompt: list[int], **settings: Any) -> None:
    engine = engine_of(model, page_size=4, **settings)
    engine.add("0", prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    (tops,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
    assert [top.token for top in tops] == prompt[1:]
    assert_said(list(tops), model.logprobs(prompt)[:-1])


def check_greedy(model: Saved, prompts: Sequence[list[int]]) -> Sequence[KVCacheGroup]:
    """The groups of layers of the engine that is made of the folder."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with LLM(str(model.folder), skip_tokenizer_init=True, dtype="float32", threads=1, kv_tokens=2048) as llm:
        groups = llm.engine.scheduler.memory.kv_config.groups
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = [model.generate(prompt)[0] for prompt in prompts]
    assert [result.outputs[0].token_ids for result in results] == answers
    assert len({token for answer in answers for token in answer}) > 5
    return groups


@pytest.mark.share(8)
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_branches(saved: Any, case: str, page_size: int, preemption: str | None) -> None:
    for chunk in (3, 16, 64):
        check(saved(case), PROMPTS, 2, page_size=page_size, max_num_batched_tokens=chunk, preemption=preemption)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("case", "ranks", "preemption"),
    [
        ("mistral, layer_types", 2, "swap"),
        ("gemma2", 4, "recompute"),
        ("gemma3", 2, "recompute"),
        ("gpt_oss", 2, "swap"),
    ],
)
def test_logits_of_ranks(saved: Any, case: str, ranks: int, preemption: str) -> None:
    check(saved(case), PROMPTS, 2, tp=ranks, page_size=4, max_num_batched_tokens=16, preemption=preemption)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_scored_prompts(saved: Any, case: str) -> None:
    check_scored(saved(case), PROMPTS[0], max_num_batched_tokens=8)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_from_a_folder(saved: Any, case: str) -> None:
    groups = check_greedy(saved(case), PROMPTS)
    assert {group.window for group in groups} == ({WINDOW} if case == "mistral" else {WINDOW, None})
