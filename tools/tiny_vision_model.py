"""The bundled vision model: its settings, a quick forward pass for training, and the folder it is saved as.

The model is transformers' LlavaOnevisionForConditionalGeneration. The quick pass gives the same logits for pictures
that are prepared already and whose features are placed by an index, with no loop over pictures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_model import write_folder
from tiny_text import BEGIN, CHAT_TEMPLATE, END, END_OF_TEXT, PAD
from tiny_tiles import GRIDS, MEAN, PATCH, SIDE, STD, TILE, TILES
from tokenizers import AddedToken, Tokenizer
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

IMAGE = "<image>"
SHARED = Path(__file__).parents[1] / "src" / "quire" / "assets" / "tiny"  # whose tokenizer it uses
CONTEXT = 4096
_TEXT_PARTS = "{{ part['text'] | trim }}"
# As the bundled model's, and a message's pictures come before its text, wherever they stand among its parts.
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% else %}{% for part in message['content'] %}" + _TEXT_PARTS,
    "{% else %}"
    "{% for part in message['content'] %}{% if part['type'] in ['image', 'image_url'] %}<image>{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}" + _TEXT_PARTS + "{% endif %}",
)
# In memory a part's name begins as on the left, in published checkpoints as on the right.
NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}


def shared_tokenizer() -> Tokenizer:
    """The bundled text model's, with one more token."""
    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return tokenizer


def settings() -> dict[str, Any]:
    """config.json."""
    tokenizer = shared_tokenizer()
    begin, end, pad, image = (tokenizer.token_to_id(token) for token in (BEGIN, END, PAD, IMAGE))
    assert image is not None, f"the tokenizer has no {IMAGE}"
    ends = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "torch_dtype": "bfloat16"}
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
        "image_grid_pinpoints": [list(grid) for grid in GRIDS],
        "image_token_index": image, "video_token_index": image + 1, "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu", "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "tie_word_embeddings": True, **ends,
        "text_config": {
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 3080,  # the tokenizer's 3073, filled up
            "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "use_sliding_window": False, "tie_word_embeddings": True, **ends,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH, "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "vision_use_head": False,
        },
    }  # fmt: skip


def build(seed: int) -> LlavaOnevisionForConditionalGeneration:
    """A new model in fp32; the same for the same seed."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig(**settings()))
    return torch.nn.Module.float(model)  # the same method of the model has no types


def see(model: LlavaOnevisionForConditionalGeneration, tiles: torch.Tensor) -> torch.Tensor:
    """What the tower makes of uint8 tiles [pictures, TILES, TILE, TILE, 3]: [pictures, TILES, SIDE * SIDE, hidden]."""
    tower = model.model.vision_tower
    pixels = (tiles.flatten(0, 1).permute(0, 3, 1, 2).float() / 255 - MEAN) / STD
    hidden: torch.Tensor = tower.embeddings(pixels)
    for layer in tower.encoder.layers:
        hidden = layer(hidden, None)
    return hidden.view(len(tiles), TILES, SIDE * SIDE, -1)


def read(
    model: LlavaOnevisionForConditionalGeneration, ids: torch.Tensor, feature: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """The language model's last hidden states [pictures, tokens, hidden].

    `feature` [pictures, tokens] says which of a picture's features stands at a token's place (as
    tiny_tiles.features_of does), -1 where the token itself does."""
    inner = model.model
    rows = inner.multi_modal_projector(seen.flatten(1, 2))
    rows = torch.cat((rows, inner.image_newline.to(rows.dtype).expand(len(rows), 1, -1)), dim=1)
    placed = rows.gather(1, feature.clamp(min=0)[..., None].expand(-1, -1, rows.shape[-1]))
    words = inner.language_model.embed_tokens(ids).to(rows.dtype)
    hidden = torch.where(feature[..., None] >= 0, placed, words)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    rotary = inner.language_model.rotary_emb(hidden, places)
    for layer in inner.language_model.layers:
        hidden = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=rotary)
    normed: torch.Tensor = inner.language_model.norm(hidden)
    return normed


def logits_at(model: LlavaOnevisionForConditionalGeneration, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, model.model.language_model.embed_tokens.weight.to(hidden.dtype)).float()


def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names that published checkpoints have; the head is the embedding and not among them."""
    named = {}
    for name, weight in weights.items():
        if name != "lm_head.weight":
            ours, theirs = next(pair for pair in NAMES.items() if name.startswith(pair[0]))
            named[theirs + name.removeprefix(ours)] = weight
    return named


def save(model: LlavaOnevisionForConditionalGeneration, folder: Path) -> None:
    """Write the model's folder, with the preparation of pictures."""
    config, tokenizer = settings(), shared_tokenizer()
    generation = {
        "bos_token_id": config["bos_token_id"], "do_sample": False,
        "eos_token_id": [config["eos_token_id"], tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": config["pad_token_id"],
    }  # fmt: skip
    preparation = {
        "image_processor_type": "LlavaOnevisionImageProcessor", "processor_class": "LlavaOnevisionProcessor",
        "do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True,
        "image_grid_pinpoints": config["image_grid_pinpoints"], "image_mean": [MEAN] * 3, "image_std": [STD] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "size": {"height": TILE, "width": TILE},
    }  # fmt: skip
    files = {"config": config, "generation_config": generation, "preprocessor_config": preparation}
    write_folder(folder, published(model.state_dict()), tokenizer, VISION_TEMPLATE, files)


def load(folder: Path) -> LlavaOnevisionForConditionalGeneration:
    """A saved model in fp32, to go on training or to judge."""
    model, stored = build(0), load_file(folder / "model.safetensors")
    own = model.state_dict()
    names = dict(zip(published({name: torch.empty(0) for name in own}), (n for n in own if n != "lm_head.weight")))
    model.load_state_dict({names[name]: weight.float() for name, weight in stored.items()}, strict=False)
    model.tie_weights()
    return model
