"""Streams on both of their ways, written at once and by a task: the same bytes, whatever is asked for and comes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import echo_service
import pytest

from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.server.answer_size import AnswerBudget, AnswerSize
from quire.server.direct_writer import DIRECT_EXTENSION
from quire.server.generation import Generation
from quire.server.json_pieces import SHORT_CHARS
from quire.server.render import ChatRenderer, CompletionRenderer, RenderSettings
from quire.server.request_models import ChatRequest, CompletionRequest
from quire.server.streaming import EngineCall, EventStream
from quire.text.input_processor import InputProcessor, Prompt
from quire.text.output_stream import OutputStream, RequestRecord, engine_dead_error
from quire.text.request_detokenizer import RequestDetokenizer

TEXTS = (
    " a", "", '"', "\\", "\n\r\t", "é", "漢字", "\U0001f600", "\x00\x7f\u2028", "data: [DONE]\n\n", "</s>", " b" * 40,
)  # fmt: skip
TALK = [{"role": "user", "content": "a"}]
Step = list[tuple[int, BranchOutput]] | Exception
Act = Callable[["Client"], None]


def deliver(batch: list[tuple[OutputStream, BranchOutput]]) -> None:
    """A step's outputs, each to its stream."""
    for stream, output in batch:
        stream.put(output)


class Client:
    """What a client is sent: `is_open` and `write` are Direct's, `send` is ASGI's. `reads` is unset while it is "
    "slow."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.started = False
        self.written = 0  # of them, at once
        self.reads, self.left = asyncio.Event(), asyncio.Event()
        self.reads.set()

    @property
    def is_open(self) -> bool:
        return self.started and self.reads.is_set()

    def write(self, part: bytes) -> None:
        assert self.is_open
        assert part, "an empty chunk ends a body"
        self.written += 1
        self.parts.append(part)

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.started = True
        if message["type"] == "http.response.body":
            self.parts.append(message["body"])

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}


@cache
def prompts_of_echo() -> InputProcessor:
    return echo_service.prompts()


def new_stream(id: str, accepted: asyncio.Future[None]) -> OutputStream:
    """A stream whose outputs have their text already."""
    params = SamplingParams(detokenize=False)
    detokenizer = RequestDetokenizer(None, (), params, lambda branch, stop: None)
    return OutputStream(0, RequestRecord(id, 1, params, 0.0), detokenizer, accepted)


def answer_to(body: dict[str, Any], prompts: int, engine: Any) -> tuple[EventStream, list[OutputStream]]:
    """The answer to `body`, and the streams that it reads."""
    accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    accepted.set_result(None)
    call = EngineCall(engine, "cmpl-x", AnswerBudget(), AnswerSize(0, 0))
    call.streams = [new_stream(f"cmpl-x-{at}", accepted) for at in range(prompts)]
    given = [Prompt("once", [5, 6 + at]) for at in range(prompts)]
    is_chat = "messages" in body
    request = ChatRequest(**body) if is_chat else CompletionRequest(**body)
    generation = Generation("cmpl-x", request, given, SamplingParams(), AnswerSize(0, 0))
    renderer = (ChatRenderer if is_chat else CompletionRenderer)(generation, RenderSettings("echo", prompts_of_echo()))
    return EventStream(call, renderer, {}), call.streams


async def turns(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def streamed(
    body: dict[str, Any], prompts: int, steps: list[Step | Act], direct: bool, aborted: list[str] | None = None
) -> Client:
    """What the client was sent of `steps`, after each of which the event loop turns."""
    client = Client()
    answer, streams = answer_to(body, prompts, SimpleNamespace(abort=(aborted if aborted is not None else []).append))
    scope = {"type": "http", "extensions": {DIRECT_EXTENSION: client} if direct else {}}
    task = asyncio.create_task(answer(scope, client.receive, client.send))
    await turns()
    for step in steps:
        if isinstance(step, list):
            deliver([(streams[at], output) for at, output in step])
        elif isinstance(step, Exception):
            streams[0].fail(step)
        else:
            step(client)
        await turns()
    await asyncio.wait_for(task, 60)
    return client


def output(branch: int, text: str, why: str | None = None, *, done: bool = False, stop: Any = None) -> BranchOutput:
    token = 7 + len(text)
    return BranchOutput(
        "x",
        branch,
        (token,),
        text,
        (TopLogprobs(token, -0.5, 2, (4, 5), (-0.1, -0.25)),),
        why,
        stop,
        done,
        0.0,
        None,
        3,
    )


def story(seed: int, prompts: int, n: int) -> list[Step | Act]:
    """Random steps of all branches until each has ended, in which some bring nothing and some twice."""
    chance = random.Random(seed)
    going = [(at, branch) for at in range(prompts) for branch in range(n)]
    steps: list[Step | Act] = []
    while going:
        step = []
        for at, branch in [key for key in going if chance.random() < 0.8]:
            for _ in range(chance.choice((1, 1, 2))):
                step.append((at, output(branch, chance.choice(TEXTS))))
            if chance.random() < 0.15:
                going.remove((at, branch))
                why, stop = chance.choice((("length", None), ("stop", None), ("stop", "</s>"), ("stop", 3)))
                done = at not in [key[0] for key in going]
                step.append((at, output(branch, chance.choice(TEXTS), why, done=done, stop=stop)))
        steps.append(step)
    return steps


def events(client: Client) -> list[Any]:
    lines = b"".join(client.parts).decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) if line != "data: [DONE]" else "[DONE]" for line in lines]


def undated(client: Client) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', b"".join(client.parts))


PLAIN: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stream_options": {"include_usage": True}},
    {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
OTHERS: list[dict[str, Any]] = [{"return_token_ids": True}, {"n": 2, "return_token_ids": True}]
SCORED: list[dict[str, Any]] = [{"logprobs": 1, "n": 2}, {"echo": True, "n": 2}, {"echo": True, "logprobs": 1}]
CASES = [
    *((plain, prompts, {"prompt": "once", **more}) for plain, some in ((True, PLAIN), (False, [*OTHERS, *SCORED]))
      for more in some for prompts in (1, 3)),
    *((True, 1, {"messages": TALK, **more}) for more in PLAIN),
    *((False, 1, {"messages": TALK, **more}) for more in (*OTHERS, {"logprobs": True, "top_logprobs": 2})),
]  # fmt: skip


@pytest.mark.parametrize(("plain", "prompts", "body"), CASES, ids=str)
def test_both_ways_send_the_same(plain: bool, prompts: int, body: dict[str, Any]) -> None:
    for seed in range(8):
        steps = story(seed, prompts, body.get("n", 1))
        task = asyncio.run(streamed(body, prompts, steps, direct=False))
        direct = asyncio.run(streamed(body, prompts, steps, direct=True))
        assert undated(direct) == undated(task)
        assert (direct.written > 0) == plain
        assert task.written == 0
        told(direct, steps, body)


def told(client: Client, steps: list[Any], body: dict[str, Any]) -> None:
    """All texts, in order, and one end of each choice and of the stream."""
    found = events(client)
    assert found.pop() == "[DONE]"
    assert "[DONE]" not in found
    said: dict[int, str] = {}
    ends: dict[int, tuple[Any, Any]] = {}
    for choice in (choice for event in found for choice in event["choices"]):
        assert choice["index"] not in ends
        text = choice["text"] if "text" in choice else choice["delta"]["content"]
        said[choice["index"]] = said.get(choice["index"], "") + text
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    meant: dict[int, str] = {}
    reasons: dict[int, tuple[Any, Any]] = {}
    for at, put in (item for step in steps for item in step):
        index = at * body.get("n", 1) + put.branch
        meant[index] = meant.get(index, "once" if body.get("echo") else "") + put.text
        if put.finish_reason:
            reasons[index] = put.finish_reason, put.stop_reason
    assert (said, ends) == (meant, reasons)


def test_a_step_is_one_write() -> None:
    steps: list[Step | Act] = [[(at, output(branch, " a")) for at in range(3) for branch in range(4)] for _ in range(5)]
    steps.append([(at, output(branch, "", "stop", done=branch == 3)) for at in range(3) for branch in range(4)])
    client = asyncio.run(streamed({"prompt": "a", "n": 4}, 3, steps, direct=True))
    assert [part.count(b"data: ") for part in client.parts] == [12, 12, 12, 12, 12, 12, 1]
    assert client.written == 6


def test_a_slow_client_gets_one_merged_chunk_a_branch() -> None:
    many: list[Step | Act] = [[(0, output(branch, f" {at}")) for branch in range(2)] for at in range(50)]
    end: Step = [(0, output(branch, "", "stop", done=branch == 1)) for branch in range(2)]
    steps = [*many[:10], lambda client: client.reads.clear(), *many[10:40], lambda client: client.reads.set()]
    for direct in (True, False):
        client = asyncio.run(streamed({"prompt": "a", "n": 2}, 1, [*steps, *many[40:], end], direct))
        # While it is away: the chunk that waits to be sent, and all that came later, for each of the two.
        assert len(events(client)) <= 2 * (10 + 2 + 10) + 3
        told(client, [*many, end], {"n": 2})


def test_a_long_text_is_sent_in_parts_by_the_task() -> None:
    steps: list[Step | Act] = [
        [(0, output(0, "a"))], [(0, output(0, "b" * (SHORT_CHARS + 1)))], [(0, output(0, "c", "stop", done=True))],
    ]  # fmt: skip
    client = asyncio.run(streamed({"messages": TALK}, 1, steps, direct=True))
    assert client.written == 2
    assert len(client.parts) == 2 + 2 + 1
    told(client, steps, {})


def test_an_engine_that_dies_midway() -> None:
    for direct in (True, False):
        steps: list[Step | Act] = [[(0, output(0, "a"))], [(0, output(0, "b"))], engine_dead_error(None)]
        found = events(asyncio.run(streamed({"messages": TALK}, 1, steps, direct)))
        assert [event["choices"][0]["delta"]["content"] for event in found[:-1]] == ["", "a", "b"]
        assert found[-1]["error"]["code"] == 503


def test_a_chunk_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, at: int, output: BranchOutput) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ChatRenderer, "choice_nowait", broken)
    aborted: list[str] = []
    for direct in (True, False):
        found = events(asyncio.run(streamed({"messages": TALK}, 1, [[(0, output(0, "a"))]], direct, aborted)))
        assert found[-1]["error"]["message"] == "internal error"
    assert aborted == ["cmpl-x-0"] * 2


def test_a_client_that_leaves() -> None:
    aborted: list[str] = []
    steps: list[Step | Act] = [[(0, output(0, "a"))], lambda client: client.left.set(), [(0, output(0, "b"))]]
    client = asyncio.run(streamed({"messages": TALK}, 1, steps, True, aborted))
    assert aborted == ["cmpl-x-0"]
    assert b'"a"' in client.parts[-1]


def test_what_came_before_it_was_listened_to() -> None:
    """A listener gets what is there at once, merged; the last one is `done` if the end was among it."""

    async def work() -> None:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for end in (True, False):
            stream, seen, errors = new_stream("x", accepted), [], []
            for branch in (0, 1, 0):
                stream.put(output(branch, "a", done=end and branch == 1))
            stream.listen(seen.append, errors.append)
            assert [(found.branch, found.text, found.done) for found in seen] == [(0, "aa", False), (1, "a", end)]
            assert stream.done is end
            stream.fail(engine_dead_error(None))
            assert len(errors) == 1
        late: list[Exception] = []
        failed = new_stream("x", accepted)
        failed.fail(engine_dead_error(None))
        failed.listen(seen.append, late.append)
        assert len(late) == 1
        with pytest.raises(Exception, match="the engine stopped"):
            await accepted

    asyncio.run(work())
