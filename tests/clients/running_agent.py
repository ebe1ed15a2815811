"""OpenAI's agents' library with one tool: `python running_agent.py URL MODEL`. Prints the tool's argument, waits for a
line on the standard input, gives it as the tool's result and prints the agent's answer."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import agents
from openai import AsyncOpenAI


@agents.function_tool
def weather(city: str) -> str:
    """Of a city."""
    print(city, flush=True)
    return sys.stdin.readline().strip()


async def ask(url: str, name: str) -> Any:
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=20) as client:
        model = agents.OpenAIResponsesModel(name, client)
        agent = agents.Agent(name="a", instructions="Be kind.", model=model, tools=[weather])
        return (await agents.Runner.run(agent, "Weather?")).final_output


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    print(asyncio.run(ask(*sys.argv[1:])))
