"""The interface of a vision model's image processor: how an image becomes bytes for the encoder, and where images are
in a prompt. Made from a model's settings; independent of tensors, files and requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.protocol.images import ImagePixels

if TYPE_CHECKING:
    from PIL.Image import Image

GridNumbers = tuple[int, ...]
TOKEN_ESCAPE = "\ufdd0\ufdd1"  # Unicode noncharacters, reserved for internal use


def escape_image_tokens(text: str, token_texts: Sequence[str]) -> str:
    """Return `text` with a TOKEN_ESCAPE inside each of the `token_texts`, so that these stay text: the tokenizer gets
    the text in parts that are split there."""
    pattern = "|".join(map(re.escape, sorted(token_texts, key=len, reverse=True)))
    return re.sub(pattern, lambda match: match[0][:1] + TOKEN_ESCAPE + match[0][1:], text)


def escape_image_tokens_in_json(value: Any, token_texts: Sequence[str]) -> Any:
    """Apply `escape_image_tokens` to all strings of a JSON value."""
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
    """The image processor of one model. Used by several threads at once.

    `image_token_id` is the id of a whole image in a prompt before `expand_placeholders`. `reserved_ids` are the ids
    that only `expand_placeholders` may write; they may include `image_token_id`. `reserved_texts` are the texts that
    the tokenizer or `normalize_placeholders` turns into one of these. `cache_settings` describes all that `prepare`
    depends on, and is part of an image's key. With `joins_adjacent` adjacent images of a prompt are merged, and their
    rows are not in the prompt."""

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
        """Return the text of image `number`, from 1, for templates that only take strings."""

    def normalize_placeholders(self, text: str) -> str:
        """Return the text for the tokenizer, with one `image_token_id` per image instead of, for example, numbered
        markers. Raise InputError for invalid numbers."""

    def prepare(self, image: Image, only_image: bool = True) -> ImagePixels:
        """Return the encoder's input of an RGB image, without a key. `only_image`: it is the only image of its prompt,
        which some models cut into more tiles; its grid shows it. Raise InputError if it cannot be prepared."""

    def num_rows(self, grid: GridNumbers) -> int:
        """Return the number of embedding rows of an image."""

    def num_parts(self, grid: GridNumbers) -> int:
        """Return the number of equal parts in which an image can be encoded one after another."""

    def expand_placeholders(
        self, token_ids: Sequence[int], grids: Sequence[GridNumbers]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Replace each `image_token_id`, one per grid, by as many ids as the image has. Return the prompt, and the
        first position and length of each image. Raise InputError for more images than the model takes."""
