"""A tiny random Llama 3.2 Vision of transformers', its checkpoint, prompts with pictures, and what it says of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import test_unlike_logits
import torch
import transformers
from torch import Tensor
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from quire.models import resolve_model_class
from quire.protocol.image_tiling import TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.text.images.loader import merge_adjacent
from quire.weights.checkpoint_files import read_config

VOCAB, SIDE = 89, 31
PICTURE = VOCAB  # the first of the tokens beyond the vocabulary
TEXT: dict[str, Any] = {
    "model_type": "mllama_text_model", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1, 3],
    "max_position_embeddings": 2048, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "attention_heads": 4, "num_global_layers": 1,
    "image_size": SIDE, "patch_size": 7, "max_num_tiles": 4, "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
}  # fmt: skip
GRIDS = [(1, 1), (2, 1), (1, 3), (2, 2), (1, 2)]
"""Of the pictures that prompts may have, by their numbers."""
Mixed = list[int | str]
"""A prompt: tokens, and in the places of pictures their numbers, as strings."""


def text(length: int, seed: int) -> Mixed:
    return [(7 * i * i + 3 * seed) % VOCAB for i in range(length)]


PROMPTS: list[Mixed] = [
    [*text(5, 0), "0", *text(20, 1)],
    text(33, 2),
    ["1", "2", *text(9, 3), "3", *text(6, 4)],
    [*text(23, 5), "2", "0", "4"],
]
"""A picture in the middle, none, neighbours before everything and another one later, and neighbours at the end."""


def picture(number: int) -> ImagePixels:
    rows, columns = GRIDS[number]
    generator = torch.Generator().manual_seed(number)
    tiles = torch.randint(0, 256, (rows * columns, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    data = tiles.numpy().tobytes()
    return ImagePixels(
        hashlib.sha256(data).digest(), tuple(tiles.shape), data, (rows, columns, rows * SIDE, columns * SIDE)
    )


def tokens_of(prompt: Mixed) -> list[int]:
    return [PICTURE if isinstance(token, str) else token for token in prompt]


def pictures_in(prompt: Mixed) -> list[int]:
    return [int(token) for token in prompt if isinstance(token, str)]


def shown(prompt: Mixed) -> tuple[tuple[ImageItem, ...], tuple[ImagePixels, ...]]:
    """The pictures of a prompt, as an engine gets them."""
    pixels = [picture(number) for number in pictures_in(prompt)]
    places = [i for i, token in enumerate(prompt) if isinstance(token, str)]
    return merge_adjacent([ImageItem(one.key, at, 1, 17 * one.shape[0]) for at, one in zip(places, pixels)], pixels)


class Saved:
    """The model, in `folder` under the names that transformers writes."""

    settings: ClassVar[dict[str, Any]] = {"kv_tokens": 4096, "device": "cpu"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        config = transformers.MllamaConfig(vision_config=dict(TOWER), text_config=dict(TEXT), image_token_index=PICTURE)
        model = transformers.MllamaForConditionalGeneration._from_config(config, attn_implementation="eager")
        self.model = model.float().eval()
        generator = torch.Generator().manual_seed(5)
        for name, parameter in self.model.named_parameters():
            scale = 0.1 if parameter.dim() == 1 else 0.3
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale + 1.0 * ("norm" in name))
            if "gate" in name:
                parameter.data.add_(0.7)
        self.model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        # transformers counts layers' outputs, the model's authors their inputs.
        written["vision_config"]["intermediate_layers_indices"] = [1]
        (folder / "config.json").write_text(json.dumps(written))
        settings = read_config(folder)
        self.eyes = resolve_model_class(settings)(settings, torch.float32, torch.device("cpu")).vision_encoder  # type: ignore[union-attr]
        self.seeing = torch.ones(1)
        for layer in self.model.model.language_model.layers:
            if hasattr(layer, "cross_attn"):
                layer.cross_attn.register_forward_hook(self._blind)
        self.kept: dict[tuple[int | str, ...], Tensor] = {}

    def _blind(self, module: Any, inputs: Any, found: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Tokens that see no picture get nothing of any, as the model's authors have it; transformers masks what the
        MLP makes of them alone, and gives them all pictures, also those behind them."""
        now = found[0].shape[1]
        return found[0] * (self.seeing if now > 1 else self.seeing[-1:])[None, :, None], found[1]

    def inputs(self, prompt: Mixed, more: Sequence[int] = ()) -> dict[str, Any]:
        """What transformers' processor would make of a prompt and what follows it."""
        found = self._inputs(tokens_of(prompt) + list(more), pictures_in(prompt))
        if "cross_attention_mask" in found:
            self.seeing = (found["cross_attention_mask"][0].flatten(1) > 0).any(1).float()
        return found

    def _inputs(self, tokens: Sequence[int], pictures: Sequence[int]) -> dict[str, Any]:
        ids = torch.tensor([tokens])
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not pictures:
            return found
        grids = [TileGrid(*picture(number).grid) for number in pictures]
        pixels, ratios = torch.zeros(1, len(grids), 4, 3, SIDE, SIDE), torch.zeros(1, len(grids), 4, dtype=torch.long)
        for i, (number, grid) in enumerate(zip(pictures, grids)):
            shown, count = picture(number), grid.rows * grid.columns
            tiles = torch.frombuffer(bytearray(shown.data), dtype=torch.uint8).view(shown.shape)
            pixels[0, i, :count], ratios[0, i, :count] = self.eyes.preprocess(tiles, grid)[0], 1
        spans = get_cross_attention_token_mask(list(tokens), PICTURE)
        counts = [grid.rows * grid.columns for grid in grids]
        mask = convert_sparse_cross_attention_mask_to_dense([spans], [counts], 4, len(tokens))
        shapes = torch.tensor([[self.eyes.tiling.aspect_ratio_id(grid) for grid in grids]])
        return found | {
            "pixel_values": pixels, "aspect_ratio_ids": shapes, "aspect_ratio_mask": ratios,
            "cross_attention_mask": torch.from_numpy(mask),
        }  # fmt: skip

    @torch.inference_mode()
    def logits(self, prompt: Mixed, tokens: Sequence[int]) -> Tensor:
        """[T, V]: of what follows each token of a prompt, and of those behind it."""
        key = (*prompt, *tokens)
        if key not in self.kept:
            self.kept[key] = self.model(**self.inputs(prompt, tokens)).logits[0]
        return self.kept[key]

    def following(self, prompt: Mixed, tokens: Sequence[int]) -> Tensor:
        """[T, V]: of each of these tokens behind a prompt."""
        return self.logits(prompt, tokens)[len(prompt) - 1 : -1].log_softmax(-1)

    @torch.inference_mode()
    def generate(self, prompt: Mixed, count: int, **options: Any) -> list[list[int]]:
        """Greedy tokens, or beams."""
        inputs = self.inputs(prompt)
        found = self.model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, **options)
        rows: list[list[int]] = found[:, len(prompt) :].tolist()
        return rows


def request(prompt: Mixed) -> tuple[list[int], dict[str, Any]]:
    media, pixels = shown(prompt)
    return tokens_of(prompt), {"images": media, "pixels": pixels}


run = partial(test_unlike_logits.run, request=request)
