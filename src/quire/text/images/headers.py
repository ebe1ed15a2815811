"""Image file headers, read before anything is decoded: format, size, animation and orientation. Metadata that decoders
do not need (profiles, EXIF, texts, thumbnails) is removed from the data that they get.

Files are untrusted: each loop is bounded, and each length is checked against the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

MAX_BLOCKS = 1 << 16  # chunks of a PNG or WebP, segments of a JPEG's head
MAX_GIF_BLOCKS = 1 << 17  # of up to 255 bytes each
MAX_SCANS = 32  # of a progressive JPEG: each may touch every pixel; encoders write about ten
PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
WEBP_CHUNKS, WEBP_ALPHA = (b"ALPH", b"VP8 ", b"VP8L"), 0x10
GIF_CONTROL = 0xF9  # the extension with the transparent colour
ADOBE, JFIF, COMMENT, SCAN = 0xEE, 0xE0, 0xFE, 0xDA
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
MARKERS_WITHOUT_SEGMENT = frozenset({0x01, *range(0xD0, 0xD9)})
ORIENTATION = 0x0112
TRUNCATED = "it is cut short"


class BadImage(ValueError):
    """The reason why an image cannot be read. The message contains nothing about this machine."""


class ImageHeader(NamedTuple):
    """`data` is the file to decode, without metadata. `orientation` is EXIF's orientation, from 1 (upright) to 8."""

    format: str
    width: int
    height: int
    data: bytes
    orientation: int = 1
    is_animated: bool = False


def read_header(data: bytes) -> ImageHeader:
    """Return the header of a PNG, JPEG, WebP or GIF, detected by its first bytes. Raise BadImage for anything else."""
    for start, read in READERS:
        if data.startswith(start):
            try:
                return read(data)
            except (struct.error, IndexError) as error:
                raise BadImage(TRUNCATED) from error
    raise BadImage("it is no PNG, JPEG, WebP or GIF" if data else "it is empty")


def _png(data: bytes) -> ImageHeader:
    parts, at, orientation, animated = [data[:8]], 8, 1, False
    first, width, height = struct.unpack_from(">4sII", data, 12)
    if first != b"IHDR":
        raise BadImage("it does not begin with its size")
    for _ in range(MAX_BLOCKS):
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise BadImage(TRUNCATED)
        if kind in PNG_CHUNKS:
            parts.append(data[at:end])
        elif kind == b"eXIf":
            orientation = read_orientation(data[at + 8 : end - 4])
        animated |= kind == b"acTL"
        at = end
        if kind == b"IEND":
            return ImageHeader("PNG", width, height, b"".join(parts), orientation, animated)
    raise BadImage(f"it has more than {MAX_BLOCKS} chunks")


def _jpeg(data: bytes) -> ImageHeader:
    parts, at, orientation, size = [data[:2]], 2, 1, None
    for _ in range(MAX_BLOCKS):
        start = at
        if data[at] != 0xFF:
            raise BadImage("a segment of it is broken")
        while data[at] == 0xFF:
            at += 1
        marker, at = data[at], at + 1
        if marker in MARKERS_WITHOUT_SEGMENT:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        end = at + length
        if length < 2 or end > len(data):
            raise BadImage(TRUNCATED)
        if marker == SCAN:
            parts.append(data[start:])
            break
        if marker in START_OF_FRAME:
            if size is not None:
                raise BadImage("it has two sizes")
            height, width = struct.unpack_from(">HH", data, at + 3)
            size = width, height
        if marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0":
            orientation = read_orientation(data[at + 8 : end])
        if not (0xE0 <= marker <= 0xEF or marker == COMMENT) or marker in (JFIF, ADOBE):
            parts.append(data[start:end])
        at = end
    else:
        raise BadImage(f"it has more than {MAX_BLOCKS} segments")
    if size is None:
        raise BadImage("its size is missing")
    if (scans := parts[-1].count(b"\xff\xda")) > MAX_SCANS:
        raise BadImage(f"it has {scans} scans; at most {MAX_SCANS} are read")
    return ImageHeader("JPEG", *size, b"".join(parts), orientation)


def _webp(data: bytes) -> ImageHeader:
    (size,) = struct.unpack_from("<I", data, 4)
    if data[8:12] != b"WEBP":
        raise BadImage("it is no PNG, JPEG, WebP or GIF")
    if size + 8 > len(data):
        raise BadImage(TRUNCATED)
    at, orientation, animated, sizes, parts = 12, 1, False, set[tuple[int, int]](), list[bytes]()
    for _ in range(MAX_BLOCKS):
        if at + 8 > size + 8:
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        body = data[at + 8 : at + 8 + min(length, 64)]
        if kind == b"VP8X":
            animated |= bool(body[0] & 2)
            sizes.add((1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")))
        elif kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", body, 6)
            sizes.add((width & 0x3FFF, height & 0x3FFF))
        elif kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", body, 1)
            sizes.add((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        elif kind == b"EXIF":
            orientation = read_orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        animated |= kind in (b"ANIM", b"ANMF")
        start, at = at, at + 8 + length + length % 2
        if kind == b"VP8X":  # without the flags of removed chunks
            parts += data[start : start + 8], bytes([body[0] & WEBP_ALPHA]), data[start + 9 : at]
        elif kind in WEBP_CHUNKS:
            parts.append(data[start:at])
    else:
        raise BadImage(f"it has more than {MAX_BLOCKS} chunks")
    if not animated and len(sizes) != 1:
        raise BadImage("its size is missing" if not sizes else "it has two sizes")
    body = b"WEBP" + b"".join(parts)
    return ImageHeader(
        "WebP", *max(sizes, default=(1, 1)), b"RIFF" + struct.pack("<I", len(body)) + body, orientation, animated
    )


def _gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    frames, inside, start, parts = 0, False, at, [data[:at]]
    for _ in range(MAX_GIF_BLOCKS):
        block, at = data[at], at + 1
        if inside:  # data blocks, each after its length, until an empty one
            at += block
            inside = block > 0
            if not inside:
                if data[start] == 0x2C or data[start + 1] == GIF_CONTROL:
                    parts.append(data[start:at])
                start = at
        elif block == 0x21:  # an extension
            at, inside = at + 1, True
        elif block == 0x2C:  # an image
            left, top, wide, high, flags = struct.unpack_from("<4HB", data, at)
            if left + wide > width or top + high > height:
                raise BadImage("its image is larger than its header says")
            frames += 1
            at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            inside = True
        elif block == 0x3B:  # the end
            if not frames:
                raise BadImage("there is no image in it")
            return ImageHeader("GIF", width, height, b"".join([*parts, data[start:at]]), is_animated=frames > 1)
        else:
            raise BadImage("a block of it is broken")
    raise BadImage(f"it has more than {MAX_GIF_BLOCKS} blocks")


def read_orientation(exif: bytes) -> int:
    """Return the orientation in an EXIF block; 1 if it has none or cannot be read."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


READERS: tuple[tuple[bytes, Callable[[bytes], ImageHeader]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png), (b"\xff\xd8\xff", _jpeg), (b"RIFF", _webp), (b"GIF87a", _gif), (b"GIF89a", _gif),
)  # fmt: skip
