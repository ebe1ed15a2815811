"""A completion's log-probabilities: every token that was asked for has an entry of its own, and all of it is JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from asking import refusal
from echo_service import MAX_LEN, Echo, built, serving, tokenizer

from quire.protocol.step_plan import SeqSlice, SliceResult

TALK = [{"role": "user", "content": "a"}]
FACE = "\U0001f642 a"


class Undefined(Echo):
    """An Echo whose model gives NaN for every token of a prompt."""

    def compute_row(self, row: SeqSlice) -> SliceResult:
        sampled = super().compute_row(row)
        return sampled._replace(
            prompt_logprobs=tuple(top._replace(logprob=math.nan) for top in sampled.prompt_logprobs)
        )


def test_tokens_of_one_text_do_not_hide_each_other(http: httpx.Client) -> None:
    ids = tokenizer().encode(FACE)
    asked = {"prompt": FACE, "echo": True, "logprobs": 20, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    [choice] = http.post("/v1/completions", json=asked).json()["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"][: len(ids)] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", " a"]
    for token, logprob, top in zip(scores["tokens"][1:], scores["token_logprobs"][1:], scores["top_logprobs"][1:]):
        assert top[token] == logprob
        assert len(top) in (20, 21)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"best_of": 2}, {"logprobs": None, "prompt_logprobs": 1}])
def test_a_prompt_of_the_model_s_length_is_scored(http: httpx.Client, more: dict[str, Any]) -> None:
    asked = {"prompt": [5] * MAX_LEN, "echo": True, "logprobs": 1, **more}
    answer = http.post("/v1/completions", json={**asked, "max_tokens": 0}).json()
    for choice in answer["choices"]:
        scores = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else choice["prompt_logprobs"]
        assert (len(scores), scores[0], None in scores[1:]) == (MAX_LEN, None, False)
        assert choice["finish_reason"] == "length"
    assert len(answer["choices"]) == more.get("n", 1)
    assert answer["usage"]["completion_tokens"] == 0
    for prompt, max_tokens in (([5] * MAX_LEN, 1), ([5] * (MAX_LEN + 1), 0)):
        error = refusal(http, "/v1/completions", {**asked, "prompt": prompt, "max_tokens": max_tokens})
        assert error["message"].startswith("This model's maximum context length is")


def test_nothing_is_asked_for(http: httpx.Client) -> None:
    """At least one token, unless the prompt is echoed."""
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": True, "beam_width": 2}):
        assert refusal(http, "/v1/completions", {"prompt": "a", **body})["param"] == "max_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        assert refusal(http, "/v1/chat/completions", {"messages": TALK, "echo": True, name: 0})["param"] == name


def test_what_is_not_a_number_is_null() -> None:
    with serving(built(Undefined()), placement="thread") as running:
        for path, asked in (
            ("completions", {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0}),
            ("completions", {"prompt": [5, 6, 7], "prompt_logprobs": 2, "max_tokens": 1}),
            ("chat/completions", {"messages": TALK, "prompt_logprobs": 1, "max_tokens": 1}),
        ):
            answer = httpx.post(f"{running.url}/v1/{path}", json=asked)
            said = json.loads(answer.text, parse_constant=lambda name: 1 / 0)
            [choice] = said["choices"]
            if "echo" in asked:
                assert choice["logprobs"]["token_logprobs"] == [None] * 3
            else:
                scores = choice.get("prompt_logprobs") or said["prompt_logprobs"]
                assert all(None in [entry["logprob"] for entry in top.values()] for top in scores[1:])
