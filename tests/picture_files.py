"""Pictures for tests: files of every kind that is read, and of kinds that aren't."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from quire.text.images.decode import ImageLimits, decode_image, read_checked_header

RED, BLUE = (255, 0, 0), (0, 0, 255)


def drawn(width: int = 8, height: int = 6, mode: str = "RGB") -> Image.Image:
    """A picture whose four corners differ."""
    rows, columns = np.mgrid[0:height, 0:width]
    red = 255 * columns // max(width - 1, 1)
    green = 255 * rows // max(height - 1, 1)
    return Image.fromarray(np.stack([red, green, 0 * red + 90], -1).astype(np.uint8)).convert(mode)


def written(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode_file(data: bytes, limits: ImageLimits, at: str = "image") -> Image.Image:
    """Check the header of a file and decode it, as requests do."""
    return decode_image(read_checked_header(data, limits, at), at)


def uri(data: bytes, kind: str = "png") -> str:
    """The same as a data: URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, depth: int = 8, color: int = 2, data: bytes = b"\0" * 100) -> bytes:
    """A PNG that says that it is so large, whatever it holds."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def small_files() -> dict[str, bytes]:
    """One small picture in each format, and in some of their variants."""
    image, turned = drawn(), Image.Exif()
    turned[0x0112] = 6
    return {
        "png": written(image),
        "png with a palette": written(image.convert("P")),
        "png, grey": written(image.convert("L")),
        "png, 16 bits": written(Image.fromarray(np.full((6, 8), 40_000, np.uint16))),
        "png, transparent": written(image.convert("RGBA")),
        "jpeg": written(image, "JPEG"),
        "jpeg with EXIF": written(image, "JPEG", exif=turned),
        "jpeg, progressive": written(image, "JPEG", progressive=True),
        "jpeg, cmyk": written(image.convert("CMYK"), "JPEG"),
        "webp": written(image, "WEBP"),
        "webp, lossless": written(image, "WEBP", lossless=True, exif=turned),
        "webp, transparent": written(image.convert("RGBA"), "WEBP"),
        "gif": written(image, "GIF"),
    }


def mutated(seed: int, times: int) -> Iterator[bytes]:
    """Small pictures with bytes changed, cut out, repeated and swapped between formats."""
    chance, files = random.Random(seed), list(small_files().values())
    for _ in range(times):
        data = bytearray(chance.choice(files))
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at, size = chance.randrange(len(data)), chance.choice((1, 1, 2, 4, 32))
            match chance.randrange(6):
                case 0:
                    data[at : at + size] = chance.randbytes(size)
                case 1:
                    data[at] ^= 1 << chance.randrange(8)
                case 2:
                    data[at : at + size] = chance.choice((b"\0", b"\xff", b"\x7f")) * size
                case 3:
                    del data[at : at + size]
                case 4:
                    data[at:at] = data[at : at + 8 * size]
                case _:
                    other = chance.choice(files)
                    data[at:] = other[chance.randrange(len(other)) :]
            if not data:
                break
        yield bytes(data)
