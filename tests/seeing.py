"""Eyes for an echo: pictures are cut into tiles of 4 x 4 pixels, each of which takes a token, and an end takes one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import echo_service
import numpy as np
import tokenizers
from PIL.Image import Image

from quire.core.engine import Engine
from quire.errors import InputError
from quire.protocol.images import ImageItem, ImagePixels
from quire.text.images.decode import ImageLimits
from quire.text.images.loader import ImageLoader
from quire.text.input_processor import InputProcessor
from quire.text.tokenizer import Tokenizer

SIDE = 4
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    """The echo's, with a token for pictures and one for their ends."""
    backend = tokenizers.Tokenizer.from_str(echo_service.tokenizer()._backend.to_str())
    backend.add_special_tokens(["<image>", "<end_of_image>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"})


PICTURE, END = tokenizer().encode("<image><end_of_image>")


class Dots:
    """As quire.text.images.processor.ImageProcessor says."""

    image_token_id, reserved_ids = PICTURE, frozenset({PICTURE, END})
    reserved_texts = ("<image>", "<end_of_image>")
    cache_settings, joins_adjacent = "dots of 4", False

    def placeholder_text(self, number: int) -> str:
        return "<image>"

    def normalize_placeholders(self, text: str) -> str:
        return text

    def prepare(self, image: Image, only_image: bool = True) -> ImagePixels:
        if image.width < SIDE or image.height < SIDE:
            raise InputError(f"it must have {SIDE} pixels a side, it has {image.width} x {image.height}")
        down, across = image.height // SIDE, image.width // SIDE
        cut = np.asarray(image)[: down * SIDE, : across * SIDE].reshape(down, SIDE, across, SIDE, 3)
        tiles = np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(-1, SIDE, SIDE, 3)
        return ImagePixels(b"", tiles.shape, tiles.tobytes(), (down, across))

    def num_rows(self, grid: tuple[int, ...]) -> int:
        return grid[0] * grid[1] + 1

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return grid[0] * grid[1]

    def expand_placeholders(
        self, token_ids: Sequence[int], grids: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        placed: list[int] = []
        spans, left = [], iter(grids)
        for token in token_ids:
            if token != PICTURE:
                placed.append(token)
                continue
            rows = self.num_rows(next(left))
            spans.append((len(placed), rows))
            placed += [PICTURE] * (rows - 1) + [END]
        return placed, spans


class Noted:
    """What an engine was given beside tokens."""

    def __init__(self, engine: Engine) -> None:
        self.media: list[tuple[ImageItem, ...]] = []
        self.pixels: list[ImagePixels] = []
        self._add = engine.add_all

    def __call__(self, prompts: Any, params: Any, *, images: Any = (), pixels: Any = (), **more: Any) -> None:
        self._add(prompts, params, **more)
        self.media += images
        self.pixels += pixels


def sight(**limits: int) -> ImageLoader:
    return ImageLoader(Dots(), ImageLimits(**limits))


def built(template: str = PARTS, limits: dict[str, int] | None = None, **more: Any) -> tuple[Any, Noted]:
    """An echo that sees, and a note of what it is shown."""
    model = echo_service.built(**more)
    model = model._replace(
        tokenizer=tokenizer(),
        chat_template=echo_service.template(template),
        image_loader=sight(**limits or {}),
        recipe=None,
    )
    noted = Noted(model.engine)
    model.engine.add_all = noted  # type: ignore[method-assign,assignment]
    return model, noted


def prompts(template: str = PARTS, **limits: int) -> InputProcessor:
    model, _ = built(template, limits)
    return echo_service.input_processor(model, model.engine.limits)
