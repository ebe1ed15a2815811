"""The tools of a chat request: what may be called, what must be, and how the output will say so."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire.errors import InputError, shown
from quire.server.protocol import ChatRequest
from quire.server.structured import asked_for
from quire.text.calls.events import CallReader
from quire.text.calls.formats import FORMATS, SPECIAL, OnlyCalls
from quire.text.grammar_endless import endless
from quire.text.tools import MAX_CALLS, Tool, read_tools
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.structured import MAX_SOURCE, Structured, closed, compact

ANYTHING: dict[str, Any] = {"type": "object"}
VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords whose value is no schema
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}  # the parameters of a function that names none
TYPED = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
CALL = re.compile(r"#?/items/anyOf/(\d+)/properties/arguments")  # in the schema of a list of calls
ID_LETTERS = 9  # of a call's id, where templates want exactly so many


class Toolbox(NamedTuple):
    """`choice` is "none", "auto", "required", or "named", which is the tool `named`. `format` is how the model writes
    calls. With `parallel` an output may have several."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str = ""
    parallel: bool = True
    format: str = "json"

    def reader(self) -> CallReader | None:
        """What reads one output's calls; None where the output is text, or the arguments of the named tool."""
        if self.choice in ("none", "named"):
            return None
        kind = FORMATS[self.format] if self.choice == "auto" else OnlyCalls
        return kind([tool.name for tool in self.tools])

    def call_id(self) -> str:
        """A new id for a call."""
        id = uuid.uuid4().hex
        return id[:ID_LETTERS] if self.format == "mistral" else f"call_{id[:24]}"

    def applied(self, params: SamplingParams, request: ChatRequest, free: bool = False) -> SamplingParams:
        """`params` of an output with calls. Where it must be a call, response_format has no text to speak of. A format
        whose markers are special tokens needs them in the text. `free`: arguments are any object."""
        if self.choice in ("required", "named"):
            if (other := asked_for(request)) not in ("", "response_format"):
                raise InputError(f"tool_choice and {other} both say what form the output has: give one", "tool_choice")
            return replace(params, structured=self._structured(free))
        special = self.choice == "auto" and issubclass(FORMATS[self.format], SPECIAL)
        if special and request.skip_special_tokens is None and params.structured is None:
            return replace(params, skip_special_tokens=False)
        return params

    def _structured(self, free: bool) -> Structured:
        """The form of an output that must call: the named tool's arguments, or a list of calls."""
        tools = [tool._replace(parameters=ANYTHING) if free else tool for tool in self.tools]
        if self.choice == "named":
            schema = _arguments(next(tool for tool in tools if tool.name == self.named))
        else:
            calls = [_call_schema(tool, f"#/items/anyOf/{at}") for at, tool in enumerate(tools)]
            most = MAX_CALLS if self.parallel else 1
            schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
        source = json.dumps(schema, ensure_ascii=False)
        if len(source) > MAX_SOURCE:
            raise InputError(f"the tools' schema has {len(source)} characters; the limit is {MAX_SOURCE}", "tools")
        return compact(Structured("json", source))  # white space would be tokens that say nothing

    def loosened(self, lost: Iterable[str]) -> list[str]:
        """What is to be said of calls that a grammar holds to their parameters but for the keywords at these places,
        and but for parameters that refer to themselves for ever."""
        at = {tool.name: f"tools[{i}].function.parameters" for i, tool in enumerate(self.tools)}
        called = [tool for tool in self.tools if self.choice == "required" or tool.name == self.named]
        places = [at[tool.name] for tool in called if endless(_parameters(tool)) is not None]
        for place in lost:
            if self.choice == "named":
                places.append(at[self.named] + place)
            else:
                places.append(CALL.sub(lambda found: f"tools[{found[1]}].function.parameters#", place))
        return [f"not enforced in tool calls: {', '.join(places)}"] if places else []


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even where it doesn't say so. Keywords that are null are
    left out: some libraries write those that they have no value for."""
    found = _without_null(tool.parameters or NOTHING)
    return {"type": "object", **found} if TYPED.isdisjoint(found) else found


def _without_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    said = {key: value for key, value in schema.items() if value is not None or key in VALUES}
    return {key: value if key in VALUES else _without_null(value) for key, value in said.items()}


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema that calls of a tool are held to."""
    parameters = _parameters(tool)
    return ANYTHING if parameters == ANYTHING or endless(parameters) is not None else closed(parameters)


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    properties = {
        "name": {"const": tool.name},
        "arguments": moved(_arguments(tool), f"{place}/properties/arguments"),
    }
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one: its references to itself are to there."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else moved(value, place)
            for key, value in schema.items()
        }
    return [moved(item, place) for item in schema] if isinstance(schema, list) else schema


def toolbox(request: ChatRequest, format: str) -> Toolbox:
    """What a request says of tools. InputError for tools that are none, and for a choice that can't be had."""
    tools = tuple(read_tools(request.tools or []))
    choice, named = _choice(request.tool_choice, tools)
    return Toolbox(tools, choice, named, request.parallel_tool_calls is not False, format)


def _choice(given: Any, tools: tuple[Tool, ...]) -> tuple[str, str]:
    if given is None or given == "auto":
        return ("auto" if tools else "none"), ""
    if given == "none":
        return "none", ""
    if given == "required" or isinstance(given, Mapping):
        if not tools:
            raise InputError("tool_choice needs tools", "tool_choice")
        if given == "required":
            return given, ""
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if given.get("type", "function") == "function" and isinstance(name, str):
            if name not in {tool.name for tool in tools}:
                raise InputError(f"tool_choice names {name[:64]!r}, and there is no such tool", "tool_choice")
            return "named", name
    form = '{"type": "function", "function": {"name": ...}}'
    raise InputError(f"tool_choice is none, auto, required or {form}, got {shown(given)}", "tool_choice")
