"""An agent: a loop in which the model calls a tool until it answers. Start `make serve`, then run it:
`python examples/agent.py http://127.0.0.1:8000/v1 "How many pages has a quire?"`.

The bundled model never saw a tool: its first turn must call one (`tool_choice="required"`), which a grammar sees to.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

PAGES = {"quire": 48, "ream": 960}
THING = {"type": "object", "properties": {"thing": {"enum": list(PAGES)}}, "required": ["thing"],
         "additionalProperties": False}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "pages", "description": "how many", "parameters": THING}}]


def run(client: OpenAI, question: str, turns: int = 4) -> list[Any]:
    """The conversation, which ends with the answer."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(turns):
        choice: Any = "none" if turn == turns - 1 else "auto" if turn else "required"
        [said] = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=100
        ).choices
        messages.append(said.message.model_dump(exclude_none=True))
        for call in said.message.tool_calls or ():
            pages = PAGES[json.loads(call.function.arguments)["thing"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(pages)})
        if not said.message.tool_calls:
            break
    return messages


if __name__ == "__main__":
    for message in run(OpenAI(base_url=sys.argv[1], api_key="unused"), sys.argv[2]):
        print(json.dumps(message))
