"""An agent: the model calls a tool until it answers. `python examples/agent.py http://127.0.0.1:8000/v1 "How many pages
has a quire?"` asks what `make serve` serves. That never saw a tool: its first turn must call one, by a grammar."""

import json
import sys

from openai import OpenAI

PAGES = {"quire": 48, "ream": 960}
THING = {"type": "object", "properties": {"thing": {"enum": list(PAGES)}}, "required": ["thing"]}
TOOLS = [{"type": "function", "function": {"name": "pages", "description": "how many", "parameters": THING}}]


def run(client: OpenAI, question: str) -> list[dict]:
    """The conversation, which ends with the answer."""
    messages = [{"role": "user", "content": question}]
    asked = {"model": client.models.list().data[0].id, "messages": messages, "tools": TOOLS, "max_tokens": 100}
    for choice in ("required", "auto", "auto", "none"):
        said = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            pages = PAGES[json.loads(call.function.arguments)["thing"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(pages)})
        if not said.tool_calls:
            break
    return messages


if __name__ == "__main__":
    print(*run(OpenAI(base_url=sys.argv[1], api_key="unused"), sys.argv[2]), sep="\n")
