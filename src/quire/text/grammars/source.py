"""Conversion of a request's output form to llguidance's grammar format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.errors import InputError
from quire.protocol.structured_output import (
    LLGUIDANCE_OPTIONS_KEY,
    PARAM_NAME,
    SCHEMA_VALUE_KEYWORDS,
    Structured,
    map_subschemas,
    parse_source,
)
from quire.text.grammars.schema_cycles import find_endless_reference

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

WHITESPACE = r"( |\r?\n[ \t]{0,20})"  # between JSON tokens: indentation is allowed, but bounded
MAX_DEPTH = 64  # of a schema, as far as it is examined here
MAX_TAGS = 128
NO_OP_FORMATS = frozenset(("password", "binary", "path"))  # OpenAPI's and pydantic's: hints without constraints
COUNT_KEYWORDS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
MAX_PROPERTIES = 2048  # in all of a schema
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
GBNF_ERROR_LINE = re.compile(r" at line (\d+)")
MAX_GBNF_RULES = 512  # converted in a quarter of a second; the time grows with the square of the number
FREE_TEXT_RULE = r"TAG_TEXT: /(.|\n)*/"


def make_grammar_source(structured: Structured, tokenizer: Tokenizer) -> str:
    """Return a grammar for LLMatcher. Raise InputError for invalid JSON, or JSON of the wrong shape for its kind."""
    try:
        return _compile_source(structured, tokenizer)
    except UnicodeEncodeError as error:
        raise InputError(f"{structured.kind} is no text: it has half of a surrogate pair", PARAM_NAME) from error


def _compile_source(structured: Structured, tokenizer: Tokenizer) -> str:
    from llguidance import LLMatcher

    match structured.kind:
        case "any":
            raise AssertionError("any output needs no grammar")
        case "json":
            return str(
                LLMatcher.grammar_from_json_schema(
                    json.dumps(with_whitespace_pattern(without_no_ops(read_schema(structured))))
                )
            )
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(with_whitespace_pattern({"type": "object"}))))
        case "regex":
            return str(LLMatcher.grammar_from_regex(structured.source))
        case "choice":
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, parse_source(structured)))))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(to_lark(structured.source)))
        case "structural_tag":
            return str(LLMatcher.grammar_from_lark(structural_tag_grammar(parse_source(structured), tokenizer)))


def to_lark(source: str) -> str:
    """Return a grammar in Lark. `source` is in Lark or in GBNF, the EBNF of llama.cpp and vLLM, with rules
    `name ::= ...` that begin at `root`. Raise InputError if it can't be converted."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    rules = len(GBNF_RULE.findall(source))
    if not rules:
        return source
    if rules > MAX_GBNF_RULES:
        raise InputError(
            f"grammar: it has {rules} rules in GBNF (name ::= ...); at most {MAX_GBNF_RULES} are converted: write it "
            "in Lark (name: ...)",
            PARAM_NAME,
        )
    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # the library raises its own errors, plain ones, and RecursionError
        at = GBNF_ERROR_LINE.search(str(error))
        line = source.split("\n")[int(at[1]) - 1].strip()[:80] if at else ""
        reason = " ".join(str(error).partition(" at line")[0].split())[:120]
        shown = f", in line {at[1]}: {line!r}" if at else ""
        raise InputError(
            f"grammar: {reason}{shown}. It is read as GBNF (root ::= ...), as it has ::=; Lark's rules have a colon "
            "(start: ...)",
            PARAM_NAME,
        ) from error


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_schema(structured: Structured) -> Any:
    """Return the schema of a `json` form. Raise InputError if it is invalid or no finite value satisfies it."""
    schema = parse_source(structured)
    if not isinstance(schema, dict | bool):
        raise InputError(f"json must be a schema, an object or true, got {type(schema).__name__}", PARAM_NAME)
    if (count := sum(place.rsplit("/", 2)[-2] == "properties" for place in _pointers(schema, "#", 0))) > MAX_PROPERTIES:
        raise InputError(f"json: the schema has {count} properties; at most {MAX_PROPERTIES} are compiled", PARAM_NAME)
    if (place := find_endless_reference(schema)) is not None:
        raise InputError(f"json: the schema refers to itself for ever, at {place}", PARAM_NAME)
    return schema


def with_whitespace_pattern(schema: Any) -> Any:
    """Return the schema with bounded white space between parts, unless the schema defines it."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    given = schema.get(LLGUIDANCE_OPTIONS_KEY)
    options = given if isinstance(given, dict) else {}
    if options.get("whitespace_flexible") is False or "whitespace_pattern" in options:
        return schema
    return {**schema, LLGUIDANCE_OPTIONS_KEY: {**options, "whitespace_pattern": WHITESPACE}}


def without_no_ops(schema: Any, depth: int = 0) -> Any:
    """Return the schema without keywords that constrain nothing: propertyNames of type string, which zod writes for
    every record, and formats that any string has. Counts such as 1.0 become integers."""
    if isinstance(schema, list):
        return [without_no_ops(one, depth + 1) for one in schema] if depth <= MAX_DEPTH else schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    kept = {name: _as_integer(name, one) for name, one in schema.items() if not _is_no_op(name, one)}
    return map_subschemas(kept, lambda one: without_no_ops(one, depth + 1), (*SCHEMA_VALUE_KEYWORDS, "allOf"))


def _is_no_op(name: str, value: Any) -> bool:
    if name == "format":
        return isinstance(value, str) and value in NO_OP_FORMATS
    return name == "propertyNames" and value == {"type": "string"}


def _as_integer(name: str, value: Any) -> Any:
    return int(value) if name in COUNT_KEYWORDS and type(value) is float and value.is_integer() else value


def structural_tag_grammar(given: Any, tokenizer: Tokenizer) -> str:
    """Return a Lark grammar of vLLM's structural tags: free text in which a trigger begins one of `structures`, namely
    the one whose `begin` starts with it; between `begin` and `end` is JSON of `schema`."""
    structures, triggers = (given.get(name) if isinstance(given, dict) else None for name in ("structures", "triggers"))
    if not isinstance(structures, list) or not isinstance(triggers, list) or not 0 < len(structures) <= MAX_TAGS:
        raise InputError(f"structural_tag must have 1 to {MAX_TAGS} structures, and triggers", PARAM_NAME)
    lines = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(structures)))})* tag_end",
        "tag_end: TAG_TEXT",
        FREE_TEXT_RULE,
    ]
    for i, one in enumerate(structures):
        begin, end = (one.get(name) if isinstance(one, dict) else None for name in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InputError(f"structural_tag: structures[{i}] must have the texts begin and end", PARAM_NAME)
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None:
            raise InputError(f"structural_tag: structures[{i}].begin starts with none of the triggers", PARAM_NAME)
        schema = one.get("schema", {"type": "object"})
        if not isinstance(schema, dict):
            raise InputError(f"structural_tag: structures[{i}].schema must be an object", PARAM_NAME)
        if (place := find_endless_reference(schema)) is not None:
            where = f"structures[{i}].schema"
            raise InputError(f"structural_tag: {where} refers to itself for ever, at {where}{place}", PARAM_NAME)
        body = [begin[len(trigger) :], f"%json {json.dumps(with_whitespace_pattern(without_no_ops(schema)))}", end]
        parts = " ".join(part if part.startswith("%json") else _literal(part) for part in body if part)
        if tokenizer.token_to_id(trigger) in tokenizer.special_ids:
            lines.append(f"tag_{i}: TAG_TEXT <[{tokenizer.token_to_id(trigger)}]> {parts}")
        else:
            lines += [f"tag_{i}_trigger[lazy]: TAG_TEXT {_literal(trigger)}", f"tag_{i}: tag_{i}_trigger {parts}"]
    return "\n".join(lines)


def _pointers(at: Any, place: str, depth: int) -> Iterator[str]:
    """Yield the pointers of all members and items in a schema."""
    pairs = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
    for key, value in pairs:
        where = f"{place}/{str(key).replace('/', '~1')}"
        yield where
        if depth < MAX_DEPTH:
            yield from _pointers(value, where, depth + 1)
