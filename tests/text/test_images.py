"""Pictures of strangers: what is read comes out as it is meant to be seen, and all else is an InputError with the
place, found in the header where a header can tell."""

from __future__ import annotations

import base64
import io
import re
import struct
from typing import Any

import numpy as np
import pytest
from picture_files import BLUE, RED, chunk, decode_file, drawn, mutated, png_of, small_files, uri, written
from PIL import Image, ImageCms, PngImagePlugin

from quire.errors import InputError
from quire.protocol.image_tiling import MAX_IMAGE_SIDE
from quire.text.images import decode
from quire.text.images.decode import ImageLimits, check_size, read_checked_header, read_data_uri
from quire.text.images.headers import MAX_SCANS, read_header

LIMITS = ImageLimits()
AT = "messages[1].content[0].image_url"


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    image = decode_file(data, LIMITS, AT)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_turns_pictures(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.new("RGB", (32, 16), BLUE)
    stored.paste(RED, (0, 0, 16, 16))
    found = pixels(written(stored, format, exif=exif))
    red = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}[orientation]
    assert found.shape == ((16, 32, 3) if orientation < 5 else (32, 16, 3))
    place = {"left": (8, 4), "right": (8, 28), "top": (4, 8), "bottom": (28, 8)}[red]
    assert np.abs(found[place] - RED).max() < 60


def test_profiles_and_texts_are_left_out() -> None:
    """They never reach Pillow: a text of a gigabyte, compressed, costs nothing."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", "x" * 100_000, zip=True)
    for data in (
        written(drawn(), "PNG", icc_profile=profile, pnginfo=texts),
        written(drawn(), "JPEG", icc_profile=profile, comment=b"x" * 1000, quality=100),
        written(drawn(), "WEBP", icc_profile=profile, xmp=b"x" * 1000, lossless=True),
        written(drawn(), "GIF", comment=b"x" * 1000),
    ):
        assert len(read_header(data).data) < len(data) - 300
        assert decode_file(data, LIMITS).info == {}
        assert np.abs(pixels(data) - np.asarray(drawn())).max() < 40


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 2, 4))
    if mode in ("P", "L", "RGB"):
        plain = Image.new(mode, (4, 4), 0 if mode != "RGB" else (9, 9, 9))
        plain.paste(1 if mode != "RGB" else (1, 1, 1), (0, 0, 2, 4))
        data = written(plain, transparency=0 if mode != "RGB" else (9, 9, 9))
    else:
        data = written(image.convert(mode))
    found = pixels(data)
    assert (found[:, 2:] == 255).all()
    assert (found[:, :2] < 10).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_transparent_level_of_few_bits_is_white(bits: int) -> None:
    levels = np.arange(1 << bits)
    grey = (levels * 255 // levels[-1]).astype(int)
    spelled = "".join(f"{level:0{bits}b}" for level in levels).ljust(8, "0")
    row = b"\0" + int(spelled, 2).to_bytes(len(spelled) // 8, "big")
    for clear in range(0, len(levels), max(len(levels) // 16, 1)):
        plain = png_of(len(levels), 1, bits, color=0, data=row)
        data = plain[:33] + chunk(b"tRNS", struct.pack(">H", clear)) + plain[33:]
        assert (pixels(data)[0, :, 0] == np.where(levels == clear, 255, grey)).all()


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    assert (pixels(written(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))) == 127).all()


def test_16_bits_keep_their_upper_halves() -> None:
    levels = np.array([[0, 255, 256], [32_768, 65_280, 65_535]], np.uint16)
    assert pixels(written(Image.fromarray(levels)))[:, :, 0].tolist() == [[0, 0, 1], [128, 255, 255]]


def test_cmyk_keeps_its_colours() -> None:
    found = pixels(written(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG"))
    assert np.abs(found - RED).max() < 40


SIZES = [(0, 5), (5, 0), (100_000, 1), (1, 100_000), (20_000, 20_000), (4097, 4096), (2**31 - 1, 2**31 - 1)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_sizes_are_refused_from_the_header(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_open_image", lambda header: pytest.fail("it was opened"))
    with pytest.raises(InputError, match=rf"{width} x {height} pixels; it must have 1 to 16777216") as caught:
        decode_file(png_of(width, height), LIMITS, AT)
    assert caught.value.param == AT


def test_files_of_two_sizes_are_refused() -> None:
    """Whichever a decoder believes: a header of one pixel doesn't hide another of very many."""
    small, large = png_of(1, 1), png_of(20_000, 20_000)
    jpeg = written(drawn(), "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    (length,) = struct.unpack_from(">H", jpeg, frame + 2)
    webp = bytearray(small_files()["webp, lossless"])  # has EXIF, hence a size beside the picture's
    webp[24:27] = (99).to_bytes(3, "little")
    for data in (
        small[:33] + large[8:33] + small[33:],
        jpeg[:frame] + jpeg[frame : frame + 2 + length] + jpeg[frame:],
        bytes(webp),
    ):
        with pytest.raises(InputError, match="it has two sizes"):
            decode_file(data, LIMITS, AT)


def test_sizes_at_the_limit() -> None:
    check_size(4096, 4096, LIMITS, AT)
    check_size(MAX_IMAGE_SIDE, 1024, LIMITS, AT)
    with pytest.raises(InputError, match="at most 16384 a side"):
        check_size(MAX_IMAGE_SIDE + 1, 1, LIMITS, AT)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_moving_pictures_are_refused(format: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, BLUE)]
    data = written(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="it is animated; only still images are supported"):
        decode_file(data, LIMITS, AT)


def test_a_gif_of_very_many_frames_is_refused_before_any_is_drawn() -> None:
    one = written(Image.new("P", (2, 2)), "GIF")
    at = one.index(b"\x2c\0\0\0\0")
    data = one[:at] + one[at:-1] * 100_000 + b";"
    with pytest.raises(InputError, match=r"it is animated|has more than 131072 blocks"):
        decode_file(data, ImageLimits(bytes=1 << 25), AT)


def test_a_gif_may_not_say_less_than_it_is() -> None:
    data = bytearray(written(Image.new("P", (64, 64)), "GIF"))
    data[6:10] = bytes((2, 0, 2, 0))
    with pytest.raises(InputError, match="its image is larger than its header says"):
        decode_file(bytes(data), LIMITS, AT)


@pytest.mark.parametrize("format", ["BMP", "TIFF", "JPEG2000", "ICO", "PPM", "AVIF"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(InputError, match="it is no PNG, JPEG, WebP or GIF"):
        decode_file(written(drawn(64, 64), format), LIMITS, AT)


def test_a_bomb_costs_nothing() -> None:
    """A zip bomb behind a small size: what goes beyond the picture isn't inflated."""
    assert (pixels(png_of(1, 1, data=b"\0" * 30_000_000)) == 0).all()


def test_a_jpeg_may_not_be_drawn_over_and_over() -> None:
    data = written(drawn(64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    bomb = data[:last] + data[last:-2] * (MAX_SCANS + 1) + data[-2:]
    with pytest.raises(InputError, match=rf"scans; at most {MAX_SCANS} are read"):
        decode_file(bomb, LIMITS, AT)


def test_pictures_behind_the_first_are_not_looked_at() -> None:
    """As telephones append them: a second view, a preview, a film."""
    first, second = written(drawn(), "JPEG"), written(Image.new("RGB", (64, 64), BLUE), "JPEG")
    several = written(drawn(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 64), BLUE)])
    for data in (first + second, first + bytes(1000), several):
        assert (pixels(data) == pixels(first)).all()
    png = written(drawn())
    assert (pixels(png + written(Image.new("RGB", (64, 64), BLUE))) == pixels(png)).all()


# URIs


@pytest.mark.parametrize(
    "kind", ["image/png", "image/JPG", "application/octet-stream", "", "image/png;name=a.png", "text/html"]
)
def test_the_bytes_say_what_a_picture_is(kind: str) -> None:
    data = written(drawn(), "WebP")
    found = read_data_uri(f"data:{kind};base64,{base64.b64encode(data).decode()}", LIMITS, AT)
    assert found == data
    assert read_checked_header(found, LIMITS, AT).format == "WebP"


@pytest.mark.parametrize("size", range(40))
def test_base64_may_be_wrapped_and_unpadded(size: int) -> None:
    data = bytes(range(size))
    for text in (base64.encodebytes(data).decode(), base64.b64encode(data).decode().rstrip("=")):
        assert read_data_uri(f"data:image/png;base64,{text}", LIMITS, AT) == data


def test_long_uris_are_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BASE64_SLICE_CHARS", 8)
    for size in range(40):
        assert read_data_uri(uri(bytes(range(size))), LIMITS, AT) == bytes(range(size))
    with pytest.raises(InputError, match="is no base64"):
        read_data_uri("data:image/png;base64,AAAAAAA=AAAA", LIMITS, AT)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", "a.png", "//example.com/a.png", "", "data:",
        "data:image/png,AAAA", " data:image/png;base64,AA==",
    ],
)  # fmt: skip
def test_nothing_is_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    monkeypatch.setattr(io, "open", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(InputError, match=r"must be data:TYPE;base64,DATA .* nothing is ever fetched") as caught:
        read_data_uri(url, LIMITS, AT)
    assert caught.value.param == AT


@pytest.mark.parametrize("wrong", ["A", "AAAA=", "====", "AA=A", "A-_A", "AAA==", "\xe9AAA",
                                   "AAAA====", "AB==AAAA", "AAA=AAAA", "AAAA%3D"])  # fmt: skip
def test_base64_that_is_none(wrong: str) -> None:
    with pytest.raises(InputError, match="is no base64"):
        read_data_uri(f"data:image/png;base64,{wrong}", LIMITS, AT)


def test_base64_is_bounded_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.binascii, "a2b_base64", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(InputError, match="has 16 characters of base64; images may have 9 bytes"):
        read_data_uri(uri(bytes(10)), ImageLimits(bytes=9), AT)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_pictures_are_read_or_refused(seed: int) -> None:
    """Never another error, and never a warning (which is one here)."""
    read, places, told = 0, set(), list[str]()
    for data in mutated(seed, 750):
        try:
            image = decode_file(data, ImageLimits(pixels=1 << 16), AT)
        except InputError as error:
            places.add(error.param)
            told.append(str(error))
            continue
        assert image.mode == "RGB"
        assert 0 < image.width * image.height <= 1 << 16
        read += 1
    assert places == {AT}
    assert not re.search(r"0x[0-9a-f]{4}|<|PIL|/", "".join(told)), "it tells of this process"
    assert read > 30, "mutations that leave something to decode are among them"


def test_chunks_are_bounded() -> None:
    data = png_of(1, 1)
    many = data[:33] + chunk(b"tEXt", b"") * (1 << 16) + data[33:]
    with pytest.raises(InputError, match="has more than 65536 chunks"):
        decode_file(many, LIMITS, AT)
