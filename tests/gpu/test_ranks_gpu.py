"""Two ranks on GPUs, or as they take turns on one, say what one rank says: tokens drawn from shared-out logits in
graphs, prompts whose sums are carried while they are computed, and both beside each other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.local_nodes import LocalNodes
from quire import LLM, SamplingParams
from quire.core.speculation import NgramIndex
from quire.distributed import remote_runner
from quire.distributed.device_exchange import NCCL_MIN_BYTES
from quire.distributed.nccl_stage_links import VARIABLE as STAGE_NCCL_VARIABLE
from quire.distributed.remote_runner import RemoteRunner
from quire.models.named_configs import named_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HIDDEN, LONG = 2048, 5000
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 4100, "max_position_embeddings": 8192,
}  # fmt: skip
TRANSFORMERS_SHAPE = {
    **SHAPE, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRANSFORMERS_CONFIGS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 1000, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots1": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 256, "first_k_dense_replace": 1, "head_dim": 64,
    },
    "gpt_neox": {},
}  # fmt: skip
SEEDS = range(24)
DRAWN: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True) for _ in SEEDS],
    "drawn": [SamplingParams(temperature=0.9, seed=i, max_tokens=24, ignore_eos=True) for i in SEEDS],
    "mixed": [
        SamplingParams(temperature=0.6 * (i % 3), min_p=0.02 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in SEEDS
    ],
    "few": [SamplingParams(temperature=1.1, seed=i, max_tokens=24, ignore_eos=True) for i in range(3)],
    "cut": [
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50, seed=i, max_tokens=24, ignore_eos=True) for i in SEEDS
    ],
}
PROMPTS = [[(11 * i + j * j) % 4000 + 50 for j in range(5 + 3 * i)] for i in SEEDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    (found / "config.json").write_text(json.dumps({**named_config("llama3-8b"), **SHAPE}))
    return found


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("QUIRE_SHARE_GPU", "1")


def generate_all(folder: Path, **settings: Any) -> dict[str, list[list[int]]]:
    options = {"dtype": "float32", "dummy_weights": True, "skip_tokenizer_init": True, "kv_gib": 1.0,
               "max_num_seqs": 32, "max_num_batched_tokens": 8192, "enable_prefix_caching": False}  # fmt: skip
    llm = LLM(str(folder), **{**options, **settings})
    try:
        found = {}
        for name, params in DRAWN.items():
            answers = llm.generate([{"prompt_token_ids": one} for one in PROMPTS[: len(params)]], params)
            found[name] = [list(answer.outputs[0].token_ids) for answer in answers]
        long = [[(i + 7 * j + j * j // 3) % 4000 + 50 for j in range(LONG - 900 * i)] for i in range(3)]
        params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True) for _ in long]
        answers = llm.generate([{"prompt_token_ids": one} for one in long], params)
        found["long"] = [list(answer.outputs[0].token_ids) for answer in answers]
        found["accepted"] = [[llm.engine.stats.accepted_tokens]]
        return found
    finally:
        llm.close()


def compared(one: dict[str, list[list[int]]], two: dict[str, list[list[int]]], spared: int) -> None:
    assert len({tuple(answer) for answer in one["drawn"]}) == len(SEEDS)
    for name in (*DRAWN, "long"):
        answers = one[name]
        same = sum(a == b for a, b in zip(answers, two[name]))
        least = len(answers) - (0 if name in ("greedy", "long") else spared)
        assert same >= least, f"{name}: {same} of {len(answers)} answers are the same"


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"cuda_graphs": False}], ids=str)
def test_two_ranks_say_what_one_says(folder: Path, settings: dict[str, Any]) -> None:
    assert LONG * HIDDEN * 4 > NCCL_MIN_BYTES, "prompts' sums are large"
    # Logits differ in their last bits, so that a draw may fall on the other side of a token's edge.
    compared(generate_all(folder, **settings), generate_all(folder, tp=2, **settings), spared=2)


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"max_num_batched_tokens": 512}], ids=str)
def test_two_stages_say_what_one_says(folder: Path, settings: dict[str, Any]) -> None:
    compared(generate_all(folder, **settings), generate_all(folder, pp=2, **settings), spared=0)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"cuda_graphs": False}], ids=str)
def test_ranks_with_whole_experts_say_what_one_says(settings: dict[str, Any], tmp_path: Path) -> None:
    experts = {"num_experts": 15, "num_experts_per_tok": 4, "moe_intermediate_size": 328, "head_dim": 128}
    config = {**named_config("qwen3-30b-a3b"), **SHAPE, **experts, "hidden_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    two = generate_all(tmp_path, tp=2, expert_parallel=True, **settings)
    compared(generate_all(tmp_path, **settings), two, spared=2)


@pytest.mark.parametrize("family", TRANSFORMERS_CONFIGS)
def test_ranks_of_transformers_models_say_what_one_says(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **TRANSFORMERS_SHAPE, **TRANSFORMERS_CONFIGS[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    one, two = (generate_all(tmp_path, dummy_weights=False, tp=ranks) for ranks in (1, 2))
    compared(one, two, spared=2)


class NodesOfTwoHosts(LocalNodes):
    """Agents that NCCL takes for two hosts, so that it connects ranks that share a GPU: through its sockets, without
    NVLink."""

    def start_agent(self, number: int, host: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_HOSTID", f"node-{number}")
            super().start_agent(number, host)


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("over", ["NCCL", "TCP"])
def test_stages_on_two_nodes_say_what_one_says(
    folder: Path, over: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, rows go by way of the CPU's memory."""
    one = generate_all(folder, **settings)
    if over == "TCP":
        monkeypatch.setenv(STAGE_NCCL_VARIABLE, "0")
    runners: list[remote_runner.RemoteRunner] = []

    def start(*args: Any, **kwargs: Any) -> remote_runner.RemoteRunner:
        nodes = NodesOfTwoHosts([range(1), range(1, 2)])
        runners.append(RemoteRunner(*args, **{**kwargs, "open_hosts": nodes}))
        return runners[-1]

    monkeypatch.setattr(remote_runner, "RemoteRunner", start)
    begin = time.perf_counter()
    two = generate_all(folder, pp=2, **settings)
    print(f"over {over}, {settings}: {time.perf_counter() - begin:.1f} s with the start")
    compared(one, two, spared=0)
    assert any(notice.startswith(f"rows between nodes go over {over}") for notice in runners[0].notices)


DRAFT_MODEL: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive_speculation": False}
NGRAMS: dict[str, Any] = {**DRAFT_MODEL, "speculative_method": "ngram", "prompt_lookup_min": 1}


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}], ids=str)
def test_two_ranks_verify_drafts_of_a_model(folder: Path, settings: dict[str, Any]) -> None:
    """The draft model is the model, divided as it is, so most of its drafts are right."""
    two = generate_all(folder, tp=2, speculative_model=str(folder), **DRAFT_MODEL, **settings)
    compared(generate_all(folder, **settings), two, spared=2)
    assert two["accepted"][0][0] > 1000


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}, {"pp": 2, "cuda_graphs": False}], ids=str)
def test_two_ranks_verify_ngrams(folder: Path, ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens drafted are right up to one that depends on the length."""
    one = generate_all(folder)
    texts = [[*prompt, *tokens] for name in DRAWN for prompt, tokens in zip(PROMPTS, one[name])]

    def propose(self: NgramIndex, tokens: list[int], count: int) -> tuple[int, ...]:
        text = next((text for text in texts if text[: len(tokens)] == tokens), [])
        wrong = len(tokens) * 7 % 5
        return tuple((token + (i == wrong)) % 4100 for i, token in enumerate(text[len(tokens) :][:count]))

    monkeypatch.setattr(NgramIndex, "propose", propose)
    two = generate_all(folder, **ranks, **NGRAMS)
    compared(one, two, spared=2)
    assert two["accepted"][0][0] > 500
