"""The image processor of a vision model. Made from a model's settings; independent of tensors, files and requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.errors import InputError
from quire.protocol.image_tiling import TileGrid, tiling_settings
from quire.protocol.images import ImagePixels
from quire.text.images.placeholders import ImagePlaceholder

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.text.images.preprocessor import ImagePreprocessor

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


class ImageProcessor:
    """The image processor of one model: how an image becomes bytes for the encoder, and where images are in a prompt.
    Used by several threads at once.

    `image_token_id` is the id of a whole image in a prompt before `expand_placeholders`. `reserved_ids` are the ids
    that only `expand_placeholders` may write. `reserved_texts` are the texts that the tokenizer or
    `normalize_placeholders` turns into one of these. `cache_settings` describes all that `prepare` depends on, and is
    part of an image's key. With `joins_adjacent` adjacent images of a prompt are merged, and their rows are not in the
    prompt."""

    def __init__(
        self,
        preprocessor: ImagePreprocessor,
        placeholder: ImagePlaceholder,
        id_to_token: Callable[[int], str],
        ending_ids: Sequence[int] = (),
    ) -> None:
        """`id_to_token` returns a token's text by its id; `ending_ids` are the ids that end a prompt whose images come
        first."""
        self.preprocessor, self.placeholder, self.ending_ids = preprocessor, placeholder, list(ending_ids)
        self.image_token_id, self.reserved_ids = placeholder.token, placeholder.reserved_ids
        self.token_text = id_to_token(placeholder.token)
        self.reserved_texts = tuple(dict.fromkeys(map(id_to_token, sorted(self.reserved_ids)))) + tuple(
            self._marker_texts()
        )
        self.cache_settings, self.joins_adjacent = _cache_settings(preprocessor), placeholder.single_token

    def _marker_texts(self) -> Iterator[str]:
        """Yield the texts that `normalize_placeholders` treats as images, besides the token's text."""
        for mark in self.placeholder.markers:
            if self.placeholder.is_numbered:
                yield mark.partition("1")[0]  # with any number
            elif mark != self.token_text:
                yield mark

    def placeholder_text(self, number: int) -> str:
        """Return the text of image `number`, from 1, for templates that only take strings."""
        mark = self.placeholder.markers[0]
        return mark.replace("1", str(number)) if self.placeholder.is_numbered else mark

    def normalize_placeholders(self, text: str) -> str:
        """Return the text for the tokenizer, with one `image_token_id` per image instead of, for example, numbered
        markers. Raise InputError for invalid numbers."""
        markers = self.placeholder.find_markers(text)
        if self.placeholder.is_numbered:
            for number, (start, end, image) in enumerate(markers):
                if image != number:
                    raise InputError(
                        f"the prompt's image {number + 1} is marked {text[start:end]!r}: they are numbered in order, "
                        "from 1 on",
                        "prompt",
                    )
        pieces, last = [], 0
        image_text = f"{self.placeholder.surrounding}{self.token_text}{self.placeholder.surrounding}"
        for start, end, _ in markers:
            pieces += [text[last:start], image_text]
            last = end
        return "".join([*pieces, text[last:]])

    def prepare(self, image: Image, only_image: bool = True) -> ImagePixels:
        """Return the encoder's input of an RGB image, without a key. `only_image`: it is the only image of its prompt,
        which some models cut into more tiles; its grid shows it. Raise InputError if it cannot be prepared."""
        pixels, grid = self.preprocessor.prepare(image, only_image)
        return ImagePixels(b"", pixels.shape, pixels.tobytes(), tuple(grid))

    def num_rows(self, grid: GridNumbers) -> int:
        """Return the number of embedding rows of an image."""
        return self.preprocessor.tiling.num_embeds(TileGrid(*grid))

    def num_parts(self, grid: GridNumbers) -> int:
        """Return the number of equal parts in which an image can be encoded one after another."""
        return self.preprocessor.tiling.num_parts(TileGrid(*grid))

    def expand_placeholders(
        self, token_ids: Sequence[int], grids: Sequence[GridNumbers]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Replace each `image_token_id`, one per grid, by as many ids as the image has. Return the prompt, and the
        first position and length of each image."""
        holder, ids = self.placeholder, list(token_ids)
        if holder.images_first:
            text = [token for token in ids if token not in (self.image_token_id, holder.bos)]
            first = [] if holder.bos is None else [holder.bos]
            ending = [] if text[-len(self.ending_ids) :] == self.ending_ids else self.ending_ids
            ids = [self.image_token_id] * len(grids) + first + text + ending
        placed, spans, left = list[int](), list[tuple[int, int]](), iter(grids)
        for token in ids:
            if token != self.image_token_id:
                placed.append(token)
                continue
            count = 1 if holder.single_token else self.num_rows(next(left))
            spans.append((len(placed) + len(holder.before), count))
            placed += holder.token_ids(count)
        return placed, spans


def _cache_settings(preprocessor: ImagePreprocessor) -> str:
    """Return all settings of the preprocessing in a text without names of classes or fields: it is part of the keys of
    cached images, which a rename must not change."""
    red, green, blue = preprocessor.background
    return f"{tiling_settings(preprocessor.tiling)} resample {preprocessor.resample} background {red} {green} {blue}"
