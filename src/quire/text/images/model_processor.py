"""The ImageProcessor of a model family: its preprocessing, and its placeholders in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from quire.errors import InputError
from quire.protocol.image_tiling import TileGrid, tiling_settings
from quire.protocol.images import ImagePixels
from quire.text.images.placeholders import ImagePlaceholder
from quire.text.images.preprocessor import ImagePreprocessor

if TYPE_CHECKING:
    from PIL.Image import Image


class ModelImageProcessor:
    """See quire.text.images.processor.ImageProcessor. `id_to_token` returns a token's text by its id; `ending_ids` are
    the ids that end a prompt whose images come first."""

    def __init__(
        self,
        preprocessor: ImagePreprocessor,
        placeholder: ImagePlaceholder,
        id_to_token: Callable[[int], str],
        ending_ids: Sequence[int] = (),
    ) -> None:
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
        mark = self.placeholder.markers[0]
        return mark.replace("1", str(number)) if self.placeholder.is_numbered else mark

    def normalize_placeholders(self, text: str) -> str:
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
        for start, end, _ in markers:
            pieces += [text[last:start], self.token_text]
            last = end
        return "".join([*pieces, text[last:]])

    def prepare(self, image: Image, only_image: bool = True) -> ImagePixels:
        pixels, grid = self.preprocessor.prepare(image, only_image)
        return ImagePixels(b"", pixels.shape, pixels.tobytes(), tuple(grid))

    def num_rows(self, grid: tuple[int, ...]) -> int:
        return self.preprocessor.tiling.num_embeds(TileGrid(*grid))

    def num_parts(self, grid: tuple[int, ...]) -> int:
        return self.preprocessor.tiling.num_parts(TileGrid(*grid))

    def expand_placeholders(
        self, token_ids: Sequence[int], grids: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
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
            spans.append((len(placed) + holder.row_offset, count))
            placed += holder.token_ids(count)
        return placed, spans


def _cache_settings(preprocessor: ImagePreprocessor) -> str:
    """Return all settings of the preprocessing in a text without names of classes or fields: it is part of the keys of
    cached images, which a rename must not change."""
    red, green, blue = preprocessor.background
    return f"{tiling_settings(preprocessor.tiling)} resample {preprocessor.resample} background {red} {green} {blue}"
