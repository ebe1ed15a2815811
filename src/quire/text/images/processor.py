"""What a model that sees offers to the text plane: how a picture becomes bytes for its encoder, and where pictures
stand in a prompt. Made from a model's settings; knows no tensors, no files and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.protocol.images import ImagePixels

if TYPE_CHECKING:
    from PIL.Image import Image

GridNumbers = tuple[int, ...]
TOKEN_ESCAPE = "\ufdd0\ufdd1"  # characters that Unicode keeps for a program's own use


def escape_image_tokens(text: str, token_texts: Sequence[str]) -> str:
    """`text` with a GUARD inside each of the `token_texts`, so that it stays text: it is tokenised in parts, cut "
    "there."""
    pattern = "|".join(map(re.escape, sorted(token_texts, key=len, reverse=True)))
    return re.sub(pattern, lambda found: found[0][:1] + TOKEN_ESCAPE + found[0][1:], text)


def escape_image_tokens_in_json(value: Any, token_texts: Sequence[str]) -> Any:
    """A JSON value with all of its texts `escape_image_tokens`."""
    if isinstance(value, str):
        return escape_image_tokens(value, token_texts)
    if isinstance(value, list):
        return [escape_image_tokens_in_json(one, token_texts) for one in value]
    if isinstance(value, dict):
        return {
            escape_image_tokens(key, token_texts): escape_image_tokens_in_json(one, token_texts)
            for key, one in value.items()
        }
    return value


class ImageProcessor(Protocol):
    """Of one model. Used by several threads at once.

    `image_token_id` is the id that stands for a whole picture in a prompt before `expand_placeholders`; `reserved_ids`
    are the ids that only `expand_placeholders` may write, `image_token_id` among them or not. `reserved_texts` are the
    texts that the tokenizer, or `normalize_placeholders`, takes for one of these. `cache_settings` says all that
    `prepare` depends on: it is part of what a picture's key is made of. Where it `joins_adjacent` them, pictures that
    are neighbours in a prompt are seen as one: their rows stand nowhere in it."""

    @property
    def image_token_id(self) -> int: ...
    @property
    def reserved_ids(self) -> frozenset[int]: ...
    @property
    def reserved_texts(self) -> tuple[str, ...]: ...
    @property
    def cache_settings(self) -> str: ...
    @property
    def joins_adjacent(self) -> bool: ...

    def placeholder_text(self, number: int) -> str:
        """The text of a prompt's picture `number`, from 1 on, as a template that takes only strings is given it."""

    def normalize_placeholders(self, text: str) -> str:
        """A prompt's text as the tokenizer is to read it, with one `image_token_id` a picture: where publishers number
        their markers, say. InputError for numbers that can't be."""

    def prepare(self, image: Image, only_image: bool = True) -> ImagePixels:
        """What the encoder gets of an RGB picture, under no key yet. `only_image`: it is its prompt's only one, which
        some models show in more tiles; its grid says so. InputError for one that can't be prepared."""

    def num_rows(self, grid: GridNumbers) -> int:
        """Rows that the encoder makes of a picture."""

    def num_parts(self, grid: GridNumbers) -> int:
        """Equal shares that it can be encoded in, one after another."""

    def expand_placeholders(
        self, token_ids: Sequence[int], grids: Sequence[GridNumbers]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The prompt with each `image_token_id`, of which there is one a grid, as long as its picture is; and where
        each picture stands: its first position, and how many it takes. InputError for more pictures than the model
        takes."""
