"""What the config.json of a model whose text has pictures' rows in place of tokens' embeddings says: eyes, and a text
model that is one of ours. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader
from quire.models.gemma_settings import GemmaSettings
from quire.models.settings import LlamaSettings
from quire.models.vision.settings import VisionSettings
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import Shard

PREPROCESSOR_KEY = "preprocessor_config"
"""Where a config.json that was read has what preprocessor_config.json says, see quire.weights.checkpoint_files."""
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"vocab_size": 32_000, "max_position_embeddings": 2048}),
    "mistral": ("MistralForCausalLM", {"vocab_size": 32_000, "max_position_embeddings": 131_072}),
    "qwen2": ("Qwen2ForCausalLM", {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "qwen3": ("Qwen3ForCausalLM", {"vocab_size": 151_936, "max_position_embeddings": 32_768}),
    "internlm2": ("InternLM2ForCausalLM", {"vocab_size": 103_168, "max_position_embeddings": 2048}),
    "phi3": ("Phi3ForCausalLM", {"vocab_size": 32_064, "max_position_embeddings": 4096}),
    "gemma2": ("Gemma2ForCausalLM", {"vocab_size": 256_000, "max_position_embeddings": 8192}),
}
"""By the model_type of the text: its architecture, and what a config may leave out, since transformers has it so."""


@dataclass(frozen=True, slots=True)
class VisionLanguageSettings:
    """`text_config` is the text's own."""

    text_config: dict[str, Any]
    text: LlamaSettings | GemmaSettings
    vision: VisionSettings

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """StartupError for a value that is missing, wrong or not supported, and for eyes and a text that don't fit."""
        text = extract_text_config(config)
        vision = VisionSettings.from_config(config, ConfigReader(config).get_object(PREPROCESSOR_KEY))
        kind = GemmaSettings if text["architectures"] == ["Gemma2ForCausalLM"] else LlamaSettings
        settings = cls(text, kind.from_config(text), vision)
        if vision.bidirectional != isinstance(settings.text, GemmaSettings):
            raise StartupError(
                f"the text of a {short_repr(config['architectures'][0])} is a {text['architectures'][0]}",
                "PaliGemma on Gemma-2 is supported, and of the others those on Llama's relatives",
            )
        token, vocab = vision.image_token_id, settings.text.vocab_size
        if token is not None and token >= vocab:
            raise StartupError(
                f"config.json's token for pictures is {token}, and the text knows {vocab} tokens",
                f"image_token_index must be below {vocab}",
            )
        return settings

    def for_shard(self, shard: Shard) -> Self:
        """One rank's shard: all of the eyes, a part of the text. StartupError if there can't be so many ranks."""
        return replace(self, text=self.text.for_shard(shard))

    def spec(self) -> ModelSpec:
        """`parameters` are the text's: those of the eyes are in `vision`."""
        text = self.text.spec()
        return replace(text, vision=self.vision.spec(text.parameters))


def extract_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text's part of a config.json, as a text model's own. Of Phi-3-Vision that is all of it."""
    name = config["architectures"][0]
    if name == "Phi3VForCausalLM":
        return {**TEXT_MODELS["phi3"][1], **config, "architectures": ["Phi3ForCausalLM"]}
    where = "llm_config" if name == "InternVLChatModel" and config.get("llm_config") else "text_config"
    section = config.get(where)
    if not isinstance(section, dict):
        raise StartupError(f"config.json has no {where}", "It must describe the text's model")
    kind = section.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise StartupError(
            f"the model_type in {where} of config.json is {short_repr(kind)}", f"Supported: {', '.join(TEXT_MODELS)}"
        )
    architecture, usual = TEXT_MODELS[kind]
    more = {"architectures": [architecture]}
    if config.get("tie_word_embeddings"):  # transformers reads either
        more["tie_word_embeddings"] = True
    if config.get("quantization_config") is not None:
        more["quantization_config"] = config["quantization_config"]
    if kind == "gemma2":  # attention in the prompt is both ways here, by what calls it
        section = {k: v for k, v in section.items() if k != "use_bidirectional_attention"}
    return {**usual, **{k: v for k, v in section.items() if v is not None}, **more}
