"""Models that transformers computes, tiny and random in fp32: tokens equal transformers' own; what can't run is
refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_beams import drive, same
from test_embeddings import embed, tokens_of
from test_equality import (
    SIZES,
    Compared,
    Oracle,
    answers_of,
    assert_equal,
    engine_of,
    outputs_of,
    random_model,
)
from transformers import core_model_loading
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.cli import main
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.models import ARCHITECTURES, architectures, read_spec, transformers_plan, transformers_spec
from quire.models.transformers_model import TransformersModel
from quire.protocol.parallel_layout import Shard
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.startup.build import build, describe_memory_plan
from quire.text.embedding import embedding_vector
from quire.weights import transformers_loader

WINDOWS = {
    "sliding_window": 9, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
HEAD = {"head_dim": 8}
MHA = {"num_key_value_heads": 4}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 4}
SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": WINDOWS,
    "deepseek_v3": {**EXPERTS, **LATENT},
    "granitemoe": {**EXPERTS, **SCALES},
    "afmoe": {**EXPERTS, **WINDOWS, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "apertus": {},
    "arcee": HEAD,
    "axk1": {**EXPERTS, **LATENT},
    "bitnet": {},
    "codegen": {**GPT, "n_ctx": 128},
    "cohere": {"logit_scale": 0.5},
    "cohere2_moe": {**EXPERTS, **WINDOWS},
    "deepseek_v2": {**EXPERTS, **LATENT},
    "diffllama": {},
    "dots1": {**EXPERTS, **WINDOWS},
    "ernie4_5": HEAD,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": WINDOWS,
    "exaone_moe": {**EXPERTS, **WINDOWS},
    "flex_olmo": EXPERTS,
    "gemma": HEAD,
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": {**EXPERTS, **LATENT},
    "gpt_neox": MHA,
    "gptj": GPT,
    "granite": SCALES,
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 20},
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "hyperclovax": HEAD,
    "jais2": HEAD,
    "laguna": {**EXPERTS, **WINDOWS},
    "mellum": {**EXPERTS, **WINDOWS},
    "minicpm3": LATENT,
    "minimax_m2": {**EXPERTS, "rotary_dim": 4},
    "ministral3": HEAD,
    "nanochat": {},
    "nemotron": HEAD,
    "olmo": {"clip_qkv": 0.5},
    "olmo3": WINDOWS,
    "olmoe": EXPERTS,
    "persimmon": MHA,
    "phi": {},
    "phimoe": EXPERTS,
    "seed_oss": HEAD,
    "solar_open": EXPERTS,
    "starcoder2": {"sliding_window": 9},
    "vaultgemma": WINDOWS,
    "youtu": LATENT,
}
WITHOUT_PLAN = ("bitnet", "diffllama", "hunyuan_v1_dense", "persimmon")  # of layers
WHOLE_KEYS = (  # on each rank
    "afmoe", "axk1", "deepseek_v3", "flex_olmo", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "minimax_m2",
    "olmo3", "olmoe", "phimoe", "youtu",
)  # fmt: skip
THOROUGH = list(FAMILIES)[:3]  # windows beside full layers; latent attention; experts and scales
CALIBRATION = "h200-llama3-8b"
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class SmallOracle(Oracle):
    """The same of a family that transformers computes."""

    def __init__(self, family: str, folder: Path, **changes: Any) -> None:
        torch.set_num_threads(1)  # as engines do; several are slow beside other tests
        self.compared, self.folder = Compared(), folder
        settings = {**SIZES, "tie_word_embeddings": False, **FAMILIES[family], **changes}
        self.model = random_model(transformers.AutoConfig.for_model(family, **settings))
        for name, numbers in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name.endswith("bias"):  # smaller than other weights, so that answers depend on prompts
                numbers.data.normal_(0, 0.1)
        self.model.save_pretrained(folder)
        self.ask()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SmallOracle]:
    return cache(lambda family: SmallOracle(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(oracle: Any, family: str) -> None:
    """Over chunks, and again over pages that the prefix cache has."""
    model = oracle(family)
    assert type(model.model).__name__ not in ARCHITECTURES
    assert len({tuple(answer) for answer in model.answers}) > 1
    engine = engine_of(model, page_size=4, kv_tokens=1024, max_num_batched_tokens=7)
    assert isinstance(engine.runner.model, TransformersModel)  # type: ignore[attr-defined]
    assert_equal(model, engine, model.prompts)
    assert_equal(model, engine, model.prompts)
    assert engine.scheduler.memory.account().sharing.hits > 0
    assert model.compared.ties == 0


@pytest.mark.parametrize("family", THOROUGH)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_does_not_change_tokens(oracle: Any, family: str, preemption: str) -> None:
    model = oracle(family)
    engine = engine_of(
        model, page_size=4, kv_tokens=72, preemption=preemption, swap_gib=0.01, max_num_batched_tokens=16
    )
    assert_equal(model, engine, model.prompts[:2] * 6)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", THOROUGH)
def test_virtual_memory_does_not_change_tokens(oracle: Any, family: str) -> None:
    model = oracle(family)
    assert_equal(model, engine_of(model, memory="virtual", kv_tokens=2048, max_num_batched_tokens=7), model.prompts)


@pytest.mark.parametrize("family", THOROUGH)
def test_branches_equal_requests_of_their_own(oracle: Any, family: str) -> None:
    model = oracle(family)
    engine, prompt = engine_of(model, page_size=4, kv_tokens=1024), model.prompts[3]
    params = SamplingParams(temperature=1, seed=5, n=2, max_tokens=12, ignore_eos=True)
    outputs = outputs_of(engine, {"both": (prompt, params)})["both"]
    for branch in range(2):
        alone = replace(params, n=1, seed=branch_seed(5, branch))
        expected = tokens_of(outputs_of(engine, {"one": (prompt, alone)})["one"])
        assert tokens_of([output for output in outputs if output.branch == branch]) == expected


@pytest.mark.parametrize("family", THOROUGH)
def test_beams_equal_transformers(oracle: Any, family: str) -> None:
    model = oracle(family)
    params = SamplingParams(n=3, beam_width=3, max_tokens=10, ignore_eos=True, length_penalty=1.0)
    requests = {str(i): (prompt, params) for i, prompt in enumerate(model.prompts[1:4])}
    found = drive(engine_of(model, page_size=4, kv_tokens=1024), requests)
    for id, (prompt, _) in requests.items():
        ids = torch.tensor([prompt])
        result = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=3, do_sample=False, max_new_tokens=10, pad_token_id=0,
            num_return_sequences=3, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        expected = result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist()
        assert same(found[id], expected, 1.0)


@pytest.mark.parametrize("family", THOROUGH)
def test_prompt_logprobs_embeddings_and_drafts(oracle: Any, family: str) -> None:
    model = oracle(family)
    engine, prompt = engine_of(model, max_num_batched_tokens=7), model.prompts[4]
    outputs = outputs_of(engine, {"scored": (prompt, replace(GREEDY, prompt_logprobs=1))})["scored"]
    wanted = model.logits(prompt)[:-1].log_softmax(-1)
    tops = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
    scores = torch.tensor([top.logprob for top in tops])
    assert torch.allclose(scores, wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4)
    [output] = outputs_of(engine, {"embedded": (prompt, embed("mean"))})["embedded"]
    with torch.inference_mode():
        hidden = model.model.base_model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    assert torch.allclose(torch.from_numpy(embedding_vector(output)).float(), hidden / hidden.norm(), atol=1e-4)
    for speculation in ({"speculative_method": "ngram"}, {"speculative_model": str(model.folder)}):
        drafting = engine_of(model, num_speculative_tokens=3, adaptive_speculation=False, kv_tokens=1024, **speculation)
        assert_equal(model, drafting, model.prompts)


# Ranks


@pytest.fixture
def ranks(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on threads. One loads at a time, since transformers changes its classes while it loads."""
    lock, load = Lock(), transformers_loader.load_transformers_model

    def load_alone(*args: Any) -> TransformersModel:
        with lock:
            return load(*args)

    monkeypatch.setattr(transformers_loader, "load_transformers_model", load_alone)


def check_ranks(model: Any, prompts: list[list[int]] | None = None, **settings: Any) -> Engine:
    """Compare the tokens of ranks, by default two, with transformers'."""
    engine = engine_of(model, **{"tp": 2, "device": "cpu", "page_size": 4, "kv_tokens": 1024, **settings})
    try:
        assert_equal(model, engine, prompts or model.prompts)
    finally:
        engine.close()
    assert model.compared.ties == 0
    return engine


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_PLAN])
def test_tokens_of_two_ranks_equal_transformers(oracle: Any, family: str) -> None:
    """Over chunks, and again over pages that the prefix cache has."""
    model = oracle(family)
    engine = check_ranks(model, model.prompts * 2, max_num_batched_tokens=7)
    assert engine.scheduler.memory.account().sharing.hits > 0
    config = json.loads((model.folder / "config.json").read_text())
    whole, part = ({layer.kv_heads for layer in read_spec(config, Shard(0, ranks)).layers} for ranks in (1, 2))
    assert part == (whole if family in WHOLE_KEYS else {heads // 2 for heads in whole})


def add_bias_on_every_rank(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.add_up(torch.nn.functional.linear(x, layer.weight, layer.bias))


def look_up_by_the_last_digits(table: Any, ids: torch.Tensor) -> torch.Tensor:
    return table.add_up(torch.nn.functional.embedding(ids % 49, table.weight))


PLANTED: dict[str, tuple[str, Any, str, Any]] = {
    "a bias on every rank": ("starcoder2", transformers_plan._SummedLinear, "forward", add_bias_on_every_rank),
    "no sum": ("starcoder2", transformers_plan._Divided, "add_up", lambda layer, x: x),
    "every rank's rows": ("starcoder2", transformers_plan._Lookup, "forward", look_up_by_the_last_digits),
    "gate and up as one": (
        "granitemoe",
        transformers_plan.STYLES,
        "packed_colwise",
        transformers_plan.STYLES["colwise"],
    ),
}


@pytest.mark.usefixtures("ranks", "forgotten")
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(oracle: Any, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, place, name, wrong = PLANTED[bug]
    set_it = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
    set_it(place, name, wrong)
    with pytest.raises(AssertionError, match="answers differ from transformers'"):
        check_ranks(oracle(family))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "settings",
    [
        {"preemption": "swap", "swap_gib": 0.01, "kv_tokens": 72},
        {"preemption": "recompute", "kv_tokens": 72},
        {"memory": "virtual", "kv_tokens": 2048},
        {"speculative_model": "itself", "num_speculative_tokens": 3, "adaptive_speculation": False},
    ],
    ids=str,
)
def test_memories_and_drafts_of_two_ranks(oracle: Any, settings: dict[str, Any]) -> None:
    model = oracle("cohere2")
    if "speculative_model" in settings:
        settings = settings | {"speculative_model": str(model.folder)}
    engine = check_ranks(model, model.prompts[:2] * 6, **settings)
    assert (engine.scheduler.num_preemptions > 0) == ("preemption" in settings)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("family", "number"), [("gpt_neox", 4), ("granitemoe", 3), ("minicpm3", 4)])
def test_tokens_of_more_ranks_equal_transformers(oracle: Any, family: str, number: int) -> None:
    """Of 97 tokens two of four ranks have no rows."""
    check_ranks(oracle(family), tp=number)


@pytest.mark.usefixtures("ranks")
def test_a_tied_head_is_divided_with_the_embedding(tmp_path: Path) -> None:
    model = SmallOracle("granite", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    check_ranks(model)


def test_ranks_as_processes(oracle: Any) -> None:
    check_ranks(oracle("granitemoe"))


@pytest.mark.parametrize("family", ["starcoder2", "deepseek_v3", "gpt_neox", "olmo3"])
def test_a_rank_reads_and_has_its_part(oracle: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are those that the plan counts, no more are read, and the ranks' parts make up the whole."""
    model, read = oracle(family), list[int]()
    config = json.loads((model.folder / "config.json").read_text())
    read_tensors = transformers_loader._read_tensors

    def count(*args: Any) -> dict[str, torch.Tensor]:
        tensors = read_tensors(*args)
        read.append(sum(tensor.numel() for tensor in tensors.values()))
        return tensors

    monkeypatch.setattr(transformers_loader, "_read_tensors", count)
    both = [
        transformers_loader.load_transformers_model(
            config, model.folder, torch.float32, torch.device("cpu"), 0, shard=Shard(rank, 2)
        )
        for rank in range(2)
    ]
    spec, halves = read_spec(config, Shard(0, 2)), [dict(rank.named_parameters()) for rank in both]
    assert [spec.parameters] * 2 == [sum(weight.numel() for weight in half.values()) for half in halves]
    assert read == [sum(numbers.numel() for numbers in rank.state_dict().values()) for rank in both]
    assert 0.5 < spec.parameters / read_spec(config).parameters < 0.7
    for name, whole in model.model.named_parameters():
        base = f"base.{name.removeprefix(model.model.base_model_prefix + '.')}"
        parts = [half.get(base, half.get(f"head.{name}")) for half in halves]
        if name.endswith("gate_up_proj"):  # two groups of rows
            whole, *parts = (each.unflatten(1, (2, -1)) for each in (whole, *parts))
        for dim, size in enumerate(whole.shape):
            if parts[0].shape[dim] != size:
                parts = [torch.cat(parts, dim).narrow(dim, 0, size)]
        assert all(torch.equal(part, whole) for part in parts), name


@pytest.mark.usefixtures("ranks")
def test_the_plan_and_dummy_weights_of_two_ranks(oracle: Any) -> None:
    model = oracle("deepseek_v3")
    config = EngineConfig.of(model=str(model.folder), device="cpu", skip_tokenizer_init=True, dtype="float32",
                             kv_tokens=256, tp=2)  # fmt: skip
    count = read_spec(json.loads((model.folder / "config.json").read_text()), Shard(0, 2)).parameters
    assert any(f"{count:,} parameters in float32, on each of 2 ranks" in line for line in describe_memory_plan(config))
    engine = build(replace(config, dummy_weights=True)).engine
    try:
        assert len(answers_of(engine, [[1, 2, 3]])[0]) == 20
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "ranks", "changes", "cause"),
    [
        *((family, 2, {}, "has no plan that divides the layers of") for family in WITHOUT_PLAN),
        ("cohere2", 4, {}, "--tp is 4, .* 4 heads and 2 heads of keys, .* Use 2 or a number that divides it"),
        ("granite", 2, {"intermediate_size": 47}, "--tp is 2, .*layers.0.mlp.gate_proj.weight of Granite.* 47 rows"),
        ("deepseek_v3", 3, {"num_attention_heads": 3}, "gate_up_proj of Deepseek.*: it has 64 rows in 2 parts"),
        ("olmoe", 3, {}, "o_proj.weight of OlmoeForCausalLM: it has 32 columns"),
        ("cohere", 2, {"use_qk_norm": True}, "--tp is 2, and so transformers' Cohere.* doesn't run"),
    ],
    ids=str,
)  # fmt: skip
def test_what_ranks_cannot_divide(family: str, ranks: int, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(StartupError, match=cause):
        read_spec(config_of(family, **changes), Shard(0, ranks))


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a family."""
    settings = {**SIZES, "tie_word_embeddings": False, **FAMILIES[family], **changes}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model(family, **settings, **tokens).to_dict()
    return {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was found out by another plan is forgotten, before and after the test."""
    transformers_spec._inspect.cache_clear()
    yield
    transformers_spec._inspect.cache_clear()


@pytest.mark.parametrize(
    ("rules", "cause"),
    [
        ({"layers.*.mlp.down_proj": "grouped"}, "plan for GraniteForCausalLM has the style grouped"),
        ({"layers.*.mlp.act_fn": "colwise"}, "layers.0.mlp.act_fn has the style colwise .*for Linear: it is SiLU"),
        ({"layers.*.mlp.down_proj": "embedding_rowwise"}, "down_proj .* is for Embedding: it is Linear"),
        ({"layers.*.mlp.down_proj": "moe_tp_experts"}, "doesn't divide model.layers.0.mlp.down_proj.weight"),
        (dict.fromkeys(("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj"), "replicate"),
         "a rank has 2 of 4 heads and 2 of 2 heads of keys"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("forgotten")
def test_plans_that_are_refused(rules: dict[str, str], cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.GraniteConfig
    monkeypatch.setattr(kind, "base_model_tp_plan", kind.base_model_tp_plan | rules)
    with pytest.raises(StartupError, match=cause):
        read_spec(config_of("granite"), Shard(0, 2))


@pytest.mark.usefixtures("forgotten")
def test_heads_without_a_gathered_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.GraniteForCausalLM, "_tp_plan", {"lm_head": "colwise"})
    with pytest.raises(StartupError, match="a rank has 48 of 96 logits"):
        read_spec(config_of("granite", vocab_size=96), Shard(0, 2))


def test_conversions_that_ranks_cannot_take(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_model_loading, "MergeModulelist", core_model_loading.Transpose)
    model = oracle("deepseek_v3")
    config = json.loads((model.folder / "config.json").read_text())
    with pytest.raises(StartupError, match=r"from .*experts\.0\..* in steps that ranks can't"):
        transformers_loader.load_transformers_model(
            config, model.folder, torch.float32, torch.device("cpu"), 0, shard=Shard(0, 2)
        )


# What is refused


class Files:
    """A checkpoint that may be changed."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = load_file(source / "model.safetensors")

    def write(self) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})

    def start(self, **settings: Any) -> Engine:
        self.write()
        return engine_of(self, **settings)


@pytest.fixture
def files(oracle: Any, tmp_path: Path) -> Files:
    return Files(oracle("cohere2").folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"architectures": ["Cohere3ForCausalLM"]}, "'Cohere3ForCausalLM' is none of quire's own, nor .*Is it Cohere"),
        ({"architectures": ["MyForCausalLM"], "auto_map": {"AutoConfig": "evil.My"}}, "'MyForCausalLM'.*never"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["AutoModelForCausalLM"]}, "none of quire's own, nor a causal"),
        ({"model_type": "granite"}, "model_type 'granite' .* none of Cohere2ForCausalLM"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "an attention that can't be replaced"),
        ({"architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa"}, "has s_aux, which quire's has not"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "neither causal nor a causal window"),
        ({"architectures": ["xLSTMForCausalLM"], "model_type": "xlstm"}, "an attention that can't be replaced"),
        ({"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}, "more than text"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers|transformers can't read"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types|doesn't run|can't read"),
        ({"hidden_size": -32}, "hidden_size in config.json must be an integer from 1 to .*, got -32"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json must be an integer from 1 to .*, got 0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads in config.json must be an integer from 1 to .*, got -2"),
        ({"max_position_embeddings": None}, "no length|can't read"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is quantized"),
        ({"rope_parameters": {"rope_type": "other"}}, "doesn't run|can't read"),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_that_are_refused(files: Files, changes: dict[str, Any], cause: str) -> None:
    files.config |= changes
    with pytest.raises(StartupError, match=cause):
        files.start()


def test_layers_with_states_are_refused(files: Files) -> None:
    del files.config["layer_types"]
    files.config |= {"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma"}
    with pytest.raises(StartupError, match="layers with states"):
        files.start()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"tp": 4}, "--tp is 4, which doesn't divide Cohere2ForCausalLM: it has 4 heads and 2 heads of keys"),
        ({"pp": 2}, "--pp is given, and 'Cohere2ForCausalLM' is computed by transformers"),
        ({"tp": 2, "expert_parallel": True}, "--expert-parallel is given, and 'Cohere2ForCausalLM' is computed by"),
        ({"quantization": "int8"}, "--quantization is given"),
        ({"deterministic": True}, "--deterministic is given"),
        ({"speculative_method": "mtp"}, "leaves no hidden states|MTP|mtp"),
        ({"speculative_method": "eagle3", "speculative_model": "other"}, "leaves no hidden states"),
    ],
    ids=str,
)
def test_settings_that_are_refused(files: Files, settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(StartupError, match=cause):
        files.start(**settings)


@pytest.mark.parametrize("what", ["missing", "unknown", "shape", "integers", "garbage"])
def test_weights_that_are_refused(files: Files, what: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    if what == "missing":
        del files.tensors[name]
        cause = f"lacks .*{name}"
    elif what == "unknown":
        files.tensors["model.layers.0.mlp.other.weight"] = torch.zeros(3)
        cause = "no place for: .*model.layers.0.mlp.other.weight"
    elif what == "shape":
        files.tensors[name] = torch.zeros(3, 5)
        cause = rf"{name} of .* has the shape \(3, 5\), and the model needs \(48, 32\)"
    elif what == "integers":
        files.tensors[name] = files.tensors[name].to(torch.int32)
        cause = "has dtype int32"
    else:
        cause = "is damaged|safetensors"
    files.write()
    if what == "garbage":
        (files.folder / "model.safetensors").write_bytes(b"\xff" * 100_000)
    with pytest.raises(StartupError, match=cause):
        engine_of(files)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.up_proj.weight", (24, 32)),  # as one of two ranks has it
        ("model.layers.0.mlp.down_proj.weight", (32, 24)),
        ("model.embed_tokens.weight", (100, 32)),  # padded alike
        ("model.layers.0.self_attn.k_proj.weight", ()),
        ("model.layers.0.self_attn.k_proj.weight", (0, 32)),
        ("model.layers.0.mlp.up_proj.weight", (48, 3)),
        ("model.layers.0.mlp.up_proj.weight", (48,)),
    ],
    ids=str,
)
def test_shapes_that_ranks_refuse(files: Files, name: str, shape: tuple[int, ...]) -> None:
    """Also of a tensor whose other dimension is wrong: then the error has the shape of a rank's part."""
    files.tensors[name] = torch.zeros(shape)
    files.write()
    read = (24, *shape[1:]) if shape[:1] == (48,) else shape
    with pytest.raises(StartupError, match=f"{name}.* has the shape {re.escape(str(read))}, and the model needs"):
        transformers_loader.load_transformers_model(
            files.config, files.folder, torch.float32, torch.device("cpu"), 0, shard=Shard(1, 2)
        )


@pytest.mark.parametrize(
    ("number", "refusal"),
    [
        (torch.nan, "mlp.up_proj.weight.* has a number that isn't finite"),
        (3e38, "the hidden states of transformers' Cohere2ForCausalLM are not finite"),
    ],
)
def test_numbers_that_are_not_finite(files: Files, number: float, refusal: str) -> None:
    """In the file, and in products of those that are."""
    files.tensors["model.layers.0.mlp.up_proj.weight"][0] = number
    files.write()
    with pytest.raises(StartupError, match=refusal):
        engine_of(files)


def test_transformers_is_not_installed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="transformers is not installed"):
        files.start()


def test_tokens_that_meet_outside_of_attention(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift over tokens, and positions that a model counts itself."""
    kind = transformers.models.cohere2.modeling_cohere2.Cohere2MLP
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(StartupError, match="depend on others without attention"):
        files.start()
    monkeypatch.undo()
    rotary = transformers.models.cohere2.modeling_cohere2.Cohere2RotaryEmbedding
    forward_rotary = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda self, x, position_ids: forward_rotary(self, x, position_ids.sort().values)
    )
    with pytest.raises(StartupError, match="depend on others without attention, or on their order"):
        files.start()
    monkeypatch.undo()
    files.start()


def test_no_code_of_a_checkpoint_runs(files: Files) -> None:
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (files.folder / name).write_text(f"open({str(files.folder / 'ran')!r}, 'w')")
    files.config["auto_map"] = {
        "AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model",
    }  # fmt: skip
    files.start()
    assert not (files.folder / "ran").exists()


def test_plan_dummy_weights_and_simulation(oracle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = oracle("deepseek_v3")
    spec = read_spec(json.loads((model.folder / "config.json").read_text()))
    assert spec.parameters == sum(weight.numel() for weight in model.model.parameters())
    assert [layer.head_dim for layer in spec.layers] == [16, 16]
    config = EngineConfig.of(model=str(model.folder), device="cpu", skip_tokenizer_init=True, dtype="float32",
                             kv_tokens=256)  # fmt: skip
    assert any(line.startswith("KV cache") for line in describe_memory_plan(config))
    built = build(replace(config, dummy_weights=True))
    assert len(answers_of(built.engine, [[1, 2, 3]])[0]) == 20
    assert any("the class of transformers" in notice for notice in built.notices)
    assert main(["simulate", str(model.folder), "--calibration", CALIBRATION, "--workload", "fixed:8:4@2"]) != 0
    assert "is computed by transformers" in capsys.readouterr().err


def test_the_documentation_names_the_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Models of transformers\n")
    named = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in FAMILIES} <= named
    [ranks] = [part for part in section.split("\n\n") if part.startswith("`--tp N`")]
    named = set(re.findall(r"`(\w+ForCausalLM)`", ranks))
    assert named == {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in (*WITHOUT_PLAN, *WHOLE_KEYS)}
    assert f"Of the {len(FAMILIES)}, {len(FAMILIES) - len(WITHOUT_PLAN)} have such a plan" in " ".join(ranks.split())
