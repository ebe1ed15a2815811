"""Anthropic's client, step by step: `python running_anthropic.py URL MODEL`. Each line of the standard input names a
step; its outcome is printed as a line of JSON. Within `tools` the tool's argument is printed first, and the next line
is its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Tell."}]
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


class Page(BaseModel):
    title: str
    number: int


@anthropic.beta_tool
def weather(city: str) -> str:
    """Of a city."""
    print(json.dumps(city), flush=True)
    return sys.stdin.readline().strip()


class Steps:
    """Each returns what JSON can say."""

    def __init__(self, url: str, model: str) -> None:
        self.client = anthropic.Anthropic(base_url=url, api_key="one", max_retries=0, timeout=20)
        self.asked: Any = {"model": model, "max_tokens": 200, "messages": MESSAGES}

    def create(self) -> Any:
        return self.client.messages.create(**self.asked, system="Be kind.", stop_sequences=["x"]).to_dict()

    def stream(self) -> Any:
        with self.client.messages.stream(**self.asked, tools=[TOOL]) as stream:
            events = list(stream)
            text = "".join(event.text for event in events if event.type == "text")
            return [text, stream.get_final_message().to_dict(), [event.type for event in events]]

    def tools(self) -> Any:
        runner = self.client.beta.messages.tool_runner(**self.asked, tools=[weather])
        return [message.stop_reason for message in runner] + [runner.until_done().content[0].text]

    def parse(self) -> Any:
        found = self.client.messages.parse(**self.asked, output_format=Page).parsed_output
        return found and found.model_dump()

    def count(self) -> Any:
        return self.client.messages.count_tokens(model=self.asked["model"], messages=MESSAGES).input_tokens

    def errors(self) -> Any:
        stranger = self.client.with_options(api_key="two")
        asks: list[Callable[[], Any]] = [
            lambda: self.client.messages.create(**self.asked | {"max_tokens": 0}),
            lambda: self.client.messages.create(**self.asked | {"model": "claude"}),
            lambda: stranger.messages.create(**self.asked),
            lambda: self.client.messages.create(**self.asked, system="a" * 50_000),
        ]
        return [_failed(ask) for ask in asks]


def _failed(ask: Callable[[], Any]) -> Any:
    try:
        ask()
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.body]


if __name__ == "__main__":
    steps = Steps(*sys.argv[1:])
    while name := sys.stdin.readline().strip():
        print(json.dumps(getattr(steps, name)()), flush=True)
