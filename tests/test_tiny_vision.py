"""The bundled vision model as committed: small enough, read by transformers, and right about held-out pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert train_tiny_vision.share(judged["held out"]) >= 0.95
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


def test_answers_are_misread_by_whole_words_and_within_a_kind():
    torch.manual_seed(0)
    config = SimpleNamespace(pad_token_id=0, vision_config=SimpleNamespace(hidden_size=8))
    student = train_tiny_vision.Student(SimpleNamespace(config=config))
    said = (
        tiny_vision_data.shared_tokenizer()
        .encode("There are two red stars at the top left.", add_special_tokens=False)
        .ids
    )
    ids = torch.tensor([said * 2] * 500)
    answer = (torch.arange(len(said) * 2) >= len(said)).long().expand_as(ids)
    read = student.misread({"ids": ids, "answer": answer})
    assert torch.equal(read[:, : len(said)], ids[:, : len(said)]), "questions are read as they are"
    read, ids = read[:, len(said) :], ids[:, len(said) :]
    missed, begins = read == config.pad_token_id, student.begins[ids]
    assert torch.equal(missed[:, 1:][~begins[:, 1:]], missed[:, :-1][~begins[:, 1:]]), "a word lacks none of its tokens"
    assert 0.07 < missed[:, 0].float().mean() < 0.13
    other = (read != ids) & ~missed
    assert all(new in student.likes[old][: student.sizes[old]] for old, new in zip(ids[other], read[other]))
    assert other.any(0).sum() >= 4, "a number, a colour, a shape, a place"
