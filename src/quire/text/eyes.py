"""What a model that sees offers to the text plane: how a picture becomes bytes for its encoder, and where pictures
stand in a prompt. Made from a model's settings; knows no tensors, no files and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.vocabulary.media import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, ...]
GUARD = "\ufdd0\ufdd1"  # characters that Unicode keeps for a program's own use


def guarded(text: str, words: Sequence[str]) -> str:
    """`text` with a GUARD inside each of the `words`, so that it stays text: it is tokenised in parts, cut there."""
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(pattern, lambda found: found[0][:1] + GUARD + found[0][1:], text)


def guarded_within(value: Any, words: Sequence[str]) -> Any:
    """A JSON value with all of its texts `guarded`."""
    if isinstance(value, str):
        return guarded(value, words)
    if isinstance(value, list):
        return [guarded_within(one, words) for one in value]
    if isinstance(value, dict):
        return {guarded(key, words): guarded_within(one, words) for key, one in value.items()}
    return value


class Eyes(Protocol):
    """Of one model. Used by several threads at once.

    `token` is the id that stands for a whole picture in a prompt before `place`; `reserved` are the ids that only
    `place` may write, `token` among them or not. `words` are the texts that the tokenizer, or `spelled`, takes for one
    of these. `settings` says all that `prepare` depends on: it is part of what a picture's key is made of. Where it
    `joins` them, pictures that are neighbours in a prompt are seen as one: their rows stand nowhere in it."""

    @property
    def token(self) -> int: ...
    @property
    def reserved(self) -> frozenset[int]: ...
    @property
    def words(self) -> tuple[str, ...]: ...
    @property
    def settings(self) -> str: ...
    @property
    def joins(self) -> bool: ...

    def marker(self, number: int) -> str:
        """The text of a prompt's picture `number`, from 1 on, as a template that takes only strings is given it."""

    def spelled(self, text: str) -> str:
        """A prompt's text as the tokenizer is to read it, with one `token` a picture: where publishers number their
        markers, say. InputError for numbers that can't be."""

    def prepare(self, image: Image, alone: bool = True) -> Pixels:
        """What the encoder gets of an RGB picture, under no key yet. `alone`: it is its prompt's only one, which some
        models show in more tiles; its grid says so. InputError for one that can't be prepared."""

    def rows(self, grid: Grid) -> int:
        """Rows that the encoder makes of a picture."""

    def parts(self, grid: Grid) -> int:
        """Equal shares that it can be encoded in, one after another."""

    def place(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> tuple[list[int], list[tuple[int, int]]]:
        """The prompt with each `token`, of which there is one a grid, as long as its picture is; and where each picture
        stands: its first position, and how many it takes. InputError for more pictures than the model takes."""
