"""The images of an engine's requests: how many requests use each, and which the runner has. Pixels are sent to the
runner once for each key (quire.protocol.images); plans carry no pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.core.validation import check_pixels
from quire.errors import InputError
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.images import ImageItem, ImagePixels


class ImageRegistry:
    """Counts the requests of each image. `tiling`: how the model tiles images; None: images are not checked."""

    def __init__(self, tiling: ImageTiling | None) -> None:
        self.tiling = tiling
        self.runner_pixels: dict[bytes, ImagePixels] = {}  # pixels that the runner has, by key
        self._num_requests: Counter[bytes] = Counter()  # by image key

    def check(self, prompts: Iterable[tuple[ImageItem, ...]], pixels: Sequence[ImagePixels], is_joined: bool) -> None:
        """Raise InputError if pixels are missing or don't match their image. Of pixels with the same key the runner's
        count, else the first. `is_joined`: several images may be encoded as one (see check_pixels)."""
        by_key = {one.key: one for one in reversed(pixels)} | self.runner_pixels
        for i, image in ((i, image) for images in prompts for i, image in enumerate(images)):
            if image.key not in by_key:
                raise InputError(f"the pixels of image {i} are missing", "media")
            if self.tiling is not None:
                check_pixels(i, image, by_key[image.key], self.tiling, is_joined)

    def add_request(self, images: tuple[ImageItem, ...]) -> None:
        """Count the images of a new request."""
        self._num_requests.update({image.key for image in images})

    def take_new(self, pixels: Sequence[ImagePixels]) -> list[ImagePixels]:
        """Return the pixels to send to the runner: those that requests use and it lacks."""
        new: list[ImagePixels] = []
        for one in pixels:
            if one.key not in self.runner_pixels and one.key in self._num_requests:
                self.runner_pixels[one.key] = one
                new.append(one)
        return new

    def remove_request(self, images: tuple[ImageItem, ...]) -> list[bytes]:
        """Remove the images of a request that has ended. Return the keys that no request uses any more."""
        keys = {image.key for image in images}
        self._num_requests.subtract(keys)
        unused = [key for key in keys if not self._num_requests[key]]
        for key in unused:
            del self._num_requests[key]
            self.runner_pixels.pop(key, None)
        return unused
