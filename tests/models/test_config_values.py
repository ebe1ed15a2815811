"""Each value of each field of a config.json gives transformers' log-probabilities of the same weights, or a
StartupError that names the field before weights are read. Fields are those of the config's class in transformers, and
MORE."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
import test_state_logits
import test_unlike_logits
import torch
import transformers
from test_against_transformers import CASES, SHARP_YARN
from test_unlike_logits import check_branches, engine_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import StartupError
from quire.layers.mlp import ACTIVATIONS
from quire.models import config_reader, read_model_config, read_spec
from quire.models.decoder_config import DecoderConfig
from quire.models.named_configs import named_config

ABSENT = object()
FULL, LOCAL, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PROMPT = [(7 * i * i + 3) % 89 for i in range(30)]
STATES = reversed(test_state_logits.CASES.values())
BASES: dict[str, dict[str, Any]] = {
    family.lower(): {"max_position_embeddings": 64, **options}
    for family, options in [*CASES.values(), *STATES, *(CASES[name] for name in ("llama", "phi3", "opt"))]
}
"""transformers' model_type -> a small config.json, that of a case in the tests of families."""
MORE = ("head_dim", "is_causal", "partial_rotary_factor", "rope_scaling", "rope_theta", "sliding_window_pattern")
"""Fields that are read, though some classes lack them."""
ON_PURPOSE = {("mistral", "layer_types"), ("nemotron_h", "time_step_limit"), ("nemotron_h", "time_step_min")}
"""Where quire differs from transformers: see docs/models.md."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.2, 2.0, 3.0, 4.0]}
ROPES: list[Any] = [
    {}, {"rope_type": "default", "rope_theta": 300.0}, {"type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0}, YARN, {**YARN, "beta_fast": 4, "beta_slow": 2}, SHARP_YARN,
    {**SHARP_YARN, "truncate": False},
    {**YARN, "attention_factor": 1.5}, {**YARN, "mscale": 0.7}, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "factor": None}, {**YARN, **LONGROPE, "rope_type": "yarn"}, LLAMA3, {**LLAMA3, "low_freq_factor": 5.0},
    {**LLAMA3, "original_max_position_embeddings": 32}, LONGROPE, {**LONGROPE, "type": "su", "rope_type": None},
    {**LONGROPE, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5}, {"rope_type": "linear", "partial_rotary_factor": 0.5},
    {"rope_type": "mrope"},
]  # fmt: skip
ACTS = [*ACTIVATIONS, "gelu_fast", "mish"]
VALUES: dict[str, list[Any]] = {
    "hidden_act": ACTS, "hidden_activation": ACTS, "activation_function": ACTS, "mlp_hidden_act": ACTS,
    "mamba_hidden_act": ACTS, "rope_theta": [300.0, 5000], "partial_rotary_factor": [0.25, 0.5, 1.0],
    "vocab_size": [90, 101], "num_hidden_layers": [1, 3, 5], "n_layer": [1, 3], "max_position_embeddings": [48, 128],
    "n_positions": [48, 128], "original_max_position_embeddings": [16, 64], "hidden_size": [16, 48], "n_embd": [48],
    "num_attention_heads": [1, 2, 8], "n_head": [1, 2], "num_key_value_heads": [1, 2, 3, 4], "head_dim": [6, 8, 20],
    "intermediate_size": [17, 64], "sliding_window": [1, 4, 64], "is_causal": [False],
    "query_pre_attn_scalar": [1, 256], "attention_dropout": [0.5], "use_bidirectional_attention": [True, "all"],
    "rms_norm_eps": [0.0, 1e-12, 0.1], "eos_token_id": [3, [3, 4]], "no_rope_layers": [[1] * 5, [0, 1, 1, 0, 0]],
    "mlp_only_layers": [[], [0], [9]], "attn_layer_indices": [[], [0]], "full_attn_idxs": [[], [0]],
    "position_embedding_type": ["rope", "nope", "learned"], "time_step_limit": [[0.0, 0.5], [0.1, 0.2]],
    "time_step_rank": ["auto", 3], "mamba_dt_rank": ["auto", 3], "mamba_d_head": ["auto", 8], "mamba_d_state": [8, 32],
    "time_step_min": [0.5], "residual_multiplier": [0.2, 1, 2.0],
}  # fmt: skip


def of_type(kind: str, default: Any) -> list[Any]:
    """Return values for a field that VALUES lacks, by the type in its class and by its default."""
    if isinstance(default, bool) or kind.startswith("bool"):
        return [True, False]
    return [1, 3, 8] if isinstance(default, int) or kind.startswith("int") else [0.5, 2.0] if "float" in kind else []


@cache
def fields_of(kind: str) -> dict[str, list[Any]]:
    """Return the values to try for each field of a config: null, no field, and others."""
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    own = dataclasses.fields(transformers.CONFIG_MAPPING[kind])
    layers = BASES[kind].get("num_hidden_layers", 2)
    types = [[one] * layers for one in (FULL, LOCAL, LINEAR, "conv")]
    types += [[LOCAL, *[FULL] * (layers - 1)], [*[FULL] * (layers - 1), LOCAL], [LINEAR, *[FULL] * (layers - 1)]]
    by_type = [{one: rope, other: {}} for rope in ROPES[1:] for one, other in ((FULL, LOCAL), (LOCAL, FULL))]
    values = {field.name: of_type(str(field.type), field.default) for field in own if field.name not in common}
    values |= {name: of_type("", None) for name in MORE}
    values |= {name: VALUES[name] for name in values.keys() & VALUES.keys()}
    values |= dict.fromkeys(values.keys() & {"layer_types", "layers_block_type"}, types)
    values |= {"rope_parameters": ROPES + (by_type if kind.startswith("gemma") else []), "rope_scaling": ROPES[1::4]}
    sizes = {field.name for field in own if type(field.default) is int and field.default > 64}  # too large to build
    return {
        name: [None, *([] if name in sizes else [ABSENT]), *some]
        for name, some in values.items()
        if (kind, name) not in ON_PURPOSE
    }


class Changed(test_unlike_logits.Saved):
    """A model of transformers with random weights and the config.json of `options`, which transformers does not
    rewrite."""

    settings = {"kv_tokens": 512, "page_size": 4, "max_num_batched_tokens": 12}  # noqa: RUF012

    def __init__(self, kind: str, options: dict[str, Any], folder: Path) -> None:
        self.cases = {"": (kind, deepcopy(options))}  # transformers changes them
        folder.mkdir()
        super().__init__("", folder)
        self.saved = json.loads((folder / "config.json").read_text())
        self.config = {**options, "model_type": kind, "architectures": self.saved["architectures"]}
        (folder / "config.json").write_text(json.dumps(self.config))
        if not self.logprobs(PROMPT).isfinite().all():
            raise ValueError("transformers' numbers aren't finite")

    def draw(self, kind: str, name: str, weights: torch.Tensor) -> None:
        """Draw the same weights for the same name and shape, whatever else the model has."""
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        if weights.dim() > 1 and "A_log" not in name:
            small = kind.startswith("gemma") and "embed" in name
            weights.copy_(noise * (0.3 if small else 1.2 / weights.shape[-1] ** 0.5 if "conv" not in name else 0.5))
        elif not name.endswith(("A_log", ".D")):
            weights.add_(noise * 0.25)


def read(config: dict[str, Any]) -> DecoderConfig | str:
    """Return the declaration of a config, or the error."""
    try:
        return read_model_config(config)
    except StartupError as error:
        return str(error)


@cache
def base(kind: str) -> tuple[DecoderConfig, torch.Tensor]:
    """Return the declaration and transformers' log-probabilities of the unchanged config."""
    with TemporaryDirectory() as folder:
        model = Changed(kind, BASES[kind], Path(folder) / "base")
        return read_model_config(model.config), model.logprobs(PROMPT)


def changed(kind: str, field: str, value: Any) -> dict[str, Any]:
    """Return the config with another value of a field, or without it."""
    options = {**BASES[kind], field: value}
    return {name: one for name, one in options.items() if one is not ABSENT}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in BASES for field in fields_of(kind)])
def test_a_value_is_computed_as_transformers_does_or_refused(kind: str, field: str, tmp_path: Path) -> None:
    for number, value in enumerate(fields_of(kind)[field]):
        try:
            model = Changed(kind, changed(kind, field, value), tmp_path / str(number))
        except Exception:  # transformers cannot build or run such a model
            continue
        declared = read(model.config)
        if isinstance(declared, str):
            assert any(
                name in declared for name in (field, *BASES[kind], *(value if isinstance(value, dict) else ()))
            ), (field, value, declared)
            continue
        plain, logprobs = base(kind)
        if declared == plain and torch.equal(logprobs, model.logprobs(PROMPT)):
            continue  # a field that has no effect
        engine = engine_of(model)
        check_branches(engine, model, [PROMPT], 1, 1e-3, least=1)
        engine.close()
        spec, saved = declared.spec(), read_spec(model.saved)  # as transformers writes it
        assert dataclasses.replace(saved, eos_ids=()) == dataclasses.replace(spec, eos_ids=()), (field, value)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("llama", "rope_parameters", rope) for rope in ROPES[1:3]]
    + [
        ("llama", "hidden_act", "relu"),
        ("qwen2", "sliding_window", 4),
        ("gemma3_text", "query_pre_attn_scalar", 1),
        ("mamba2", "n_groups", 2),
    ],
)
def test_values_change_what_transformers_computes(kind: str, field: str, value: Any, tmp_path: Path) -> None:
    """Else the test above would pass for values that quire does not read."""
    logprobs = Changed(kind, changed(kind, field, value), tmp_path / "changed").logprobs(PROMPT)
    assert (logprobs - base(kind)[1]).abs().max() > 0.1


@pytest.mark.parametrize("kind", BASES)
def test_absent_fields_have_transformers_defaults(kind: str) -> None:
    """But for the ids of end tokens, which come from generation_config.json or the tokenizer then."""
    blocks = {name: one for name, one in BASES[kind].items() if name == "hybrid_override_pattern"}
    defaults = transformers.CONFIG_MAPPING[kind](**blocks)  # Nemotron-H's have blocks that aren't supported
    config = json.loads(defaults.to_json_string(use_diff=False))
    config |= {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "eos_token_id": None}
    whole = read_model_config(config)
    for name in config.keys() - {"architectures", "layers_block_type"}:
        declared = read({key: value for key, value in config.items() if key != name})
        assert declared == whole or (isinstance(declared, str) and name in declared), name


def test_activations_are_those_of_the_layers() -> None:
    assert set(config_reader.ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ["gemma-3-4b-vision", "gemma-4-31b-vision", "paligemma2-10b"])
def test_the_outer_config_says_whether_embeddings_of_models_with_images_are_tied(name: str) -> None:
    """As in transformers, by default they are."""
    config = named_config(name)
    for outer, tied in (({}, True), ({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False)):
        text = {**config["text_config"], "tie_word_embeddings": not tied}
        plain = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
        assert read_model_config({**plain, "text_config": text, **outer}).tied == tied


def test_a_null_window_of_a_text_model_is_none() -> None:
    """As in transformers; an absent one has 4,096 tokens."""
    config = named_config("llava-onevision-7b")
    for window, expected in (({"sliding_window": None}, None), ({}, 4096)):
        text = {key: value for key, value in config["text_config"].items() if key != "sliding_window"}
        text |= {"model_type": "mistral", **window}
        assert {layer.window for layer in read_model_config({**config, "text_config": text}).layers} == {expected}
