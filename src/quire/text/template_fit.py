"""Conversion of a conversation to the nearest one that a chat template can express.

Templates differ in what they accept. Some raise an error, or drop a message, for a late system message, for two
consecutive messages of one role, or for a tool's result without its call. Each such trait is tested once, by rendering
small conversations. A conversation that the template accepts is not changed, except that several system messages at the
start become one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.text.tools import Tool

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Tool]], str | None]
"""Renders messages with tools. Returns None if the template fails."""

SYSTEM_ROLES = ("system", "developer")
LATE_SYSTEM = "System message:\n"  # begins a user message that was a system message
RESULT = "Result of the function:\n"  # begins a user message that was a tool's result
TOOLS_PROMPT = (
    "You can call functions. Their descriptions, one a line:\n{tools}\n"
    'To call one, answer only with JSON: {{"name": "...", "arguments": {{...}}}}'
)
PROBE_TOOL = "quire_probe"
SHORT_ID = 9  # characters of a call's id; Mistral's templates accept no other length
KNOWN_ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
_QUOTED_WORD = re.compile(r"""["']([A-Za-z0-9_-]{1,64})["']""")


class TemplateTraits(NamedTuple):
    """What a template can express."""

    words: frozenset[str]  # words in quotation marks, such as roles
    other_roles: bool  # roles that it does not name
    system: bool  # a system message at the start
    lone_system: bool  # a system message without others
    late_system: bool  # a system message after other messages
    same_role: bool  # consecutive messages of one role
    assistant_first: bool  # an assistant's message at the start
    calls: bool  # calls and their results
    lone_results: bool  # results without a call just before them
    argument_texts: bool  # arguments that are texts, unchanged
    any_ids: bool  # ids of calls of any length


def probe_traits(source: str, render: Render) -> TemplateTraits:
    """Return the traits of the template `source`, by calling its `render` with small conversations."""
    tool = Tool(
        PROBE_TOOL, None, {"type": "function", "function": {"name": PROBE_TOOL, "description": "", "parameters": {}}}
    )

    def output(*messages: Message) -> str | None:
        has_calls = any("tool_calls" in message for message in messages)
        has_results = any(message["role"] == "tool" for message in messages)
        return render(messages, [tool] if has_calls or has_results else [])

    def takes(*messages: Message) -> bool:
        return output(*messages) is not None

    def shows(*messages: Message) -> bool:
        """Return True if the contents are in the output, in order."""
        text, at = output(*messages) or "", 0
        for message in messages:
            at = text.find(str(message["content"]), at)
            if at < 0:
                return False
        return bool(text)

    def say(role: str, number: int, **fields: Any) -> Message:
        return {"role": role, "content": f"quire tries out {number}", **fields}

    def call(id: str = "quire0000", arguments: Any = None) -> Message:
        function = {"name": PROBE_TOOL, "arguments": {} if arguments is None else arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": id, "function": function}],
        }

    def result(number: int, id: str = "quire0000") -> Message:
        return say("tool", number, tool_call_id=id, name=PROBE_TOOL)

    user, assistant, long, broken = say("user", 1), say("assistant", 2), "call_quire_tries_out", '{"quire tries": '
    text = output(user, call(arguments=broken), result(3))
    return TemplateTraits(
        words=frozenset(_QUOTED_WORD.findall(source)),
        other_roles=shows(user, say("quire_role", 3), say("user", 4)),
        system=takes(say("system", 3), user),
        lone_system=shows(say("system", 3)),
        late_system=shows(user, assistant, say("system", 3), say("user", 4)),
        same_role=takes(user, say("user", 3)) and takes(user, assistant, say("assistant", 3)),
        assistant_first=takes(assistant, say("user", 3)),
        calls=PROBE_TOOL in (output(user, call()) or "") and shows(user, call(), result(3), result(4)),
        lone_results=shows(result(3), user) and shows(user, call(), say("user", 3), result(4), assistant),
        argument_texts=text is not None and broken in text,
        any_ids=takes(user, call(long), result(3, long)) or not takes(user, call(), result(3)),
    )


def is_plain(messages: Sequence[Message]) -> bool:
    """Return True if a user and the assistant take turns in `messages`, without calls: every template accepts these."""
    turns = ("user", "assistant")
    return all(message["role"] == turns[i % 2] and "tool_calls" not in message for i, message in enumerate(messages))


def fit_messages(
    messages: Sequence[Message], traits: TemplateTraits, described_tools: Sequence[Tool] | None
) -> list[Message]:
    """Return the nearest conversation that a template with `traits` can express. `described_tools` is None if the
    template reads `tools`; otherwise the system message describes these. If the template does not read
    `tools` or does not show calls, calls become JSON, and results become user messages."""
    fitted: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "developer" and role not in traits.words:
            message = {**message, "role": "system"}
        elif role not in KNOWN_ROLES and role not in traits.words and not traits.other_roles:
            message = {**message, "role": "user", "content": _join(f"{role}:\n", message["content"], "")}
        if message["role"] in SYSTEM_ROLES and fitted and all(other["role"] in SYSTEM_ROLES for other in fitted):
            fitted[-1] = {**fitted[-1], "content": _join(fitted[-1]["content"], message["content"])}
        else:
            fitted.append(message)
    if described_tools is not None or not traits.calls:
        fitted = [_without_tool_fields(message) for message in fitted]
    if described_tools:
        fitted = _describe_tools(fitted, described_tools)
    fitted = [_fit_message(i, message, fitted, traits) for i, message in enumerate(fitted)]
    if len(fitted) == 1 and fitted[0]["role"] in SYSTEM_ROLES and not traits.lone_system:
        fitted = [{**fitted[0], "role": "user"}]
    if not traits.same_role or not traits.system:
        fitted = _join_neighbors(fitted)
    first = 1 if fitted[0]["role"] in SYSTEM_ROLES and len(fitted) > 1 else 0
    if not traits.assistant_first and fitted[first]["role"] == "assistant":
        fitted.insert(first, {"role": "user", "content": ""})
    return fitted


def _fit_message(at: int, message: Message, messages: Sequence[Message], traits: TemplateTraits) -> Message:
    """Return the message at position `at` of `messages` in a form that the template accepts there."""
    role, content = message["role"], message["content"]
    if role in SYSTEM_ROLES and not (traits.late_system if at else traits.system):
        mark = LATE_SYSTEM if at else ""
        return {**message, "role": "user", "content": _join(mark, content, "")}
    if role == "tool" and not traits.lone_results and not _follows_call(at, messages):
        return _result_as_user(message)
    if "tool_calls" in message:
        calls = [_fit_call(call, traits) for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message and not traits.any_ids:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _follows_call(at: int, messages: Sequence[Message]) -> bool:
    """Return True if the result at position `at` follows a message with calls, or other results of one."""
    before = at - 1
    while before >= 0 and messages[before]["role"] == "tool":
        before -= 1
    return before >= 0 and "tool_calls" in messages[before]


def _fit_call(call: Mapping[str, Any], traits: TemplateTraits) -> Message:
    function = call["function"]
    if isinstance(function["arguments"], str) and not traits.argument_texts:
        function = {**function, "arguments": {"arguments": function["arguments"]}}
    fitted = {**call, "function": function}
    if "id" in call and not traits.any_ids:
        fitted["id"] = _short_id(call["id"])
    return fitted


def _short_id(id: str) -> str:
    """Return `id` if it has SHORT_ID letters and digits, else that many of its hash."""
    if len(id) == SHORT_ID and id.isalnum():
        return id
    from hashlib import sha256

    return sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID]


def _join_neighbors(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with consecutive ones of one role joined."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
            joined.append(message)
            continue
        both = {**last, **message, "content": _join(last["content"], message["content"])}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            both["tool_calls"] = calls
        joined[-1] = both
    return joined


def _join(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Return two contents as one: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first and second else first or second
    lists = [[content] if isinstance(content, str) else list(content) for content in (first, second) if content]
    return [part for parts in lists for part in parts]


def _describe_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with a description of the tools in the system message."""
    lines = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
    description = TOOLS_PROMPT.format(tools=lines)
    first, *rest = messages
    if first["role"] in SYSTEM_ROLES:
        return [{**first, "content": _join(first["content"], description)}, *rest]
    return [{"role": "system", "content": description}, *messages]


def _without_tool_fields(message: Message) -> Message:
    if message["role"] == "tool":
        return _result_as_user(message)
    if "tool_calls" not in message:
        return message
    calls = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _join(message["content"], calls, "\n")}


def _result_as_user(message: Message) -> Message:
    rest = {name: value for name, value in message.items() if name not in ("tool_call_id", "name")}
    return {**rest, "role": "user", "content": _join(RESULT, message["content"], "")}
