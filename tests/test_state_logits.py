"""Models whose layers keep a running state, from transformers' checkpoints: what the engine says of tokens is what
transformers' logits say to 1e-4, whatever the chunks, pages, hits, preemptions, forks and beams; and greedy tokens are
those of transformers' `generate`. States are kept at every 512th token; where that is far for a test, at every 16th.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import pytest
import test_unlike_logits
import torch
from test_unlike_logits import NEW, check, check_greedy, check_scored, engine_of, run, serving

from quire import SamplingParams
from quire.models import read_spec, resolve_model_class
from quire.weights.checkpoint_files import read_config
from quire.weights.dummy import fill_dummy_weights

VOCAB = 89
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    **COMMON, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
    "mamba_d_state": 8, "use_mamba_kernels": False,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 4,
    "chunk_size": 16,
}
GRANITE_HYBRID: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "num_local_experts": 4,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
NEMOTRON_H: dict[str, Any] = {  # transformers limits steps in prompts alone
    **COMMON,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "max_position_embeddings": 2048,
    "time_step_min": 1e-12,
}
BAMBA: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
LFM2: dict[str, Any] = {
    **COMMON, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "block_multiple_of": 16, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_5: dict[str, Any] = {
    **COMMON, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "rms_norm_eps": 1e-2,  # else norms make much of the last bits of outputs near 0, as transformers' two ways differ
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
}  # fmt: skip
QWEN3_NEXT = {**QWEN3_5, **EXPERTS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("jamba", {**JAMBA, "num_hidden_layers": 3}),
    "jamba, attention last": ("jamba", {**JAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "jamba, no experts": ("jamba", {**JAMBA, "num_hidden_layers": 4, "num_experts": 1, "tie_word_embeddings": True}),
    "mamba": ("mamba", {**COMMON, "num_hidden_layers": 3, "state_size": 8, "use_bias": True}),
    "falcon_mamba": ("falcon_mamba", {**COMMON, "num_hidden_layers": 2, "conv_kernel": 3}),
    "mamba2": ("mamba2", {**MAMBA2, "tie_word_embeddings": True}),
    "mamba2, one group, biased": (
        "mamba2",
        {**MAMBA2, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    ),
    "granite hybrid, experts": ("granitemoehybrid", GRANITE_HYBRID),
    "granite hybrid, rope, no experts": (
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "mamba_proj_bias": True,
            "residual_multiplier": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M-M*-M-"}),
    "nemotron_h, biased, attention last": (
        "nemotron_h",
        {**NEMOTRON_H, "hybrid_override_pattern": "*-MM-*", "mlp_bias": True, "use_bias": True},
    ),
    "bamba": ("bamba", {**BAMBA, "attn_layer_indices": [1]}),
    "bamba, biased, attention last": (
        "bamba",
        {
            **BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_groups": 2,
            "mlp_bias": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": ("lfm2", {**LFM2, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2, biased": ("lfm2", {**LFM2, "full_attn_idxs": [0, 2], "conv_bias": True, "conv_L_cache": 5}),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT),
    "qwen3_next, attention first": (
        "qwen3_next",
        {
            **QWEN3_NEXT,
            "num_hidden_layers": 3,
            "layer_types": [FULL, LINEAR, LINEAR],
            "mlp_only_layers": [1],
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {**QWEN3_5, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**QWEN3_NEXT, "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}),
}
SHORT = [[(7 * i * i + 3 * k) % VOCAB for i in range(length)] for k, length in enumerate((75, 4, 33))]
LONG = [[(5 * i * i + 11 * i + k) % VOCAB for i in range(length)] for k, length in enumerate((1030, 513, 40))]


class Saved(test_unlike_logits.Saved):
    cases = CASES
    settings: ClassVar[dict[str, Any]] = {"kv_tokens": 8192, "state_tokens": 16}

    def draw(self, kind: str, name: str, weights: torch.Tensor) -> None:
        if "A_log" not in name and not name.endswith(".D"):
            # Larger ones make of the last bits of fp32 sums ten times as much behind experts.
            is_offset = kind.startswith("qwen3") and not name.endswith("linear_attn.norm.weight")
            weights.normal_(1.0 * ("norm" in name and not is_offset), 0.1 if weights.dim() == 1 else 0.2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Saved(case, tmp_path_factory.mktemp("saved")))


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
    check(saved(case), SHORT, 2, tp=ranks, device="cpu", **{"page_size": 4, "max_num_batched_tokens": 24, **settings})


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", ["jamba", "granite hybrid, experts", "qwen3_next", "qwen3_5_moe"])
def test_logits_of_ranks_with_whole_experts(saved: Any, case: str) -> None:
    options: dict[str, Any] = {"tp": 2, "expert_parallel": True, "device": "cpu"}
    check(saved(case), SHORT, 2, page_size=4, max_num_batched_tokens=24, **options)


@pytest.mark.share(80)
@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 3), (4, 64), (16, 20)])
@pytest.mark.parametrize("memory", ["paged", "uniform"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_branches(
    saved: Any, case: str, memory: str, page_size: int, chunk: int, preemption: str | None, hit: bool
) -> None:
    settings = {"memory": memory, "page_size": page_size, "max_num_batched_tokens": chunk}
    check(saved(case), SHORT, 2, preemption=preemption, enable_prefix_caching=hit, **settings)


@pytest.mark.parametrize(
    ("case", "page_size", "chunk", "preemption"),
    [("jamba", 16, 1024, None), ("jamba, attention last", 4, 512, "swap"), ("mamba", 16, 512, "recompute")],
)
def test_logits_behind_512_tokens(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "state_tokens": 512}
    check(saved(case), LONG, 1, preemption=preemption, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_gpu(saved: Any, case: str, preemption: str) -> None:
    """To what fp32 sums in another order leave, and exponentials of another library."""
    for chunk, kept, prompts in ((20, 16, SHORT), (1024, 512, LONG)):
        options = {"max_num_batched_tokens": chunk, "state_tokens": kept, "device": "cuda"}
        check(saved(case), prompts, 2, within=2e-3, preemption=preemption, **options)


@pytest.mark.share(8)
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("settings", [{"page_sizes": "max"}, {"table_scope": "layer"}, {"memory": "uniform"}], ids=str)
@pytest.mark.parametrize("case", ["jamba", "jamba, attention last", "jamba, no experts"])
def test_logits_in_other_memories(saved: Any, case: str, settings: dict[str, Any], preemption: str | None) -> None:
    check(saved(case), SHORT, 2, max_num_batched_tokens=20, page_size=4, preemption=preemption, **settings)


@pytest.mark.parametrize("case", ["jamba", "jamba, attention last", "mamba"])
def test_logits_of_scored_prompts(saved: Any, case: str) -> None:
    check_scored(saved(case), SHORT[0], max_num_batched_tokens=24)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_counted(saved: Any, case: str) -> None:
    config = read_config(saved(case).folder)
    ours = resolve_model_class(config)(config, torch.float32, torch.device("meta"))
    count = sum(parameter.numel() for parameter in saved(case).model.parameters())
    assert read_spec(config).parameters == count == sum(parameter.numel() for parameter in ours.parameters())


def test_dummy_weights_forget_as_an_untrained_model_does(saved: Any) -> None:
    """Steps from 0.001 to 0.1 and decays from 1 on: outputs stay finite, however long a sequence is."""
    config = read_config(saved("jamba").folder)
    model = resolve_model_class(config)(config, torch.float32, torch.device("cpu"))
    fill_dummy_weights(model, 0)
    mixer = model.layers[0].mixer
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    torch.testing.assert_close(steps[[0, -1]], torch.tensor([1e-3, 0.1]), rtol=1e-4, atol=0)
    assert torch.equal(mixer.A_log[5].exp().round(), torch.arange(1.0, 9.0))
    assert (mixer.D == 1).all()
    engine = engine_of(saved("jamba"), dummy_weights=True, max_num_batched_tokens=512)
    found = list(run(engine, [LONG[0] + LONG[1]], SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)))
    assert len(found[0][1]) == NEW


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_from_a_folder(saved: Any, case: str) -> None:
    groups = check_greedy(saved(case), SHORT)
    alone = CASES[case][0] in ("mamba", "falcon_mamba", "mamba2")
    assert {group.kind for group in groups} == ({"state"} if alone else {"state", "full"})
    [kept] = {group.run_tokens for group in groups if group.kind == "state"}
    assert (kept == 512) == alone, "a memory of other layers' pages has room for more states"


@pytest.mark.share(10)
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 3), (4, 64), (16, 512)])
@pytest.mark.parametrize("case", CASES)
def test_beams(saved: Any, case: str, page_size: int, chunk: int, preemption: str | None) -> None:
    model, width = saved(case), 4
    params = SamplingParams(n=width, beam_width=width, max_tokens=NEW, ignore_eos=True)
    settings = {"max_num_batched_tokens": chunk, "page_size": page_size, "max_num_seqs": 16}
    with serving(model, preemption, {6, 9, 13}, **settings) as engine:
        for _ in range(2):
            answers = list(run(engine, SHORT, params))
            for prompt in SHORT:
                found = [tokens for one, tokens, _ in answers if one is prompt]
                assert found == model.generate(prompt, num_beams=width, num_return_sequences=width)
