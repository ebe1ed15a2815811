"""Decoding of untrusted image files to RGB. Sizes are checked from the header before anything is decoded, and every
fault is an InputError with its parameter. Nothing is fetched or opened. Independent of models.

Decoding takes much time and memory, so callers use threads of their own (loader.py).
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
    from PIL.ImageFile import ImageFile

WHITE = (255, 255, 255)  # background of transparent pixels
BASE64_SLICE_CHARS = 1 << 20  # characters of base64 decoded per call, which holds the GIL
MAX_SHOWN_CHARS = 40  # characters of a URL in an error
URI_HEAD_CHARS = 256  # characters of a data: URI within which its data must begin
DATA_URI = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
ORIENTATION_TRANSPOSES = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a request's images: pixels per image, bytes of all files, and the number of images."""

    pixels: int = 1 << 24
    bytes: int = 1 << 24
    count: int = 8

    @property
    def max_body_chars(self) -> int:
        """The maximum number of characters of a request's images as data: URIs."""
        return 4 * (self.bytes // 3 + self.count) + 1024 * self.count


def read_data_uri(uri: str, limits: ImageLimits, at: str) -> bytes:
    """Return the file in a data: URI; its declared type is ignored. Raise InputError for other URLs."""
    match = DATA_URI.match(uri[:URI_HEAD_CHARS])
    if match is None:
        raise InputError(
            f"{at} must be data:TYPE;base64,DATA with an image; nothing is ever fetched: got {uri[:MAX_SHOWN_CHARS]!r}",
            at,
        )
    text = "".join(uri[match.end() :].split())
    if len(text) > 4 * -(-limits.bytes // 3):
        raise InputError(
            f"{at} has {len(text)} characters of base64; images may have {limits.bytes} bytes (--max-image-bytes)", at
        )
    return _base64(text, at)


def _base64(text: str, at: str) -> bytes:
    """Decode `text`, padded or not."""
    bare = text.rstrip("=")
    padding = "=" * (-len(bare) % 4)
    try:
        if "=" in bare or len(text) - len(bare) not in (0, len(padding)):
            raise ValueError
        whole = bare + padding
        slices = [whole[start : start + BASE64_SLICE_CHARS] for start in range(0, len(whole), BASE64_SLICE_CHARS)]
        return b"".join([binascii.a2b_base64(chars, strict_mode=True) for chars in slices])
    except ValueError as error:  # binascii.Error included; also for characters beyond ASCII
        raise InputError(f"{at} is no base64 (RFC 4648)", at) from error


def read_checked_header(data: bytes, limits: ImageLimits, at: str) -> ImageHeader:
    """Return the header of an image within the limits. Raise InputError for one that is animated or too large, and for
    other files."""
    if len(data) > limits.bytes:
        raise InputError(f"{at} has {len(data)} bytes; the limit is {limits.bytes} (--max-image-bytes)", at)
    with image_errors_to_input_error(at):
        header = read_header(data)
        if header.is_animated:
            raise BadImage("it is animated; only still images are supported")
    check_size(header.width, header.height, limits, at)
    return header


def check_size(width: int, height: int, limits: ImageLimits, at: str) -> None:
    """Raise InputError for an image without pixels, or with too many."""
    if not (0 < width <= MAX_IMAGE_SIDE and 0 < height <= MAX_IMAGE_SIDE and width * height <= limits.pixels):
        raise InputError(
            f"{at} is an image of {width} x {height} pixels; it must have 1 to {limits.pixels} (--max-image-pixels), "
            f"and at most {MAX_IMAGE_SIDE} a side",
            at,
        )


def decode_image(header: ImageHeader, at: str) -> Image:
    """Return the image upright, in 8-bit RGB, with transparent pixels on white. Colour profiles are ignored. Raise
    InputError for broken data."""
    with image_errors_to_input_error(at):
        image = _open_image(header)
        if image.size != (header.width, header.height):
            raise BadImage("it has two sizes")
        _scale_transparent_level(image)
        image.load()
        return apply_orientation(to_rgb(image), header.orientation)


def _open_image(header: ImageHeader) -> ImageFile:
    """Return Pillow's image of the header's format, with no pixels read."""
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    kinds: dict[str, Callable[[BytesIO], ImageFile]] = {
        "PNG": PngImageFile, "JPEG": JpegImageFile, "WebP": WebPImageFile, "GIF": GifImageFile,
    }  # fmt: skip
    return kinds[header.format](BytesIO(header.data))


def _scale_transparent_level(image: ImageFile) -> None:
    """Scale the transparent level of a 2- or 4-bit grey PNG to 8 bits, as Pillow does with all other levels."""
    scale = {"L;2": 85, "L;4": 17}.get(str(image.tile[0][3])) if image.format == "PNG" and image.tile else None
    if scale and isinstance(clear := image.info.get("transparency"), int):
        image.info["transparency"] = clear * scale


def to_rgb(image: Image) -> Image:
    """Convert an image of any mode to RGB. Raise ValueError for a mode that has no conversion."""
    from PIL import Image as pil_image

    if image.mode.startswith("I"):
        return _of_16_bits(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        rgb = pil_image.new("RGB", image.size, WHITE)
        rgb.paste(rgba, mask=rgba.getchannel("A"))
    else:
        rgb = image.convert("RGB")
    rgb.info = {}
    return rgb


def _of_16_bits(image: Image) -> Image:
    """Keep the upper byte of each grey level. Pillow's own conversion clips values above 255."""
    import numpy as np
    from PIL import Image as pil_image

    levels = np.asarray(image)
    grey = np.clip(levels, 0, 0xFFFF).astype(np.uint16) >> 8
    if isinstance(clear := image.info.get("transparency"), int):
        grey[levels == clear] = 255
    return pil_image.fromarray(grey.astype(np.uint8)).convert("RGB")


def apply_orientation(image: Image, orientation: int) -> Image:
    """Return the image rotated or mirrored as EXIF's orientation demands."""
    from PIL.Image import Transpose

    return image if orientation == 1 else image.transpose(Transpose[ORIENTATION_TRANSPOSES[orientation]])


@contextmanager
def image_errors_to_input_error(at: str, why: str = "can't be read: its data is broken or cut short") -> Iterator[None]:
    """Convert a library's errors on untrusted bytes to InputError. The library's message is dropped: it may contain an
    address of this process."""
    try:
        yield
    except BadImage as error:
        raise InputError(f"{at} can't be read: {error}", at) from error
    except MemoryError as error:
        raise Overloaded("there is no memory to decode an image now") from error
    except Exception as error:
        raise InputError(f"{at} {why}", at) from error
