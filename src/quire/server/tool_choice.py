"""The tools of a chat request: which may be called, whether one must be, and how the output writes calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire.errors import InputError, short_repr
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import MAX_SOURCE_CHARS, Structured, close_objects, without_whitespace
from quire.server.request_models import ChatRequest
from quire.server.request_params import given_structured_fields
from quire.text.grammars.schema_cycles import find_endless_reference
from quire.text.tool_parsers.base import ToolCallParser
from quire.text.tool_parsers.formats import SPECIAL_TOKEN_PARSERS, TOOL_PARSERS, RequiredToolParser
from quire.text.tools import MAX_CALLS, Tool, read_tools

ANY_OBJECT: dict[str, Any] = {"type": "object"}
VALUE_KEYWORDS = frozenset({"const", "default", "enum", "examples"})  # keywords whose value is not a schema
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # of a function without parameters
TYPE_KEYWORDS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
CALL_ARGUMENTS = re.compile(r"#?/items/anyOf/(\d+)/properties/arguments")  # in the schema of a list of calls
ID_LETTERS = 9  # of a call's id for Mistral's templates, which require this length


class ToolChoice(NamedTuple):
    """The tools of a request, and the `callable` ones among them. `mode` is "none", "auto", "required", or "named"
    for the tool `named_tool`. `format` is how the model writes calls. `parallel`: an output may have several calls."""

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    mode: str = "none"
    named_tool: str = ""
    parallel: bool = True
    format: str = "json"

    def new_parser(self) -> ToolCallParser | None:
        """Return a parser of one output's calls. Return None if all of the output is text or the arguments of the named
        tool."""
        if self.mode in ("none", "named"):
            return None
        kind = TOOL_PARSERS[self.format] if self.mode == "auto" else RequiredToolParser
        return kind([tool.name for tool in self.callable])

    def new_call_id(self) -> str:
        """Return a new id of a call."""
        id = uuid.uuid4().hex
        return id[:ID_LETTERS] if self.format == "mistral" else f"call_{id[:24]}"

    def apply_to(self, params: SamplingParams, request: ChatRequest, any_arguments: bool = False) -> SamplingParams:
        """Return `params` for outputs with calls. If a call is required, response_format is ignored, since there is no
        text. Formats with special tokens as markers keep them in the text. `any_arguments`: arguments may be any
        object."""
        if self.mode in ("required", "named"):
            for other in given_structured_fields(request):
                if other != "response_format":
                    what = f"tool_choice and {other} both set the form of the output: give one"
                    raise InputError(what, "tool_choice")
            return replace(params, structured=self._structured(any_arguments))
        special = self.mode == "auto" and issubclass(TOOL_PARSERS[self.format], SPECIAL_TOKEN_PARSERS)
        if special and request.skip_special_tokens is None and params.structured is None:
            return replace(params, skip_special_tokens=False)
        return params

    def _structured(self, any_arguments: bool) -> Structured:
        """Return the structured output for a required call: the named tool's arguments, or a list of calls."""
        tools = [tool._replace(parameters=ANY_OBJECT) if any_arguments else tool for tool in self.callable]
        if self.mode == "named":
            schema = _arguments_schema(next(tool for tool in tools if tool.name == self.named_tool))
        else:
            calls = [_call_schema(tool, f"#/items/anyOf/{at}") for at, tool in enumerate(tools)]
            most = MAX_CALLS if self.parallel else 1
            schema = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
        source = json.dumps(schema, ensure_ascii=False)
        if len(source) > MAX_SOURCE_CHARS:
            raise InputError(
                f"the tools' schema has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}", "tools"
            )
        return without_whitespace(Structured("json", source))  # whitespace would only cost tokens

    def unenforced_warnings(self, dropped: Iterable[str]) -> list[str]:
        """Return warnings about what a grammar does not enforce in calls: the keywords at the paths `dropped`, and
        schemas that refer to themselves endlessly."""
        at = {tool.name: f"tools[{i}].function.parameters" for i, tool in enumerate(self.tools)}
        called = [tool for tool in self.callable if self.mode == "required" or tool.name == self.named_tool]
        places = [at[tool.name] for tool in called if find_endless_reference(_parameters_schema(tool)) is not None]
        for place in dropped:
            if self.mode == "named":
                places.append(at[self.named_tool] + place)
            else:
                places.append(CALL_ARGUMENTS.sub(lambda match: f"{at[self.callable[int(match[1])].name]}#", place))
        return [f"not enforced in tool calls: {', '.join(places)}"] if places else []


NO_TOOLS = ToolChoice()


def _parameters_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments. It is an object even if the tool does not say so. Keywords that are
    null, which some libraries write for absent ones, are left out."""
    schema = _without_null(tool.parameters or NO_PARAMETERS)
    return {"type": "object", **schema} if TYPE_KEYWORDS.isdisjoint(schema) else schema


def _without_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if value is not None or key in VALUE_KEYWORDS}
    return {key: value if key in VALUE_KEYWORDS else _without_null(value) for key, value in kept.items()}


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema that is enforced for the arguments of a call."""
    parameters = _parameters_schema(tool)
    return (
        ANY_OBJECT
        if parameters == ANY_OBJECT or find_endless_reference(parameters) is not None
        else close_objects(parameters)
    )


def _call_schema(tool: Tool, pointer: str) -> dict[str, Any]:
    properties = {
        "name": {"const": tool.name},
        "arguments": rebase_refs(_arguments_schema(tool), f"{pointer}/properties/arguments"),
    }
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def rebase_refs(schema: Any, pointer: str) -> Any:
    """Return a schema for use at `pointer` of another one: its references to itself are changed accordingly."""
    if isinstance(schema, Mapping):
        return {
            key: pointer + value[1:]
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else rebase_refs(value, pointer)
            for key, value in schema.items()
        }
    return [rebase_refs(item, pointer) for item in schema] if isinstance(schema, list) else schema


def read_tool_choice(request: ChatRequest, format: str) -> ToolChoice:
    """Return the tools of a request. Raise InputError for invalid tools or an invalid choice."""
    tools, given = tuple(read_tools(request.tools or [])), request.tool_choice
    choice = ToolChoice(tools, tools, "none", "", request.parallel_tool_calls is not False, format)
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        choice, given = _apply_allowed_tools(choice, given.get("allowed_tools"))
    if given == "none":
        return choice
    if given is None or given == "auto":
        return choice._replace(mode="auto" if tools else "none")
    if given == "required" or isinstance(given, Mapping):
        if not tools:
            raise InputError("tool_choice needs tools", "tool_choice")
        if given == "required":
            return choice._replace(mode="required")
        function = given.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if given.get("type", "function") == "function" and isinstance(name, str):
            if name not in {tool.name for tool in tools}:
                raise InputError(f"tool_choice names {name[:64]!r}, and there is no such tool", "tool_choice")
            return choice._replace(mode="named", named_tool=name)
    form = '{"type": "function", "function": {"name": ...}}'
    raise InputError(f"tool_choice is none, auto, required or {form}, got {short_repr(given)}", "tool_choice")


def _apply_allowed_tools(choice: ToolChoice, given: Any) -> tuple[ToolChoice, str]:
    """Return the choice with only the allowed tools callable, and the mode. All tools stay in the prompt, so that it is
    found in the prefix cache."""
    tools = given.get("tools") if isinstance(given, Mapping) else None
    listed = tools if isinstance(tools, list) else []
    functions = [tool.get("function") for tool in listed if isinstance(tool, Mapping)]
    found = [function.get("name") for function in functions if isinstance(function, Mapping)]
    names = {name for name in found if isinstance(name, str)}
    if not names or given.get("mode") not in ("auto", "required"):
        form = '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}'
        raise InputError(f"tool_choice.allowed_tools must be {form}, got {short_repr(given)}", "tool_choice")
    known = tuple(tool for tool in choice.tools if tool.name in names)
    if missing := names - {tool.name for tool in known}:
        raise InputError(f"tool_choice allows {min(missing)[:64]!r}, which is not the name of a tool", "tool_choice")
    return choice._replace(callable=known), given["mode"]
