"""Images in the frame of a request: their places in its prompt, and the encoder's input for each."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain

from quire.protocol.columns import COUNT, MAX_PIXEL_BYTES, FrameReader, WireError, pack_struct, split_runs, write_ints
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.wire import KEY_BYTES, read_image_items, write_image_items

PIXELS_HEAD = struct.Struct("<32s4IIH")  # key, shape, bytes, numbers of the grid
MAX_GRID_NUMBERS = 4096  # numbers; the grids of images that are encoded together follow each other

ImageItems = tuple[ImageItem, ...]


def write_images(media: Sequence[ImageItems], pixels: Sequence[ImagePixels]) -> Iterator[bytes]:
    """Yield the images of several requests, then all their `pixels`. Raise WireError if they can't be encoded."""
    yield write_ints(list(map(len, media)), "numbers of images")
    yield from write_image_items(chain.from_iterable(media))
    yield COUNT.pack(len(pixels))
    for image_pixels in pixels:
        yield from write_pixels(image_pixels)


def write_pixels(pixels: ImagePixels) -> Iterator[bytes]:
    """Yield the encoder's input for one image. Raise WireError if it can't be encoded."""
    key, shape, data, grid = pixels
    if len(key) != KEY_BYTES or len(shape) != 4 or len(data) != math.prod(shape) or len(data) > MAX_PIXEL_BYTES:
        raise WireError("pixels", f"{len(data)} bytes of shape {shape} under a key of {len(key)} bytes")
    yield pack_struct(PIXELS_HEAD, "pixels", key, *shape, len(data), len(grid))
    yield write_ints(grid, "grid")
    yield data


def read_images(
    reader: FrameReader, prompts: Sequence[Sequence[int]]
) -> tuple[list[ImageItems], tuple[ImagePixels, ...]]:
    """Read what `write_images` wrote, for requests with these prompts. Raise WireError for images that overlap or lie
    outside of their prompt, for pixels of no image, and for a number of bytes that does not match the shape."""
    lengths = reader.read_lengths(len(prompts), "numbers of images")
    all_images = read_image_items(reader, sum(lengths))
    media = split_runs(all_images, lengths)
    for prompt, images in zip(prompts, media):
        end = 0
        for image in images:
            if image.start < end or not image.num_tokens or not image.num_parts or image.end > len(prompt):
                raise reader.error("image", f"{image[1:]} can't be in a prompt of {len(prompt)} tokens, from {end} on")
            end = image.end
    keys = {image.key for image in all_images}
    (count,) = reader.unpack(COUNT, "number of pixels")
    if count > len(keys):
        raise reader.error("pixels", f"those of {count} images are announced, and the requests have {len(keys)}")
    pixels = tuple([read_pixels(reader) for _ in range(count)])
    if len({image.key for image in pixels} & keys) < count:
        raise reader.error("pixels", "some belong to no image of the requests, or two belong to the same image")
    return media, pixels


def read_pixels(reader: FrameReader) -> ImagePixels:
    """Read what `write_pixels` wrote. Raise WireError if it is malformed."""
    key, *sides, size, numbers = reader.unpack(PIXELS_HEAD, "pixels")
    shape = tuple(sides)
    if size != math.prod(shape) or not 0 < size <= MAX_PIXEL_BYTES or shape[3] != 3 or numbers > MAX_GRID_NUMBERS:
        raise reader.error(
            "pixels", f"{size} bytes are no image of the shape {shape}; at most {MAX_PIXEL_BYTES} are read"
        )
    grid = reader.read_ints(numbers, "grid")
    return ImagePixels(key, shape, reader.read_bytes(size, "pixels"), grid)
