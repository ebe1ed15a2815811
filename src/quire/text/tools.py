"""Tool definitions of requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.errors import InputError, short_repr

MAX_TOOLS = 128
MAX_CALLS = 128  # per message
MAX_VALUES = 8192  # JSON values of all tools, or of a call's arguments
MAX_DEPTH = 32
MAX_PROPERTIES = 1024  # of one tool's parameters
MAX_CHARACTERS = 1 << 18  # of all tools
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
    """Return checked copies of a request's functions, without the `other_tools`. Raise InputError with the tool that is
    invalid, and why."""
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools must be a list, got {type(tools).__name__}", "tools")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools may have at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    bound = JsonCopier("tools", "tools")
    others, checked = other_tools(tools), list[Tool]()
    for i, given in enumerate(tools):
        if i in others:
            continue
        tool = _tool(f"tools[{i}]", given, bound)
        if any(tool.name == other.name for other in checked):
            raise InputError(f"tools[{i}].function.name is {tool.name!r}, which another tool has", "tools")
        checked.append(tool)
    size = sum(len(json.dumps(tool.definition, ensure_ascii=False)) for tool in checked)
    if size > MAX_CHARACTERS:
        raise InputError(f"tools have {size} characters of JSON; the limit is {MAX_CHARACTERS}", "tools")
    return checked


def other_tools(tools: Any) -> dict[int, str]:
    """Return the types of the tools that are not functions, by position. Such tools, as web search, run on OpenAI's or
    Anthropic's servers, and not here."""
    kinds = {i: tool.get("type") for i, tool in enumerate(tools) if isinstance(tool, Mapping)}
    return {i: kind[:40] for i, kind in kinds.items() if isinstance(kind, str) and kind != "function"}


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
