"""/v1/chat/completions/batch: several conversations, each answered as it is alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from asking import refusal

from quire.server.request_models import MAX_PROMPTS
from quire.server.response_models import ChatCompletion

TALKS: list[Any] = [
    [{"role": "user", "content": "once upon a time"}],
    [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "well"}],
]
PATH = "/v1/chat/completions/batch"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"echo": True, "best_of": 2, "tool_choice": "none"},
        {"response_format": {"type": "json_object"}, "max_tokens": 200},
    ],
)
def test_each_is_answered_as_alone(http: httpx.Client, more: dict[str, Any]) -> None:
    asked = {"seed": 3, "max_tokens": 6, **more}
    alone = [http.post("/v1/chat/completions", json={**asked, "messages": talk}).json() for talk in TALKS]
    found = http.post(PATH, json={**asked, "messages": TALKS}).json()
    assert found["choices"] == [{**answer["choices"][0], "index": at} for at, answer in enumerate(alone)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(answer["usage"][name] for answer in alone)
    ChatCompletion.model_validate(found, strict=True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"beam_width": 2}, "beam_width"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": TALKS[0]}, "messages"),
        ({"messages": [*TALKS, []]}, "messages"),
        ({"messages": [*TALKS, [{"role": "user", "content": "a" * 1000}]]}, "messages"),
        ({"messages": TALKS[:1] * (MAX_PROMPTS + 1)}, "messages"),
    ],
)
def test_what_it_does_not_have(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    error = refusal(http, PATH, {"messages": TALKS, "max_tokens": 2, **more})
    assert error["param"] == param
    assert len(more.get("messages", ())) != 3 or "(conversation 2)" in error["message"]
