"""The tools of a chat request: what may be called, what must be, and how the output will say so."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
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

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}  # the parameters of a function that names none
TYPED = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
CALL = re.compile(r"#?/items/anyOf/(\d+)/properties/arguments")  # in the schema of a list of calls
AT = re.compile(r", at #(?=/|$)")
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

    def applied(self, params: SamplingParams, request: ChatRequest) -> SamplingParams:
        """`params` of an output with calls. Where it must be a call, response_format has no text to speak of. A format
        whose markers are special tokens needs them in the text."""
        if self.choice in ("required", "named"):
            if (other := asked_for(request)) not in ("", "response_format"):
                raise InputError(f"tool_choice and {other} both say what form the output has: give one", "tool_choice")
            return replace(params, structured=self._structured())
        special = self.choice == "auto" and issubclass(FORMATS[self.format], SPECIAL)
        if special and request.skip_special_tokens is None and params.structured is None:
            return replace(params, skip_special_tokens=False)
        return params

    def _structured(self) -> Structured:
        """The form of an output that must call: the named tool's arguments, or a list of calls."""
        for at, tool in enumerate(self.tools):
            if self.choice == "required" or tool.name == self.named:
                _check_ends(f"tools[{at}].function.parameters", tool)
        if self.choice == "named":
            tool = next(tool for tool in self.tools if tool.name == self.named)
            schema: dict[str, Any] = closed(_parameters(tool))
        else:
            calls = [_call_schema(tool, f"#/items/anyOf/{at}") for at, tool in enumerate(self.tools)]
            most = MAX_CALLS if self.parallel else 1
            schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
        source = json.dumps(schema, ensure_ascii=False)
        if len(source) > MAX_SOURCE:
            raise InputError(f"the tools' schema has {len(source)} characters; the limit is {MAX_SOURCE}", "tools")
        return compact(Structured("json", source))  # white space would be tokens that say nothing


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even where it doesn't say so."""
    found = tool.parameters or NOTHING
    return {"type": "object", **found} if TYPED.isdisjoint(found) else found


def _check_ends(at: str, tool: Tool) -> None:
    if (place := endless(_parameters(tool))) is not None:
        raise InputError(f"{at} refers to itself for ever, at {at}{place}", "tools")


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    properties = {
        "name": {"const": tool.name},
        "arguments": moved(closed(_parameters(tool)), f"{place}/properties/arguments"),
    }
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def name_tools(error: InputError, request: ChatRequest) -> None:
    """Have an error about the form of calls say where it is in the request's tools, if it says where it is."""
    if request.tool_choice == "required":
        text = CALL.sub(lambda found: f"tools[{found[1]}].function.parameters#", str(error))
    else:
        assert isinstance(request.tool_choice, Mapping), "else there is no form"
        name = request.tool_choice["function"]["name"]
        at = next(i for i, tool in enumerate(request.tools or ()) if tool["function"]["name"] == name)
        text = AT.sub(f", at tools[{at}].function.parameters#", str(error))
    if text != str(error):
        error.args, error.param = (text,), "tools"


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
