"""The bundled vision model as committed: small enough, read by transformers, and right about held-out pictures. These
differ from training's, and are prepared and read as transformers does it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

import quire

ROOT = Path(__file__).parents[1]
FOLDER = Path(quire.__file__).parent / "assets" / "tiny-vision"
REPORT = ROOT / "docs" / "measurements" / "tiny_vision.json"
sys.path.insert(0, str(ROOT / "tools"))  # scripts, not a part of the package

import tiny_pictures as pictures  # noqa: E402
import tiny_tiles as tiles  # noqa: E402
import tiny_vision_data as data  # noqa: E402
import tiny_vision_model as vision  # noqa: E402
import train_tiny_vision  # noqa: E402


def test_it_fits_in_six_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000
    assert {weight.dtype for weight in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_transformers_reads_it():
    model, info = LlavaOnevisionForConditionalGeneration.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids(vision.IMAGE)
    assert len(tokenizer) <= model.config.text_config.vocab_size


def test_its_report_is_what_the_training_reached():
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    judged = report["judged"]
    assert train_tiny_vision.share(judged["held out"]) >= 0.95
    assert train_tiny_vision.share(judged["fresh"]) >= 0.99


def test_held_out_pictures_are_answered_right():
    model = vision.load(FOLDER).eval()
    rows, turns = data.judged_rows(77, 96, pictures.HELD_OUT)
    kinds, wrong = train_tiny_vision.judge(model, rows, turns, "cpu")
    assert train_tiny_vision.share(kinds) >= 0.85, wrong  # of few, so that a little below the whole's is allowed
    assert train_tiny_vision.as_generated(model, 78, 4, "cpu") >= 3


def test_without_a_picture_it_asks_for_one():
    model = vision.load(FOLDER).eval()
    kinds, wrong = train_tiny_vision.judge(model, *data.without_pictures(79, 64), "cpu")
    assert train_tiny_vision.share(kinds) >= 0.95, wrong


def test_held_out_pictures_are_unlike_training_s():
    train, held = ([*pictures.draw_pictures(9, 300, split)] for split in (pictures.TRAIN, pictures.HELD_OUT))
    for of in (lambda p: p.owners.shape, lambda p: (p.ground, p.pattern)):
        assert not {of(picture) for picture in train} & {of(picture) for picture in held}
    pairs = {(group.colour, group.shape) for picture in train for group in picture.groups}
    triples = {(group.number, group.shape, group.place) for picture in train for group in picture.groups}
    for picture in held:
        new = [g for g in picture.groups if (g.colour, g.shape) not in pairs or (g[0], *g[2:]) not in triples]
        assert new, picture.groups
    assert len(pairs) == len(pictures.COLOURS) * len(pictures.SHAPES) * 7 // 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision.save(vision.build(3), folder)
    return folder


def test_prepared_and_read_as_transformers_does(saved: Path):
    theirs = LlavaOnevisionForConditionalGeneration.from_pretrained(saved, dtype=torch.float32).eval()
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(saved)
    ours, image = vision.load(saved).eval(), theirs.config.image_token_id
    grids = set()
    for height, width in ((31, 47), (48, 48), (97, 61), (61, 97), (60, 150), (300, 121), (57, 200), (224, 224)):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
        cut, places = tiles.tiles_of(pixels), tiles.features_of(height, width)
        given = processor(Image.fromarray(pixels), return_tensors="pt")
        shown = (torch.from_numpy(cut).permute(0, 3, 1, 2).float() / 255 - tiles.MEAN) / tiles.STD
        torch.testing.assert_close(given["pixel_values"][0], shown, atol=1e-6, rtol=0)
        ids = torch.tensor([[0, 3, *[image] * len(places), 300, 5, 4]])
        feature = torch.full_like(ids, -1)
        feature[0, 2:-3] = torch.from_numpy(places)
        padded = torch.zeros(1, tiles.TILES, tiles.TILE, tiles.TILE, 3)
        padded[0, : len(cut)] = torch.from_numpy(cut)
        with torch.inference_mode():
            want = theirs(ids, pixel_values=given["pixel_values"], image_sizes=given["image_sizes"]).logits
            got = vision.logits_at(ours, vision.read(ours, ids, feature, vision.see(ours, padded)))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        grids.add(tiles.best_grid(height, width))
    assert grids == set(tiles.GRIDS)
