"""How pictures stand in the frame of a request: where they are in its prompt, and what the encoder gets of each."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain

from quire.protocol.columns import COUNT, MAX_PIXEL_BYTES, FrameReader, WireError, pack_struct, split_runs, write_ints
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.wire import IMAGE_ITEM, KEY_BYTES

PIXELS_HEAD = struct.Struct("<32s4IIH")  # key, shape, bytes, numbers of the grid
MAX_GRID_NUMBERS = 4096  # numbers; pictures that are seen as one have theirs in a row

ImageItems = tuple[ImageItem, ...]


def write_images(media: Sequence[ImageItems], pixels: Sequence[ImagePixels]) -> Iterator[bytes]:
    """The pictures of some requests, and all `pixels` of them. WireError for those that can't be sent."""
    yield write_ints(list(map(len, media)), "numbers of pictures")
    for medium in chain.from_iterable(media):
        yield pack_struct(IMAGE_ITEM, "picture", *medium)
    yield COUNT.pack(len(pixels))
    for one in pixels:
        yield from write_pixels(one)


def write_pixels(pixels: ImagePixels) -> Iterator[bytes]:
    """What the encoder gets of one picture. WireError where it can't be sent."""
    key, shape, data, grid = pixels
    if len(key) != KEY_BYTES or len(shape) != 4 or len(data) != math.prod(shape) or len(data) > MAX_PIXEL_BYTES:
        raise WireError("pixels", f"{len(data)} bytes of shape {shape} under a key of {len(key)} bytes")
    yield pack_struct(PIXELS_HEAD, "pixels", key, *shape, len(data), len(grid))
    yield write_ints(grid, "grid")
    yield data


def read_images(
    reader: FrameReader, prompts: Sequence[Sequence[int]]
) -> tuple[list[ImageItems], tuple[ImagePixels, ...]]:
    """The same, read: of requests with these prompts. WireError for what no writer says: pictures that overlap or stand
    outside of their prompt, pixels of no picture, or fewer or more bytes than their shape has."""
    lengths = reader.read_lengths(len(prompts), "numbers of pictures")
    if sum(lengths) * IMAGE_ITEM.size > reader.end - reader.offset:
        raise reader.error("pictures", f"{sum(lengths)} are announced, {reader.end - reader.offset} bytes remain")
    every = tuple([ImageItem(*reader.unpack(IMAGE_ITEM, "picture")) for _ in range(sum(lengths))])
    media = split_runs(every, lengths)
    for prompt, some in zip(prompts, media):
        end = 0
        for one in some:
            if one.start < end or not one.num_tokens or not one.num_parts or one.end > len(prompt):
                raise reader.error("picture", f"{one[1:]} can't be in a prompt of {len(prompt)} tokens, from {end} on")
            end = one.end
    known = {one.key for one in every}
    (count,) = reader.unpack(COUNT, "number of pixels")
    if count > len(known):
        raise reader.error("pixels", f"those of {count} pictures are announced, and there are {len(known)}")
    pixels = tuple([read_pixels(reader) for _ in range(count)])
    if len({one.key for one in pixels} & known) < count:
        raise reader.error("pixels", "some are of no picture, or of one twice")
    return media, pixels


def read_pixels(reader: FrameReader) -> ImagePixels:
    """The same, read. WireError for what no writer says."""
    key, *sides, size, numbers = reader.unpack(PIXELS_HEAD, "pixels")
    shape = tuple(sides)
    if size != math.prod(shape) or not 0 < size <= MAX_PIXEL_BYTES or shape[3] != 3 or numbers > MAX_GRID_NUMBERS:
        raise reader.error(
            "pixels", f"{size} bytes are no picture of the shape {shape}; at most {MAX_PIXEL_BYTES} are read"
        )
    grid = reader.read_ints(numbers, "grid")
    at = reader.skip(size, "pixels")
    return ImagePixels(key, shape, bytes(reader.frame[at : at + size]), grid)
