"""Convert a request's fields to the engine's SamplingParams: defaults, conflicts, the form of the output, and
the client's names in errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from quire.errors import InputError
from quire.protocol.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS, SamplingParams
from quire.protocol.structured_output import (
    PARAM_NAME,
    STRUCTURED_KINDS,
    Structured,
    StructuredOutputsParams,
    to_source,
    with_lenient,
)
from quire.server.request_models import (
    EMPTY_VALUES,
    MAX_PROMPTS,
    REQUEST_ID_PATTERN,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)

MAX_ALLOWED_TOKEN_IDS = 1 << 15  # the event loop reads these in some milliseconds
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
OPTIONS = ("disable_any_whitespace",)
IGNORED_OPTIONS = ("disable_fallback",)  # of vLLM's backends; quire has only one
_BRANCH_FIELDS = ("best_of", "beam_width", "length_penalty", "early_stopping")
PASSED_FIELDS = [
    field.name
    for field in fields(SamplingParams)
    if field.name in SamplingFields.model_fields and field.name not in (*_BRANCH_FIELDS, "structured_outputs")
]


class RequestRules(NamedTuple):
    """Rules for every request: the model's sampling `defaults`, whether there is a tokenizer, the most
    log-probabilities per token, and whether unknown fields are refused (`strict`)."""

    defaults: Mapping[str, Any]
    has_tokenizer: bool = True
    max_logprobs: int = MAX_LOGPROBS
    strict: bool = False


def _given_params(request: SamplingFields, rules: RequestRules) -> dict[str, Any]:
    """Return the parameters that completions and chats have by the same names. Raise InputError for an invalid
    field."""
    if isinstance(request, CompletionRequest):
        for name, nothing in (
            ("tools", EMPTY_VALUES), ("tool_choice", (None, "none", "auto")), ("thinking_token_budget", EMPTY_VALUES),
        ):  # fmt: skip
            if getattr(request, name) not in nothing:
                raise InputError(f"{name} is for chats: completions have no tools and no reasoning", name)
    if request.modalities not in (None, ["text"]):
        raise InputError('modalities may only be ["text"]', "modalities")
    if request.spaces_between_special_tokens is False:
        raise InputError("spaces_between_special_tokens can't be false", "spaces_between_special_tokens")
    if request.stream_options is not None and not request.stream:
        raise InputError("stream_options needs stream to be true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InputError("prompt_logprobs can't be streamed", "prompt_logprobs")
    if len(request.allowed_token_ids or ()) > MAX_ALLOWED_TOKEN_IDS:
        raise InputError(
            f"allowed_token_ids may have at most {MAX_ALLOWED_TOKEN_IDS} entries, got "
            f"{len(request.allowed_token_ids or ())}",
            "allowed_token_ids",
        )
    if request.cache_salt == "":
        raise InputError("cache_salt must not be empty", "cache_salt")
    if request.request_id is not None and not REQUEST_ID_PATTERN.fullmatch(request.request_id):
        shown = f"{request.request_id[:40]!r}"
        raise InputError(f"request_id must have 1 to 128 visible ASCII characters, got {shown}", "request_id")

    if request.prompt_logprobs is not None:
        _check_logprobs("prompt_logprobs", request.prompt_logprobs, rules)
    given = {name: getattr(request, name) for name in PASSED_FIELDS if getattr(request, name) is not None}
    return {
        **rules.defaults, "detokenize": rules.has_tokenizer, **given, **_branch_params(request),
        "structured": read_structured(request),
    }  # fmt: skip


def _branch_params(request: SamplingFields) -> dict[str, Any]:
    """Return the parameters of best_of or of beam search. Beam search is enabled by `use_beam_search` or `beam_width`;
    its width is `beam_width`, else, as in vLLM, `best_of`, else `n`. Beams are streamed once they are final. The
    samples of best_of cannot be streamed, since the ones to return are known only at the end."""
    beams = request.use_beam_search
    if beams is False or (beams is None and request.beam_width is None):
        for name, plain in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(request, name) not in (None, plain):
                raise InputError(f"{name} needs beam search: set use_beam_search to true", name)
        if request.stream and request.best_of is not None and request.best_of > (request.n or 1):
            raise InputError(
                f"best_of can be streamed only if it is n ({request.n or 1}), got {str(request.best_of)[:30]}",
                "best_of",
            )
        return {"best_of": request.best_of}
    given = {name: getattr(request, name) for name in ("beam_width", "best_of", "n")}
    name, width = next(((name, value) for name, value in given.items() if value is not None), ("n", 1))
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise InputError(
            f"{name}, the width of the beam search, must be between 1 and {MAX_BEAM_WIDTH}, got {str(width)[:30]}", name
        )
    if request.best_of not in (None, width):
        raise InputError(f"best_of is {str(request.best_of)[:30]}, but beam_width is {width}: give one", "best_of")
    params: dict[str, Any] = {"beam_width": width}
    for name in ("length_penalty", "early_stopping"):
        if getattr(request, name) is not None:
            params[name] = getattr(request, name)
    return params


def _check_logprobs(name: str, value: int, rules: RequestRules) -> None:
    if not 0 <= value <= rules.max_logprobs:
        raise InputError(f"{name} must be between 0 and {rules.max_logprobs}, got {str(value)[:30]}", name)


def completion_params(request: CompletionRequest, rules: RequestRules) -> SamplingParams:
    """Return the parameters of a completion. The default of max_tokens is 16. `echo` with `logprobs` scores the prompt.
    `max_tokens` 0 with `echo` generates nothing."""
    given = _given_params(request, rules)
    if request.max_tokens == 0:
        if not request.echo:
            raise InputError("max_tokens must be at least 1 without echo, got 0", "max_tokens")
        if request.logprob_token_ids:
            raise InputError("logprob_token_ids are of generated tokens, and max_tokens is 0", "logprob_token_ids")
        given["min_tokens"] = 0
    if request.logprobs is not None:
        _check_logprobs("logprobs", request.logprobs, rules)
        if not request.logprob_token_ids:
            given["logprobs"] = request.logprobs
    if request.echo and (request.logprobs is not None or request.logprob_token_ids):
        given["prompt_logprobs"] = max(request.logprobs or 0, given.get("prompt_logprobs", 0))
    return SamplingParams(**given)


def chat_params(request: ChatRequest, rules: RequestRules) -> SamplingParams:
    """Return the parameters of a chat. Without max_tokens the output may fill the context. `top_logprobs` needs
    `logprobs`."""
    given = _given_params(request, rules)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    given["max_tokens"] = getattr(request, name)
    if given["max_tokens"] == 0:
        raise InputError(f"{name} must be at least 1, got 0", name)
    if request.top_logprobs is not None:
        _check_logprobs("top_logprobs", request.top_logprobs, rules)
        if not request.logprobs and request.top_logprobs:
            raise InputError("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.logprobs and not request.logprob_token_ids:
        given["logprobs"] = request.top_logprobs or 0
    names = {"logprobs": "top_logprobs", "max_tokens": name}
    try:
        return SamplingParams(**given)
    except InputError as error:
        if (param := error.param) is None or param not in names:
            raise
        raise InputError(str(error).replace(param, names[param], 1), names[param]) from None


def split_prompts(prompt: Any, name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Return the prompts of a completion request, or the entries of another field `name`: one string, strings, one list
    of ids, or lists of ids, at most `max_prompts`."""
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if single else prompt
    if not 1 <= len(prompts) <= max_prompts:
        raise InputError(f"{name} must have 1 to {max_prompts} entries, got {len(prompts)}", name)
    return list(prompts)


def check_batch(request: ChatRequest) -> None:
    """Raise InputError for a field that is not supported in a batch of conversations."""
    for name, plain in (
        ("stream", False), ("tools", []), ("n", 1), ("use_beam_search", False), ("beam_width", None),
        ("prompt_logprobs", None),
    ):  # fmt: skip
        if (value := getattr(request, name)) is not None and value != plain:
            raise InputError(
                f"{name} is not supported for a batch of conversations: send each to /v1/chat/completions", name
            )


def last_assistant_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if its role is assistant, else "". The messages must have been rendered by
    the template before, which checks them."""
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant":
        return ""
    if isinstance(content, str):
        return content
    texts = [part.get("text", part.get("refusal")) for part in content or () if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def structured_field(request: SamplingFields) -> str:
    """Return the name of the request's field for structured output. It is tool_choice if that requires a call."""
    other = next(iter(given_structured_fields(request)), "")
    must_call = request.tool_choice not in (None, "none", "auto")
    return "tool_choice" if must_call and other in ("", "response_format") else other or PARAM_NAME


def given_structured_fields(request: SamplingFields) -> list[str]:
    """Return the names of the fields that ask for structured output."""
    form, options = request.response_format, request.structured_outputs
    is_given = {
        "response_format": form is not None and form.get("type") != "text",
        # clients send all members of structured_outputs, most of them null
        PARAM_NAME: options is not None and any(value not in (None, False) for value in options.values()),
        **{name: getattr(request, name) is not None for name in GUIDED},
    }
    return [name for name, given in is_given.items() if given]


def read_structured(request: SamplingFields) -> Structured | None:
    """Return the structured output that the request asks for, or None. Raise InputError for an invalid field, or for
    two."""
    given = given_structured_fields(request)
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} both set the form of the output: give one", given[1])
    if not given:
        return None
    [name] = given
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
    structured = _from_schema(about["schema"], f"{name}.json_schema.schema")
    return with_lenient(structured) if strict is False else structured


def _from_schema(value: Any, place: str) -> Structured:
    if not isinstance(value, Mapping | bool):
        raise InputError(f"{place} must be an object, got {type(value).__name__}", "response_format")
    return Structured("json", to_source("json", value, "response_format"))
