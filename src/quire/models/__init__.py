"""The models: one file per family. Torch is imported only when a model's class is resolved."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.errors import StartupError, short_repr
from quire.models.gemma_settings import GemmaSettings
from quire.models.mamba_settings import JambaSettings, MambaSettings
from quire.models.mllama_settings import MllamaSettings
from quire.models.settings import GPT2Settings, LlamaSettings, OPTSettings
from quire.models.vision_language_settings import VisionLanguageSettings
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard

if TYPE_CHECKING:
    from quire.models.gemma import Gemma
    from quire.models.gpt2 import GPT2
    from quire.models.jamba import Jamba
    from quire.models.llama import Llama
    from quire.models.mamba import Mamba
    from quire.models.mllama import Mllama
    from quire.models.opt import OPT
    from quire.models.vision_language import VisionLanguageModel

    Model: TypeAlias = Llama | Gemma | OPT | GPT2 | Jamba | Mamba | Mllama | VisionLanguageModel

Settings = (
    type[LlamaSettings] | type[GemmaSettings] | type[OPTSettings] | type[GPT2Settings]
    | type[JambaSettings] | type[MambaSettings] | type[MllamaSettings] | type[VisionLanguageSettings]
)  # fmt: skip

# The architecture in config.json -> the settings class that reads it, and the model class as "module:name".
ARCHITECTURES: dict[str, tuple[Settings, str]] = {
    "LlamaForCausalLM": (LlamaSettings, "llama:Llama"),
    "MistralForCausalLM": (LlamaSettings, "llama:Llama"),
    "MinistralForCausalLM": (LlamaSettings, "llama:Llama"),
    "Qwen2ForCausalLM": (LlamaSettings, "llama:Llama"),
    "Qwen3ForCausalLM": (LlamaSettings, "llama:Llama"),
    "InternLM2ForCausalLM": (LlamaSettings, "llama:Llama"),
    "Phi3ForCausalLM": (LlamaSettings, "llama:Llama"),
    "Gemma2ForCausalLM": (GemmaSettings, "gemma:Gemma"),
    "Gemma3ForCausalLM": (GemmaSettings, "gemma:Gemma"),
    "Gemma3ForConditionalGeneration": (GemmaSettings, "gemma:Gemma"),  # its text
    "OPTForCausalLM": (OPTSettings, "opt:OPT"),
    "GPT2LMHeadModel": (GPT2Settings, "gpt2:GPT2"),
    "JambaForCausalLM": (JambaSettings, "jamba:Jamba"),
    "MambaForCausalLM": (MambaSettings, "mamba:Mamba"),
    "FalconMambaForCausalLM": (MambaSettings, "mamba:Mamba"),
    "MllamaForConditionalGeneration": (MllamaSettings, "mllama:Mllama"),
    "LlavaOnevisionForConditionalGeneration": (VisionLanguageSettings, "vision_language:VisionLanguageModel"),
    "InternVLForConditionalGeneration": (VisionLanguageSettings, "vision_language:VisionLanguageModel"),
    "InternVLChatModel": (VisionLanguageSettings, "vision_language:VisionLanguageModel"),
    "Phi3VForCausalLM": (VisionLanguageSettings, "vision_language:VisionLanguageModel"),
    "PaliGemmaForConditionalGeneration": (VisionLanguageSettings, "vision_language:VisionLanguageModel"),
}


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture that `config` names. Raise StartupError if there is none or it is not supported."""
    names: object = config.get("architectures")
    remedy = f"Supported architectures: {', '.join(ARCHITECTURES)}"
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise StartupError("config.json names no architecture", remedy)
    name: str = names[0]
    if name not in ARCHITECTURES:
        raise StartupError(f"the architecture {short_repr(name)} is not supported", remedy)
    return name


def resolve_model_class(config: dict[str, Any]) -> type[Model]:
    """Return the model class. Raise StartupError for an architecture that is not supported."""
    module, _, name = ARCHITECTURES[architecture_of(config)][1].partition(":")
    model_class: type[Model] = getattr(import_module(f"quire.models.{module}"), name)
    return model_class


def read_spec(config: dict[str, Any], shard: Shard = UNSHARDED) -> ModelSpec:
    """Return resolve_model_class(config).spec(config) without importing torch; or that of one rank's shard, with the
    whole model's `vocab_size` and `hidden`. Raise StartupError for a model that can't be divided so."""
    return ARCHITECTURES[architecture_of(config)][0].from_config(config).for_shard(shard).spec()
