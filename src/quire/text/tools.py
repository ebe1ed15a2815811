"""Tool definitions of requests, tool calls in conversations, and their text form for templates without tool support."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import InputError, short_repr

MAX_TOOLS = 128
MAX_CALLS = 128  # per message
MAX_VALUES = 8192  # JSON values of all tools, or of a call's arguments
MAX_DEPTH = 32
MAX_PROPERTIES = 1024  # of one tool's parameters
MAX_CHARACTERS = 1 << 18  # of all tools
MAX_ID_CHARS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
FUNCTION_FIELDS = (("description", str, "a string"), ("strict", bool, "true or false"),
                   ("parameters", Mapping, "a JSON schema"))  # fmt: skip
TOOL_SHAPE = 'a function, like {"type": "function", "function": {"name": ...}}'


class Tool(NamedTuple):
    """A function that a model may call. `parameters` is a JSON schema or None; `definition` is the object for
    templates."""

    name: str
    parameters: dict[str, Any] | None
    definition: dict[str, Any]


def read_tools(tools: Any) -> list[Tool]:
    """Return checked copies of a request's tools. Raise InputError with the tool that is invalid, and why."""
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools must be a list, got {type(tools).__name__}", "tools")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools may have at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    bound = JsonCopier("tools", "tools")
    checked = [_tool(f"tools[{i}]", tool, bound) for i, tool in enumerate(tools)]
    names: set[str] = set()
    for i, tool in enumerate(checked):
        if tool.name in names:
            raise InputError(f"tools[{i}].function.name is {tool.name!r}, which another tool has", "tools")
        names.add(tool.name)
    size = sum(len(json.dumps(tool.definition, ensure_ascii=False)) for tool in checked)
    if size > MAX_CHARACTERS:
        raise InputError(f"tools have {size} characters of JSON; the limit is {MAX_CHARACTERS}", "tools")
    return checked


def _tool(at: str, tool: Any, bound: JsonCopier) -> Tool:
    if not isinstance(tool, Mapping):
        raise InputError(f"{at} must be an object, got {type(tool).__name__}", "tools")
    if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InputError(f"{at} must be {TOOL_SHAPE}", "tools")
    function = tool["function"]
    name = check_name(f"{at}.function.name", function.get("name"), "tools")
    for key, wanted, kind in FUNCTION_FIELDS:
        if function.get(key) is not None and not isinstance(function[key], wanted):
            raise InputError(f"{at}.function.{key} must be {kind}, got {type(function[key]).__name__}", "tools")
    parameters = function.get("parameters")
    if parameters:
        _check_parameters(f"{at}.function.parameters", parameters)
    entry = bound.copy({"type": "function", "function": {k: v for k, v in function.items() if v is not None}}, at)
    return Tool(name, entry["function"].get("parameters"), entry)


def _check_parameters(at: str, parameters: Mapping[str, Any]) -> None:
    if parameters.get("type") not in (None, "object"):
        raise InputError(f'{at}.type must be "object", got {short_repr(parameters["type"])}', "tools")
    properties = parameters.get("properties")
    if properties is not None and not isinstance(properties, Mapping):
        raise InputError(f"{at}.properties must be an object, got {type(properties).__name__}", "tools")
    if len(properties or ()) > MAX_PROPERTIES:
        raise InputError(f"{at}.properties has {len(properties or ())} entries; the limit is {MAX_PROPERTIES}", "tools")


def check_name(at: str, name: Any, param: str) -> str:
    """Return the name of a tool. Raise InputError if it is invalid."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(f"{at} must have 1 to 64 letters, digits, _, . or -, got {short_repr(name)}", param)
    return name


class JsonCopier:
    """Makes bounded copies that consist of JSON types only, so that a template gets no object with methods."""

    def __init__(self, subject: str, param: str, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
        self._subject, self._param, self._values_left = subject, param, max_values
        self._limits = f"{max_values} JSON values, {max_depth} levels deep"
        self._max_depth = max_depth

    def copy(self, value: Any, at: str, depth: int = 0) -> Any:
        """Return a copy. Raise InputError beyond `max_values` values in all, or `max_depth` levels."""
        self._values_left -= 1
        if self._values_left < 0 or depth > self._max_depth:
            raise InputError(f"{self._subject} may hold {self._limits}", self._param)
        if isinstance(value, Mapping):
            if not all(type(key) is str for key in value):
                raise InputError(f"{at} has a key that is no string", self._param)
            return {key: self.copy(item, at, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(item, at, depth + 1) for item in value]
        if type(value) is float and not math.isfinite(value):  # json.loads accepts NaN and 1e999
            raise InputError(f"{at} has the number {value}, which JSON doesn't have", self._param)
        if value is None or type(value) in (str, bool, int, float):
            return value
        raise InputError(f"{at} has a {type(value).__name__}, which JSON doesn't have", self._param)


def read_calls(at: str, calls: Any) -> list[dict[str, Any]]:
    """Return an assistant message's tool_calls with the arguments as objects, as templates expect."""
    if not isinstance(calls, list | tuple):
        raise InputError(f"{at} must be a list, got {type(calls).__name__}", "messages")
    if len(calls) > MAX_CALLS:
        raise InputError(f"{at} may have at most {MAX_CALLS} entries, got {len(calls)}", "messages")
    return [_call(f"{at}[{i}]", call) for i, call in enumerate(calls)]


def _call(at: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InputError(f"{at} must be a call of {TOOL_SHAPE}", "messages")
    name = check_name(f"{at}.function.name", function.get("name"), "messages")
    checked: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(at, function)}}
    if call.get("id") is not None:
        checked["id"] = check_call_id(f"{at}.id", call["id"])
    return checked


def check_call_id(at: str, id: Any) -> str:
    """Return the id of a call. Raise InputError if it is invalid."""
    if not isinstance(id, str) or not 1 <= len(id) <= MAX_ID_CHARS:
        raise InputError(f"{at} must be a string of 1 to {MAX_ID_CHARS} characters, got {short_repr(id)}", "messages")
    return id


def _arguments(at: str, function: Mapping[str, Any]) -> dict[str, Any]:
    at = f"{at}.function.arguments"
    given = function.get("arguments")
    if given is None or given == "":
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{at} is no JSON: {str(error)[:120]}", "messages") from None
    if not isinstance(given, Mapping):
        raise InputError(f"{at} must be the JSON of an object, got {type(given).__name__}", "messages")
    arguments: dict[str, Any] = JsonCopier(at, "messages").copy(given, at)
    return arguments


def check_tool_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for a tool's result without a call before it."""
    call_ids: set[str] | None = None  # of the last assistant message
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            if call_ids is None:
                raise InputError(f"messages[{i}] has a tool's result, and no call of a tool is before it", "messages")
            id = message.get("tool_call_id")
            if id is not None and call_ids and id not in call_ids:
                raise InputError(f"messages[{i}].tool_call_id is {id[:60]!r}, which no call before it has", "messages")
        else:
            calls = message.get("tool_calls")
            call_ids = {call["id"] for call in calls if "id" in call} if calls else None


# For templates without tool support

TOOLS_PROMPT = (
    "You can call functions. Their descriptions, one a line:\n{tools}\n"
    'To call one, answer only with JSON: {{"name": "...", "arguments": {{...}}}}'
)


def describe_tools_in_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages for a template that does not read `tools`: the system message describes the tools, calls are
    JSON, and results are user messages."""
    plain = [_without_tool_fields(message) for message in messages]
    if not tools or not plain:
        return plain
    lines = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
    description = TOOLS_PROMPT.format(tools=lines)
    if plain[0]["role"] in ("system", "developer") and isinstance(plain[0]["content"], str):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{description}"}, *plain[1:]]
    return [{"role": "system", "content": description}, *plain]


def _without_tool_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message and message["role"] != "tool":
        return dict(message)
    rest = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {**rest, "role": "user", "content": f"Result of the function:\n{message['content']}"}
    calls = "\n".join(json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    return {**rest, "content": f"{message['content']}\n{calls}".lstrip("\n")}
