"""What clients may send: pydantic models of OpenAI's requests with vLLM's additions, and their SamplingParams.

Unknown fields are ignored, wrong types are refused. Lists fail at their first bad element, so that no request makes an
error larger than itself; ranges are SamplingParams' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from quire.errors import InputError
from quire.vocabulary.params import MAX_BEAM_WIDTH, SamplingParams

MAX_PROMPTS = 256
MAX_LOGPROBS = 20


class First(FailFast):
    """FailFast that may stand in a union, whose members must be hashable."""

    __hash__ = object.__hash__


Strings = Annotated[list[str], First()]
Ids = Annotated[list[int], First()]
Objects = Annotated[list[dict[str, Any]], First()]
PromptField = str | Ids | Strings | Annotated[list[Ids], First(), Field(max_length=MAX_PROMPTS)]

# Fields that change the output in ways not offered: ignoring them would be worse than saying so.
UNSUPPORTED = (
    "tools", "functions", "function_call", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "suffix", "prompt_embeds", "audio", "logits_processors",
)  # fmt: skip


class Fields(BaseModel):
    """Strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Fields):
    include_usage: bool | None = None


class Sampling(Fields):
    """What completions and chat have in common. None everywhere: the model's default, else OpenAI's.

    Beam search takes vLLM's fields, see `_branches`. It looks for the most likely text, so temperature, top_p, top_k,
    min_p and seed are ignored; penalties, biases and bans act.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Ids | None = None
    logit_bias: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    response_format: dict[str, Any] | None = None
    # Named so that they can be refused.
    tools: Any = None
    functions: Any = None
    function_call: Any = None
    tool_choice: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    audio: Any = None
    logits_processors: Any = None


class CompletionRequest(Sampling):
    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatRequest(Sampling):
    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class PrefixRequest(Fields):
    name: str
    text: str | None = None
    token_ids: Ids | None = None


class TokenizeRequest(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Ids


def check_supported(request: Sampling) -> None:
    """InputError for a field that asks for something that this server doesn't do."""
    for name in UNSUPPORTED:
        if getattr(request, name) not in (None, False, "", [], {}):
            raise InputError(f"{name} is not supported", name)
    if request.tool_choice not in (None, "none", "auto"):
        raise InputError("tool_choice is not supported: there are no tools", "tool_choice")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise InputError("response_format is not supported, except {'type': 'text'}", "response_format")
    if request.stream_options is not None and not request.stream:
        raise InputError("stream_options needs stream to be true", "stream_options")
    if request.cache_salt == "":
        raise InputError("cache_salt must not be empty", "cache_salt")


_PASSED = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "ignore_eos", "max_tokens",
    "min_tokens", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


def _given(request: Sampling, defaults: Mapping[str, Any], detokenize: bool) -> dict[str, Any]:
    check_supported(request)
    given = {name: getattr(request, name) for name in _PASSED if getattr(request, name) is not None}
    return {**defaults, "detokenize": detokenize, **given, **_branches(request)}


def _branches(request: Sampling) -> dict[str, Any]:
    """best_of, or beam search: asked for by `use_beam_search`, its width given by `beam_width`, else (as vLLM had it)
    by `best_of`, else by `n`; or by `beam_width` alone. Beams are streamed as they settle; the samples of a best_of
    can't be, since which of them are returned is known at the end."""
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
    found: dict[str, Any] = {"beam_width": width}
    for name in ("length_penalty", "early_stopping"):
        if getattr(request, name) is not None:
            found[name] = getattr(request, name)
    return found


def _logprobs(name: str, value: int) -> int:
    if not 0 <= value <= MAX_LOGPROBS:
        shown = value if abs(value) < 10**20 else "a huge number"
        raise InputError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {shown}", name)
    return value


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], detokenize: bool = True
) -> SamplingParams:
    """Completions: 16 tokens unless asked; `echo` with `logprobs` scores the prompt. `max_tokens` 0 with `echo`, which
    only scores, draws one token that the response leaves out."""
    given = _given(request, defaults, detokenize)
    if request.echo and request.max_tokens == 0:
        given |= {"max_tokens": 1, "min_tokens": 0}
    if request.logprobs is not None:
        given["logprobs"] = _logprobs("logprobs", request.logprobs)
        if request.echo:
            given["prompt_logprobs"] = max(request.logprobs, given.get("prompt_logprobs", 0))
    return SamplingParams(**given)


def chat_params(request: ChatRequest, defaults: Mapping[str, Any], detokenize: bool = True) -> SamplingParams:
    """Chat: as many tokens as fit unless asked; `top_logprobs` needs `logprobs`."""
    given = _given(request, defaults, detokenize)
    given["max_tokens"] = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if request.top_logprobs is not None:
        _logprobs("top_logprobs", request.top_logprobs)
        if not request.logprobs and request.top_logprobs:
            raise InputError("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    if request.chat_template is not None:
        raise InputError("chat_template can't be set by a request: start the server with --chat-template",
                         "chat_template")  # fmt: skip
    return SamplingParams(**given)


def completion_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: one string, strings, one list of ids, or lists of ids."""
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if single else prompt
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InputError(f"prompt must have 1 to {MAX_PROMPTS} entries, got {len(prompts)}", "prompt")
    return list(prompts)


UNIONS = {
    "prompt": f"a string, token ids, or a list of at most {MAX_PROMPTS} of either",
    "stop": "a string or a list of strings",
    "early_stopping": 'true, false or "never"',
}


def wrong_type(location: Any, message: str) -> InputError:
    """An error at `location`, which may begin with FastAPI's "body"."""
    path = [str(part)[:60] for part in location if part != "body"]
    where = path[0] if path and not path[0].isdigit() else None
    if where in UNIONS and len(path) > 1:
        return InputError(f"{where} must be {UNIONS[where]}", where)
    return InputError(f"{'.'.join(path[:2]) or 'the request body'}: {message}"[:300], where)
