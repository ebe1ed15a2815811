"""The models: one file a family. Torch is imported only when a model's class is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.data.models.gemma_settings import GemmaSettings
from quire.data.models.mamba_settings import JambaSettings, MambaSettings
from quire.data.models.mllama_settings import MllamaSettings
from quire.data.models.seeing_settings import VisionLanguageSettings
from quire.data.models.settings import GPT2Settings, LlamaSettings, OPTSettings
from quire.errors import StartupError, short_repr
from quire.vocabulary.layout import UNSHARDED, Shard
from quire.vocabulary.specs import ModelSpec

if TYPE_CHECKING:
    from quire.data.models.gemma import Gemma
    from quire.data.models.gpt2 import GPT2
    from quire.data.models.jamba import Jamba
    from quire.data.models.llama import Llama
    from quire.data.models.mamba import Mamba
    from quire.data.models.mllama import Mllama
    from quire.data.models.opt import OPT
    from quire.data.models.seeing import VisionLanguageModel

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
    "LlavaOnevisionForConditionalGeneration": (VisionLanguageSettings, "seeing:VisionLanguageModel"),
    "InternVLForConditionalGeneration": (VisionLanguageSettings, "seeing:VisionLanguageModel"),
    "InternVLChatModel": (VisionLanguageSettings, "seeing:VisionLanguageModel"),
    "Phi3VForCausalLM": (VisionLanguageSettings, "seeing:VisionLanguageModel"),
    "PaliGemmaForConditionalGeneration": (VisionLanguageSettings, "seeing:VisionLanguageModel"),
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
    found: type[Model] = getattr(import_module(f"quire.data.models.{module}"), name)
    return found


def read_spec(config: dict[str, Any], shard: Shard = UNSHARDED) -> ModelSpec:
    """The same as resolve(config).spec(config), without torch; or what one rank's shard has, `vocab_size` and `hidden`
    aside, which are the model's. StartupError for a model that can't be divided so."""
    return ARCHITECTURES[architecture_of(config)][0].from_config(config).for_shard(shard).spec()
