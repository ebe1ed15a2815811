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
from unittest.mock import Mock

import echo_service
import h11
import httpx
import pytest
from asking import TALK, connect
from echo_service import Running, deliver, new_stream
from starlette.types import Receive, Scope, Send

from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.server.answer_size import AnswerBudget, AnswerSize
from quire.server.connections import BoundedProtocol, ConnectionLimits, LogThrottle
from quire.server.direct_writer import DIRECT_EXTENSION, DirectWriter
from quire.server.generation import Generation
from quire.server.json_pieces import SHORT_CHARS
from quire.server.options import ServeOptions
from quire.server.render import ChatRenderer, CompletionRenderer, RenderSettings
from quire.server.request_models import ChatRequest, CompletionRequest
from quire.server.streaming import EngineCall, EventStream
from quire.server.web_server import WebServer
from quire.text.input_processor import InputProcessor, Prompt
from quire.text.output_stream import OutputStream, engine_dead_error

TEXTS = (
    " a", "", '"', "\\", "\n\r\t", "é", "漢字", "\U0001f600", "\x00\x7f\u2028", "data: [DONE]\n\n", "</s>", " b" * 40,
)  # fmt: skip
Step = list[tuple[int, BranchOutput]] | Exception
Act = Callable[["Client"], None]


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
    top = TopLogprobs(token, -0.5, 2, (4, 5), (-0.1, -0.25))
    return BranchOutput("x", branch, (token,), text, (top,), why, stop, done, 0.0, None, 3)


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


# Bodies written at once: framed as h11 frames them, and only while that is right; what is around them goes on


class App:
    """Answers with a body of which parts are sent by ASGI and by Direct, in turn with the test."""

    def __init__(self) -> None:
        self.direct: list[DirectWriter] = []
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope["extensions"][DIRECT_EXTENSION]
        assert not direct.is_open, "nothing has been sent"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        self.direct.append(direct)
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await self.go.wait()
        self.go.clear()
        await send({"type": "http.response.body", "body": b" end", "more_body": False})


def connected(app: App) -> tuple[BoundedProtocol, Mock]:
    """A connection, and its transport, which keeps what is written."""
    server = WebServer(app, ServeOptions(), bool)
    server.config.load()
    protocol = BoundedProtocol(
        server.config, server.server_state, {}, ConnectionLimits(), set(), LogThrottle("refused")
    )
    wire = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
    protocol.connection_made(wire)
    return protocol, wire


def written(wire: Mock) -> bytes:
    return b"".join(call.args[0] for call in wire.write.call_args_list)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def body(data: bytes) -> bytes:
    """The first answer's, as h11 reads it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    found = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Data):
            found += event.data
    return found


def test_what_is_written_is_a_part_of_the_body() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        for round in range(2):  # the connection lives on
            wire.write.reset_mock()
            protocol.data_received(GET)
            await turns()
            assert app.direct[round].is_open
            app.direct[round].write(b"two")
            app.direct[round].write(b"-" * 5000)
            app.go.set()
            await turns()
            assert body(written(wire)) == b"one two" + b"-" * 5000 + b" end"
            assert not any(direct.is_open for direct in app.direct)
        wire.close.assert_not_called()
        wire.pause_reading.assert_not_called()  # nothing came that had to wait
        protocol.shutdown()

    asyncio.run(work())


def test_nothing_is_written_to_who_does_not_read_or_has_left() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        protocol.data_received(GET)
        await turns()
        [direct] = app.direct
        assert direct.is_open
        protocol.pause_writing()
        assert not direct.is_open
        protocol.resume_writing()
        assert direct.is_open
        wire.is_closing.return_value = True
        assert not direct.is_open
        wire.is_closing.return_value = False
        protocol.connection_lost(None)
        assert not direct.is_open
        app.go.set()
        await turns()
        protocol, _ = connected(app)
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        await turns()
        assert app.direct[-1].is_open
        protocol.data_received(b"no number\r\n")  # it breaks a rule while its answer is under way
        assert not app.direct[-1].is_open
        app.go.set()
        await turns()
        protocol.connection_lost(None)

    asyncio.run(work())


def test_a_request_that_comes_early_waits_and_is_not_read_further() -> None:
    async def work() -> None:
        app = App()
        protocol, wire = connected(app)
        protocol.data_received(GET)
        await turns()
        protocol.data_received(GET)
        await turns()
        wire.pause_reading.assert_called_once()
        assert len(app.direct) == 1
        app.go.set()
        await turns()
        assert len(app.direct) == 2
        app.go.set()
        await turns()
        assert written(wire).count(b"one ") == written(wire).count(b" end") == 2
        protocol.shutdown()

    asyncio.run(work())


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_over_a_socket(echo: Running, http: httpx.Client, path: str, version: str) -> None:
    """As its bytes are on the wire; then the same connection answers once more, where it lives on."""
    asked = {"max_tokens": 20, "n": 2, "ignore_eos": True, "stream": True, "seed": 3}
    asked |= {"messages": TALK} if "chat" in path else {"prompt": "a"}
    data = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    raw = b""
    with connect(echo) as client:
        client.sendall(
            head.encode() + b"\r\n\r\n" + data + (GET.replace(b" / ", b" /ping ") if version == "1.1" else b"")
        )
        while not (b"Content-Length: 0" in raw or b"content-length: 0" in raw) and (piece := client.recv(1 << 16)):
            raw += piece
    assert b"content-type: text/event-stream" in raw.lower()
    chunks = body(raw) if version == "1.1" else raw.partition(b"\r\n\r\n")[2]
    lines = chunks.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    whole = {**asked, "stream": False}
    for choice in http.post(f"/v1/{path}", json=whole).json()["choices"]:
        mine = [found for found in choices if found["index"] == choice["index"]]
        said = [found["text"] if "text" in found else found["delta"]["content"] for found in mine]
        assert "".join(said) == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [found["finish_reason"] for found in mine if found["finish_reason"]] == [choice["finish_reason"]]
