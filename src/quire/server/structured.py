"""The form of an output as clients ask for it: response_format, or vLLM's structured_outputs and guided_*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import InputError
from quire.server.protocol import Sampling
from quire.vocabulary.structured import (
    KINDS,
    MAX_CHOICES,
    NAME,
    Structured,
    StructuredOutputsParams,
    closed,
    lenient,
    source_of,
)

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
FIELDS = ("response_format", "structured_outputs", *GUIDED)
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OPTIONS = ("disable_any_whitespace",)
INERT = ("disable_fallback",)  # of vLLM's backends: there is one here
__all__ = ["GUIDED", "MAX_CHOICES", "asked_for", "field_of", "structured_of"]


def field_of(request: Sampling) -> str:
    """What the request calls the form that it asks for: of a call that must be, if it is one."""
    other = asked_for(request)
    must_call = request.tool_choice not in (None, "none", "auto")
    return "tool_choice" if must_call and other in ("", "response_format") else other or NAME


def asked_for(request: Sampling) -> str:
    """The field that says what form the output has; "" if there is none."""
    return next((name for name in FIELDS if _given(request, name)), "")


def structured_of(request: Sampling) -> Structured | None:
    """The form of the output, if it is said in one of the ways that there are. InputError names the field."""
    given = [name for name in FIELDS if _given(request, name)]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} both say what form the output has: give one", given[1])
    if not given:
        return None
    name = given[0]
    value = getattr(request, name)
    try:
        if name == "response_format":
            return _format(value)
        if name == NAME:
            return _outputs(value)
        return StructuredOutputsParams(**{GUIDED[name]: value}).structured()
    except InputError as error:
        error.param = name
        raise


def _given(request: Sampling, name: str) -> bool:
    value = getattr(request, name)
    if name == "response_format":
        return value is not None and value.get("type") != "text"
    if name == NAME:  # clients send all of its fields, most of them null
        return value is not None and any(one not in (None, False) for one in value.values())
    return value is not None


def _outputs(value: Mapping[str, Any]) -> Structured:
    if unknown := next((key for key, one in value.items() if key not in (*KINDS, *OPTIONS, *INERT) and one), None):
        raise InputError(f"{NAME} has no {unknown[:60]!r}: it is one of {', '.join(KINDS)}", NAME)
    known = {key: one for key, one in value.items() if key in (*KINDS, *OPTIONS) and one not in (None, False)}
    return StructuredOutputsParams(**known).structured()


def _format(value: Mapping[str, Any]) -> Structured:
    kind, name = value.get("type"), "response_format"
    if kind not in FORMATS:
        raise InputError(f"{name}.type must be one of {', '.join(FORMATS)}, got {str(kind)[:40]!r}", name)
    if kind == "structural_tag":
        return Structured("structural_tag", source_of("structural_tag", dict(value), name))
    if kind == "json_object":
        schema = value.get("schema")
        return Structured("json_object", "") if schema is None else _schema(schema, f"{name}.schema")
    about = value.get("json_schema")
    if not isinstance(about, Mapping) or "schema" not in about:
        raise InputError(f"{name}.json_schema must be an object that has a schema", name)
    if about.get("strict") not in (None, True, False):
        raise InputError(f"{name}.json_schema.strict must be true or false, got {str(about['strict'])[:40]!r}", name)
    strict = about.get("strict")
    schema = closed(about["schema"]) if strict else about["schema"]
    found = _schema(schema, f"{name}.json_schema.schema")
    return lenient(found) if strict is False else found


def _schema(value: Any, place: str) -> Structured:
    if not isinstance(value, Mapping | bool):
        raise InputError(f"{place} must be an object, got {type(value).__name__}", "response_format")
    return Structured("json", source_of("json", value, "response_format"))
