"""What tests of the server have in common: clients and connections, asking the echo server, and what it must draw."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import echo_service
import httpx
from echo_oracle import expected_tokens
from echo_service import MAX_LEN, VOCAB, Echo, EchoBuilt, Placement, Running, Saying
from openai import OpenAI

from quire.async_llm import AsyncLLM
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed

TALK: Any = [{"role": "user", "content": "once upon a time"}]
MARKERS = "<think>", "</think>"
HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
SAID = "Let me see.\n" + CALL % "Paris" + CALL % "Oslo" + "Wait."
CALLS = [  # as a history has them
    {"id": id, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    for id, city in (("a", "Oslo"), ("b", "Paris"))
]
KEY, ADMIN = "sk-quire-test-key", "sk-quire-admin-key"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def as_admin(running: Running) -> httpx.Client:
    """A client with the key ADMIN."""
    return httpx.Client(base_url=running.url, timeout=60, headers=bearer(ADMIN))


def openai_of(running: Running, key: str = "unused") -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=20)


def connect(running: Running) -> socket.socket:
    """A connection on which nothing has been said."""
    url = urlsplit(running.url)
    return socket.create_connection((url.hostname, url.port), timeout=30)


def linked(model: EchoBuilt, placement: Placement = "process") -> closing[AsyncLLM]:
    """An AsyncLLM over an echo, until it is closed at the end of a `with` block."""
    return closing(echo_service.linked(model, placement=placement))


def run(work: Callable[[AsyncLLM], Any], placement: Placement = "process", pause: float = 0.0, **settings: Any) -> None:
    """Run a coroutine function with an AsyncLLM, whose engine's thread ends with it."""
    before = set(threading.enumerate())
    with linked(echo_service.built(Echo(pause=pause), **settings), placement) as llm:
        asyncio.run(work(llm))
    assert not any(thread.name == "quire-engine" for thread in set(threading.enumerate()) - before)


class Talker(NamedTuple):
    """A server whose model says what it is told to, and clients of it with its first key."""

    running: Running
    say: Callable[[str], None]
    client: OpenAI
    http: httpx.Client

    def chat(self, **more: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "echo", "messages": TALK, "max_tokens": 400, **more})

    def respond(self, **more: Any) -> Any:
        return self.client.responses.create(**{"model": "echo", "input": "Tell.", **more})


@contextmanager
def saying(template: str, markers: tuple[str, ...] = (), **options: Any) -> Iterator[Talker]:
    """A Talker with this chat template; each of `markers` is a token."""
    words = echo_service.tokenizer(markers)
    runner = Saying(words)
    model = echo_service.built(runner, kv_tokens=4096, max_len=1024)
    model = model._replace(chat_template=echo_service.template(template), tokenizer=words)
    key = options.get("keys", ["unused"])[0]
    with echo_service.serving(model, **options) as running, openai_of(running, key) as client:
        running.http.headers.update(bearer(key))
        yield Talker(running, runner.say, client, running.http)


def tokens_of(prompt: list[int], seed: int, branch: int, count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return expected_tokens(prompt, params, branch_seed(seed, branch), vocab_size=VOCAB, max_len=MAX_LEN)


@dataclass
class StreamedChoice:
    """What a stream says of a choice. Calls are [id, name, arguments]."""

    text: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None


def choices_of(chunks: Any) -> list[StreamedChoice]:
    """The choices of a stream of OpenAI's client; AssertionError if anything follows the end of one."""
    found: dict[int, StreamedChoice] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        one = found.setdefault(choice.index, StreamedChoice())
        assert one.reason is None, "something follows the end of a choice"
        delta = getattr(choice, "delta", None)
        thought = getattr(delta, "reasoning_content", None) or ""
        assert not (one.text and thought), "thoughts come first"
        one.text += choice.text if delta is None else delta.content or ""
        one.thought += thought
        one.reason = choice.finish_reason
        one.logprobs += [choice.logprobs] if choice.logprobs else []
        for piece in getattr(delta, "tool_calls", None) or ():
            if piece.id:
                assert (piece.index, piece.type) == (len(one.calls), "function")
                one.calls.append([piece.id, piece.function.name, ""])
            one.calls[piece.index][2] += piece.function.arguments
    return [found[index] for index in range(len(found))]


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


def cached(http: httpx.Client, prompt: list[int], **more: Any) -> int:
    """How much of a prompt was found in the cache. The tokens of the answer must be right as well."""
    body = {"prompt": prompt, "max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True, **more}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == tokens_of(prompt, 1, 0, 3)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ids_of(http: httpx.Client, **given: Any) -> list[int]:
    answer = http.post("/tokenize", json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]
