"""A stranger's picture, as an RGB image: sizes are checked from its header before anything is decoded, and all that can
be wrong with it is an InputError with its place. Nothing is ever fetched or opened; knows no models.

Decoding takes long and much memory, so callers do it on threads of their own (pictures.py).
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from quire.errors import InputError, Overloaded
from quire.protocol.image_tiling import MAX_IMAGE_SIDE
from quire.text.images.headers import BadImage, ImageHeader, read_header

if TYPE_CHECKING:
    from PIL.Image import Image

WHITE = (255, 255, 255)  # what stands behind transparent pixels
BASE64_SLICE_CHARS = 1 << 20  # characters of base64 that are decoded in one go: each holds up other threads
MAX_SHOWN_CHARS = 40  # characters of a URL in an error
URI_HEAD_CHARS = 256  # characters of a data: URI in which its data begins
DATA_URI = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
ORIENTATION_TRANSPOSES = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE",
6: "ROTATE_270", 7: "TRANSVERSE",
         8: "ROTATE_90"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Of a request's pictures: pixels of one, bytes of all their files, and how many there may be."""

    pixels: int = 1 << 24
    bytes: int = 1 << 24
    count: int = 8

    @property
    def max_body_chars(self) -> int:
        """Characters that a request's pictures have at most, as data: URIs."""
        return 4 * (self.bytes // 3 + self.count) + 1024 * self.count


def read_data_uri(uri: str, limits: ImageLimits, at: str) -> bytes:
    """The file that a data: URI holds, of whatever type it says that it is. InputError for any other URL."""
    found = DATA_URI.match(uri[:URI_HEAD_CHARS])
    if found is None:
        raise InputError(
            f"{at} must be data:TYPE;base64,DATA with a picture; nothing is ever fetched: got "
            f"{uri[:MAX_SHOWN_CHARS]!r}",
            at,
        )
    text = "".join(uri[found.end() :].split())
    if len(text) > 4 * -(-limits.bytes // 3):
        raise InputError(
            f"{at} has {len(text)} characters of base64; pictures may have {limits.bytes} bytes (--max-image-bytes)", at
        )
    return _base64(text, at)


def _base64(text: str, at: str) -> bytes:
    """What `text` stands for, padded or not."""
    bare = text.rstrip("=")
    padding = "=" * (-len(bare) % 4)
    try:
        if "=" in bare or len(text) - len(bare) not in (0, len(padding)):
            raise ValueError
        whole = bare + padding
        slices = [whole[place : place + BASE64_SLICE_CHARS] for place in range(0, len(whole), BASE64_SLICE_CHARS)]
        return b"".join([binascii.a2b_base64(one, strict_mode=True) for one in slices])
    except ValueError as error:  # binascii's too, and for letters beyond ASCII
        raise InputError(f"{at} is no base64 (RFC 4648)", at) from error


def read_checked_header(data: bytes, limits: ImageLimits, at: str) -> ImageHeader:
    """The header of a picture that may be decoded. InputError for one that moves, or that is too large, and for what is
    no picture."""
    if len(data) > limits.bytes:
        raise InputError(f"{at} has {len(data)} bytes; the limit is {limits.bytes} (--max-image-bytes)", at)
    with image_errors_to_input_error(at):
        header = read_header(data)
        if header.is_animated:
            raise BadImage("it moves; only still pictures are read")
    check_size(header.width, header.height, limits, at)
    return header


def check_size(width: int, height: int, limits: ImageLimits, at: str) -> None:
    """InputError for a picture of no pixels, or of too many."""
    if not (0 < width <= MAX_IMAGE_SIDE and 0 < height <= MAX_IMAGE_SIDE and width * height <= limits.pixels):
        raise InputError(
            f"{at} is a picture of {width} x {height} pixels; it must have 1 to {limits.pixels} (--max-image-pixels), "
            f"and at most {MAX_IMAGE_SIDE} a side",
            at,
        )


def decode_image(header: ImageHeader, at: str) -> Image:
    """The picture upright, in RGB of 8 bits, on white where it is transparent. Profiles are ignored. InputError for
    broken data."""
    with image_errors_to_input_error(at):
        image = _open_image(header)
        if image.size != (header.width, header.height):
            raise BadImage("it says two sizes")
        _scale_transparent_level(image)
        image.load()
        return apply_orientation(to_rgb(image), header.orientation)


def decode_file(data: bytes, limits: ImageLimits, at: str = "image") -> Image:
    """`decode_image`, of a file whose header is checked first."""
    return decode_image(read_checked_header(data, limits, at), at)


def _open_image(header: ImageHeader) -> Image:
    """Pillow's image of the one format, read no further than its header."""
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    kinds: dict[str, Callable[[BytesIO], Image]] = {
        "PNG": PngImageFile, "JPEG": JpegImageFile, "WebP": WebPImageFile, "GIF": GifImageFile,
    }  # fmt: skip
    return kinds[header.format](BytesIO(header.data))


def _scale_transparent_level(image: Image) -> None:
    """Of a PNG of 2 or 4 bits of grey, the level that is transparent: Pillow spreads all others over 8 bits."""
    scale = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3])) if image.format == "PNG" and image.tile else None
    if scale and isinstance(clear := image.info.get("transparency"), int):
        image.info["transparency"] = clear * scale


def to_rgb(image: Image) -> Image:
    """A picture of any mode in RGB; ValueError for a mode that has no such form."""
    from PIL import Image as pil_image

    if image.mode.startswith("I"):
        return _of_16_bits(image)
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        found = pil_image.new("RGB", image.size, WHITE)
        found.paste(seen, mask=seen.getchannel("A"))
    else:
        found = image.convert("RGB")
    found.info = {}
    return found


def _of_16_bits(image: Image) -> Image:
    """Of each grey level the upper half. Pillow's own conversion would cut off what is above 255."""
    import numpy as np
    from PIL import Image as pil_image

    levels = np.asarray(image)
    grey = np.clip(levels, 0, 0xFFFF).astype(np.uint16) >> 8
    if isinstance(clear := image.info.get("transparency"), int):
        grey[levels == clear] = 255
    return pil_image.fromarray(grey.astype(np.uint8)).convert("RGB")


def apply_orientation(image: Image, orientation: int) -> Image:
    """The picture as EXIF's orientation says that it is seen."""
    from PIL.Image import Transpose

    return image if orientation == 1 else image.transpose(Transpose[ORIENTATION_TRANSPOSES[orientation]])


@contextmanager
def image_errors_to_input_error(at: str, why: str = "can't be read: its data is broken or cut short") -> Iterator[None]:
    """Whatever a library raises over a stranger's bytes is an InputError. What it says isn't told: it may hold an
    address of this process."""
    try:
        yield
    except BadImage as error:
        raise InputError(f"{at} can't be read: {error}", at) from error
    except MemoryError as error:
        raise Overloaded("there is no memory to decode a picture in now") from error
    except Exception as error:
        raise InputError(f"{at} {why}", at) from error
