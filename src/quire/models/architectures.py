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


VISION_LANGUAGE = Architecture(vision_language_families.read_vision_language, "vision_language:VisionLanguageModel")
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(families.read_llama),
    "MistralForCausalLM": Architecture(families.read_mistral),
    "MinistralForCausalLM": Architecture(families.read_mistral),
    "Qwen2ForCausalLM": Architecture(families.read_qwen2),
    "MiMoForCausalLM": Architecture(families.read_mimo),
    "Qwen3ForCausalLM": Architecture(families.read_qwen3),
    "InternLM2ForCausalLM": Architecture(families.read_internlm2),
    "Phi3ForCausalLM": Architecture(families.read_phi3),
    "SmolLM3ForCausalLM": Architecture(families.read_smollm3),
    "Olmo2ForCausalLM": Architecture(families.read_olmo2),
    "Gemma2ForCausalLM": Architecture(families.read_gemma2),
    "Gemma3ForCausalLM": Architecture(families.read_gemma3),
    "Gemma3ForConditionalGeneration": Architecture(
        vision_language_families.read_gemma3_with_images, "vision_language:VisionLanguageModel"
    ),
    "Gemma4ForCausalLM": Architecture(gemma4.read_gemma4, "per_layer_inputs:PerLayerInputDecoder"),
    "Gemma4ForConditionalGeneration": Architecture(
        vision_language_families.read_gemma4_with_images, "vision_language:PerLayerInputVisionLanguageModel"
    ),
    "MixtralForCausalLM": Architecture(expert_families.read_mixtral),
    "Qwen2MoeForCausalLM": Architecture(expert_families.read_qwen2_moe),
    "Qwen3MoeForCausalLM": Architecture(expert_families.read_qwen3_moe),
    "GptOssForCausalLM": Architecture(expert_families.read_gpt_oss),
    "Qwen3NextForCausalLM": Architecture(delta_rule_families.read_qwen3_next),
    "Qwen3_5ForCausalLM": Architecture(delta_rule_families.read_qwen3_5),
    "Qwen3_5ForConditionalGeneration": Architecture(delta_rule_families.read_qwen3_5_with_vision),  # its text
    "Qwen3_5MoeForCausalLM": Architecture(delta_rule_families.read_qwen3_5_moe),
    "Qwen3_5MoeForConditionalGeneration": Architecture(delta_rule_families.read_qwen3_5_moe_with_vision),  # its text
    "OPTForCausalLM": Architecture(families.read_opt, "opt:OPT"),
    "GPT2LMHeadModel": Architecture(families.read_gpt2),
    "JambaForCausalLM": Architecture(state_families.read_jamba),
    "MambaForCausalLM": Architecture(state_families.read_mamba),
    "FalconMambaForCausalLM": Architecture(state_families.read_falcon_mamba),
    "Mamba2ForCausalLM": Architecture(state_families.read_mamba2),
    "GraniteMoeHybridForCausalLM": Architecture(state_families.read_granite_hybrid),
    "BambaForCausalLM": Architecture(state_families.read_bamba),
    "NemotronHForCausalLM": Architecture(state_families.read_nemotron_h),
    "Lfm2ForCausalLM": Architecture(state_families.read_lfm2),
    "MllamaForConditionalGeneration": Architecture(vision_language_families.read_mllama, "mllama:Mllama"),
    "LlavaOnevisionForConditionalGeneration": VISION_LANGUAGE,
    "InternVLForConditionalGeneration": VISION_LANGUAGE,
    "InternVLChatModel": VISION_LANGUAGE,
    "Phi3VForCausalLM": VISION_LANGUAGE,
    "PaliGemmaForConditionalGeneration": VISION_LANGUAGE,
}
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

    if shard.tp_size > 1 or shard.pp_size > 1:
        flag = "--tp" if shard.tp_size > 1 else "--pp"
        raise StartupError(f"{flag} is given, and {name} is computed by transformers, in one process",
                           "Leave it out; --replicas serves several of it")  # fmt: skip
    return transformers_spec.read_spec(config)
