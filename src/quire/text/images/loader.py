"""The images of a prompt: from the request's sources to the encoder's inputs, their keys, and their positions among the
tokens. Images are decoded on threads of their own, so that they do not delay text. Independent of server and engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from quire.core.validation import NEEDS_OUTPUT, EngineLimits, check_salt
from quire.errors import InputError, Overloaded, short_repr
from quire.protocol.columns import MAX_PIXEL_BYTES
from quire.protocol.images import ImageItem, ImagePixels
from quire.text.bounded_threads import BoundedThreads
from quire.text.chat_messages import ImageSource
from quire.text.images.decode import (
    ImageLimits,
    check_size,
    decode_image,
    image_errors_to_input_error,
    read_checked_header,
    read_data_uri,
    to_rgb,
)
from quire.text.images.headers import ImageHeader
from quire.text.images.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

DECODE_THREADS = 2  # each may need about 20 bytes per pixel of --max-image-pixels
MAX_WAITING = 256  # requests whose images wait to be decoded


class ImageLoader:
    """Loads the images of one model's prompts with its `processor`, within `limits`."""

    def __init__(self, processor: ImageProcessor, limits: ImageLimits) -> None:
        self.processor, self.limits = processor, limits
        self._threads = BoundedThreads(
            DECODE_THREADS, "quire-pictures", MAX_WAITING, "the images of {} requests wait to be decoded"
        )

    async def load_async(self, given: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """Load images on another thread. Raise Overloaded if too many requests wait."""
        return await self._threads.run(partial(self.load, given, salt))

    def load(self, given: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """Return the encoder's input of each image, with its key. All headers are read before anything is decoded.
        Raise InputError with the parameter of the first invalid image."""
        check_salt(salt)
        self.check_count(given)
        loaded: list[ImagePixels] = []
        size = 0
        for at, source in self._read_sources(given):
            image = decode_image(source, at) if isinstance(source, ImageHeader) else source
            loaded.append(self._prepare(image, at, salt, len(given) == 1))
            size += len(loaded[-1].data)
            if size > MAX_PIXEL_BYTES:
                cause = f"with {at} the request's images have {size} bytes, prepared; the limit is {MAX_PIXEL_BYTES}"
                raise InputError(cause, at)
        return loaded

    def check_count(self, given: Sequence[ImageSource]) -> None:
        """Raise InputError for more images than a request may have."""
        if len(given) > self.limits.count:
            at = given[self.limits.count].param
            raise InputError(f"{at} is one of {len(given)} images; the limit is {self.limits.count} (--max-images)", at)

    def _read_sources(self, given: Sequence[ImageSource]) -> list[tuple[str, ImageHeader | Image]]:
        """Return the header or image of each source, with its parameter, after checking all sizes."""
        images: list[tuple[str, ImageHeader | Image]] = []
        size, most = 0, self.limits.bytes
        for at, source in given:
            if not isinstance(source, str | bytes | bytearray | memoryview):
                images.append((at, self._from_python(source, at)))
                continue
            data = read_data_uri(source, self.limits, at) if isinstance(source, str) else bytes(source)
            size += len(data)
            if size > most >= len(data):
                cause = f"with {at} the request's images have {size} bytes; the limit is {most} (--max-image-bytes)"
                raise InputError(cause, at)
            images.append((at, read_checked_header(data, self.limits, at)))
        return images

    def _from_python(self, source: Any, at: str) -> Image:
        """Return the RGB image of an array or a PIL image."""
        import numpy as np
        from PIL import Image as pil_image

        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
                what = f"{source.dtype} of shape {source.shape}"
                raise InputError(f"{at} is an array of {what}; it must be uint8 of (height, width, 3 or 4)"[:300], at)
            check_size(source.shape[1], source.shape[0], self.limits, at)
            source = pil_image.fromarray(source)
        if not isinstance(source, pil_image.Image):
            kind = type(source).__name__
            raise InputError(f"{at} must be a data: URI, bytes, an array or a PIL image, got {kind[:60]}", at)
        check_size(*source.size, self.limits, at)
        with image_errors_to_input_error(at, f"can't be read as RGB: its mode is {source.mode}, or its file is broken"):
            return to_rgb(source)

    def _prepare(self, image: Image, at: str, salt: str, only_image: bool) -> ImagePixels:
        try:
            prepared = self.processor.prepare(image, only_image)
        except InputError as error:
            raise InputError(f"{at}: {error}", at) from error
        except MemoryError as error:
            raise Overloaded("there is no memory to prepare an image now") from error
        return prepared._replace(key=image_key(image, f"{self.processor.cache_settings} {prepared.grid}", salt))

    def expand_placeholders(
        self, ids: Sequence[int], pixels: Sequence[ImagePixels], limits: EngineLimits, given: Sequence[ImageSource] = ()
    ) -> tuple[list[int], tuple[ImageItem, ...]]:
        """Return the prompt's token ids with each image at its full length, and the images with their positions. Raise
        InputError if the number of placeholders differs from that of images or an id is reserved, and PromptTooLong if
        the result is too long. If images are at fault, the error names the first of `given` without a placeholder or
        room."""
        processor = self.processor
        if not all(type(token) is int for token in ids):
            limits.check_prompt(ids)  # raises
        places = ids.count(processor.image_token_id)
        if places != len(pixels):
            missing = given[places].param if places < len(given) else ""
            raise InputError(
                f"the prompt has {places} image placeholders (token {processor.image_token_id}, written "
                f"{processor.placeholder_text(1)!r}), and "
                f"{len(pixels)} images are given{missing and f': {missing} has none'}",
                missing or "prompt",
            )
        reserved_ids, image_id = processor.reserved_ids, processor.image_token_id
        if not reserved_ids.isdisjoint(ids) and (reserved := reserved_ids - {image_id} & set(ids)):
            raise InputError(
                f"prompt token {min(reserved)} stands for a part of an image: prompts can't have it", "prompt"
            )
        if not pixels:
            return list(ids), ()
        grids = [one.grid for one in pixels]
        placed, spans = processor.expand_placeholders(ids, grids)
        assert len(spans) == len(pixels), "one placeholder per image"
        if len(placed) >= limits.max_len:
            taken = list(accumulate(tokens for _, tokens in spans))
            room = limits.max_len - len(placed) + taken[-1]  # left for images by the text
            over = next((one.param for one, tokens in zip(given, taken) if tokens >= room), "") if room > 0 else ""
            detail = f", {taken[-1]} of them for {len(spans)} images{over and f', with {over}'}{NEEDS_OUTPUT}"
            raise limits.length_error(f"{len(placed)} tokens", f"{limits.max_len}", detail, over or "prompt")
        return placed, tuple(
            ImageItem(one.key, start, tokens, processor.num_rows(one.grid), processor.num_parts(one.grid))
            for one, (start, tokens) in zip(pixels, spans)
        )


def merge_adjacent(
    images: Sequence[ImageItem], pixels: Sequence[ImagePixels]
) -> tuple[tuple[ImageItem, ...], tuple[ImagePixels, ...]]:
    """Merge images that are adjacent in a prompt, for layers that attend to all of them. `pixels` are those of
    `images`, in order. The merged image has the parts of its images, and their grids concatenated."""
    runs: list[list[int]] = []
    for i, image in enumerate(images):
        if i and images[i - 1].end == image.start:
            runs[-1].append(i)
        else:
            runs.append([i])
    merged: list[tuple[ImageItem, ImagePixels]] = []
    for run in runs:
        first, shown = images[run[0]], pixels[run[0]]
        if len(run) > 1:
            parts = [pixels[i] for i in run]
            key = hashlib.sha256(b"quire: neighbours" + b"".join(one.key for one in parts)).digest()
            shape = sum(one.shape[0] for one in parts), *shown.shape[1:]
            shown = ImagePixels(key, shape, b"".join(one.data for one in parts), sum((one.grid for one in parts), ()))
            joined = [images[i] for i in run]
            first = ImageItem(
                key,
                first.start,
                sum(image.num_tokens for image in joined),
                sum(image.num_embeds for image in joined),
                sum(image.num_parts for image in joined),
            )
        merged.append((first, shown))
    return tuple(image for image, _ in merged), tuple(shown for _, shown in merged)


def image_key(image: Image, settings: str, salt: str) -> bytes:
    """Return an image's cache key: a digest of its size and RGB pixels, its preprocessing, and the tenant's salt. Each
    field is preceded by its length, so that different fields never give the same bytes."""
    digest = hashlib.sha256(b"quire: a picture")
    for part in (settings.encode(), salt.encode(), repr(image.size).encode(), image.tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def split_multi_modal(given: Any) -> tuple[Any, list[ImageSource]]:
    """Return a prompt's text or token ids, and the images in its multi_modal_data ({"image": one, or a list})."""
    if not isinstance(given, Mapping):
        return given, []
    content, data = given.get("prompt_token_ids", given.get("prompt")), given.get("multi_modal_data")
    if data is None:
        return content, []
    if not isinstance(data, Mapping):
        raise InputError(f"multi_modal_data must be an object, got {type(data).__name__}", "multi_modal_data")
    if unknown := next((name for name in data if name != "image"), None):
        raise InputError(f"multi_modal_data has {short_repr(unknown)}; only 'image' is supported", "multi_modal_data")
    images = data.get("image")
    if not isinstance(images, list | tuple):
        return content, [] if images is None else [ImageSource("multi_modal_data.image", images)]
    return content, [ImageSource(f"multi_modal_data.image[{i}]", one) for i, one in enumerate(images)]
