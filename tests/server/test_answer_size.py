"""An answer has a size: its product of n, prompts, max_tokens and logprobs is bounded before anything is queued, a
prompt's part is written once, and the event loop turns while a long answer is written."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import echo_service
import httpx
import pytest
from asking import TALK
from echo_service import MAX_LEN, Servers
from waiting import wait_until

import quire.server.answer_size as size_limits
from quire.errors import InputError, Overloaded
from quire.protocol.sampling_params import SamplingParams
from quire.server import json_pieces
from quire.server.answer_size import MAX_HELD_LOGPROBS, AnswerBudget, AnswerSize, EchoedPrompt, answer_size
from quire.server.json_pieces import WritePace, WriterTurns

PROMPTS = echo_service.prompts()


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limits, "MAX_LOGPROBS", 1000)
    monkeypatch.setattr(size_limits, "MAX_TOKENS", 2000)


SCORED = "log-probabilities (", "the limit is 1000"
OFTEN = {"return_token_ids": True, "n": 16, "max_tokens": 30}  # scores and ids of a prompt, once for each choice


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": [5] * 200, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}, "logprobs", SCORED),
        ({"prompt": [[5] * 9] * 16, "logprobs": 4, "max_tokens": 20}, "logprobs", SCORED),
        ({"prompt": [5] * 9, "logprobs": 20, "n": 1, "best_of": 12, "max_tokens": 5}, "logprobs", SCORED),
        ({"prompt": [5] * 200, "beam_width": 8, "logprobs": 20, "max_tokens": 10}, "logprobs", SCORED),
        ({"messages": TALK, "logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 10}, "logprobs", SCORED),
        ({"prompt": [5] * 100, "echo": True, "prompt_logprobs": 2, **OFTEN}, "prompt_logprobs", SCORED),
        ({"prompt": [[5] * 99] * 10, **OFTEN}, "n", ("the limit is 2000",)),
    ],
)
def test_a_product_is_refused_before_anything_is_queued(
    servers: Servers, tight: None, body: dict[str, Any], param: str, said: tuple[str, ...], stream: bool
) -> None:
    running = servers(placement="thread")
    before = running.engine.stats.steps
    path = "chat/completions" if "messages" in body else "completions"
    given = {**body, "stream": stream and not {"best_of", "prompt_logprobs"} & body.keys()}
    answer = running.http.post(f"/v1/{path}", json=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert all(text in error["message"] for text in said), error
    assert running.engine.stats.steps == before


def test_unset_max_tokens_are_what_the_limits_leave(http: httpx.Client, tight: None) -> None:
    talk = {"messages": TALK, "ignore_eos": True, "seed": 1}
    whole = http.post("/v1/chat/completions", json={**talk, "logprobs": True, "top_logprobs": 9}).json()
    assert whole["usage"]["completion_tokens"] == 100  # 1000 log-probabilities, 10 a token
    assert whole["choices"][0]["finish_reason"] == "length"
    plain = http.post("/v1/chat/completions", json=talk).json()
    assert plain["usage"]["total_tokens"] == MAX_LEN


def test_answers_under_way_are_bounded_together(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    count = AnswerBudget()
    most = AnswerSize(0, MAX_HELD_LOGPROBS // 4)
    for _ in range(4):
        count.reserve(most)
    with pytest.raises(Overloaded, match=str(MAX_HELD_LOGPROBS)):
        count.reserve(AnswerSize(0, 1))
    count.reserve(AnswerSize(5, 0))  # one without log-probabilities passes
    count.release(most)
    count.reserve(AnswerSize(0, 1))
    monkeypatch.setattr(size_limits, "MAX_HELD_LOGPROBS", 10)
    body = {"prompt": [5], "max_tokens": 2, "logprobs": 5}
    for _ in range(3):
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert http.post("/v1/completions", json={**body, "logprobs": 1}).status_code == 200  # nothing stays counted
    assert http.post("/v1/completions", json={**body, "logprobs": 1, "max_tokens": 0}).status_code == 400
    unknown = {**body, "prompt": [echo_service.VOCAB], "logprobs": 1}
    assert http.post("/v1/completions", json=unknown).status_code == 400  # the engine refuses it after it was counted
    assert http.post("/v1/completions", json={**body, "logprobs": 4}).status_code == 200


def test_writers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many write, the event loop turns after each slice; one that is cancelled is passed over."""
    monkeypatch.setattr(json_pieces, "TURN_SECONDS", 0.0)
    slices: list[int] = []

    async def writer(number: int, turns: WriterTurns) -> None:
        pace = WritePace(turns)
        for _ in range(9):
            slices.append(number)
            await pace("x" * json_pieces.SHORT_CHARS)

    async def most() -> int:
        turns = WriterTurns()
        writers = [asyncio.create_task(writer(number, turns)) for number in range(20)]
        await asyncio.sleep(0)
        writers[7].cancel()
        seen, found = len(slices), 0
        while not all(task.done() for task in writers):
            await asyncio.sleep(0)
            found, seen = max(found, len(slices) - seen), len(slices)
        return found

    assert asyncio.run(most()) == 1
    assert [slices.count(number) for number in range(20)] == [1 if number == 7 else 9 for number in range(20)]


def test_a_stream_of_short_chunks_waits_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "TURN_SECONDS", 0.0)
    waited = []
    monkeypatch.setattr(WriterTurns, "wait_turn", lambda self: waited.append(1) or asyncio.sleep(0))

    async def write(size: int, times: int) -> int:
        pace = WritePace(WriterTurns())
        for _ in range(times):
            await pace("x" * size)
        return len(waited)

    assert asyncio.run(write(100, 100)) == 0
    assert asyncio.run(write(100, 1000)) == 100_000 // json_pieces.SHORT_CHARS


def test_an_answer_of_unusual_tokens_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are within the limit, its bytes aren't: the writer counts what it writes."""
    pace = WritePace()
    pace.count("x" * 40_000_000)
    with pytest.raises(InputError, match="more than 64000000 bytes"):
        pace.count("x" * 24_000_001)


def test_size_of_counts_what_is_held() -> None:
    params = SamplingParams(n=2, best_of=5, max_tokens=7, logprobs=3)
    assert answer_size(params, [10, 20], 100, EchoedPrompt(2, True, 4)) == AnswerSize(
        5 * 14 + 2 * 30, 5 * 14 * 4 + 2 * 30 * 4
    )
    assert answer_size(SamplingParams(max_tokens=50), [90], 100, EchoedPrompt()) == AnswerSize(
        10, 0
    )  # cut at the model's length


def test_a_written_answer_counts_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that take nothing hold at most so many bytes; when they are gone there is room again."""
    body = {"prompt": [5] * 250, "echo": True, "logprobs": 20, "n": 15, "max_tokens": 1, "prompt_logprobs": 20}
    with echo_service.serving(echo_service.built(kv_tokens=4096)) as running, ExitStack() as stack:
        url = f"{running.url}/v1/completions"
        size = len(httpx.post(url, json=body).content)
        monkeypatch.setattr(size_limits, "MAX_HELD_BYTES", size * 3 // 2)
        slow = [stack.enter_context(httpx.Client(timeout=60)) for _ in range(2)]
        first = stack.enter_context(slow[0].stream("POST", url, json=body))
        assert first.status_code == 200
        with slow[1].stream("POST", url, json=body) as second:
            assert second.status_code == 503
            assert "wait for their clients" in second.read().decode()
        assert httpx.post(url, json={"prompt": [5], "max_tokens": 1}).status_code == 200
        first.close()
        wait_until(lambda: httpx.post(url, json=body).status_code != 503, "there is room for the answer")
        assert httpx.post(url, json=body).status_code == 200
