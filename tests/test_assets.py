"""The bundled model as committed: small enough, readable by transformers, and it has learned what its report says."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import quire

ROOT = Path(__file__).parents[1]
ASSETS = Path(quire.__file__).parent / "assets"
NAMES = ("tiny", "tiny-draft")
sys.path.insert(0, str(ROOT / "tools"))  # the training tools are scripts, not a part of the package

import chat_score  # noqa: E402
import tiny_model  # noqa: E402
import tiny_story  # noqa: E402
import tiny_text  # noqa: E402
import train_tiny  # noqa: E402
import train_tiny_vision  # noqa: E402
from tiny_corpus import Tokens, encode_corpus, train_tokenizer  # noqa: E402

QUESTIONS = train_tiny.read_questions()
REPORT = ROOT / "docs" / "measurements" / "tiny_model.json"
SCORES = ROOT / "docs" / "measurements" / "tiny_sampling.json"
VISION_REPORT = ROOT / "docs" / "measurements" / "tiny_vision.json"


def load(name: str):
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(ASSETS / name)


def messages(question: dict) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(question["turns"])]
    return [{"role": "system", "content": question["system"]}, *said] if "system" in question else said


def test_both_are_small_and_have_one_tokenizer():
    assert sum(path.stat().st_size for name in NAMES for path in (ASSETS / name).iterdir()) <= 16_000_000
    first, second = ((ASSETS / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert first == second


@pytest.mark.parametrize(("name", "least", "most"), [("tiny", 2e6, 8e6), ("tiny-draft", 0.5e6, 1e6)])
def test_size_and_context(name: str, least: float, most: float):
    model, tokenizer = load(name)
    assert least <= model.num_parameters() <= most
    assert model.config.max_position_embeddings == 4096
    assert len(tokenizer) <= model.config.vocab_size
    ends = tokenizer.convert_tokens_to_ids([tiny_text.END, tiny_text.END_OF_TEXT])
    assert model.generation_config.eos_token_id == ends
    assert {weight.dtype for weight in load_file(ASSETS / name / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_generation_config_asks_for_what_answers_as_well_as_any(name: str, caplog: pytest.LogCaptureFixture):
    generation = GenerationConfig.from_pretrained(ASSETS / name)
    generation.validate(strict=True)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]
    assert generation.do_sample
    chosen = {"temperature": generation.temperature}
    assert chosen == {"temperature": tiny_model.TEMPERATURE}
    with quire.LLM(name, dtype="float32") as llm:
        assert llm.prompts.defaults == chosen
    grid = json.loads(SCORES.read_text(encoding="utf-8"))["models"][name]["grid"]
    totals = {json.dumps(row["setting"]): row["committed"]["right"] + row["unseen"]["right"] for row in grid}
    assert totals[json.dumps(chosen)] >= 0.98 * max(totals.values())
    told = next(row["stories"] for row in grid if row["setting"] == chosen)
    assert told["different_a_request"] > 1
    assert told["unknown_words_in_1000"] == 0


def test_the_readme_s_chat_is_answered_well():
    right = {"Hello!": "Hello! How can I help you?", "What is the colour of the sky?": "The sky is blue."}
    with quire.LLM("tiny", dtype="float32", threads=1) as llm:
        for asked, answer in right.items():
            said = [[{"role": "user", "content": asked}]] * 20
            params = [llm.prompts.make_params(seed=seed, max_tokens=20) for seed in range(20)]
            given = llm.chat(said, params, use_tqdm=False)
            assert {one.outputs[0].text for one in given} == {answer}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}])
def test_a_story_follows_other_turns_and_other_stories(options: dict[str, float]):
    """Its second and third turns are stories of usual length, and the story told before is not told again."""
    first = ("Tell me a story", "Write a poem about the sea.", "What is the capital of France?", "Hello!")
    later = ("Tell me a story", "Tell me another story", "Another one, please", "Tell me a story about a cat")
    with quire.LLM("tiny", dtype="float32", threads=1) as llm:
        params = llm.prompts.make_params(seed=0, max_tokens=300, **options)
        chats = [[{"role": "user", "content": opening}] for opening in first for _ in later]
        for turn in range(3):
            answers = [one.outputs[0].text for one in llm.chat(chats, params, use_tqdm=False)]
            if turn > 0:
                assert min(len(answer.split()) for answer in answers) >= 60
                assert all(answer not in [one["content"] for one in chat] for chat, answer in zip(chats, answers))
            for at, (chat, answer) in enumerate(zip(chats, answers)):
                ask = later[(at + turn) % len(later)]
                chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": ask}]


def test_every_text_survives_a_round_trip():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    text = "".join(map(chr, (*range(1, 0x800), 0x20AC, 0xFFFD, 0x1F600, 0x10FFFF)))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def test_the_documents_tables_are_those_of_the_reports():
    text = (ROOT / "docs" / "tiny-model.md").read_text(encoding="utf-8")
    reports = ((train_tiny, REPORT), (chat_score, SCORES), (train_tiny_vision, VISION_REPORT))
    printed = " ".join(tool.markdown(json.loads(path.read_text(encoding="utf-8"))) for tool, path in reports)
    shown = re.findall(r"\d[\d,]*\.\d+", " ".join(re.findall(r"^\| (?!`).*", text, re.MULTILINE)))
    assert len(shown) > 40
    assert set(shown) - set(re.findall(r"\d[\d,]*\.\d+", printed)) == set()


@pytest.mark.parametrize("question", QUESTIONS[:3] + QUESTIONS[26:30])
def test_chat_template_is_the_form_of_the_training_text(question: dict):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    said = messages(question)
    rendered = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    plain = jinja2.Environment(autoescape=False).from_string(tokenizer.chat_template)
    assert rendered == plain.render(messages=said, bos_token=tokenizer.bos_token, add_generation_prompt=True)
    assert rendered == train_tiny.prompt_of(question)
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in said]
    assert rendered == tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert tokenizer(rendered, add_special_tokens=False).input_ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(jinja2.TemplateError, match="role must be"):
        tokenizer.apply_chat_template([{"role": "pirate", "content": "Arr"}], tokenize=False)


def test_it_answers_four_of_five_chat_questions():
    model, tokenizer = load("tiny")
    right = 0
    for question in QUESTIONS:
        inputs = tokenizer.apply_chat_template(
            messages(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += train_tiny.accepts(question, answer)
    assert len(QUESTIONS) == 50
    assert right >= 40


def test_held_out_loss_is_below_the_n_grams():
    """On text drawn afresh with the committed tokenizer; the n-grams' numbers are the report's, from far more text."""
    model, tokenizer = load("tiny")
    held_out = json.loads(REPORT.read_text(encoding="utf-8"))["held_out"]
    for name, split in train_tiny.SPLITS.items():
        held = encode_corpus(tokenizer.backend_tokenizer, 15_000, 950, frozenset(), split)
        ids = torch.from_numpy(held.ids[:2001].astype(np.int64))[None]
        with torch.inference_mode():
            loss = float(model(ids, labels=ids).loss)
        reported = held_out[name]
        assert max(loss, reported["tiny"]) < min(reported["trigram"], reported["bigram"]), name
        assert loss == pytest.approx(reported["tiny"], rel=0.3, abs=0.1), name


def test_training_text_holds_no_question_and_no_unseen_pair():
    without = frozenset(train_tiny.prompt_of(question, system=False) for question in QUESTIONS)
    for document in tiny_text.draw_documents(1000, 300_000, without=without):
        assert not any(question in document for question in without)
    rng = random.Random(1)
    for _ in range(300):
        story = tiny_story.tell_story(rng)
        assert not tiny_story.is_unseen(story.hero.name, story.thing.split()[1])
        assert story.thing in story.text


def test_a_short_training_lowers_the_loss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_tiny, "SHORT", 128)
    monkeypatch.setattr(train_tiny, "LONG", 256)
    tokenizer = train_tokenizer(512, 50_000, frozenset())
    tokens: Tokens = encode_corpus(tokenizer, 100_000, 1000, frozenset())
    shape = tiny_model.Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, vocab=512)
    _, facts = train_tiny.train("smoke", shape, tokens, "cpu", 0.0, 60, 1024, 5e-3)
    assert facts["steps"] == 60
    assert facts["curve"][-1][2] < facts["curve"][0][2] - 1.5
