"""Frameworks that aren't ours: `python running_frameworks.py NAME URL [MODEL]`. Each asks for a text, for a text in a
stream, for what needs a call of `weather` first, and for a Page; test_frameworks.py scripts the answers. Prints what
came back as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel

TELL: Any = [{"role": "user", "content": "Tell."}]
ASK: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]
LONG = "word " * 5000
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Page(BaseModel):
    title: str
    number: int


def weather(city: str) -> str:
    """Of a city."""
    return f"rain in {city}"


def litellm(url: str, model: str) -> Any:
    """`model` begins with the provider, of which Anthropic's has no /v1 in its URL."""
    import litellm

    litellm.num_retries = 0
    base = url.removesuffix("/v1") if model.startswith("anthropic/") else url
    to: Any = {"model": model, "api_base": base, "api_key": "unused", "max_tokens": 200, "timeout": 60}

    def ask(messages: Any, **more: Any) -> Any:
        return litellm.completion(messages=messages, **to, **more)

    found: Any = {"text": ask(TELL).choices[0].message.content}
    chunks = ask(TELL, stream=True, stream_options={"include_usage": True})
    found["stream"] = litellm.stream_chunk_builder([*chunks]).choices[0].message.content
    called = ask(ASK, tools=[WEATHER]).choices[0].message
    [call] = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
    found["tool"] = ask([*ASK, called, result], tools=[WEATHER]).choices[0].message.content
    found["page"] = Page.model_validate_json(ask(TELL, response_format=Page).choices[0].message.content).model_dump()
    try:
        ask([{"role": "user", "content": LONG}])
    except Exception as error:
        found["overflow"] = type(error).__name__
    return found


def llama_index(url: str) -> Any:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="echo", api_base=url, api_key="unused", is_chat_model=True, is_function_calling_model=True,
        context_window=4096, max_tokens=200, max_retries=0,
    )  # fmt: skip
    agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="Be kind.")

    async def run() -> str:
        return str(await agent.run("Weather?"))

    told = [ChatMessage(role="user", content="Tell.")]
    return {
        "text": llm.chat(told).message.content,
        "stream": "".join(chunk.delta or "" for chunk in llm.stream_chat(told)),
        "tool": asyncio.run(run()),
        "page": llm.structured_predict(Page, PromptTemplate("Tell.")).model_dump(),
    }


def llm(url: str) -> Any:
    """Simon Willison's; the model is an entry of extra-openai-models.yaml in $LLM_USER_PATH."""
    import llm

    model = llm.get_model("quire")
    model.key = "unused"
    return {
        "text": model.prompt("Tell.", stream=False).text(),
        "stream": "".join(model.prompt("Tell.")),
        "tool": model.chain("Weather?", system="Be kind.", tools=[weather]).text(),
        "page": json.loads(model.prompt("Tell.", schema=Page).text()),
    }


def pydantic_ai(url: str, kind: str) -> Any:
    """`kind` names the API: chat, responses or messages."""
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any
    if kind == "messages":
        theirs = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="unused", max_retries=0)
        model = AnthropicModel("echo", provider=AnthropicProvider(anthropic_client=theirs))
    else:
        ours = OpenAIProvider(openai_client=AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))
        model = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("echo", provider=ours)
    settings: Any = {"max_tokens": 200}
    plain = Agent(model, model_settings=settings)

    async def run() -> Any:
        found: Any = {"text": (await plain.run("Tell.")).output}
        async with plain.run_stream("Tell.") as stream:
            found["stream"] = await stream.get_output()
        agent = Agent(model, instructions="Be kind.", tools=[weather], model_settings=settings)
        found["tool"] = (await agent.run("Weather?")).output
        shaped = Agent(model, output_type=Page if kind == "messages" else NativeOutput(Page), model_settings=settings)
        found["page"] = (await shaped.run("Tell.")).output.model_dump()
        return found

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
