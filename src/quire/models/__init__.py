"""The models: one file a family. Torch is imported only when a model's class is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

    Model = Llama | Gemma | OPT | GPT2 | Jamba | Mamba | Mllama | VisionLanguageModel

Settings = (
    type[LlamaSettings] | type[GemmaSettings] | type[OPTSettings] | type[GPT2Settings]
    | type[JambaSettings] | type[MambaSettings] | type[MllamaSettings] | type[VisionLanguageSettings]
)  # fmt: skip

# The name in config.json -> the settings that read it, and the class as "module:name".
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
    """The supported architecture that `config` names; StartupError if it names none."""
    names = config.get("architectures")
    remedy = f"Supported architectures: {', '.join(ARCHITECTURES)}"
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise StartupError("config.json names no architecture", remedy)
    if names[0] not in ARCHITECTURES:
        raise StartupError(f"the architecture {short_repr(names[0])} is not supported", remedy)
    return names[0]


def resolve_model_class(config: dict[str, Any]) -> type[Model]:
    """The model's class. StartupError for an architecture that isn't supported."""
    module, _, name = ARCHITECTURES[architecture_of(config)][1].partition(":")
    found: type[Model] = getattr(import_module(f"quire.models.{module}"), name)
    return found


def read_spec(config: dict[str, Any], shard: Shard = UNSHARDED) -> ModelSpec:
    """The same as resolve(config).spec(config), without torch; or what one rank's shard has, `vocab_size` and `hidden`
    aside, which are the model's. StartupError for a model that can't be divided so."""
    return ARCHITECTURES[architecture_of(config)][0].from_config(config).for_shard(shard).spec()
