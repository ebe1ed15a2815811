"""Models that ranks share out, as threads with a list between them: logits are those of transformers and of the whole
model; a rank's shard is what its spec says; and what can't be divided is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dense_context import DenseContext
from internlm2_files import as_internlm2
from test_against_transformers import CASES, LLAMA, built, reference
from thread_ranks import Meeting, ThreadExchange

from quire.errors import StartupError
from quire.layers.prepare import connect_ranks
from quire.models import read_spec, resolve_model_class
from quire.models.decoder import attention_sinks
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import Shard
from quire.weights.checkpoint_files import read_config
from quire.weights.loader import load_weights

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(1))
WIDE = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256}
DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: CASES[name] for name in (
        "llama, one kv head a query head", "llama, tied", "llama, biases", "mistral", "qwen2", "qwen3", "phi3",
        "phi3, as Phi-4-mini", "mixtral", "gpt_oss", "qwen2_moe, dense layers, normalised", "qwen3_moe",
        "qwen3_next, attention alone, biased", "smollm3, listed, windows, biased",
        "gemma2", "gemma2, untied, biased", "gemma3", "gemma4", "gemma4, shared keys and values, softcap",
        "gemma4, experts", "gemma4, all", "opt", "opt, norm after, projected", "opt, no final norm", "gpt2",
        "gpt2, n_inner",
    )},
    "llama, two heads a copied kv head": ("Llama", WIDE),
    "phi3, two heads a copied kv head": ("Phi3", {**WIDE, "pad_token_id": None}),
    "internlm2": ("Llama", {**WIDE, "num_key_value_heads": 4}),
    "internlm2, copied kv heads": ("Llama", WIDE),
}  # fmt: skip
EXPERTS = (
    "mixtral", "gpt_oss", "qwen2_moe, dense layers, normalised", "qwen3_moe", "qwen3_next, attention alone, biased",
    "gemma4, experts", "gemma4, all",
)  # fmt: skip


def published(case: str, folder: Path) -> torch.Tensor:
    """transformers' logits of TOKENS; its checkpoint is in the folder."""
    theirs = reference(*DIVIDED[case], folder)
    if case.startswith("internlm2"):
        as_internlm2(folder)
    with torch.no_grad():
        return theirs(TOKENS[None]).logits[0]


def shard(folder: Path, part: Shard) -> Any:
    """One rank's, loaded, not prepared. Its parameters begin as NaN, so that one that isn't filled shows."""
    config = read_config(folder)
    model = resolve_model_class(config)(config, torch.float32, CPU, part)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, folder)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return model


class Outputs(NamedTuple):
    """Of TOKENS."""

    hidden: torch.Tensor
    logits: torch.Tensor


def together(folder: Path, ranks: int, expert_parallel: bool = False) -> list[Outputs]:
    """What each rank says."""

    def work(exchange: ThreadExchange) -> Outputs:
        model = shard(folder, exchange.shard)
        model.prepare()
        connect_ranks(model, exchange)
        return run_whole(model, read_spec(read_config(folder), exchange.shard))

    return Meeting(ranks, expert_parallel).run(work)


def run_whole(model: Any, spec: ModelSpec) -> Outputs:
    """Computed in two steps."""
    context, parts = DenseContext(spec), []
    context.sinks = attention_sinks(model)
    for tokens, start in ((TOKENS[:17], 0), (TOKENS[17:], 17)):
        positions = torch.arange(start, start + len(tokens))
        parts.append(model.forward(tokens, context.step(positions, torch.zeros_like(positions))))
    hidden = torch.cat(parts)
    return Outputs(hidden, model.logits(hidden))


def check(got: list[Outputs], expected: torch.Tensor) -> None:
    for each in got:
        assert all(map(torch.equal, each, got[0])), "ranks have different bits"
    torch.testing.assert_close(got[0].logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", DIVIDED)
def test_ranks_together_say_what_transformers_says(case: str, tmp_path: Path) -> None:
    expected, config = published(case, tmp_path), read_config(tmp_path)
    undivided = run_whole(built(tmp_path), read_spec(config))
    torch.testing.assert_close(undivided.logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
    assert all(map(torch.equal, together(tmp_path, 1)[0], undivided)), "one rank is the whole model"
    for ranks in (2, 4):
        got = together(tmp_path, ranks)
        check(got, expected)
        check(got, undivided.logits)
        for rank in range(ranks):
            part, spec = Shard(rank, ranks), read_spec(config, Shard(rank, ranks))
            model = resolve_model_class(config)(config, torch.float32, torch.device("meta"), part)
            assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
            assert spec.heads == read_spec(config).heads // ranks
            assert (spec.vocab_size, spec.hidden) == (read_spec(config).vocab_size, read_spec(config).hidden)


@pytest.mark.parametrize("case", EXPERTS)
def test_ranks_with_whole_experts_say_what_transformers_says(case: str, tmp_path: Path) -> None:
    """Of six experts, four ranks have two or one."""
    expected, config = published(case, tmp_path), read_config(tmp_path)
    for ranks in (2, 4):
        check(together(tmp_path, ranks, expert_parallel=True), expected)
        own = []
        for rank in range(ranks):
            part = Shard(rank, ranks, expert_parallel=True)
            model = resolve_model_class(config)(config, torch.float32, torch.device("meta"), part)
            spec = read_spec(config, part)
            assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
            own.append(spec.expert_parameters)
        assert sum(own) == read_spec(config).expert_parameters
        assert max(own) == own[0], "a plan is of the first rank"


def wrong_heads(part: Shard, queries: int, keys: int) -> Any:
    """Copied heads in turn, where neighbours must have the same one."""
    found = right_heads(part, queries, keys)
    return (
        found
        if keys % part.tp_size == 0
        else found._replace(kv_heads=range(part.tp_rank % keys, part.tp_rank % keys + 1))
    )


def backwards(exchange: ThreadExchange, x: torch.Tensor) -> torch.Tensor:
    """The last rank sums in another order."""
    each = exchange.all_gather(x)
    return x.copy_(sum(each.flip(0) if exchange.shard.tp_rank == exchange.shard.tp_size - 1 else each))


right_heads = Shard.head_ranges
BIASES, COPIED = "llama, biases", "llama, two heads a copied kv head"
PLANTED: dict[str, tuple[type, str, Any, str, str]] = {
    "a bias on every rank": (
        Shard,
        "is_first_tp_rank",
        property(lambda part: True),
        BIASES,
        "^Tensor-likes are not close",
    ),
    "a wrong map of copied heads": (Shard, "head_ranges", wrong_heads, COPIED, "^Tensor-likes are not close"),
    "one rank sums in another order": (ThreadExchange, "all_reduce", backwards, COPIED, "ranks have different bits"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong, case, words = PLANTED[bug]
    expected = published(case, tmp_path)
    monkeypatch.setattr(kind, name, wrong)
    with pytest.raises(AssertionError, match=words):
        check(together(tmp_path, 4), expected)


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("opt-13b", 3, "it has 40 heads, 40 heads of keys, ffn_dim 20480"),
        ("gpt2-xl", 2, "it has 25 heads"),
        ("llama-125m", 8, "it has 12 heads, 4 heads of keys, intermediate_size 2048"),
    ],
)
def test_what_does_not_divide_is_named(name: str, ranks: int, words: str) -> None:
    with pytest.raises(StartupError, match=words) as failure:
        read_spec(named_config(name), Shard(0, ranks))
    assert "Use " in failure.value.remedy
    with pytest.raises(StartupError, match=words):
        resolve_model_class(named_config(name))(
            named_config(name), torch.float32, torch.device("meta"), Shard(0, ranks)
        )


def test_experts_that_do_not_divide_are_named() -> None:
    """Their columns may be any number."""
    config = {**named_config("qwen3-30b-a3b"), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 769}
    assert read_spec(config, Shard(0, 4, expert_parallel=True)).expert_parameters == 48 * 3 * 2048 * 769
    with pytest.raises(StartupError, match="--tp is 8, and --expert-parallel divides 4 experts") as failure:
        read_spec(config, Shard(0, 8, expert_parallel=True))
    assert "at most 4" in failure.value.remedy
    shared = {**named_config("qwen3-next-80b-a3b"), "shared_expert_intermediate_size": 513}
    with pytest.raises(StartupError, match="shared_expert_intermediate_size 513"):
        read_spec(shared, Shard(0, 2, expert_parallel=True))


def test_norms_over_all_heads_are_not_divided() -> None:
    config = {**named_config("llama-125m"), "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(StartupError, match="--tp is 2, and the model normalises the queries of all heads together"):
        read_spec(config, Shard(0, 2))
    assert read_spec(config, Shard(0, 1, 1, 2)).parameters == read_spec(config).parameters


def test_inputs_of_layers_are_not_sent_between_stages() -> None:
    with pytest.raises(StartupError, match="--pp is 2, and each layer of the model has an input that its first stage"):
        read_spec(named_config("gemma-4-e2b"), Shard(0, 1, 0, 2))


def test_what_key_heads_keep_of_a_prompt_needs_all_of_their_query_heads() -> None:
    config = named_config("pyramidkv-8b")
    assert read_spec(config, Shard(0, 8)).layers[0].kv_heads == 1
    with pytest.raises(StartupError, match=r"pyramid_kv of config\.json needs whole key heads: there are 8"):
        read_spec(config, Shard(0, 16))
