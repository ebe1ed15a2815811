"""Structured output as requests ask for it: response_format, or vLLM's structured_outputs and guided_*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InputError
from quire.protocol.structured_output import (
    MAX_CHOICES,
    PARAM_NAME,
    STRUCTURED_KINDS,
    Structured,
    StructuredOutputsParams,
    close_objects,
    to_source,
    with_lenient,
)
from quire.server.request_models import SamplingFields

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
FIELDS = ("response_format", "structured_outputs", *GUIDED)
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OPTIONS = ("disable_any_whitespace",)
IGNORED_OPTIONS = ("disable_fallback",)  # of vLLM's backends; quire has only one
__all__ = ["GUIDED", "MAX_CHOICES", "given_structured_field", "read_structured", "structured_field"]


def structured_field(request: SamplingFields) -> str:
    """Return the name of the request's field for structured output. It is tool_choice if that requires a call."""
    other = given_structured_field(request)
    must_call = request.tool_choice not in (None, "none", "auto")
    return "tool_choice" if must_call and other in ("", "response_format") else other or PARAM_NAME


def given_structured_field(request: SamplingFields) -> str:
    """Return the name of the field that asks for structured output, or ""."""
    return next((name for name in FIELDS if _is_given(request, name)), "")


def read_structured(request: SamplingFields) -> Structured | None:
    """Return the structured output that the request asks for, or None. Raise InputError for an invalid field, or for
    two."""
    given = [name for name in FIELDS if _is_given(request, name)]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} both set the form of the output: give one", given[1])
    if not given:
        return None
    name = given[0]
    value = getattr(request, name)
    try:
        if name == "response_format":
            return _from_response_format(value)
        if name == PARAM_NAME:
            return _from_structured_outputs(value)
        return StructuredOutputsParams(**{GUIDED[name]: value}).structured()
    except InputError as error:
        error.param = name
        raise


def _is_given(request: SamplingFields, name: str) -> bool:
    value = getattr(request, name)
    if name == "response_format":
        return value is not None and value.get("type") != "text"
    if name == PARAM_NAME:  # clients send all of its fields, most of them null
        return value is not None and any(one not in (None, False) for one in value.values())
    return value is not None


def _from_structured_outputs(value: Mapping[str, Any]) -> Structured:
    if unknown := next(
        (key for key, one in value.items() if key not in (*STRUCTURED_KINDS, *OPTIONS, *IGNORED_OPTIONS) and one), None
    ):
        raise InputError(
            f"{PARAM_NAME} has no {unknown[:60]!r}: it is one of {', '.join(STRUCTURED_KINDS)}", PARAM_NAME
        )
    known = {
        key: one for key, one in value.items() if key in (*STRUCTURED_KINDS, *OPTIONS) and one not in (None, False)
    }
    return StructuredOutputsParams(**known).structured()


def _from_response_format(value: Mapping[str, Any]) -> Structured:
    kind, name = value.get("type"), "response_format"
    if kind not in RESPONSE_FORMATS:
        raise InputError(f"{name}.type must be one of {', '.join(RESPONSE_FORMATS)}, got {str(kind)[:40]!r}", name)
    if kind == "structural_tag":
        return Structured("structural_tag", to_source("structural_tag", dict(value), name))
    if kind == "json_object":
        schema = value.get("schema")
        return Structured("json_object", "") if schema is None else _from_schema(schema, f"{name}.schema")
    about = value.get("json_schema")
    if not isinstance(about, Mapping) or "schema" not in about:
        raise InputError(f"{name}.json_schema must be an object that has a schema", name)
    if about.get("strict") not in (None, True, False):
        raise InputError(f"{name}.json_schema.strict must be true or false, got {str(about['strict'])[:40]!r}", name)
    strict = about.get("strict")
    schema = close_objects(about["schema"]) if strict else about["schema"]
    structured = _from_schema(schema, f"{name}.json_schema.schema")
    return with_lenient(structured) if strict is False else structured


def _from_schema(value: Any, place: str) -> Structured:
    if not isinstance(value, Mapping | bool):
        raise InputError(f"{place} must be an object, got {type(value).__name__}", "response_format")
    return Structured("json", to_source("json", value, "response_format"))
