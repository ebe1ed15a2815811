"""Prompts that are cut, and conversations: what is sent is what a sliced prompt or the template gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import echo_service
import httpx
import pytest
from asking import TALK, ids_of, refusal, tokens_of
from echo_service import MAX_LEN, Servers, tokenizer
from tokenizers.processors import TemplateProcessing

from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Truncation


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_truncated_prompt_is_a_sliced_one(http: httpx.Client, side: str | None) -> None:
    chance = random.Random(3)
    given: dict[str, Any] = {} if side is None else {"truncation_side": side}
    whole = ids_of(http, messages=TALK)
    for _ in range(20):
        ids = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 60))]
        keep = chance.randrange(1, 60)
        cut = ids[:keep] if side == "right" else ids[-keep:]
        asked = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True}
        answer = http.post("/v1/completions", json={**asked, **given, "prompt": ids, "truncate_prompt_tokens": keep})
        [choice] = answer.json()["choices"]
        assert choice["prompt_token_ids"] == cut
        assert choice["token_ids"] == tokens_of(cut, 1, 0, 3)
        text = "once upon a time there was a quire " * 3
        words = ids_of(http, prompt=text)
        assert ids_of(http, prompt=text, truncate_prompt_tokens=keep, **given) == (
            words[:keep] if side == "right" else words[-keep:]
        )
        chat = {**asked, **given, "messages": TALK, "truncate_prompt_tokens": keep}
        found = http.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"]
        assert found == (whole[:keep] if side == "right" else whole[-keep:])
        assert found == ids_of(http, messages=TALK, truncate_prompt_tokens=keep, **given)


def test_truncating_to_what_fits(http: httpx.Client) -> None:
    long = [1 + at % 300 for at in range(1000)]
    asked = {"prompt": long, "truncate_prompt_tokens": -1, "return_token_ids": True, "ignore_eos": True}
    for count in (1, 7):
        [choice] = http.post("/v1/completions", json={**asked, "max_tokens": count}).json()["choices"]
        assert choice["prompt_token_ids"] == long[-(MAX_LEN - count) :]
        assert len(choice["token_ids"]) == count
    echoed = http.post("/v1/completions", json={**asked, "truncate_prompt_tokens": 4, "echo": True, "max_tokens": 0})
    assert echoed.json()["choices"][0]["text"] == tokenizer().decode(long[-4:])


# Conversations


def test_a_final_message_that_goes_on(http: httpx.Client) -> None:
    said = [*TALK, {"role": "assistant", "content": "there was"}]
    text = "<|im_start|>user\nonce upon a time<|im_end|>\n<|im_start|>assistant\nthere was"
    wanted = tokenizer().encode(text)
    assert ids_of(http, messages=said, continue_final_message=True) == wanted
    asked = {"messages": said, "continue_final_message": True, "max_tokens": 2, "return_token_ids": True}
    assert http.post("/v1/chat/completions", json=asked).json()["prompt_token_ids"] == wanted


def test_effort_is_for_templates_that_read_it(servers: Servers) -> None:
    """Clients send it to any model, so it is named, and refused only by a strict server."""
    body = {"messages": TALK, "reasoning_effort": "high"}
    for strict in (False, True):
        http = servers(strict=strict).http
        for path in ("/tokenize", "/v1/chat/completions"):
            if strict:
                assert refusal(http, path, body)["param"] == "reasoning_effort"
            else:
                assert "ignored: reasoning_effort" in http.post(path, json=body).headers["warning"]
    model = echo_service.built()
    reading = ChatTemplate("{{ messages[0].content }}{{ reasoning_effort }}", {})
    with echo_service.serving(model._replace(chat_template=reading)) as running:
        http = running.http
        assert ids_of(http, messages=TALK, reasoning_effort="high") == tokenizer().encode("once upon a timehigh")
        assert "warning" not in http.post("/v1/chat/completions", json=body).headers


@pytest.fixture
def bos() -> Iterator[httpx.Client]:
    """A server whose tokenizer puts <|im_start|> before each text."""
    backend = tokenizer()._backend
    adding = type(backend).from_str(backend.to_str())
    special = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    adding.post_processor = TemplateProcessing(single=f"{special[0]} $A", special_tokens=[special])
    names = {"eos_token": "<|end|>", "bos_token": special[0]}
    model = echo_service.built()._replace(tokenizer=Tokenizer(adding, names))
    with echo_service.serving(model) as running:
        yield running.http


def test_special_tokens_of_a_chat_are_the_templates(bos: httpx.Client) -> None:
    """The tokenizer's are added on request only."""
    plain = tokenizer().encode("<|im_start|>user\nonce upon a time<|im_end|>\n<|im_start|>assistant\n")
    for asked, wanted in ((None, plain), (False, plain), (True, [plain[0], *plain])):
        body = {"messages": TALK, "add_special_tokens": asked}
        assert ids_of(bos, **body) == wanted
        answer = bos.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True})
        assert answer.json()["prompt_token_ids"] == wanted


def test_two_bos_tokens_are_reported(bos: httpx.Client) -> None:
    """One that a completion's text names, after the one that the tokenizer puts before it."""
    for more, warned in (({}, True), ({"add_special_tokens": False}, False)):
        answer = bos.post("/v1/completions", json={"prompt": "<|im_start|>once", "max_tokens": 1, **more})
        assert ("two BOS tokens" in answer.headers.get("Warning", "")) is warned
