"""The pictures of an engine's requests: how many requests have each, and which the runner keeps. Pixels go to it once,
by their key (vocabulary.media); no plan carries them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.control.edge import check_pixels
from quire.errors import InputError
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.pictures import Tiling


class Pictures:
    """`tiling` is how the model's pictures are cut; None: they are taken as they come."""

    def __init__(self, tiling: Tiling | None) -> None:
        self.tiling = tiling
        self.kept: dict[bytes, Pixels] = {}  # by the runner
        self._users: Counter[bytes] = Counter()  # requests that have a picture

    def check(self, prompts: Iterable[tuple[Medium, ...]], pixels: Sequence[Pixels], joins: bool) -> None:
        """InputError for pictures without pixels, or with others than they say: those that count are the first ones of
        their key. `joins`: their tokens are the prompt's."""
        there = {picture.key: picture for picture in reversed(pixels)} | self.kept
        for i, medium in ((i, medium) for media in prompts for i, medium in enumerate(media)):
            if medium.key not in there:
                raise InputError("the pixels of a picture are missing", "media")
            if self.tiling is not None:
                check_pixels(i, medium, there[medium.key], self.tiling, joins)

    def came(self, media: tuple[Medium, ...]) -> None:
        """With a request."""
        self._users.update({medium.key for medium in media})

    def keep(self, pixels: Sequence[Pixels]) -> list[Pixels]:
        """Those that the runner is to see, as requests have them and it doesn't keep them."""
        new: list[Pixels] = []
        for one in pixels:
            if one.key not in self.kept and one.key in self._users:
                self.kept[one.key] = one
                new.append(one)
        return new

    def left(self, media: tuple[Medium, ...]) -> list[bytes]:
        """With a request that has ended: the keys that the runner is to forget."""
        keys = {medium.key for medium in media}
        self._users.subtract(keys)
        gone = [key for key in keys if not self._users[key]]
        for key in gone:
            del self._users[key]
            self.kept.pop(key, None)
        return gone
