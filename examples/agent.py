"""An agent: the model calls a tool until it answers. `python examples/agent.py http://127.0.0.1:8000/v1 "How many pages
has a quire?"` asks the model of `make serve`, which was not trained to call tools: a grammar makes its first turn a
call. The agent survives a call that is cut off, a wrong argument, and a conversation longer than the model."""

import json
import sys

from openai import BadRequestError, OpenAI

PAGES = {"quire": 48, "ream": 960}
THING = {"type": "object", "properties": {"thing": {"enum": list(PAGES)}}, "required": ["thing"]}
TOOLS = [{"type": "function", "function": {"name": "pages", "description": "how many", "parameters": THING}}]


def run(client: OpenAI, question: str, max_tokens: int = 100) -> list[dict]:
    """Return the conversation, which ends with the answer."""
    messages = [{"role": "user", "content": question}]
    fields = {"model": client.models.list().data[0].id, "messages": messages, "tools": TOOLS, "max_tokens": max_tokens}
    for choice in ("required", *["auto"] * 6, "none"):
        try:
            output = client.chat.completions.create(**fields, tool_choice=choice).choices[0]
        except BadRequestError as error:
            if error.code != "context_length_exceeded" or len(messages) == 1:
                raise
            del messages[1 : 1 + len(messages) // 2]  # drop the older half, except the question
            continue
        answer = output.message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            try:
                result = str(PAGES[json.loads(call.function.arguments)["thing"]])
            except (ValueError, KeyError, TypeError) as error:  # cut off, or not as the schema says
                result = f"Error: {error!r}. The argument is one of {[*PAGES]}."
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not answer.tool_calls and (choice != "required" or output.finish_reason != "length"):
            break
    return messages


if __name__ == "__main__":
    print(*run(OpenAI(base_url=sys.argv[1], api_key="unused"), sys.argv[2]), sep="\n")
