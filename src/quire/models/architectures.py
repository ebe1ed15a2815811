"""The table of supported architectures, and the reading of a config.json by it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from quire.errors import StartupError, short_repr
from quire.models import (
    delta_rule_families,
    expert_families,
    families,
    gemma4,
    head_config,
    state_families,
    vision_language_families,
)
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import DecoderConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard


class Architecture(NamedTuple):
    """The function that reads a config.json, and the class of the model as "module:name"."""

    read: Callable[[ConfigReader], DecoderConfig]
    model: str = "decoder:Decoder"


CHECKPOINTS = "FP8, AWQ, GPTQ"


class Family(NamedTuple):
    """A row of the table in docs/models.md: architectures of one kind, by their names in config.json; their layers in
    words; the formats of quantized checkpoints that can be read, GGUF aside; and what tests compare them with."""

    layers: str
    architectures: dict[str, Architecture]
    checkpoints: str = CHECKPOINTS
    tested: str = "transformers"


VISION_LANGUAGE = Architecture(vision_language_families.read_vision_language, "vision_language:VisionLanguageModel")
FAMILIES = (
    Family(
        "full attention; also `layer_types` with windows or chunks, and quire's own keys `kv_sharing` and `pyramid_kv`",
        {"LlamaForCausalLM": Architecture(families.read_llama)},
    ),
    Family(
        "a window each, or by `layer_types`",
        {
            "MistralForCausalLM": Architecture(families.read_mistral),
            "MinistralForCausalLM": Architecture(families.read_mistral),
        },
    ),
    Family(
        "full, or windows by `layer_types` or `max_window_layers`",
        {
            "Qwen2ForCausalLM": Architecture(families.read_qwen2),
            "MiMoForCausalLM": Architecture(families.read_mimo),
            "Qwen3ForCausalLM": Architecture(families.read_qwen3),
        },
        tested="transformers; MiMo: its Qwen2",
    ),
    Family("full", {"InternLM2ForCausalLM": Architecture(families.read_internlm2)}, tested="transformers' Llama"),
    Family(
        "full, or a window each; rotary embeddings of whole heads or, as in Phi-4-mini, of a part",
        {"Phi3ForCausalLM": Architecture(families.read_phi3)},
    ),
    Family(
        "full, with layers without positions (`no_rope_layers`)",
        {"SmolLM3ForCausalLM": Architecture(families.read_smollm3)},
    ),
    Family(
        "full; norms after blocks and over whole queries and keys; one rank",
        {"Olmo2ForCausalLM": Architecture(families.read_olmo2)},
    ),
    Family(
        "windows and full in turns, or by `layer_types`; soft caps",
        {"Gemma2ForCausalLM": Architecture(families.read_gemma2)},
    ),
    Family(
        "five windows to each full layer, or by `layer_types`",
        {"Gemma3ForCausalLM": Architecture(families.read_gemma3)},
    ),
    Family(
        "five windows to each full layer, or by `layer_types`; full layers have larger heads; keys and values shared "
        "among the last layers; inputs of each layer (no `--pp`); experts beside a dense block; "
        "text and images",
        {
            "Gemma4ForCausalLM": Architecture(gemma4.read_gemma4, "per_layer_inputs:PerLayerInputDecoder"),
            "Gemma4ForConditionalGeneration": Architecture(
                vision_language_families.read_gemma4_with_images, "vision_language:PerLayerInputVisionLanguageModel"
            ),
        },
    ),
    Family("full, or a window each; experts", {"MixtralForCausalLM": Architecture(expert_families.read_mixtral)}),
    Family(
        "as Qwen2 and Qwen3, with experts in all layers or those of `decoder_sparse_step` and `mlp_only_layers`; "
        "Qwen2-MoE has a shared expert too",
        {
            "Qwen2MoeForCausalLM": Architecture(expert_families.read_qwen2_moe),
            "Qwen3MoeForCausalLM": Architecture(expert_families.read_qwen3_moe),
        },
    ),
    Family(
        "windows and full in turns, or by `layer_types`, with attention sinks; experts with biases",
        {"GptOssForCausalLM": Architecture(expert_families.read_gpt_oss)},
        checkpoints=f"{CHECKPOINTS}, MXFP4",
    ),
    Family(
        "states of the gated delta rule, gated attention in every fourth layer or by `layer_types`; experts and a "
        "shared one in all layers, or those of `decoder_sparse_step` and `mlp_only_layers`",
        {"Qwen3NextForCausalLM": Architecture(delta_rule_families.read_qwen3_next)},
    ),
    Family(
        "as Qwen3-Next, without experts or with experts in all layers; text alone",
        {
            "Qwen3_5ForCausalLM": Architecture(delta_rule_families.read_qwen3_5),
            "Qwen3_5ForConditionalGeneration": Architecture(delta_rule_families.read_qwen3_5_with_vision),
            "Qwen3_5MoeForCausalLM": Architecture(delta_rule_families.read_qwen3_5_moe),
            "Qwen3_5MoeForConditionalGeneration": Architecture(delta_rule_families.read_qwen3_5_moe_with_vision),
        },
    ),
    Family("full", {"OPTForCausalLM": Architecture(families.read_opt, "opt:OPT")}),
    Family("full", {"GPT2LMHeadModel": Architecture(families.read_gpt2)}, checkpoints="none"),
    Family(
        "Mamba states, attention in some layers, experts in some",
        {"JambaForCausalLM": Architecture(state_families.read_jamba)},
    ),
    Family(
        "Mamba states",
        {
            "MambaForCausalLM": Architecture(state_families.read_mamba),
            "FalconMambaForCausalLM": Architecture(state_families.read_falcon_mamba),
        },
    ),
    Family("Mamba-2 states", {"Mamba2ForCausalLM": Architecture(state_families.read_mamba2)}),
    Family(
        "Mamba-2 states, attention in some layers, with or without positions; a feed-forward block in each, also "
        "beside experts",
        {"GraniteMoeHybridForCausalLM": Architecture(state_families.read_granite_hybrid)},
    ),
    Family(
        "Mamba-2 states, attention in some layers",
        {"BambaForCausalLM": Architecture(state_families.read_bamba)},
    ),
    Family(
        "blocks of Mamba-2, attention without positions, and plain MLPs; no experts",
        {"NemotronHForCausalLM": Architecture(state_families.read_nemotron_h)},
    ),
    Family(
        "gated short convolutions, attention in some layers",
        {"Lfm2ForCausalLM": Architecture(state_families.read_lfm2)},
    ),
    Family(
        "full, and cross-attention to images (Llama 3.2 Vision)",
        {"MllamaForConditionalGeneration": Architecture(vision_language_families.read_mllama, "mllama:Mllama")},
    ),
    Family(
        "a vision encoder, and a text model of the families above",
        {
            "LlavaOnevisionForConditionalGeneration": VISION_LANGUAGE,
            "InternVLForConditionalGeneration": VISION_LANGUAGE,
            "InternVLChatModel": VISION_LANGUAGE,
            "Phi3VForCausalLM": VISION_LANGUAGE,
            "PaliGemmaForConditionalGeneration": VISION_LANGUAGE,
            "Gemma3ForConditionalGeneration": Architecture(
                vision_language_families.read_gemma3_with_images, "vision_language:VisionLanguageModel"
            ),
        },
        tested="transformers; Phi-3-Vision: its CLIP and Phi-3",
    ),
)
"""The models that quire computes itself."""
ARCHITECTURES = {name: one for family in FAMILIES for name, one in family.architectures.items()}
HEADS = {
    head_config.EAGLE3: Architecture(head_config.read_eagle3, "speculation_heads:Eagle3Head"),
    "LlamaForCausalLMEagle3": Architecture(head_config.read_eagle3, "speculation_heads:Eagle3Head"),
    head_config.MTP: Architecture(head_config.read_mimo_mtp, "speculation_heads:MtpHead"),
    head_config.QWEN3_NEXT_MTP: Architecture(head_config.read_qwen3_next_mtp, "speculation_heads:MtpHead"),
    head_config.QWEN3_5_MTP: Architecture(head_config.read_qwen3_5_mtp, "speculation_heads:MtpHead"),
    head_config.QWEN3_5_MOE_MTP: Architecture(head_config.read_qwen3_5_moe_mtp, "speculation_heads:MtpHead"),
}
"""Speculation heads, which are used beside a model."""


def uses_transformers(config: dict[str, Any]) -> bool:
    """Return True if the architecture of `config` is none of quire's own: transformers has to compute it."""
    names: object = config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and not _is_own(config, names[0])


def _is_own(config: dict[str, Any], name: str) -> bool:
    return name in ARCHITECTURES or name in HEADS or config.get("speculators_model_type") == "eagle3"


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Return the architecture of quire's own that `config` names. Raise StartupError if it names another, or none."""
    names: object = config.get("architectures")
    remedy = f"quire's own: {', '.join(ARCHITECTURES)}"
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise StartupError("config.json names no architecture", remedy)
    is_unnamed_head = names[0] == "LlamaForCausalLM" and config.get("draft_vocab_size") is not None
    if is_unnamed_head or config.get("speculators_model_type") == "eagle3":
        return HEADS[head_config.EAGLE3]
    if names[0] in HEADS:
        return HEADS[names[0]]
    if names[0] not in ARCHITECTURES:
        raise StartupError(f"the architecture {short_repr(names[0])} is none of quire's own", remedy)
    return ARCHITECTURES[names[0]]


def read_model_config(config: dict[str, Any]) -> DecoderConfig:
    """Return the declaration of the model of a config.json. Raise StartupError if it is not supported."""
    return architecture_of(config).read(ConfigReader(config))


def read_spec(config: dict[str, Any], shard: Shard = UNSHARDED) -> ModelSpec:
    """Return the ModelSpec of a config.json, or that of one rank's shard, with the whole model's `vocab_size` and
    `hidden`. Raise StartupError if it is not supported, or can't be divided so."""
    if not uses_transformers(config):
        return read_model_config(config).for_shard(shard).spec()
    name = short_repr(config["architectures"][0])
    if find_spec("transformers") is None:
        raise StartupError(
            f"the architecture {name} is none of quire's own, and transformers is not installed",
            f"pip install 'quire[hf]' if it is one of transformers. quire's own: {', '.join(ARCHITECTURES)}",
        )
    from quire.models import transformers_spec

    for flag, given in (("--pp", shard.pp_size > 1), ("--expert-parallel", shard.expert_parallel)):
        if given:
            raise StartupError(
                f"{flag} is given, and {name} is computed by transformers",
                "Leave it out; --tp divides many such models, and --replicas serves several copies",
            )
    return transformers_spec.read_spec(config, shard.tp_size)
