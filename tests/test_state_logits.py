"""Models whose layers keep a running state, from transformers' checkpoints: what the engine says of tokens is what
transformers' logits say to 1e-4, whatever the chunks, pages, hits, preemptions, forks and beams; and greedy tokens are
those of transformers' `generate`. States are kept at every 512th token; where that is far for a test, at every 16th.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_unlike_logits import assert_said, preempting

from quire import LLM, SamplingParams
from quire.build import build
from quire.config import EngineConfig
from quire.control.engine import Engine
from quire.data.models import read_spec, resolve
from quire.data.weights.checkpoint import read_config
from quire.data.weights.dummy import fill_dummy
from quire.vocabulary.plan import Top

VOCAB, NEW = 89, 9
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    **COMMON, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
    "mamba_d_state": 8, "use_mamba_kernels": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("jamba", {**JAMBA, "num_hidden_layers": 3}),
    "jamba, attention last": ("jamba", {**JAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "jamba, no experts": ("jamba", {**JAMBA, "num_hidden_layers": 4, "num_experts": 1, "tie_word_embeddings": True}),
    "mamba": ("mamba", {**COMMON, "num_hidden_layers": 3, "state_size": 8, "use_bias": True}),
    "falcon_mamba": ("falcon_mamba", {**COMMON, "num_hidden_layers": 2, "conv_kernel": 3}),
}
SHORT = [[(7 * i * i + 3 * k) % VOCAB for i in range(length)] for k, length in enumerate((75, 4, 33))]
LONG = [[(5 * i * i + 11 * i + k) % VOCAB for i in range(length)] for k, length in enumerate((1030, 513, 40))]


class Saved:
    """A random model of transformers', its folder, and what it says of tokens."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder, (kind, options) = folder, CASES[case]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **options)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, parameter in self.model.named_parameters():
            if "A_log" not in name and not name.endswith(".D"):
                # Larger ones make of the last bits of fp32 sums ten times as much behind experts.
                parameter.data.normal_(1.0 * ("norm" in name), 0.1 if parameter.dim() == 1 else 0.2)
        self.model.save_pretrained(folder)
        self.said: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]: of what follows each of them."""
        key = tuple(tokens)
        if key not in self.said:
            self.said[key] = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return self.said[key]

    @torch.inference_mode()
    def generate(self, prompt: list[int], **options: Any) -> Any:
        ids = torch.tensor([prompt])
        return self.model.generate(
            ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids), **options
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Saved(case, tmp_path_factory.mktemp("saved")))


def engine_of(model: Saved, **settings: Any) -> Engine:
    config = {"kv_tokens": 8192, "max_num_seqs": 8, "threads": 1, "debug": True, "state_tokens": 16, **settings}
    return build(EngineConfig(model=str(model.folder), skip_tokenizer_init=True, dtype="float32", **config)).engine


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> Iterator[tuple[list[int], list[int], list[Top]]]:
    """Each branch's prompt and tokens, and what was said of these."""
    found: dict[tuple[str, int], tuple[list[int], list[Top]]] = {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    while engine.unfinished:
        for output in engine.step():
            tokens, tops = found.setdefault((output.request, output.branch), ([], []))
            tokens += output.tokens
            tops += output.tops
        engine.scheduler.memory.check()
    for (request, _), (tokens, tops) in found.items():
        yield prompts[int(request)], tokens, tops


def check(model: Saved, prompts: Sequence[list[int]], branches: int, within: float = 1e-4, **settings: Any) -> None:
    """Twice: the second time prompts are found in memory, but without caching, and where pages keep no state."""
    how, uniform = settings.get("preemption"), settings.get("memory") == "uniform"
    found = settings.get("enable_prefix_caching", True) and not uniform
    if how is not None:
        settings["depth"] = 1
    engine = engine_of(model, **settings)
    if how is not None:
        preempting(engine, {3, 5, 8, 14, 22})
    params = SamplingParams(temperature=0.9, seed=3, n=branches, max_tokens=NEW, ignore_eos=True, logprobs=20)
    for _ in range(2):
        answers = list(run(engine, prompts, params))
        assert len({tuple(tokens) for _, tokens, _ in answers}) == branches * len(prompts), "branches part"
        for prompt, tokens, tops in answers:
            assert_said(tops, model.logprobs(prompt + tokens)[len(prompt) - 1 : -1], within)
    assert how is None or engine.scheduler.preempted[how] > 0
    assert (engine.scheduler.memory.account().sharing.hits > 0) == found
    engine.close()


CUTS = [(1, 7), (16, 3), (4, 64), (16, 20)]
"""Tokens of a page, and most of a step."""
SOME = [
    (case, *CUTS[(i + j) % len(CUTS)], preemption)
    for i, case in enumerate(CASES) for j, preemption in enumerate((None, "swap", "recompute", "recompute"))
]  # fmt: skip


@pytest.mark.share(3)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 7}, {"preemption": "swap"}, {"preemption": "recompute"}],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_ranks(saved: Any, case: str, settings: dict[str, Any], ranks: int) -> None:
    """Each has some channels of a state; beyond two, of a key head a copy."""
    check(saved(case), SHORT, 2, tp=ranks, **{"page_size": 4, "max_num_batched_tokens": 24, **settings})


@pytest.mark.share(8)
@pytest.mark.parametrize(("case", "page_size", "chunk", "preemption"), SOME)
def test_logits_of_branches(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    how = {} if preemption is None else {"preemption": preemption}
    check(saved(case), SHORT, 2, page_size=page_size, max_num_batched_tokens=chunk, **how)


@pytest.mark.parametrize(
    ("case", "page_size", "chunk", "preemption"),
    [("jamba", 16, 1024, None), ("jamba, attention last", 4, 512, "swap"), ("mamba", 16, 512, "recompute")],
)
def test_logits_behind_512_tokens(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    how = {} if preemption is None else {"preemption": preemption}
    check(saved(case), LONG, 1, page_size=page_size, max_num_batched_tokens=chunk, state_tokens=512, **how)


@pytest.mark.soak
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 512, 1024])
@pytest.mark.parametrize("case", CASES)
def test_all_logits(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    how = {} if preemption is None else {"preemption": preemption}
    check(saved(case), LONG, 2, page_size=page_size, max_num_batched_tokens=chunk, state_tokens=512, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_gpu(saved: Any, case: str, preemption: str) -> None:
    """To what fp32 sums in another order leave, and exponentials of another library."""
    for chunk, run in ((20, 16), (1024, 512)):
        options = {"max_num_batched_tokens": chunk, "state_tokens": run, "preemption": preemption, "device": "cuda"}
        check(saved(case), SHORT if run == 16 else LONG, 2, within=2e-3, **options)


@pytest.mark.share(8)
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("settings", [{"page_sizes": "max"}, {"table_scope": "layer"}, {"memory": "uniform"}], ids=str)
@pytest.mark.parametrize("case", ["jamba", "jamba, attention last", "jamba, no experts"])
def test_logits_in_other_memories(saved: Any, case: str, settings: dict[str, Any], preemption: str | None) -> None:
    """Twice, with forks."""
    how = {} if preemption is None else {"preemption": preemption}
    check(saved(case), SHORT, 2, max_num_batched_tokens=20, page_size=4, **settings, **how)


@pytest.mark.soak
@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), CUTS)
@pytest.mark.parametrize("memory", ["paged", "uniform"])
@pytest.mark.parametrize("case", CASES)
def test_all_memories(
    saved: Any, case: str, memory: str, page_size: int, chunk: int, preemption: str | None, hit: bool
) -> None:
    how: dict[str, Any] = {"enable_prefix_caching": hit} | ({} if preemption is None else {"preemption": preemption})
    check(saved(case), SHORT, 2, memory=memory, page_size=page_size, max_num_batched_tokens=chunk, **how)


@pytest.mark.parametrize("case", ["jamba", "jamba, attention last", "mamba"])
def test_logits_of_scored_prompts(saved: Any, case: str) -> None:
    model, engine = saved(case), engine_of(saved(case), max_num_batched_tokens=24, page_size=4)
    engine.add("0", SHORT[0], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    (tops,) = [output.prompt_tops for output in outputs if output.prompt_tops]
    assert [top.token for top in tops] == SHORT[0][1:]
    assert_said(list(tops), model.logprobs(SHORT[0])[:-1])


@pytest.mark.parametrize("case", CASES)
def test_weights_are_counted(saved: Any, case: str) -> None:
    config = read_config(saved(case).folder)
    ours = resolve(config)(config, torch.float32, torch.device("meta"))
    count = sum(parameter.numel() for parameter in saved(case).model.parameters())
    assert read_spec(config).parameters == count == sum(parameter.numel() for parameter in ours.parameters())


def test_dummy_weights_forget_as_an_untrained_model_does(saved: Any) -> None:
    """Steps from 0.001 to 0.1 and decays from 1 on: outputs stay finite, however long a sequence is."""
    config = read_config(saved("jamba").folder)
    model = resolve(config)(config, torch.float32, torch.device("cpu"))
    fill_dummy(model, 0)
    mixer = model.layers[0].mamba
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    torch.testing.assert_close(steps[[0, -1]], torch.tensor([1e-3, 0.1]), rtol=1e-4, atol=0)
    assert torch.equal(mixer.decay_log[5].exp().round(), torch.arange(1.0, 9.0))
    assert (mixer.skip == 1).all()
    engine = engine_of(saved("jamba"), dummy_weights=True, max_num_batched_tokens=512)
    found = list(run(engine, [LONG[0] + LONG[1]], SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)))
    assert len(found[0][1]) == NEW


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_from_a_folder(saved: Any, case: str) -> None:
    model = saved(case)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with LLM(str(model.folder), skip_tokenizer_init=True, dtype="float32", threads=1, kv_tokens=2048) as llm:
        groups = llm.engine.scheduler.memory.geometry.groups
        assert {group.kind for group in groups} == ({"state", "full"} if "jamba" in case else {"state"})
        assert {group.run_tokens for group in groups if group.kind == "state"} == {512}
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in SHORT], params, use_tqdm=False)
    answers = [model.generate(prompt)[0, len(prompt) :].tolist() for prompt in SHORT]
    assert [result.outputs[0].token_ids for result in results] == answers
    assert len({token for answer in answers for token in answer}) > 5


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("case", ["jamba", "mamba"])
def test_beams(saved: Any, case: str, preemption: str | None) -> None:
    beams(saved, case, preemption, 4, 24)


@pytest.mark.soak
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 3), (4, 64), (16, 512)])
@pytest.mark.parametrize("case", CASES)
def test_all_beams(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    beams(saved, case, preemption, page_size, chunk)


def beams(saved: Any, case: str, preemption: str | None, page_size: int, chunk: int) -> None:
    model, width = saved(case), 4
    how = {} if preemption is None else {"preemption": preemption, "depth": 1}
    engine = engine_of(model, max_num_batched_tokens=chunk, page_size=page_size, max_num_seqs=16, **how)
    if preemption is not None:
        preempting(engine, {6, 9, 13})
    params = SamplingParams(n=width, beam_width=width, max_tokens=NEW, ignore_eos=True)
    for _ in range(2):
        found: dict[str, list[list[int]]] = {str(i): [[] for _ in range(width)] for i in range(len(SHORT))}
        for i, prompt in enumerate(SHORT):
            engine.add(str(i), prompt, params)
        while engine.unfinished:
            for output in engine.step():
                found[output.request][output.branch] += output.tokens
            engine.scheduler.memory.check()
        for i, prompt in enumerate(SHORT):
            rows = model.generate(prompt, num_beams=width, num_return_sequences=width)
            assert found[str(i)] == rows[:, len(prompt) :].tolist()
    assert preemption is None or engine.scheduler.preempted[preemption] > 0
