"""Request bodies as pydantic models: OpenAI's requests with vLLM's additions.

Wrong types are refused, and so are unsupported fields that would change the output. Unknown fields are ignored and
named in a warning header (`unknown_fields`). Lists fail at their first bad element, so that an error is never larger
than the request. Ranges are checked by SamplingParams; the schema only shows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, WithJsonSchema

from quire.errors import InputError
from quire.protocol.device_params import MAX_TOKENS
from quire.protocol.sampling_params import MAX_BIASES, MAX_LOGPROB_IDS, MAX_STOP_CHARS, MAX_STOPS, PARAMS
from quire.text.chat_messages import MAX_MESSAGES, MAX_PARTS, unknown_message_fields
from quire.text.tools import MAX_CALLS, MAX_TOOLS

MAX_PROMPTS = 256
MAX_WARNING_CHARS = 512
MAX_INPUTS = 2048  # texts that are embedded at once
REQUEST_ID_PATTERN = re.compile(r"[!-~]{1,128}", re.ASCII)


class HashableFailFast(FailFast):
    """FailFast for members of a union, which must be hashable."""

    __hash__ = object.__hash__


# Schemas for the OpenAPI document, of values that are checked elsewhere.


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object. `required` names its required properties."""
    required_names = {"required": required.split()} if required else {}
    return {"type": "object", **required_names, **({"properties": properties} if properties else {})}


def _array(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _any_of(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": [*schemas]}


def _only(value: object) -> dict[str, Any]:
    return {"const": value}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


NULL, STRING, OBJECT = {"type": "null"}, {"type": "string"}, _object()
TOKEN = {"type": "integer", "minimum": 0}
DATA_URI = {"type": "string", "pattern": "^data:[^,]*;base64,"}
NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
IMAGE_URL = _any_of(DATA_URI, _object("url", url=DATA_URI, detail={"enum": [None, "auto", "low", "high"]}))
PART = _any_of(
    _object("type text", type=_only("text"), text=STRING),
    _object("type image_url", type=_only("image_url"), image_url=IMAGE_URL),
)
MULTI_MODAL = _any_of({**_object(image=_any_of(DATA_URI, _array(DATA_URI))), "additionalProperties": False}, NULL)
FUNCTION = _object(
    "name", name=NAME, description=_or_null("string"), parameters=_or_null("object"), strict=_or_null("boolean")
)
TOOLS = _any_of(_array(_object("type function", type=_only("function"), function=FUNCTION), maxItems=MAX_TOOLS), NULL)
NAMED_TOOL = _object("type function", type=_only("function"), function=_object("name", name=NAME))
TOOL_CHOICE = _any_of({"enum": [None, "none", "auto", "required"]}, NAMED_TOOL)
CALLED_FUNCTION = _object("name", name=NAME, arguments={"type": ["string", "object", "null"]})
CALL = _object("function", id=_or_null("string"), type=_only("function"), function=CALLED_FUNCTION)
CONTENT = (STRING, _array(PART, minItems=1, maxItems=MAX_PARTS))
OPTIONAL_MESSAGE_FIELDS = {
    name: _or_null("string") for name in ("name", "reasoning", "reasoning_content", "tool_call_id")
}
TEXT_MESSAGE = _object(
    "role content",
    role={"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    content=_any_of(*CONTENT),
    tool_calls={"enum": [None, []]},
    **OPTIONAL_MESSAGE_FIELDS,
)
CALL_MESSAGE = _object(
    "role tool_calls",
    role=_only("assistant"),
    content=_any_of(*CONTENT, NULL),
    tool_calls=_array(CALL, minItems=1, maxItems=MAX_CALLS),
    **OPTIONAL_MESSAGE_FIELDS,
)
MESSAGE = _any_of(*({**message, "additionalProperties": False} for message in (TEXT_MESSAGE, CALL_MESSAGE)))
RESPONSE_FORMAT = _any_of(
    _object("type", type={"enum": ["text", "json_object"]}),
    _object(
        "type json_schema",
        type=_only("json_schema"),
        json_schema=_object("schema", schema=OBJECT, strict=_or_null("boolean")),
    ),
    _object(
        "type structures triggers",
        type=_only("structural_tag"),
        structures=_array(OBJECT),
        triggers=_array(STRING),
    ),
    NULL,
)
JSON_TEXT = _any_of(OBJECT, STRING, NULL)
TEXT_MODALITY = _any_of(_only(["text"]), NULL)
LOGIT_BIAS = _any_of(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,12}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    },
    NULL,
)

Strings = Annotated[list[str], HashableFailFast()]
Ids = Annotated[list[Annotated[int, Strict(), WithJsonSchema(TOKEN)]], HashableFailFast()]
Objects = Annotated[list[dict[str, Any]], HashableFailFast()]
Messages = Annotated[
    list[dict[str, Any]],
    HashableFailFast(),
    WithJsonSchema(_array(MESSAGE, minItems=1, maxItems=MAX_MESSAGES)),
]
InputField = str | Ids | Strings | Annotated[list[Ids], HashableFailFast(), Field(max_length=MAX_INPUTS)]
PromptField = str | Ids | Strings | Annotated[list[Ids], HashableFailFast(), Field(max_length=MAX_PROMPTS)]
RefusedField = Annotated[Any, WithJsonSchema(NULL)]

# Fields that do not change the output: ignored without a warning.
IGNORED_FIELDS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "session_id", "guided_decoding_backend",
})  # fmt: skip

# Unsupported fields that change the output: refused, since ignoring them would give a wrong answer.
REFUSED_FIELDS = frozenset({
    "functions", "function_call", "guided_whitespace_pattern", "structural_tag", "suffix", "prompt_embeds",
    "audio", "logits_processors", "web_search_options", "mm_processor_kwargs", "media_io_kwargs",
    "kv_transfer_params", "vllm_xargs", "repetition_detection", "priority",
})  # fmt: skip
EMPTY_VALUES: tuple[object, ...] = (None, False, 0, "", [], {})


def ranged_field(low: float | None = None, high: float | None = None, **more: Any) -> Any:
    """Return a field with default None whose range is shown in the schema."""
    limits = {name: value for name, value in (("minimum", low), ("maximum", high)) if value is not None}
    return Field(default=None, json_schema_extra={**limits, **more})


class RequestFields(BaseModel):
    """Values are converted as in pydantic's lax mode: "8" and 8.0 are integers, but not token ids. Unknown fields are
    kept, to be named in a warning."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(RequestFields):
    """Options of a stream. `continuous_usage_stats` adds to each chunk the usage of its choice so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TruncationFields(RequestFields):
    """Truncates the prompt to `truncate_prompt_tokens` tokens: the last ones, or the first ones with `truncation_side`
    "right". -1 leaves room for the output."""

    truncate_prompt_tokens: int | None = ranged_field(-1)
    truncation_side: Literal["left", "right"] | None = None


def param_field(name: str) -> Any:
    """Return a field with default None whose range is that of a sampling parameter."""
    [param] = [declared.param for declared in PARAMS if declared.name == name]
    return ranged_field(param.low, None if param.high == MAX_TOKENS else param.high)


class ModelFields(RequestFields):
    """The model, and a salt: requests share cached prefixes only with those of the same one."""

    model: str | None = None
    cache_salt: str | None = ranged_field(minLength=1)


class SharedFields(ModelFields):
    """Fields that have the same name and meaning in all APIs. None means the model's default, else OpenAI's. The
    sampling parameters that are declared as `shared` are fields too."""

    stream: bool | None = None
    stop_token_ids: Ids | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Ids | None = ranged_field(minItems=1)
    logit_bias: Annotated[dict[str, Any] | None, WithJsonSchema(LOGIT_BIAS)] = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None

    __annotations__ |= {
        declared.name: Annotated[declared.kind | None, param_field(declared.name)]
        for declared in PARAMS
        if declared.param.shared
    }


class SamplingFields(SharedFields, TruncationFields):
    """Fields of completions and chats.

    Beam search takes vLLM's fields, see `request_params._branch_params`. It searches for the most likely text, so
    temperature, top_p, top_k, min_p and seed are ignored; penalties, biases and bans apply.
    """

    stream_options: StreamOptions | None = None
    request_id: str | None = ranged_field(pattern=f"^{REQUEST_ID_PATTERN.pattern}$")
    n: int | None = param_field("n")
    stop: str | Strings | None = ranged_field(minLength=1, maxLength=MAX_STOP_CHARS, maxItems=MAX_STOPS)
    max_tokens: int | None = ranged_field(0)
    prompt_logprobs: int | None = param_field("prompt_logprobs")
    logprob_token_ids: Ids | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    best_of: int | None = param_field("best_of")
    use_beam_search: bool | None = None
    beam_width: int | None = param_field("beam_width")
    length_penalty: float | None = param_field("length_penalty")
    early_stopping: bool | Literal["never"] | None = None
    response_format: Annotated[dict[str, Any] | None, WithJsonSchema(RESPONSE_FORMAT)] = None
    guided_json: Annotated[dict[str, Any] | str | None, WithJsonSchema(JSON_TEXT)] = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Strings | None, WithJsonSchema(TEXT_MODALITY)] = None


class CompletionRequest(SamplingFields):
    """The body of /v1/completions. `multi_modal_data` holds the images of a single prompt."""

    prompt: PromptField
    multi_modal_data: Annotated[dict[str, Any] | None, WithJsonSchema(MULTI_MODAL)] = None
    echo: bool | None = None
    logprobs: int | None = param_field("logprobs")
    add_special_tokens: bool = True
    tools: RefusedField = None
    thinking_token_budget: RefusedField = None


class ChatTemplateFields(RequestFields):
    """Options of the chat template. `continue_final_message` leaves the last message open, so that the output continues
    it. `documents` and `reasoning_effort` are for templates that use them."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: Objects | None = None
    tools: Annotated[Objects | None, WithJsonSchema(TOOLS)] = None
    reasoning_effort: str | None = None
    chat_template: RefusedField = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, ChatTemplateFields):
    """The body of /v1/chat/completions. `echo` puts the last message before the output if its role is assistant.
    `thinking_token_budget` limits reasoning, `include_reasoning` is whether it is returned."""

    messages: Messages
    max_completion_tokens: int | None = ranged_field(1)
    thinking_token_budget: int | None = ranged_field(0, MAX_TOKENS)
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = param_field("logprobs")
    echo: bool | None = None

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """The conversations to answer."""
        return [self.messages]


class BatchChatRequest(ChatRequest):
    """The body of /v1/chat/completions/batch. `messages` are several conversations, each of which gets one choice."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], HashableFailFast(), Field(min_length=1, max_length=MAX_PROMPTS)
    ]

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        """The conversations to answer."""
        return self.messages


class EmbeddingRequest(ModelFields, TruncationFields, ChatTemplateFields):
    """The body of /v1/embeddings: texts, or a conversation. `dimensions` truncates each vector to its first numbers,
    scaled to length 1 again. `normalize` and `use_activation` mean the same. `embed_dtype` and `endianness` are for
    base64."""

    input: InputField | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = False
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = ranged_field(1)


class PoolingRequest(EmbeddingRequest):
    """The body of /pooling."""

    task: Annotated[str | None, WithJsonSchema({"enum": [None, "embed"]})] = None


class ScoreRequest(ModelFields, TruncationFields):
    """The body of /score: one text with each of several, or pairs. Each side has three names, of which one is given."""

    text_1: str | Strings | None = None
    queries: str | Strings | None = None
    data_1: str | Strings | None = None
    text_2: str | Strings | None = None
    documents: str | Strings | None = None
    data_2: str | Strings | None = None


class RerankRequest(ModelFields, TruncationFields):
    """The body of /rerank. Returns the `top_n` documents nearest to the query, nearest first."""

    query: str
    documents: Strings
    top_n: int | None = ranged_field(1)
    return_documents: bool | None = None


class GenerativeScoringRequest(ModelFields):
    """The body of /generative_scoring: the probability of the first of `label_token_ids` after the query and each item,
    among all of these tokens, or without `apply_softmax` among all tokens."""

    query: str | Ids
    items: Strings | Annotated[list[Ids], HashableFailFast(), Field(max_length=MAX_INPUTS)]
    label_token_ids: Annotated[Ids, Field(min_length=1, max_length=MAX_LOGPROB_IDS)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True


class PrefixRequest(RequestFields):
    """The body of POST /v1/prefixes: a name, and either a text or token ids."""

    name: str
    text: str | None = None
    token_ids: Ids | None = None


class TokenizeRequest(TruncationFields, ChatTemplateFields):
    """The body of /tokenize: either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestFields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids


def unknown_fields(request: RequestFields) -> list[str]:
    """Return the names of the unknown fields, in order. Those of stream_options and messages are prefixed with that
    name."""
    names = [name for name in request.model_extra or () if name not in IGNORED_FIELDS and name not in REFUSED_FIELDS]
    options = getattr(request, "stream_options", None)
    names += [f"stream_options.{name}" for name in (options.model_extra if options is not None else None) or ()]
    messages = getattr(request, "messages", None)
    if isinstance(request, BatchChatRequest):
        messages = list(chain.from_iterable(request.conversations))
    return names + [f"messages.{name}" for name in unknown_message_fields(messages)]


def warning_header(request: RequestFields, ignored: Sequence[str] = (), texts: Sequence[str] = ()) -> dict[str, str]:
    """Return the Warning header, or {} if there is nothing to warn of. It names fields that are unknown or `ignored`,
    and contains `texts`, each cut to a limit."""
    names = [re.sub(r"[^ !#-\[\]-~]", "?", name[:54]) for name in (*ignored, *unknown_fields(request))]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        texts = (f"fields were ignored: {', '.join(names[:8])}{more}", *texts)
    cut = [text if len(text) <= MAX_WARNING_CHARS else f"{text[:MAX_WARNING_CHARS]} ..." for text in texts]
    quoted = ['299 quire "{}"'.format(re.sub(r"[^ !#-\[\]-~]", "?", text)) for text in cut]
    return {"Warning": ", ".join(quoted)} if quoted else {}


UNION_TYPES = {
    "prompt": f"a string, token ids, or a list of at most {MAX_PROMPTS} of either",
    "input": f"a string, token ids, or a list of at most {MAX_INPUTS} of either",
    **dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "data_1", "data_2", "stop"), "a string or a list of strings"
    ),
    "query": "a string or token ids",
    "items": f"a list of at most {MAX_INPUTS} strings, or lists of token ids",
    "early_stopping": 'true, false or "never"',
}


def wrong_type_error(location: Any, message: str) -> InputError:
    """Return the error for a wrong type at `location`, which may begin with FastAPI's "body" or "query"."""
    path = [str(part)[:60] for part in location]
    if path[:1] in (["body"], ["query"]):
        path = path[1:]
    where = path[0] if path and not path[0].isdigit() else None
    if where in UNION_TYPES and len(path) > 1:
        return InputError(f"{where} must be {UNION_TYPES[where]}", where)
    return InputError(f"{'.'.join(path[:2]) or 'the request body'}: {message}"[:300], where)
