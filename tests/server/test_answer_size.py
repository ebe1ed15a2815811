"""An answer has a size: its product of n, prompts, max_tokens and logprobs is bounded before anything is queued, a
prompt's part is written once, and the event loop turns while a long answer is written."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import ExitStack
from typing import Any

import echo_service
import httpx
import pytest
from asking import TALK
from echo_service import MAX_LEN, Servers
from waiting import wait_until

import quire.server.size as size_limits
from quire.control.outcomes import Output
from quire.errors import InputError, Overloaded
from quire.server import pieces
from quire.server.pieces import Pace, Turns, Words
from quire.server.protocol import ChatRequest, CompletionRequest
from quire.server.render import ChatRenderer, CompletionRenderer
from quire.server.size import MAX_HELD, MAX_LOGPROBS, MAX_TOKENS, Held, Shown, Size, bounded, size_of
from quire.text.prompts import Prompt
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Top

PROMPTS = echo_service.prompts()


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limits, "MAX_LOGPROBS", 1000)
    monkeypatch.setattr(size_limits, "MAX_TOKENS", 2000)


def held(answer: dict[str, Any]) -> Size:
    """What an answer holds: tokens as ids, and log-probabilities, whichever list they are in."""
    logprobs = tokens = 0
    scored = [answer.get("prompt_logprobs"), *(choice.get("prompt_logprobs") for choice in answer["choices"])]
    logprobs += sum(len(entry or ()) for entries in scored for entry in entries or ())
    for choice in answer["choices"]:
        found = choice["logprobs"] or {}
        logprobs += sum(len(top or ()) for top in found.get("top_logprobs") or ())
        logprobs += sum(1 + len(entry["top_logprobs"]) for entry in found.get("content") or ())
        tokens += len(choice["token_ids"] or ()) + len(choice.get("prompt_token_ids") or ())
    return Size(tokens, logprobs)


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
    answer = httpx.post(f"{running.url}/v1/{path}", json=given)
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


def test_the_answer_of_the_attack_is_refused() -> None:
    """3,900 tokens, scored with 20 alternatives each and shown 128 times: a gigabyte of JSON."""
    params = SamplingParams(n=128, max_tokens=1, logprobs=20, prompt_logprobs=20)
    for prompts in ([3900], [3900] * 8):
        with pytest.raises(InputError, match=rf"the limit is {MAX_LOGPROBS}"):
            bounded(params, prompts, 4096, Shown(128, True, 21))
    with pytest.raises(InputError, match=rf"the limit is {MAX_TOKENS}"):
        bounded(SamplingParams(n=128, max_tokens=4000), [10] * 256, 4096, Shown())


def test_no_answer_is_larger_than_its_size_said(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of what adds to an answer, counted in what comes."""
    sizes: list[Size] = []
    real = Held.add
    monkeypatch.setattr(Held, "add", lambda self, size: (sizes.append(size), real(self, size))[1])
    tried = 0
    for n, k, echoed, scored, ids in itertools.product(
        (1, 3), (None, 0, 5), (False, True), (None, 0, 2), (False, True)
    ):
        common = {"n": n, "max_tokens": 4, "prompt_logprobs": scored, "return_token_ids": ids, "ignore_eos": True}
        completion = {**common, "prompt": [[5, 6, 7], [8] * 9], "logprobs": k, "echo": echoed}
        chat = {"messages": TALK, **common, "logprobs": k is not None, "top_logprobs": k}
        for path, body in (("completions", completion), ("chat/completions", chat)):
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            found = held(answer.json())
            assert found.tokens <= sizes[-1].tokens
            assert found.logprobs <= sizes[-1].logprobs
            assert sizes[-1].logprobs <= 2 * found.logprobs + 40  # and not far from it
            tried += 1
    assert tried == len(sizes) == 144


def test_answers_under_way_are_bounded_together(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Held()
    most = Size(0, MAX_HELD // 4)
    for _ in range(4):
        count.add(most)
    with pytest.raises(Overloaded, match=str(MAX_HELD)):
        count.add(Size(0, 1))
    count.add(Size(5, 0))  # one without log-probabilities passes
    count.drop(most)
    count.add(Size(0, 1))
    monkeypatch.setattr(size_limits, "MAX_HELD", 10)
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


class Counting(Words):
    """Words that count how often one is written."""

    written = 0

    def quoted(self, token: int) -> str:
        self.written += 1
        return super().quoted(token)


def outputs(n: int, tokens: int, scored: int, k: int) -> list[Output]:
    """The merged outputs of n branches."""
    top = Top(5, -1.25, 1, tuple(range(k)), (-1.5,) * k)
    return [
        Output("r", branch, (5,) * tokens, "x" * tokens, (top,) * tokens, "length", None, True, 0.0, (top,) * scored)
        for branch in range(n)
    ]


async def write(renderer: CompletionRenderer | ChatRenderer, found: list[Output]) -> str:
    pieces = [renderer.head(whole=True)]
    for at, output in enumerate(found):
        choice = await renderer.choice(0, output, whole=True)
        assert choice is not None
        pieces += ([","] if at else []) + choice.pieces
    pieces += ["]", *await renderer.tail(whole=True), "}"]
    assert max(map(len, pieces)) < 1 << 16
    return "".join(pieces)


def test_a_prompts_part_is_written_once() -> None:
    written = []
    for n in (1, 8):
        words = Counting(PROMPTS)
        body = CompletionRequest(prompt=[5] * 200, echo=True, logprobs=3, prompt_logprobs=3, n=n)
        renderer = CompletionRenderer("c", "m", body, [Prompt(None, [5] * 200)], words, PROMPTS)
        text = asyncio.run(write(renderer, outputs(n, 2, 199, 3)))
        answer = json.loads(text)
        assert all(len(choice["logprobs"]["tokens"]) == 202 for choice in answer["choices"])
        assert all(len(choice["prompt_logprobs"]) == 200 for choice in answer["choices"])
        assert len({json.dumps(choice["prompt_logprobs"]) for choice in answer["choices"]}) == 1
        written.append(words.written)
    assert written[1] < written[0] + 7 * 30


@pytest.mark.parametrize("chat", [False, True])
def test_the_loop_turns_while_an_answer_is_written(chat: bool) -> None:
    """A hundred thousand log-probabilities take a good part of a second, and no turn of the loop takes much of it."""

    async def longest() -> tuple[float, float]:
        words, given = Words(PROMPTS), [Prompt(None, [5])]
        renderer: CompletionRenderer | ChatRenderer
        if chat:
            body = ChatRequest(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=20)
            renderer = ChatRenderer("c", "m", body, given, words)
        else:
            renderer = CompletionRenderer("c", "m", CompletionRequest(prompt=[5], logprobs=20), given, words, PROMPTS)
        writing = asyncio.create_task(write(renderer, outputs(1, 5000, 0, 20)))
        began = last = time.perf_counter()
        gap = 0.0
        while not writing.done():
            await asyncio.sleep(0)
            gap, last = max(gap, time.perf_counter() - last), time.perf_counter()
        assert len(json.loads(writing.result())["choices"][0]["logprobs"]["content" if chat else "tokens"]) == 5000
        return gap, last - began

    gaps = [asyncio.run(longest()) for _ in range(3)]
    gap, whole = min(gaps)
    assert gap < whole / 3, gaps


def test_writers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many write, the event loop turns after each slice; one that is cancelled is passed over."""
    monkeypatch.setattr(pieces, "TURN", 0.0)
    slices: list[int] = []

    async def writer(number: int, turns: Turns) -> None:
        pace = Pace(turns)
        for _ in range(9):
            slices.append(number)
            await pace("x" * pieces.SHORT)

    async def most() -> int:
        turns = Turns()
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
    monkeypatch.setattr(pieces, "TURN", 0.0)
    waited = []
    monkeypatch.setattr(Turns, "next", lambda self: waited.append(1) or asyncio.sleep(0))

    async def write(size: int, times: int) -> int:
        pace = Pace(Turns())
        for _ in range(times):
            await pace("x" * size)
        return len(waited)

    assert asyncio.run(write(100, 100)) == 0
    assert asyncio.run(write(100, 1000)) == 100_000 // pieces.SHORT


def test_an_answer_of_unusual_tokens_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are within the limit, its bytes aren't: the writer counts what it writes."""
    pace = Pace()
    pace.count("x" * 40_000_000)
    with pytest.raises(InputError, match="more than 64000000 bytes"):
        pace.count("x" * 24_000_001)


def test_size_of_counts_what_is_held() -> None:
    params = SamplingParams(n=2, best_of=5, max_tokens=7, logprobs=3)
    assert size_of(params, [10, 20], 100, Shown(2, True, 4)) == Size(5 * 14 + 2 * 30, 5 * 14 * 4 + 2 * 30 * 4)
    assert size_of(SamplingParams(max_tokens=50), [90], 100, Shown()) == Size(10, 0)  # cut at the model's length


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
