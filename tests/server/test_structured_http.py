"""Structured output over HTTP: every way to ask for it, every refusal with its place; what explodes disturbs nobody.

The echo draws tokens by hashing: what it says is of the asked form only because masks leave nothing else.
"""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import echo_service
import httpx
import jsonschema
import pytest
from echo_service import Placement

SCHEMA = {
    "type": "object", "required": ["title", "pages", "kinds"], "additionalProperties": False,
    "properties": {"title": {"type": "string", "maxLength": 12},
                   "pages": {"type": "integer", "minimum": 1, "maximum": 900},
                   "kinds": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3}},
}  # fmt: skip
TALK = [{"role": "user", "content": "a quire"}]
BOMB = {"allOf": [{"type": "integer", "multipleOf": number} for number in (5, 7, 11, 13, 17, 19, 23)]}
LATE = 40  # seconds; making a grammar of that takes minutes of a processor
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"enum": [1]}, "end": "</f>"}],
    "triggers": ["<f="],
}


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return http.post(path, json={"max_tokens": 150, "temperature": 1, **body})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", answer.text
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "way",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    ],
)
@pytest.mark.parametrize("place", ["messages", "prompt"])
def test_schemas(http: httpx.Client, way: dict[str, Any], place: str, seed: int) -> None:
    given = {"messages": TALK} if place == "messages" else {"prompt": "once"}
    jsonschema.validate(json.loads(text_of(ask(http, seed=seed, **given, **way))), SCHEMA)


def test_other_forms(http: httpx.Client) -> None:
    assert re.fullmatch("[a-c]{2}-[0-9]{3}", text_of(ask(http, prompt="a", guided_regex="[a-c]{2}-[0-9]{3}")))
    assert text_of(ask(http, prompt="a", guided_choice=["quire", 'page\n"two" é'])) in ("quire", 'page\n"two" é')
    assert re.fullmatch("no[0-9]", text_of(ask(http, prompt="a", guided_grammar='start: "no" /[0-9]/')))
    assert re.fullmatch("x+y", text_of(ask(http, messages=TALK, structured_outputs={"regex": "x{1,4}y"})))
    plain = ask(http, prompt="a", seed=1, max_tokens=8).json()["choices"]
    assert ask(http, prompt="a", seed=1, max_tokens=8, response_format={"type": "text"}).json()["choices"] == plain
    assert ask(http, prompt="a", seed=1, max_tokens=8, structured_outputs={"json": None}).json()["choices"] == plain


def test_structural_tags(http: httpx.Client) -> None:
    """Text is free; a tag that begins has its schema, and its end."""
    for seed in range(6):
        answer = ask(http, prompt="once", seed=seed, response_format=TAG, max_tokens=120,
                     logit_bias={str(ord("<") - 33 + 3): 10})  # fmt: skip
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        for piece in text.split("<f=")[1:]:
            assert "a>1</f>".startswith(piece[:7]) or piece.startswith("a>1</f>"), text


def test_not_enforced_keywords_can_be_let_pass(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert ask(http, prompt="a", response_format=form).status_code == 400
    form["json_schema"]["strict"] = False  # type: ignore[index]
    assert len(json.loads(text_of(ask(http, prompt="a", response_format=form, seed=2)))) <= 3


def test_objects_have_no_other_members(http: httpx.Client) -> None:
    """However a schema is given, strict or not; where it says so they have."""
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
               for strict in (True, False, None)]  # fmt: skip
    for asked in (*({"response_format": one} for one in formats), {"guided_json": schema},
                  {"guided_json": json.dumps(schema)}, {"structured_outputs": {"json": schema}}):  # fmt: skip
        for seed in range(4):
            assert json.loads(text_of(ask(http, prompt="a", **asked, seed=seed))) == {"a": 1}
    opened = {**schema, "additionalProperties": {"const": 2}}
    answers = [ask(http, prompt="a", guided_json=opened, seed=seed).json()["choices"][0] for seed in range(8)]
    assert any('"a":1,' in "".join(answer["text"].split()) for answer in answers)


def test_what_explodes_disturbs_nobody(placement: Placement) -> None:
    """While grammars that can't be had are refused, others' tokens come on, and the same ones."""
    bad = [
        {"guided_json": BOMB},
        {"guided_regex": "a{1000000000}"},
        {"guided_regex": r"(\pL{1,50}\s?){1,400}"},
        {"guided_grammar": "start: " + " | ".join(f'"w{i}"' for i in range(15_000))},
        {"guided_json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(2000)]}},
    ]
    model = echo_service.built(echo_service.Echo(pause=0.01))
    begun = threading.Event()
    with echo_service.serving(model, placement=placement) as running, ThreadPoolExecutor(5) as pool:
        http = running.http

        def tokens() -> tuple[str, list[float]]:
            seen, times = [], []
            with http.stream("POST", "/v1/completions", json={
                "prompt": "a", "seed": 3, "max_tokens": 120, "stream": True, "ignore_eos": True
            }) as answer:  # fmt: skip
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.monotonic())
                        seen.append(json.loads(line[6:])["choices"][0]["text"])
                        begun.set()
            return "".join(seen), times

        def refused(way: dict[str, Any]) -> tuple[float, float]:
            began = time.monotonic()
            assert ask(http, prompt="a", **way).status_code == 400
            return began, time.monotonic()

        quiet, _ = tokens()
        begun.clear()
        busy = pool.submit(tokens)
        assert begun.wait(20)
        (began, ended), *_ = [one.result() for one in [pool.submit(refused, way) for way in bad]]
        disturbed, times = busy.result()
        assert disturbed == quiet
        assert ended - began < LATE
        assert sum(began < at < ended for at in times) > 3, "others waited"
        assert text_of(ask(http, prompt="a", guided_regex="ab")) == "ab"
        trial = running.llm.prompts.text_backend.grammars._trial_process._process
        assert trial.poll() is None
    assert trial.poll() is not None, "it ends with the server"
