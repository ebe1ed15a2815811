"""Settings of Llama 3.2 Vision: a Llama with cross-attention layers, and a vision encoder. No torch. Defaults are
transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from quire.errors import StartupError, short_repr
from quire.models.attention_kinds import AttentionKind
from quire.models.config_reader import ConfigReader
from quire.models.settings import LlamaSettings
from quire.models.vision.settings import VisionSettings
from quire.models.vision_language_settings import PREPROCESSOR_KEY
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import Shard

EXTRA_TOKENS = 8
"""Embeddings after the vocabulary's, for tokens that are never generated, such as the image token."""
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
}  # fmt: skip
DEFAULT_CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]


@dataclass(frozen=True, slots=True)
class MllamaSettings:
    """`text` has all layers; those in `cross_layers` have cross-attention to images in place of self-attention."""

    text: LlamaSettings
    vision: VisionSettings
    cross_layers: tuple[int, ...]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a config.json. Raise StartupError for a value that is missing, wrong or not supported, and for a vision
        encoder and a text model that don't fit."""
        fields = ConfigReader(config)
        section = fields.get_object("text_config")
        if not section:
            raise StartupError("config.json has no text_config", "It must describe the text's model")
        given = {**TEXT_DEFAULTS, **{name: value for name, value in section.items() if value is not None}}
        given |= {"architectures": ["LlamaForCausalLM"]}
        if config.get("quantization_config") is not None:
            given["quantization_config"] = config["quantization_config"]
        text = LlamaSettings.from_config(given)
        if text.head_dim * text.heads != text.hidden or text.tied or set(text.attention_kinds) != {AttentionKind()}:
            raise StartupError(
                "text_config of config.json has a head_dim other than hidden_size / num_attention_heads, tied "
                "embeddings, or layers that don't attend to all tokens",
                "Llama 3.2 Vision has none of these",
            )
        vision = VisionSettings.from_config(config, fields.get_object(PREPROCESSOR_KEY))
        token = vision.image_token_id
        if token is not None and token >= text.vocab_size + EXTRA_TOKENS:
            raise StartupError(
                f"config.json's image token is {token}, and there are {text.vocab_size} tokens and {EXTRA_TOKENS} more",
                f"image_token_index must be below {text.vocab_size + EXTRA_TOKENS}",
            )
        return cls(text, vision, _read_cross_layers(section.get("cross_attention_layers"), len(text.attention_kinds)))

    def for_shard(self, shard: Shard) -> Self:
        """Return one rank's settings: the whole vision encoder and a part of the text model. Raise StartupError if the
        text model can't be divided among that many ranks."""
        return replace(self, text=self.text.for_shard(shard))

    @property
    def parameters(self) -> int:
        """Return the text model's parameters. Beyond a Llama's, cross-attention layers have two head norms and two
        gates, and the embedding has the extra tokens."""
        text, padded_rows = self.text, self.text.shard.padded_vocab_rows
        extra_rows = padded_rows(text.vocab_size + EXTRA_TOKENS) - padded_rows(text.vocab_size)
        return text.parameters + len(self.cross_layers) * (2 * text.head_dim + 2) + extra_rows * text.hidden

    def spec(self) -> ModelSpec:
        """Return the ModelSpec. `parameters` are the text model's; those of the vision encoder are in `vision`."""
        text = self.text.spec()
        vision = self.vision.spec(self.parameters)
        cross = LayerSpec(self.text.kv_heads, self.text.head_dim, is_cross_attention=True)
        layers = tuple(cross if i in self.cross_layers else layer for i, layer in enumerate(text.layers))
        return replace(text, family="mllama", layers=layers, parameters=self.parameters, vision=vision)


def _read_cross_layers(value: Any, layers: int) -> tuple[int, ...]:
    """Return the cross-attention layers. The last layer can't be one, since only selected tokens run to its end."""
    value = DEFAULT_CROSS_LAYERS if value is None else value
    if (
        not isinstance(value, list)
        or not value
        or not all(type(layer) is int and 0 <= layer < layers - 1 for layer in value)
        or value != sorted(set(value))
    ):
        raise StartupError(
            f"cross_attention_layers in text_config of config.json is {short_repr(value)}",
            f"It must list some of the layers 0 to {layers - 2}, in order",
        )
    return tuple(value)
