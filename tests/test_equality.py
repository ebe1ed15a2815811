"""Greedy tokens equal transformers' whatever the chunks, the pages, the batch, the memory pressure or the attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.models import read_spec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan
from quire.startup.build import build

SMALL: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 128, "num_hidden_layers": 2}
SIZES = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = {**SIZES, "sliding_window": 9, "head_dim": 8}
QWEN_MOE = {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GEMMA2 = {
    **WINDOW, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
    "tie_word_embeddings": False,
}  # fmt: skip
OPT = {**SMALL, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32, "dropout": 0.0}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GEMMA4 = {
    **WINDOW, "num_hidden_layers": 4, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**WINDOW),
    "opt": lambda: transformers.OPTConfig(**OPT),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **QWEN_MOE, shared_expert_intermediate_size=40, mlp_only_layers=[0]
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN_MOE, head_dim=16, norm_topk_prob=True),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **WINDOW, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **{**WINDOW, "num_hidden_layers": 4}, layer_types=["full_attention", *["sliding_attention"] * 3]
    ),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA2),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**WINDOW, "num_hidden_layers": 3}, sliding_window_pattern=3, tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
}  # fmt: skip
UNLIKE = ["ministral", "gemma2", "gemma3", "gemma4", "gpt_oss"]  # layers with a window beside layers without
MORE = {"qwen2": lambda: transformers.Qwen2Config(**SIZES)}
FRAMED: dict[str, Any] = {  # families that differ from the others in their declaration alone
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 3}, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=9
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gemma4, per-layer inputs": lambda: transformers.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2},
    ),
    "gemma4, experts": lambda: transformers.Gemma4TextConfig(**GEMMA4, **GEMMA4_EXPERTS),
}
LENGTHS = (1, 5, 16, 23, 37, 40)
NEW = 20
TIE = 1e-5


def random_model(config: Any, scale: float = 0.3, seed: int = 0) -> Any:
    """A model of transformers' in fp32, of a configuration, with random weights and no end token."""
    torch.manual_seed(seed)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(0, scale)  # larger than the default, so that tokens differ and depend on context
    return model.eval()


class Compared:
    """Answers compared with transformers' in the whole session, and those whose difference was a tie."""

    answers = ties = 0


class Oracle:
    """A random model in transformers, saved as a checkpoint; its greedy tokens for prompts of several lengths."""

    def __init__(self, family: str, folder: Path, compared: Compared) -> None:
        self.compared = compared
        self.model = random_model((FAMILIES | MORE | FRAMED)[family]())
        if family.startswith("gemma"):  # so that they depend less on the scaled embedding of the last token
            self.model.model.embed_tokens.weight.data.mul_(0.1)
        self.folder = folder
        self.model.save_pretrained(folder)
        self.ask()

    def ask(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]
        self.answers = [self.continued(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[length, vocabulary]."""
        return self.model(torch.tensor([tokens])).logits[0]

    def continued(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def agrees(self, prompt: list[int], answer: list[int]) -> bool:
        """It is our answer, or it parts from it at a tie; both are counted."""
        expected = self.answers[self.prompts.index(prompt)]
        self.compared.answers += 1
        if answer == expected:
            return True
        if len(answer) != len(expected) or not self.tied(prompt, answer, expected):
            return False
        self.compared.ties += 1
        return True

    def tied(self, prompt: list[int], answer: list[int], expected: list[int]) -> bool:
        """The first token that differs from ours was chosen between two logits within TIE."""
        first = next(i for i, (a, b) in enumerate(zip(answer, expected)) if a != b)
        best = self.logits(prompt + expected[:first])[-1].topk(2).values
        return bool(best[0] - best[1] <= TIE)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    """The oracle of each family. At the end, of 1,000 answers that were compared one at most may have been a tie."""
    compared = Compared()
    yield cache(lambda family: Oracle(family, tmp_path_factory.mktemp(family), compared))
    assert 1000 * compared.ties <= compared.answers, f"{compared.ties} ties in {compared.answers} answers"


def engine_of(oracle: Any, **settings: object) -> Engine:
    options = {
        "kv_tokens": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "debug": True, "threads": 1,
        "dtype": "float32",
    }  # fmt: skip
    return build(EngineConfig.of(model=str(oracle.folder), skip_tokenizer_init=True, **(options | settings))).engine


def outputs_of(engine: Engine, asked: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[BranchOutput]]:
    """All of each request's, once all requests are done."""
    for id, (prompt, params) in asked.items():
        engine.add(id, prompt, params)
    outputs: dict[str, list[BranchOutput]] = {id: [] for id in asked}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.memory.check()
    return outputs


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    found = outputs_of(engine, {str(i): (prompt, params) for i, prompt in enumerate(prompts)})
    return [[token for output in outputs for token in output.tokens] for outputs in found.values()]


def assert_equal(oracle: Oracle, engine: Engine, prompts: list[list[int]]) -> None:
    answers = answers_of(engine, prompts)
    differing = [prompt for prompt, answer in zip(prompts, answers) if not oracle.agrees(prompt, answer)]
    assert not differing, f"{len(differing)} of {len(prompts)} answers differ from transformers'"


WAYS: list[dict[str, Any]] = [
    *({"max_num_batched_tokens": budget} for budget in (1, 7, 16, 64)),
    *({"page_size": size} for size in (1, 4, 16, 32)),
    *({"table_scope": scope, "attention": attention, "page_size": 4}
      for scope in ("model", "layer") for attention in ("reference", "sdpa")),
]  # fmt: skip


@pytest.mark.share(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_chunks_page_sizes_scopes_and_backends_do_not_change_tokens(oracle, family: str, settings: Any) -> None:
    model = oracle(family)
    assert_equal(model, engine_of(model, **settings), model.prompts)


@pytest.mark.parametrize("family", FRAMED)
@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7, "page_size": 4}, {"kv_tokens": 64}], ids=str)
def test_declared_families(oracle, family: str, settings: dict[str, int]) -> None:
    """Over chunks, and with preemption."""
    model = oracle(family)
    assert_equal(model, engine_of(model, **settings), model.prompts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_change_tokens(oracle, family: str, caching: bool) -> None:
    model = oracle(family)
    # Room for one request of full length and one page.
    engine = engine_of(model, page_size=4, kv_tokens=64, enable_prefix_caching=caching, max_num_batched_tokens=16)
    # A window bounds what a request holds, and a long prompt holds it from the start: only short ones grow afterwards.
    assert_equal(model, engine, model.prompts if family not in ("mistral", "ministral") else model.prompts[:2] * 4)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.memory.account().usage.used == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_run_hits_the_prefix_cache_and_gives_the_same_tokens(oracle, family: str) -> None:
    model = oracle(family)
    engine = engine_of(model, page_size=4, kv_tokens=1024)
    assert_equal(model, engine, model.prompts)
    assert_equal(model, engine, model.prompts)
    assert engine.scheduler.memory.account().sharing.hits > 0


# Requests of all kinds, in little memory

KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "seed": 11},
    "penalised": {"temperature": 0.8, "seed": 12, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "parallel": {"n": 3, "seed": 13, "top_p": 0.9},
    "best": {"n": 2, "best_of": 4, "seed": 14},
    "beams": {"n": 3, "beam_width": 3, "early_stopping": "never", "logprobs": 1},
    "wide": {
        "n": 1, "beam_width": 4, "length_penalty": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(20)),
        "presence_penalty": 0.3,
    },
}  # fmt: skip
GROUPS = ("parallel", "best", "beams", "wide")
SOME = 14


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": SOME, "ignore_eos": True} | KINDS[kind])  # type: ignore[arg-type]


def prompt_of(oracle: Oracle, kind: str) -> list[int]:
    return oracle.prompts[sorted(KINDS).index(kind) % len(LENGTHS)]


class Ran(NamedTuple):
    """What every branch got: tokens, why it ended; with which log-probabilities, and how often it was preempted."""

    results: dict[str, list[tuple[list[int], str | None]]]
    logprobs: dict[str, list[float]]
    preemptions: dict[str, int]


def run_all(engine: Engine, oracle: Oracle, arrivals: Sequence[tuple[int, str]]) -> Ran:
    """Add requests of these kinds, each at its step, and step until all are done."""
    due, step, requests = sorted(arrivals, key=lambda arrival: arrival[0]), 0, {}
    results = {kind: [([], None) for _ in range(params_of(kind).n)] for _, kind in arrivals}
    logprobs = {kind: [0.0] * len(branches) for kind, branches in results.items()}
    while due or engine.has_unfinished_requests:
        while due and (due[0][0] <= step or not engine.has_unfinished_requests):
            _, kind = due.pop(0)
            engine.add(kind, prompt_of(oracle, kind), params_of(kind))
            requests[kind] = engine.requests[kind]
        for output in engine.step():
            if output.request_id in results:
                tokens, _ = results[output.request_id][output.branch]
                results[output.request_id][output.branch] = tokens + list(output.tokens), output.finish_reason
                logprobs[output.request_id][output.branch] = output.cumulative_logprob
        engine.scheduler.memory.check()
        step += 1
    assert not engine.scheduler.by_slot
    return Ran(results, logprobs, {kind: request.preemptions for kind, request in requests.items()})


@pytest.fixture(scope="module")
def plenty(oracle):
    """What each kind gives alone, with plenty of memory and no prefix cache."""

    @cache
    def alone(family: str) -> Ran:
        engine = engine_of(oracle(family), kv_tokens=2048, enable_prefix_caching=False, debug=False)
        runs = [run_all(engine, oracle(family), [(0, kind)]) for kind in KINDS]
        assert engine.scheduler.num_preemptions == 0
        return Ran(*({kind: run[i][kind] for kind, run in zip(KINDS, runs)} for i in range(3)))

    return alone


@cache
def least_tokens(oracle: Oracle, page_size: int, chunk: int, kinds: tuple[str, ...] = tuple(KINDS)) -> int:
    """Room for the largest request alone, and one page."""
    config = EngineConfig(page_size=page_size, max_num_batched_tokens=chunk, max_num_seqs=8)
    spec, tokens = read_spec(oracle.model.config.to_dict()), page_size
    asked = [(prompt_of(oracle, kind), params_of(kind).width) for kind in kinds]
    while not all(
        PagedMemory.build(config, spec, MemorySize(tokens, 128, 4)).fits([len(prompt) + SOME] * width, len(prompt))
        for prompt, width in asked
    ):
        tokens += page_size
    return tokens + page_size


def assert_same(ran: Ran, expected: Ran) -> None:
    differing = {kind for kind, result in ran.results.items() if result != expected.results[kind]}
    assert not differing, f"other tokens than with plenty of memory: {differing}"
    for kind, logprobs in ran.logprobs.items():
        assert logprobs == pytest.approx(expected.logprobs[kind], abs=1e-4), kind


@pytest.mark.share(8)
@pytest.mark.parametrize("policy", ["swap", "recompute", "auto"])
@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        ("mistral", 4), ("mistral", 16), ("opt", 4), ("gpt2", 16), ("mixtral", 16), ("qwen2_moe", 4),
        ("qwen3_moe", 1), ("gemma4, per-layer inputs", 4),
        *((family, size) for family in ("llama", *UNLIKE) for size in (1, 4, 16)),
    ],
)  # fmt: skip
def test_requests_of_all_kinds_survive_preemption(oracle, plenty, family: str, page_size: int, policy: str) -> None:
    model = oracle(family)
    least = least_tokens(model, page_size, 16)
    hurt, ways = dict.fromkeys(KINDS, 0), {"swap": 0, "recompute": 0}
    for factor, turn, caching in ((1.0, 0, True), (1.5, 4, False)):
        engine = engine_of(
            model, page_size=page_size, kv_tokens=int(least * factor) // page_size * page_size, preemption=policy,
            enable_prefix_caching=caching, max_num_batched_tokens=16, max_num_seqs=32,
        )  # fmt: skip
        ran = run_all(engine, model, [(0, kind) for kind in [*KINDS][turn:] + [*KINDS][:turn]])
        assert_same(ran, plenty(family))
        assert engine.scheduler.memory.account().usage.used == 0
        hurt = {kind: hurt[kind] + ran.preemptions[kind] for kind in KINDS}
        ways = {way: ways[way] + count for way, count in engine.scheduler.preemption_counts.items()}
    assert any(hurt[kind] for kind in GROUPS), hurt
    assert sum(ways.values()) > 0 if policy == "auto" else ways[policy] > 0


@settings(max_examples=5)
@given(data=st.data())
def test_no_schedule_changes_what_anybody_gets(oracle, plenty, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["llama", "mistral", "gpt2", *UNLIKE]), label="family")
    page_size = data.draw(st.sampled_from([1, 4, 16]), label="page_size")
    chunk = data.draw(st.sampled_from([8, 16, 64]), label="budget")
    kinds = data.draw(st.permutations(list(KINDS)), label="kinds")[: data.draw(st.integers(2, len(KINDS)))]
    arrivals = [(data.draw(st.integers(0, 25)), kind) for kind in kinds]
    model = oracle(family)
    kept = data.draw(st.sampled_from([0, 7]), label="registered")
    room = least_tokens(model, page_size, chunk) + data.draw(st.integers(0, 8)) * 4 * page_size
    engine = engine_of(
        model, page_size=page_size, kv_tokens=room + -(-kept // page_size) * page_size, prefix_tokens=kept,
        preemption=data.draw(st.sampled_from(["swap", "recompute", "auto"]), label="policy"),
        enable_prefix_caching=data.draw(st.booleans(), label="caching"), max_num_batched_tokens=chunk,
        depth=data.draw(st.sampled_from([1, 2]), label="depth"),
    )  # fmt: skip
    if kept:
        engine.register_prefix("start", prompt_of(model, kinds[0])[:kept])
    Forced(engine, data.draw(st.sets(st.integers(0, 60), max_size=8), label="preempted at"))
    assert_same(run_all(engine, model, arrivals), plenty(family))


class Forced:
    """Preempts the youngest request before the steps of these numbers, short of memory or not."""

    def __init__(self, engine: Engine, steps: set[int]) -> None:
        self.scheduler, self.left, self.count = engine.scheduler, steps, 0
        self.schedule, engine.scheduler.schedule = engine.scheduler.schedule, self.first

    def first(self) -> StepPlan | None:
        self.count += 1
        if self.count in self.left and self.scheduler.running and not self.scheduler.num_in_flight:
            self.scheduler._preempt(next(reversed(self.scheduler.running)))
        return self.schedule()


@pytest.mark.share(8)
@pytest.mark.parametrize("family", ["llama", "mistral", *UNLIKE])
@pytest.mark.parametrize("policy", ["swap", "recompute"])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_preempted_at_any_step_goes_on_as_before(oracle, plenty, family: str, policy: str, kind: str) -> None:
    model = oracle(family)
    for step in (2, 3, 5, 8):
        engine = engine_of(model, page_size=4, preemption=policy, enable_prefix_caching=step % 2 == 0, depth=1)
        Forced(engine, {step})
        ran = run_all(engine, model, [(0, kind)])
        assert engine.scheduler.preemption_counts[policy] == 1
        assert_same(ran, plenty(family))
