"""The bundled vision model as committed: small enough, read by transformers, and right about held-out pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration

import quire

ROOT = Path(__file__).parents[1]
FOLDER = Path(quire.__file__).parent / "assets" / "tiny-vision"
REPORT = ROOT / "docs" / "measurements" / "tiny_vision.json"
sys.path.insert(0, str(ROOT / "tools"))  # scripts, not a part of the package

import tiny_pictures  # noqa: E402
import tiny_vision_data  # noqa: E402
import tiny_vision_model  # noqa: E402
import train_tiny_vision  # noqa: E402


def test_it_fits_in_six_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000
    assert {weight.dtype for weight in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_transformers_reads_it():
    model, info = LlavaOnevisionForConditionalGeneration.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids(tiny_vision_model.IMAGE)
    assert len(tokenizer) <= model.config.text_config.vocab_size


def test_its_report_is_what_the_docs_say():
    judged = json.loads(REPORT.read_text(encoding="utf-8"))["judged"]
    assert train_tiny_vision.share(judged["held out"]) >= 0.91
    assert train_tiny_vision.share(judged["fresh"]) >= 0.99


def test_held_out_pictures_are_answered_right():
    model = tiny_vision_model.load(FOLDER).eval()
    rows, turns = tiny_vision_data.judged_rows(77, 96, tiny_pictures.HELD_OUT)
    kinds, wrong = train_tiny_vision.judge(model, rows, turns, "cpu")
    assert train_tiny_vision.share(kinds) >= 0.85, wrong  # of few, so that a little below the whole's is allowed
    assert train_tiny_vision.as_generated(model, 78, 4, "cpu") >= 3


def test_without_a_picture_it_asks_for_one():
    model = tiny_vision_model.load(FOLDER).eval()
    kinds, wrong = train_tiny_vision.judge(model, *tiny_vision_data.without_pictures(79, 64), "cpu")
    assert train_tiny_vision.share(kinds) >= 0.95, wrong
