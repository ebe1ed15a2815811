"""The pictures of an engine's requests: how many requests have each, and which the runner keeps. Pixels go to it once,
by their key (vocabulary.media); no plan carries them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.core.validation import check_pixels
from quire.errors import InputError
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.images import ImageItem, ImagePixels


class ImageRegistry:
    """`tiling` is how the model's pictures are cut; None: they are taken as they come."""

    def __init__(self, tiling: ImageTiling | None) -> None:
        self.tiling = tiling
        self.runner_pixels: dict[bytes, ImagePixels] = {}  # by the runner
        self._num_requests: Counter[bytes] = Counter()  # requests that have a picture

    def check(self, prompts: Iterable[tuple[ImageItem, ...]], pixels: Sequence[ImagePixels], is_joined: bool) -> None:
        """InputError for pictures without pixels, or with others than they say: those that count are the first ones of
        their key. `is_joined`: their tokens are the prompt's."""
        there = {picture.key: picture for picture in reversed(pixels)} | self.runner_pixels
        for i, medium in ((i, medium) for media in prompts for i, medium in enumerate(media)):
            if medium.key not in there:
                raise InputError("the pixels of a picture are missing", "media")
            if self.tiling is not None:
                check_pixels(i, medium, there[medium.key], self.tiling, is_joined)

    def add_request(self, images: tuple[ImageItem, ...]) -> None:
        """With a request."""
        self._num_requests.update({medium.key for medium in images})

    def take_new(self, pixels: Sequence[ImagePixels]) -> list[ImagePixels]:
        """Those that the runner is to see, as requests have them and it doesn't keep them."""
        new: list[ImagePixels] = []
        for one in pixels:
            if one.key not in self.runner_pixels and one.key in self._num_requests:
                self.runner_pixels[one.key] = one
                new.append(one)
        return new

    def remove_request(self, images: tuple[ImageItem, ...]) -> list[bytes]:
        """With a request that has ended: the keys that the runner is to forget."""
        keys = {medium.key for medium in images}
        self._num_requests.subtract(keys)
        gone = [key for key in keys if not self._num_requests[key]]
        for key in gone:
            del self._num_requests[key]
            self.runner_pixels.pop(key, None)
        return gone
