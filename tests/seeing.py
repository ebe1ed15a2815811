"""Eyes for an echo: pictures are cut into tiles of 4 x 4 pixels, each of which takes a token, and an end takes one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import echo_service
import numpy as np
import tokenizers
from PIL.Image import Image

from quire.control.engine import Engine
from quire.errors import InputError
from quire.text.chat import ChatTemplate
from quire.text.images import ImageLimits
from quire.text.prompts import Prompts
from quire.text.sight import Sight
from quire.text.tokenizer import Tokenizer
from quire.vocabulary.media import Medium, Pixels

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
    """As quire.text.eyes.Eyes says."""

    token, reserved = PICTURE, frozenset({PICTURE, END})
    words = ("<image>", "<end_of_image>")
    settings, joins = "dots of 4", False

    def marker(self, number: int) -> str:
        return "<image>"

    def spelled(self, text: str) -> str:
        return text

    def prepare(self, image: Image, alone: bool = True) -> Pixels:
        if image.width < SIDE or image.height < SIDE:
            raise InputError(f"it must have {SIDE} pixels a side, it has {image.width} x {image.height}")
        down, across = image.height // SIDE, image.width // SIDE
        cut = np.asarray(image)[: down * SIDE, : across * SIDE].reshape(down, SIDE, across, SIDE, 3)
        tiles = np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(-1, SIDE, SIDE, 3)
        return Pixels(b"", tiles.shape, tiles.tobytes(), (down, across))

    def rows(self, grid: tuple[int, ...]) -> int:
        return grid[0] * grid[1] + 1

    def parts(self, grid: tuple[int, ...]) -> int:
        return grid[0] * grid[1]

    def place(
        self, token_ids: Sequence[int], grids: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        placed: list[int] = []
        spans, left = [], iter(grids)
        for token in token_ids:
            if token != PICTURE:
                placed.append(token)
                continue
            rows = self.rows(next(left))
            spans.append((len(placed), rows))
            placed += [PICTURE] * (rows - 1) + [END]
        return placed, spans


class Noted:
    """What an engine was given beside tokens."""

    def __init__(self, engine: Engine) -> None:
        self.media: list[tuple[Medium, ...]] = []
        self.pixels: list[Pixels] = []
        self._add = engine.add_all

    def __call__(self, prompts: Any, params: Any, *, media: Any = (), pixels: Any = (), **more: Any) -> None:
        self._add(prompts, params, **more)
        self.media += media
        self.pixels += pixels


def sight(**limits: int) -> Sight:
    """The echo's."""
    return Sight(Dots(), ImageLimits(**limits))


def built(template: str = PARTS, limits: dict[str, int] | None = None, **more: Any) -> tuple[Any, Noted]:
    """An echo that sees, and a note of what it is shown."""
    model = echo_service.built(**more)
    model = model._replace(
        tokenizer=tokenizer(), chat=ChatTemplate(template, {}), sight=sight(**limits or {}), recipe=None
    )
    noted = Noted(model.engine)
    model.engine.add_all = noted  # type: ignore[method-assign,assignment]
    return model, noted


def prompts(template: str = PARTS, **limits: int) -> Prompts:
    """What is known of its texts and pictures."""
    model, _ = built(template, limits)
    return Prompts(model.tokenizer, model.chat, model.engine.limits, model.defaults, model.sight)
