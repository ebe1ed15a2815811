"""The pictures of a prompt: from what a request gives to what the encoder gets, their keys, and their places among the
tokens. Decodes on threads of its own, so that pictures hold up nobody's text; knows no server and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from quire.control.edge import Limits, check_salt
from quire.errors import InputError, Overloaded, PromptTooLong, shown
from quire.text.eyes import Eyes
from quire.text.image_headers import Header
from quire.text.images import ImageLimits, check_size, checked_header, decoded, from_uri, refused, rgb
from quire.text.messages import Given
from quire.vocabulary.columns import MOST_PIXELS
from quire.vocabulary.media import Medium, Pixels

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from PIL.Image import Image

THREADS = 2  # that decode: each may need some 20 bytes for each pixel of --max-image-pixels
MAX_WAITING = 256  # requests whose pictures wait for them
T = TypeVar("T")


class Sight:
    """How one model's prompts come by pictures: its `eyes`, within `limits`."""

    def __init__(self, eyes: Eyes, limits: ImageLimits) -> None:
        self.eyes, self.limits = eyes, limits
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Any]] = set()

    async def look(self, given: Sequence[Given], salt: str) -> list[Pixels]:
        """As `see`, on another thread. Overloaded if too many wait."""
        return await self._apart(partial(self.see, given, salt))

    async def _apart(self, work: Callable[[], T]) -> T:
        """`work` on another thread. Who is cancelled counts until his work under way is done; what hadn't begun is gone
        at once, with the pictures that it was to decode."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if len(self._under_way) >= MAX_WAITING:
            raise Overloaded(f"the pictures of {len(self._under_way)} requests wait to be decoded")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quire-pictures")
        todo = [work]  # taken out by who does it, or emptied by who doesn't wait: a queue would hold on to it
        future = self._threads.submit(lambda: todo.pop()())
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            todo.clear()

    def see(self, given: Sequence[Given], salt: str) -> list[Pixels]:
        """What the encoder gets of each picture, under its key. All headers are read before anything is decoded.
        InputError names the place of the first one that can't be seen."""
        check_salt(salt)
        self.check_count(given)
        found: list[Pixels] = []
        size = 0
        for at, opened in self._opened(given):
            image = decoded(opened, at) if isinstance(opened, Header) else opened
            found.append(self._prepared(image, at, salt, len(given) == 1))
            size += len(found[-1].data)
            if size > MOST_PIXELS:
                cause = f"with {at} the request's pictures have {size} bytes, prepared; the limit is {MOST_PIXELS}"
                raise InputError(cause, at)
        return found

    def check_count(self, given: Sequence[Given]) -> None:
        """InputError for more pictures than a request may have."""
        if len(given) > self.limits.count:
            at = given[self.limits.count].at
            raise InputError(
                f"{at} is one of {len(given)} pictures; the limit is {self.limits.count} (--max-images)", at
            )

    def _opened(self, given: Sequence[Given]) -> list[tuple[str, Header | Image]]:
        """Pictures of sizes that may be decoded, and their places."""
        found: list[tuple[str, Header | Image]] = []
        size, most = 0, self.limits.bytes
        for at, source in given:
            if not isinstance(source, str | bytes | bytearray | memoryview):
                found.append((at, self._of_python(source, at)))
                continue
            data = from_uri(source, self.limits, at) if isinstance(source, str) else bytes(source)
            size += len(data)
            if size > most >= len(data):
                cause = f"with {at} the request's pictures have {size} bytes; the limit is {most} (--max-image-bytes)"
                raise InputError(cause, at)
            found.append((at, checked_header(data, self.limits, at)))
        return found

    def _of_python(self, source: Any, at: str) -> Image:
        """An array's or a PIL image's picture."""
        import numpy as np
        from PIL import Image as images

        if isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
                what = f"{source.dtype} of shape {source.shape}"
                raise InputError(f"{at} is an array of {what}; it must be uint8 of (height, width, 3 or 4)"[:300], at)
            check_size(source.shape[1], source.shape[0], self.limits, at)
            source = images.fromarray(source)
        if not isinstance(source, images.Image):
            kind = type(source).__name__
            raise InputError(f"{at} must be a data: URI, bytes, an array or a PIL image, got {kind[:60]}", at)
        check_size(*source.size, self.limits, at)
        with refused(at, f"can't be read as RGB: its mode is {source.mode}, or its file is broken"):
            return rgb(source)

    def _prepared(self, image: Image, at: str, salt: str, alone: bool) -> Pixels:
        try:
            prepared = self.eyes.prepare(image, alone)
        except InputError as error:
            raise InputError(f"{at}: {error}", at) from error
        except MemoryError as error:
            raise Overloaded("there is no memory to prepare a picture in now") from error
        return prepared._replace(key=key_of(image, f"{self.eyes.settings} {prepared.grid}", salt))

    def placed(
        self, ids: Sequence[int], pixels: Sequence[Pixels], limits: Limits, given: Sequence[Given] = ()
    ) -> tuple[list[int], tuple[Medium, ...]]:
        """A prompt of token ids in which each picture has its length, and the pictures in it. InputError if there are
        other places than pictures, or ids that stand for parts of one; PromptTooLong with what pictures take of it.
        Where pictures are at fault these name the first one of those `given` that has no place or no room."""
        eyes = self.eyes
        if not all(type(token) is int for token in ids):
            limits.tokens(ids)  # says which
        places = ids.count(eyes.token)
        if places != len(pixels):
            missing = given[places].at if places < len(given) else ""
            raise InputError(
                f"the prompt has {places} places for pictures (token {eyes.token}, written {eyes.marker(1)!r}), and "
                f"{len(pixels)} pictures are given{missing and f': {missing} has none'}",
                missing or "prompt",
            )
        if not eyes.reserved.isdisjoint(ids) and (own := eyes.reserved - {eyes.token} & set(ids)):
            raise InputError(f"prompt token {min(own)} stands for a part of a picture: prompts can't have it", "prompt")
        if not pixels:
            return list(ids), ()
        grids = [one.grid for one in pixels]
        placed, spans = eyes.place(ids, grids)
        assert len(spans) == len(pixels), "a place for each picture"
        if len(placed) >= limits.max_len:
            taken = list(accumulate(tokens for _, tokens in spans))
            room = limits.max_len - len(placed) + taken[-1]  # that the text leaves, if it leaves some
            over = next((one.at for one, tokens in zip(given, taken) if tokens >= room), "") if room > 0 else ""
            raise PromptTooLong(
                f"{over and f'with {over} '}the prompt has {len(placed)} tokens, {taken[-1]} of them for "
                f"{len(spans)} pictures, but {limits.held_by} holds {limits.max_len} with at least one token of output",
                over or "prompt",
            )
        return placed, tuple(
            Medium(one.key, start, tokens, eyes.rows(one.grid), eyes.parts(one.grid))
            for one, (start, tokens) in zip(pixels, spans)
        )


def joined(media: Sequence[Medium], pixels: Sequence[Pixels]) -> tuple[tuple[Medium, ...], tuple[Pixels, ...]]:
    """Pictures that are neighbours in a prompt as one, for layers that attend to them: what follows sees all of these.
    `pixels` are the pictures' own, in order. One's parts are its pictures, and its grid is theirs in a row."""
    runs: list[list[int]] = []
    for i, medium in enumerate(media):
        if i and media[i - 1].end == medium.start:
            runs[-1].append(i)
        else:
            runs.append([i])
    found: list[tuple[Medium, Pixels]] = []
    for run in runs:
        first, shown = media[run[0]], pixels[run[0]]
        if len(run) > 1:
            own = [pixels[i] for i in run]
            key = hashlib.sha256(b"quire: neighbours" + b"".join(one.key for one in own)).digest()
            shape = sum(one.shape[0] for one in own), *shown.shape[1:]
            shown = Pixels(key, shape, b"".join(one.data for one in own), sum((one.grid for one in own), ()))
            sizes = (sum(media[i][field] for i in run) for field in (2, 3, 4))
            first = Medium(key, first.start, *sizes)
        found.append((first, shown))
    return tuple(medium for medium, _ in found), tuple(shown for _, shown in found)


def key_of(image: Image, settings: str, salt: str) -> bytes:
    """What a picture is found again by: a digest of its size and pixels in RGB, of how it is prepared, and of the
    tenant's salt. Each part goes in after its length, so that no two of them can be mistaken for others."""
    digest = hashlib.sha256(b"quire: a picture")
    for part in (settings.encode(), salt.encode(), repr(image.size).encode(), image.tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def pictured(given: Any) -> tuple[Any, list[Given]]:
    """A prompt's text or token ids, and the pictures that its multi_modal_data has ({"image": one, or a list})."""
    if not isinstance(given, Mapping):
        return given, []
    content, data = given.get("prompt_token_ids", given.get("prompt")), given.get("multi_modal_data")
    if data is None:
        return content, []
    if not isinstance(data, Mapping):
        raise InputError(f"multi_modal_data must be an object, got {type(data).__name__}", "multi_modal_data")
    if unknown := next((name for name in data if name != "image"), None):
        raise InputError(f"multi_modal_data has {shown(unknown)}; only 'image' is supported", "multi_modal_data")
    some = data.get("image")
    if not isinstance(some, list | tuple):
        return content, [] if some is None else [Given("multi_modal_data.image", some)]
    return content, [Given(f"multi_modal_data.image[{i}]", one) for i, one in enumerate(some)]
