"""The pictures of a prompt: from what a request gives to what the encoder gets, their keys, and their places among the
tokens. Decodes on threads of its own, so that pictures hold up nobody's text; knows no server and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from quire.core.validation import EngineLimits, check_salt
from quire.errors import InputError, Overloaded, PromptTooLong, short_repr
from quire.protocol.columns import MAX_PIXEL_BYTES
from quire.protocol.images import ImageItem, ImagePixels
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
    from concurrent.futures import Future, ThreadPoolExecutor

    from PIL.Image import Image

DECODE_THREADS = 2  # that decode: each may need some 20 bytes for each pixel of --max-image-pixels
MAX_WAITING = 256  # requests whose pictures wait for them
T = TypeVar("T")


class ImageLoader:
    """How one model's prompts come by pictures: its `processor`, within `limits`."""

    def __init__(self, processor: ImageProcessor, limits: ImageLimits) -> None:
        self.processor, self.limits = processor, limits
        self._threads: ThreadPoolExecutor | None = None
        self._pending: set[Future[Any]] = set()

    async def load_async(self, given: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """As `load`, on another thread. Overloaded if too many wait."""
        return await self._run_in_thread(partial(self.load, given, salt))

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        """`work` on another thread. Who is cancelled counts until his work under way is done; what hadn't begun is gone
        at once, with the pictures that it was to decode."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if len(self._pending) >= MAX_WAITING:
            raise Overloaded(f"the pictures of {len(self._pending)} requests wait to be decoded")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="quire-pictures")
        todo = [work]  # taken out by who does it, or emptied by who doesn't wait: a queue would hold on to it
        future = self._threads.submit(lambda: todo.pop()())
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            todo.clear()

    def load(self, given: Sequence[ImageSource], salt: str) -> list[ImagePixels]:
        """What the encoder gets of each picture, under its key. All headers are read before anything is decoded.
        InputError names the place of the first one that can't be seen."""
        check_salt(salt)
        self.check_count(given)
        found: list[ImagePixels] = []
        size = 0
        for at, opened in self._read_sources(given):
            image = decode_image(opened, at) if isinstance(opened, ImageHeader) else opened
            found.append(self._prepare(image, at, salt, len(given) == 1))
            size += len(found[-1].data)
            if size > MAX_PIXEL_BYTES:
                cause = f"with {at} the request's pictures have {size} bytes, prepared; the limit is {MAX_PIXEL_BYTES}"
                raise InputError(cause, at)
        return found

    def check_count(self, given: Sequence[ImageSource]) -> None:
        """InputError for more pictures than a request may have."""
        if len(given) > self.limits.count:
            at = given[self.limits.count].param
            raise InputError(
                f"{at} is one of {len(given)} pictures; the limit is {self.limits.count} (--max-images)", at
            )

    def _read_sources(self, given: Sequence[ImageSource]) -> list[tuple[str, ImageHeader | Image]]:
        """Pictures of sizes that may be decoded, and their places."""
        found: list[tuple[str, ImageHeader | Image]] = []
        size, most = 0, self.limits.bytes
        for at, source in given:
            if not isinstance(source, str | bytes | bytearray | memoryview):
                found.append((at, self._from_python(source, at)))
                continue
            data = read_data_uri(source, self.limits, at) if isinstance(source, str) else bytes(source)
            size += len(data)
            if size > most >= len(data):
                cause = f"with {at} the request's pictures have {size} bytes; the limit is {most} (--max-image-bytes)"
                raise InputError(cause, at)
            found.append((at, read_checked_header(data, self.limits, at)))
        return found

    def _from_python(self, source: Any, at: str) -> Image:
        """An array's or a PIL image's picture."""
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
            raise Overloaded("there is no memory to prepare a picture in now") from error
        return prepared._replace(key=image_key(image, f"{self.processor.cache_settings} {prepared.grid}", salt))

    def expand_placeholders(
        self, ids: Sequence[int], pixels: Sequence[ImagePixels], limits: EngineLimits, given: Sequence[ImageSource] = ()
    ) -> tuple[list[int], tuple[ImageItem, ...]]:
        """A prompt of token ids in which each picture has its length, and the pictures in it. InputError if there are
        other places than pictures, or ids that stand for parts of one; PromptTooLong with what pictures take of it.
        Where pictures are at fault these name the first one of those `given` that has no place or no room."""
        eyes = self.processor
        if not all(type(token) is int for token in ids):
            limits.check_prompt(ids)  # says which
        places = ids.count(eyes.image_token_id)
        if places != len(pixels):
            missing = given[places].param if places < len(given) else ""
            raise InputError(
                f"the prompt has {places} places for pictures (token {eyes.image_token_id}, written "
                f"{eyes.placeholder_text(1)!r}), and "
                f"{len(pixels)} pictures are given{missing and f': {missing} has none'}",
                missing or "prompt",
            )
        if not eyes.reserved_ids.isdisjoint(ids) and (own := eyes.reserved_ids - {eyes.image_token_id} & set(ids)):
            raise InputError(f"prompt token {min(own)} stands for a part of a picture: prompts can't have it", "prompt")
        if not pixels:
            return list(ids), ()
        grids = [one.grid for one in pixels]
        placed, spans = eyes.expand_placeholders(ids, grids)
        assert len(spans) == len(pixels), "a place for each picture"
        if len(placed) >= limits.max_len:
            taken = list(accumulate(tokens for _, tokens in spans))
            room = limits.max_len - len(placed) + taken[-1]  # that the text leaves, if it leaves some
            over = next((one.param for one, tokens in zip(given, taken) if tokens >= room), "") if room > 0 else ""
            raise PromptTooLong(
                f"{over and f'with {over} '}the prompt has {len(placed)} tokens, {taken[-1]} of them for "
                f"{len(spans)} pictures, but {limits.held_by} holds {limits.max_len} with at least one token of output",
                over or "prompt",
            )
        return placed, tuple(
            ImageItem(one.key, start, tokens, eyes.num_rows(one.grid), eyes.num_parts(one.grid))
            for one, (start, tokens) in zip(pixels, spans)
        )


def merge_adjacent(
    images: Sequence[ImageItem], pixels: Sequence[ImagePixels]
) -> tuple[tuple[ImageItem, ...], tuple[ImagePixels, ...]]:
    """Pictures that are neighbours in a prompt as one, for layers that attend to them: what follows sees all of these.
    `pixels` are the pictures' own, in order. One's parts are its pictures, and its grid is theirs in a row."""
    runs: list[list[int]] = []
    for i, medium in enumerate(images):
        if i and images[i - 1].end == medium.start:
            runs[-1].append(i)
        else:
            runs.append([i])
    found: list[tuple[ImageItem, ImagePixels]] = []
    for run in runs:
        first, shown = images[run[0]], pixels[run[0]]
        if len(run) > 1:
            own = [pixels[i] for i in run]
            key = hashlib.sha256(b"quire: neighbours" + b"".join(one.key for one in own)).digest()
            shape = sum(one.shape[0] for one in own), *shown.shape[1:]
            shown = ImagePixels(key, shape, b"".join(one.data for one in own), sum((one.grid for one in own), ()))
            sizes = (sum(images[i][field] for i in run) for field in (2, 3, 4))
            first = ImageItem(key, first.start, *sizes)
        found.append((first, shown))
    return tuple(medium for medium, _ in found), tuple(shown for _, shown in found)


def image_key(image: Image, settings: str, salt: str) -> bytes:
    """What a picture is found again by: a digest of its size and pixels in RGB, of how it is prepared, and of the
    tenant's salt. Each part goes in after its length, so that no two of them can be mistaken for others."""
    digest = hashlib.sha256(b"quire: a picture")
    for part in (settings.encode(), salt.encode(), repr(image.size).encode(), image.tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def split_multi_modal(given: Any) -> tuple[Any, list[ImageSource]]:
    """A prompt's text or token ids, and the pictures that its multi_modal_data has ({"image": one, or a list})."""
    if not isinstance(given, Mapping):
        return given, []
    content, data = given.get("prompt_token_ids", given.get("prompt")), given.get("multi_modal_data")
    if data is None:
        return content, []
    if not isinstance(data, Mapping):
        raise InputError(f"multi_modal_data must be an object, got {type(data).__name__}", "multi_modal_data")
    if unknown := next((name for name in data if name != "image"), None):
        raise InputError(f"multi_modal_data has {short_repr(unknown)}; only 'image' is supported", "multi_modal_data")
    some = data.get("image")
    if not isinstance(some, list | tuple):
        return content, [] if some is None else [ImageSource("multi_modal_data.image", some)]
    return content, [ImageSource(f"multi_modal_data.image[{i}]", one) for i, one in enumerate(some)]
