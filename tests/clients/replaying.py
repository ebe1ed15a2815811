"""Replays of one chat by clients that aren't ours: `python replaying.py NAME CHAT URL ...`. CHAT is a file of messages
in OpenAI's form and of TOOLS. For each URL the requests that end with a user's message or a tool's result are sent, as
an agent sends them. Prints for each URL, as JSON, the tokens of each prompt and how many of them were cached."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ask = Callable[[list[Any], list[Any]], tuple[int, int]]  # messages and tools: tokens of the prompt, cached ones
ENDS = ("user", "tool")
MOST = 2  # tokens of an answer


def openai(url: str) -> Ask:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

    def ask(messages: list[Any], tools: list[Any]) -> tuple[int, int]:
        answer: Any = client.chat.completions.create(model="echo", messages=messages, tools=tools, max_tokens=MOST)
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens

    return ask


def responses(url: str) -> Ask:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

    def items(message: Any) -> list[Any]:
        if message["role"] == "tool":
            return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
        calls = message.get("tool_calls", ())
        return [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls] or [message]

    def ask(messages: list[Any], tools: list[Any]) -> tuple[int, int]:
        answer: Any = client.responses.create(
            model="echo", input=[item for message in messages for item in items(message)], max_output_tokens=16,
            tools=[{"type": "function", **tool["function"]} for tool in tools], store=False,
        )  # fmt: skip
        return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens

    return ask


def anthropic(url: str) -> Ask:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="unused", max_retries=0)

    def blocks(message: Any) -> Any:
        if message["role"] == "tool":
            content = message["content"]
            return {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}],
            }
        made = [
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            for call in message.get("tool_calls", ())
            for function in [call["function"]]
        ]
        return {"role": message["role"], "content": made or message["content"]}

    def ask(messages: list[Any], tools: list[Any]) -> tuple[int, int]:
        functions = [tool["function"] for tool in tools]
        usage = client.messages.create(
            model="echo", system=messages[0]["content"], messages=[blocks(message) for message in messages[1:]],
            tools=[{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
                   for f in functions], max_tokens=MOST,
        ).usage  # fmt: skip
        return usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens

    return ask


def litellm(url: str) -> Ask:
    import litellm

    def ask(messages: list[Any], tools: list[Any]) -> tuple[int, int]:
        usage = litellm.completion(
            model="hosted_vllm/echo", api_base=f"{url}/v1", api_key="unused", messages=messages, tools=tools,
            max_tokens=MOST, num_retries=0,
        ).usage  # fmt: skip
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    return ask


if __name__ == "__main__":
    name, chat, *urls = sys.argv[1:]
    given = json.loads(Path(chat).read_text())
    messages, tools = given["messages"], given["tools"]
    messages[0]["content"] = f"{name} {messages[0]['content']}"  # no prompt begins as another client's
    counts = {
        url: [ask(messages[: i + 1], tools) for i, message in enumerate(messages) if message["role"] in ENDS]
        for url in urls
        for ask in [globals()[name](url)]
    }
    print(json.dumps([*counts.values()]))
