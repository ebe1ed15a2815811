"""The eyes of a family of models, as the text plane has them (quire.text.eyes): its preparation, and what stands for
pictures in its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from quire.errors import InputError
from quire.text.pictures.placeholders import Placeholder
from quire.text.pictures.preparation import Preparation
from quire.vocabulary.media import Pixels
from quire.vocabulary.pictures import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


class FamilyEyes:
    """See quire.text.eyes.Eyes. `piece` is a token's text, by its id; `ending` are the ids that end a prompt with
    pictures which lead it."""

    def __init__(
        self, how: Preparation, placeholder: Placeholder, piece: Callable[[int], str], ending: Sequence[int] = ()
    ) -> None:
        self.how, self.placeholder, self.ending = how, placeholder, list(ending)
        self.token, self.reserved = placeholder.token, placeholder.reserved
        self.text = piece(placeholder.token)
        self.words = tuple(dict.fromkeys(map(piece, sorted(self.reserved)))) + tuple(self._marks())
        self.settings, self.joins = repr(how), placeholder.once

    def _marks(self) -> Iterator[str]:
        """What `spelled` takes for a picture, where that is more than the token's text."""
        for mark in self.placeholder.marks:
            if self.placeholder.numbered:
                yield mark.partition("1")[0]  # whatever the number
            elif mark != self.text:
                yield mark

    def marker(self, number: int) -> str:
        mark = self.placeholder.marks[0]
        return mark.replace("1", str(number)) if self.placeholder.numbered else mark

    def spelled(self, text: str) -> str:
        found = self.placeholder.found(text)
        if self.placeholder.numbered:
            for number, (start, end, picture) in enumerate(found):
                if picture != number:
                    raise InputError(
                        f"the prompt's picture {number + 1} is marked {text[start:end]!r}: they are numbered in order, "
                        "from 1 on",
                        "prompt",
                    )
        pieces, last = [], 0
        for start, end, _ in found:
            pieces += [text[last:start], self.text]
            last = end
        return "".join([*pieces, text[last:]])

    def prepare(self, image: Image, alone: bool = True) -> Pixels:
        pixels, grid = self.how.prepare(image, alone)
        return Pixels(b"", pixels.shape, pixels.tobytes(), tuple(grid))

    def rows(self, grid: tuple[int, ...]) -> int:
        return self.how.tiling.rows(Grid(*grid))

    def parts(self, grid: tuple[int, ...]) -> int:
        return self.how.tiling.parts(Grid(*grid))

    def place(
        self, token_ids: Sequence[int], grids: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        holder, ids = self.placeholder, list(token_ids)
        if holder.leads:
            text = [token for token in ids if token not in (self.token, holder.bos)]
            first = [] if holder.bos is None else [holder.bos]
            ending = [] if text[-len(self.ending) :] == self.ending else self.ending
            ids = [self.token] * len(grids) + first + text + ending
        placed, spans, left = list[int](), list[tuple[int, int]](), iter(grids)
        for token in ids:
            if token != self.token:
                placed.append(token)
                continue
            count = 1 if holder.once else self.rows(next(left))
            spans.append((len(placed) + holder.start, count))
            placed += holder.ids(count)
        return placed, spans
