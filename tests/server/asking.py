"""What tests of requests' fields have in common: asking the echo server, and what it must draw."""

from __future__ import annotations

import json
from typing import Any

import httpx
from echo_service import MAX_LEN, VOCAB

from quire.sim.echo import expected
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.seeds import branch_seed

TALK = [{"role": "user", "content": "once upon a time"}]


def tokens_of(prompt: list[int], seed: int, branch: int, count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return expected(prompt, params, branch_seed(seed, branch), vocab_size=VOCAB, max_len=MAX_LEN)


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def refusal(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def ids_of(http: httpx.Client, **given: Any) -> list[int]:
    answer = http.post("/tokenize", json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]
