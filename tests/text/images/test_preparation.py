"""Tiles beside those of transformers' image processors, within one step of 255, over odd sizes; Phi-3-Vision's, which
transformers lacks, beside the algorithm that was published with its weights, written down here."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from published_processors import PIECES, TEXT_CONFIGS, WORDS, published_processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire.errors import InputError, StartupError
from quire.models.vision import VisionSettings, build_encoder
from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS
from quire.protocol.image_tiling import (
    MAX_IMAGE_SIDE,
    TILING_NAMES,
    AnyResTiling,
    ClosestAspectTiling,
    FittedCanvasTiling,
    HDTiling,
    ImageTiling,
    PooledTile,
    ScaledTiling,
    SingleTile,
    TileGrid,
)
from quire.text.images import preprocessor
from quire.text.images.placeholders import PLACEHOLDERS, read_placeholder
from quire.text.images.preprocessor import ImagePreprocessor, read_image_preprocessor
from quire.text.images.processor import ImageProcessor

TILE, SIDE = 56, 4
HALF = (0.5, 0.5, 0.5)
SIZES = [
    (1, 1), (1, 7), (7, 1), (1, 300), (300, 1), (2, 3), (3, 3), (3, 1000), (1000, 3), (55, 57), (56, 56), (57, 55),
    (112, 56), (56, 112), (111, 113), (168, 56), (56, 224), (225, 57), (200, 200), (640, 480), (480, 640), (333, 1000),
    (1001, 334), (224, 224), (28, 99), (1300, 1290),
]  # fmt: skip
SIZES_LLAVA = [(TILE * rows, TILE * columns) for rows in range(1, 5) for columns in range(1, 5)]
Array = npt.NDArray[Any]


def picture(height: int, width: int) -> Image.Image:
    """Smooth colours with noise on them, as a photograph has."""
    rng = np.random.default_rng(height * 10_000 + width)
    y, x = np.mgrid[:height, :width]
    waves = [127 + 90 * np.sin(x / (5 + 9 * part) + part) * np.cos(y / (4 + 7 * part)) for part in range(3)]
    noisy = np.stack(waves, axis=-1) + rng.normal(0, 25, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8), "RGB")


def bytes_of(pixels: Array, mean: Any = HALF, std: Any = HALF) -> Array:
    """Normalised [n, 3, H, W] -> what they were before, [n, H, W, 3] in steps of 1 / 255."""
    back = np.asarray(pixels, dtype=np.float64).transpose(0, 2, 3, 1) * np.array(std) + np.array(mean)
    return back * 255


def check(got: Array, expected: Array) -> None:
    assert got.dtype == np.uint8
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1 + 1e-3


NORMAL = {"image_mean": HALF, "image_std": HALF}


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_llava(height: int, width: int) -> None:
    tiling = AnyResTiling(TILE, SIDE, tuple(SIZES_LLAVA), 9)
    theirs = LlavaOnevisionImageProcessorPil(
        size={"height": TILE, "width": TILE}, image_grid_pinpoints=[list(size) for size in SIZES_LLAVA], **NORMAL
    )
    ours, image = read_image_preprocessor({}, tiling, HALF), picture(height, width)
    got = ours.prepare(image)
    check(got.pixels, bytes_of(np.asarray(theirs(image)["pixel_values"][0])))
    assert len(got.pixels) == tiling.num_parts(got.grid)
    if max(height, width) <= 1000:
        several = theirs([[image, image]])["pixel_values"][0]
        check(ours.prepare(image, only_image=False).pixels, bytes_of(np.asarray(several)))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("least", "most"), [(1, 12), (2, 6), (1, 1)])
def test_internvl(height: int, width: int, least: int, most: int) -> None:
    tiling = ClosestAspectTiling(TILE, SIDE, 2, least, most)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": TILE, "width": TILE}, crop_to_patches=True, min_patches=least, max_patches=most, **NORMAL
    )
    image = picture(height, width)
    got = read_image_preprocessor({"do_center_crop": True}, tiling, HALF).prepare(image)
    check(got.pixels, bytes_of(np.stack(theirs(image)["pixel_values"])))
    assert len(got.pixels) == tiling.num_parts(got.grid) <= tiling.max_parts


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("most", [4, 2, 6])
def test_mllama(height: int, width: int, most: int) -> None:
    tiling = FittedCanvasTiling(TILE, SIDE, most)
    theirs = MllamaImageProcessorPil(size={"height": TILE, "width": TILE}, max_image_tiles=most, **NORMAL)
    image = picture(height, width)
    got, found = read_image_preprocessor({}, tiling, HALF).prepare(image), theirs(image)
    count = found["num_tiles"][0][0]
    check(got.pixels, bytes_of(np.asarray(found["pixel_values"])[0, 0, :count]))
    assert tiling.aspect_ratio_id(got.grid) == np.asarray(found["aspect_ratio_ids"])[0, 0]
    assert got.grid.rows * got.grid.columns == count


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_paligemma(height: int, width: int) -> None:
    image = picture(height, width)
    got = read_image_preprocessor({"resample": 3}, SingleTile(TILE, SIDE), HALF).prepare(image)
    theirs = SiglipImageProcessorPil(size={"height": TILE, "width": TILE}, **NORMAL)
    check(got.pixels, bytes_of(np.stack(theirs(image)["pixel_values"])))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_gemma3(height: int, width: int) -> None:
    image = picture(height, width)
    got = read_image_preprocessor({}, PooledTile(TILE, SIDE), HALF).prepare(image)
    theirs = Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}, **NORMAL)
    check(got.pixels, bytes_of(np.stack(theirs(image)["pixel_values"])))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("most", "patch"), [(70, 8), (280, 2)])
def test_gemma4(height: int, width: int, most: int, patch: int) -> None:
    """Patches with the channels last, line by line, and black ones after them."""
    image, tiling = picture(height, width), ScaledTiling(3 * patch, 3, most)
    got = read_image_preprocessor({}, tiling, HALF).prepare(image)
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=most, patch_size=patch)(image)
    rows, columns = got.grid.rows, got.grid.columns
    assert tiling.num_embeds(got.grid) == theirs["num_soft_tokens_per_image"][0] <= most
    lines = np.asarray(theirs["pixel_values"])[0, : 9 * rows * columns] * 255
    lines = lines.reshape(rows, 3, columns, 3, patch, patch, 3).transpose(0, 2, 1, 4, 3, 5, 6)
    check(got.pixels, lines.reshape(rows * columns, 3 * patch, 3 * patch, 3))
    at = np.asarray(theirs["image_position_ids"])[0]
    assert at.max(0).tolist() == [3 * columns - 1, 3 * rows - 1]


def test_grids_of_gemma4() -> None:
    sides = [*range(1, 60), *range(60, 3000, 97), MAX_IMAGE_SIDE]
    for most, (height, width) in product((70, 280, 1120), product(sides, sides)):
        grid = ScaledTiling(48, 3, most).choose_grid(height, width)
        theirs = get_aspect_ratio_preserving_size(height, width, 16, 9 * most, 3)
        assert (grid.rows * 48, grid.columns * 48) == theirs, (most, height, width)


def published_phi3(image: Image.Image, tile: int, most: int) -> tuple[Array, Array]:
    """Tiles in steps of 255, and the whole picture, normalised with means and deviations of a half: the HD transform of
    Phi-3-Vision's image processor, but a side of 0 is one of 1."""
    upright = image.width < image.height
    lying = image.transpose(Image.Transpose.TRANSPOSE) if upright else image
    ratio, scale = lying.width / lying.height, 1
    while scale * np.ceil(scale / ratio) <= most:
        scale += 1
    wide = int((scale - 1) * tile)
    lying = lying.resize((wide, max(int(wide / ratio), 1)), Image.Resampling.BILINEAR)
    total = int(np.ceil(lying.height / tile) * tile)
    above = int((total - lying.height) / 2)
    padded = np.full((total, wide, 3), 255, np.uint8)
    padded[above : above + lying.height] = np.asarray(lying)
    padded = padded.transpose(1, 0, 2) if upright else padded
    numbers = torch.from_numpy(padded.astype(np.float32) / 255 * 2 - 1).permute(2, 0, 1)
    whole = torch.nn.functional.interpolate(numbers[None], size=(tile, tile), mode="bicubic")
    h, w = numbers.shape[1] // tile, numbers.shape[2] // tile
    cut = numbers.reshape(1, 3, h, tile, w, tile).permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, tile, tile)
    return bytes_of(cut.numpy()), whole.numpy()


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("most", [16, 4])
def test_phi3(height: int, width: int, most: int) -> None:
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"image_size": TILE, "patch_size": 14}
    config = {"architectures": ["Phi3VForCausalLM"], "hidden_size": 8, "img_processor": {"vision_config": tower}}
    said = {"num_crops": most, "image_mean": list(HALF), "image_std": list(HALF)}
    settings = VisionSettings.from_config(config, said)
    image = picture(height, width)
    got = read_image_preprocessor(said, settings.tiling, settings.normalization.mean).prepare(image)
    cut, whole = published_phi3(image, TILE, most)
    check(got.pixels, cut)
    opened = build_encoder(settings, torch.float32, torch.device("cpu")).preprocess(
        torch.from_numpy(got.pixels), got.grid
    )
    np.testing.assert_allclose(opened[:1].numpy(), whole, atol=2 / 255)
    assert len(opened) == settings.tiling.num_parts(got.grid) <= most + 1


def test_rows_are_what_is_published() -> None:
    """Of the models' cards and code: LLaVA-OneVision-7B, InternVL2-8B, Phi-3-Vision, PaliGemma2-224, Llama 3.2."""
    sizes = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
    llava = AnyResTiling(384, 27, sizes, 9)
    assert llava.num_embeds(llava.choose_grid(384, 384)) == 729 + 27 * 28
    assert llava.num_embeds(llava.choose_grid(1000, 1000, is_only_image=False)) == 730
    assert llava.max_parts == 37
    intern = ClosestAspectTiling(448, 32, 2, 1, 12)
    assert intern.choose_grid(448 * 2, 448 * 3)[:2] == (2, 3)
    assert intern.num_embeds(intern.choose_grid(448 * 2, 448 * 3)) == 7 * 256
    assert intern.max_embeds == 13 * 256
    phi3 = HDTiling(336, 24, 16)
    assert phi3.num_embeds(phi3.choose_grid(336 * 4, 336 * 4)) == 17 * 144 + 1 + 5 * 12
    assert SingleTile(224, 16).num_embeds(TileGrid(0, 0, 5, 5)) == 256
    llama = FittedCanvasTiling(560, 40, 4)
    assert llama.num_embeds(llama.choose_grid(2000, 2000)) == 6404
    sides = range(1, 6000, 97)  # plans count on most_rows: a real one, but for the bound of lines and patches apart
    for tiling in (llava, intern, phi3, SingleTile(224, 16), ScaledTiling(48, 3, 280), llama):
        found, most = (
            max(tiling.num_embeds(tiling.choose_grid(*sizes)) for sizes in product(sides, sides)),
            tiling.max_embeds,
        )
        assert found == most or (tiling is llava and 0.8 * most < found < most)


@pytest.mark.parametrize("size", [(10_000, 2), (2, 10_000)])
def test_a_long_strip_takes_no_square(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A square as wide as it is long would have 10^8 pixels."""
    canvas = Mock(wraps=preprocessor.new_canvas)
    monkeypatch.setattr(preprocessor, "new_canvas", canvas)
    ours = read_image_preprocessor({}, AnyResTiling(TILE, SIDE, tuple(SIZES_LLAVA), 9), (0.1, 0.5, 0.9))
    pixels = ours.prepare(Image.new("RGB", size, (255, 255, 255)), only_image=False).pixels
    assert tuple(pixels[0, 0, 0]) == (25, 127, 229), "the mean around it"
    areas = [height * width for (height, width, _), _ in canvas.call_args_list]
    assert max(areas) <= max(preprocessor.BAND_PIXELS, 10_000 * TILE)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_convert_rgb": "yes"}, "do_convert_rgb"),
        ({"resample": 6}, "resample"),
        ({"resample": True}, "resample"),
        ({"resample": "bicubic"}, "resample"),
    ],
)
def test_what_is_not_done_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read_image_preprocessor(said, SingleTile(TILE, SIDE), HALF)


# Families' eyes in the text plane: what users and templates write for pictures, the ids that stand for them


def test_what_stands_around_internvls_pictures() -> None:
    one = published_processor("internvl2-8b")
    assert one.normalize_placeholders("see <image> and <IMG_CONTEXT>") == "see <IMG_CONTEXT> and <IMG_CONTEXT>"
    assert {"<image>", "<img>", "</img>", "<IMG_CONTEXT>"} <= set(one.reserved_texts)
    grid = one.prepare(picture(100, 100)).grid
    ids, spans = one.expand_placeholders([93, 7, 93], [grid, grid])
    assert spans == [(1, 256), (260, 256)]
    assert (ids[0], ids[257], ids[258], ids[259]) == (91, 92, 7, 91)


def test_phi3s_pictures_are_numbered() -> None:
    one = published_processor("phi-3-vision")
    assert [one.placeholder_text(1), one.placeholder_text(12)] == ["<|image_1|>", "<|image_12|>"]
    assert one.normalize_placeholders("<|image_1|> and <|image_2|>?") == "<|image|> and <|image|>?"
    assert one.normalize_placeholders("none") == "none"
    for wrong in ("<|image_2|>", "<|image_1|><|image_1|>", "<|image_0|>", "<|image_2|><|image_1|>"):
        with pytest.raises(InputError, match=r"image \d is marked '<\|image_\d\|>': they are numbered in order"):
            one.normalize_placeholders(wrong)
    assert any(word in "so <|image_7|>" for word in one.reserved_texts), "users can't write one"


def test_paligemmas_pictures_lead() -> None:
    one: Any = published_processor("paligemma2-10b")
    grid = one.prepare(picture(50, 80)).grid
    for given in ([2, 90, 5, 6], [90, 2, 5, 6], [2, 5, 90, 6], [2, 90, 5, 6, 10]):
        ids, spans = one.expand_placeholders(given, [grid])
        assert spans == [(0, 256)]
        assert ids == [90] * 256 + [2, 5, 6, 10]
    ids, spans = one.expand_placeholders([2, 90, 90, 5], [grid, grid])
    assert spans == [(0, 256), (256, 256)]
    assert ids[512:] == [2, 5, 10]


def test_an_image_of_gemma3_is_between_empty_lines() -> None:
    one: Any = published_processor("gemma-3-4b")
    assert one.normalize_placeholders("a<start_of_image>b") == "a\n\n<image_soft_token>\n\nb"
    ids, spans = one.expand_placeholders([5, 96, 6], [one.prepare(picture(50, 80)).grid])
    assert spans == [(2, 256)]
    assert ids == [5, 95, *[96] * 256, 97, 6]


def test_an_image_of_gemma4_is_between_marks() -> None:
    one: Any = published_processor("gemma-4-31b")
    assert one.normalize_placeholders("a<|image|>b") == "a<|image|>b"
    shown = one.prepare(picture(50, 80))
    rows = shown.shape[0]
    ids, spans = one.expand_placeholders([5, 94, 6], [shown.grid])
    assert (rows, shown.grid[:2]) == (273, (13, 21))
    assert spans == [(2, rows)]
    assert ids == [5, 98, *[94] * rows, 99, 6]


def test_what_pictures_depend_on_is_told() -> None:
    assert len({published_processor(name).cache_settings for name in TEXT_CONFIGS}) == len(TEXT_CONFIGS)
    other = read_image_preprocessor({**PREPROCESSOR_CONFIGS["llava-onevision-7b"], "resample": 2},
    published_processor("llava-onevision-7b").preprocessor.tiling,
                             (0.5, 0.5, 0.5))  # fmt: skip
    placeholder = read_placeholder("llava", WORDS.get)
    assert (
        ImageProcessor(other, placeholder, PIECES.__getitem__).cache_settings
        != published_processor("llava-onevision-7b").cache_settings
    )


def test_settings_in_keys_have_no_names_of_classes_or_fields() -> None:
    """Keys of cached images must stay if classes or fields are renamed, so the texts are literals."""

    def settings(tiling: ImageTiling, background: tuple[int, int, int] = (127, 127, 127)) -> str:
        made = ImagePreprocessor(tiling, 3, background)
        return ImageProcessor(made, read_placeholder("llava", WORDS.get), PIECES.__getitem__).cache_settings

    end = "resample 3 background 127 127 127"
    tilings: dict[str, ImageTiling] = {
        f"single 56 4 {end}": SingleTile(56, 4),
        f"pooled 56 4 {end}": PooledTile(56, 4),
        f"scaled 48 3 280 {end}": ScaledTiling(48, 3, 280),
        f"closest 56 4 2 1 12 1 {end}": ClosestAspectTiling(56, 4, 2, 1, 12),
        f"closest 56 4 2 1 12 0 {end}": ClosestAspectTiling(56, 4, 2, 1, 12, thumbnail=False),
        f"fitted 56 4 9 {end}": FittedCanvasTiling(56, 4, 9),
        f"hd 56 4 9 {end}": HDTiling(56, 4, 9),
        f"hd 56 5 9 {end}": HDTiling(56, 5, 9),
        f"anyres 56 4 ((56 112) (112 56)) 9 {end}": AnyResTiling(56, 4, ((56, 112), (112, 56)), 9),
    }
    assert {text: settings(tiling) for text, tiling in tilings.items()} == {text: text for text in tilings}
    assert {type(tiling) for tiling in tilings.values()} == set(TILING_NAMES) == set(preprocessor.TILE_CUTTERS)
    assert settings(HDTiling(56, 4, 9), (0, 1, 2)) == "hd 56 4 9 resample 3 background 0 1 2"


# Placeholders


def test_marks_in_order_and_by_number() -> None:
    llava, phi3 = (read_placeholder(kind, WORDS.get) for kind in ("llava", "phi3"))
    assert llava.find_markers("a<image>b<image>") == [(1, 8, 0), (9, 16, 1)]
    assert llava.find_markers("a<|image_1|>") == []
    text = "<|image_2|>\n<|image_1|> and <|image_12|> but <|image_|> <|image_x|>"
    assert [text[begin:end] for begin, end, _ in phi3.find_markers(text)] == [
        "<|image_2|>",
        "<|image_1|>",
        "<|image_12|>",
    ]
    assert [number for _, _, number in phi3.find_markers(text)] == [1, 0, 11]
    assert phi3.find_markers(f"<|image_{'1' * 7}|>") == [], "numbers are short"
    intern = read_placeholder("internvl", WORDS.get)
    assert intern.find_markers("<image>\n<IMG_CONTEXT>") == [(0, 7, 0), (8, 21, 1)]


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_a_tokenizer_without_them(kind: str) -> None:
    with pytest.raises(StartupError, match="tokenizer has no"):
        read_placeholder(kind, lambda text: None)


def test_another_id_than_the_configs() -> None:
    assert read_placeholder("llava", WORDS.get, 90).token == 90
    assert read_placeholder("llava", lambda text: None, 11).token == 11, "an id beyond the tokenizer's vocabulary"
    with pytest.raises(StartupError, match="<image> is token 90 of the tokenizer, and config"):
        read_placeholder("llava", WORDS.get, 11)
