"""Pydantic models of the responses of all routes, errors included, for the OpenAPI document.

Responses are written as text (render.py, json_pieces.py), and these models are not used for that. Tests compare the
two.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from quire.core.sleep import MEMORY_TAGS, SLEEP_LEVELS
from quire.ipc.messages import MAX_TAGS, SLEEP_MODES
from quire.server.errors import MESSAGES_PATH


class StrictModel(BaseModel):
    """A model that forbids unknown fields."""

    model_config = ConfigDict(extra="forbid")


# Errors


class ErrorInfo(StrictModel):
    message: str
    type: str
    param: str | None
    code: int


class Error(StrictModel):
    error: ErrorInfo


class MessageErrorInfo(StrictModel):
    type: str
    message: str
    details: dict[str, Any] = Field(default={})


class MessageError(StrictModel):
    type: Literal["error"]
    error: MessageErrorInfo


# Completions and chats

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"] | None


class PromptTokensDetails(StrictModel):
    cached_tokens: int


class CompletionTokensDetails(StrictModel):
    reasoning_tokens: int = Field(default=0)
    accepted_prediction_tokens: int = Field(default=0)
    rejected_prediction_tokens: int = Field(default=0)


class Usage(StrictModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = Field(default=CompletionTokensDetails())


class PromptLogprob(StrictModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CompletionLogprobs(StrictModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Generated(StrictModel):
    id: str
    created: int
    model: str
    system_fingerprint: None


class Choice(StrictModel):
    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(StrictModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(StrictModel):
    content: list[ChatTokenLogprob]
    refusal: None


class ToolCallFunction(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class Message(StrictModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = Field(default=[])


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs
    usage: Usage


class DeltaFunctionCall(StrictModel):
    name: str = ""
    arguments: str


class DeltaToolCall(StrictModel):
    """The first delta of a call has its id, type and name. The call's arguments are those of all its deltas, joined."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: DeltaFunctionCall


class DeltaMessage(StrictModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[DeltaToolCall] = Field(default=[])


class ChunkChoice(StrictModel):
    """A completion's chunk has `text`, a chat's `delta`."""

    index: int
    text: str = ""
    delta: DeltaMessage = DeltaMessage()
    logprobs: CompletionLogprobs | ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Chunk(Generated):
    """The data of one server-sent event. The last event of a stream is [DONE], unless it fails."""

    object: Literal["text_completion", "chat.completion.chunk"]
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


# /v1/responses

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(StrictModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(StrictModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCall(StrictModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(StrictModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[str]
    content: list[ReasoningText]


class CustomToolCall(StrictModel):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | FunctionCall | CustomToolCall | OutputReasoning


class ResponseError(StrictModel):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(StrictModel):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(StrictModel):
    cached_tokens: int


class OutputTokensDetails(StrictModel):
    reasoning_tokens: int


class ResponseUsage(StrictModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReasoning(StrictModel):
    effort: str | None
    summary: None


class ResponseText(StrictModel):
    format: dict[str, Any]


class ResponseTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseCustomTool(StrictModel):
    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any]


class ResponsesResponse(StrictModel):
    """A response. `store` is true if it is stored. Only a response in the background can be queued or cancelled."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool | ResponseCustomTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: None


class DeletedResponse(StrictModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(StrictModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItemList(StrictModel):
    """Items as the client sent them, with ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StateEvent(StrictModel):
    """An event with the state of the response. The last one has the whole response."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int
    response: ResponsesResponse


class ItemEvent(StrictModel):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class InItemEvent(StrictModel):
    """An event about a part of an item."""

    sequence_number: int
    output_index: int
    item_id: str


class PartEvent(InItemEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: OutputText | ReasoningText


class OutputTextDelta(InItemEvent):
    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(InItemEvent):
    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(InItemEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningTextDone(InItemEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDelta(InItemEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItemEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(InItemEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(InItemEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseStreamEvent(
    RootModel[
        Annotated[
            StateEvent
            | ItemEvent
            | PartEvent
            | OutputTextDelta
            | OutputTextDone
            | ReasoningTextDelta
            | ReasoningTextDone
            | ArgumentsDelta
            | ArgumentsDone
            | CustomInputDelta
            | CustomInputDone,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of one server-sent event, which is named by its type. The last event of a stream is response.completed,
    .incomplete or .failed; there is no [DONE]."""


# /v1/messages


class TextContent(StrictModel):
    type: Literal["text"]
    text: str


class ThinkingContent(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUse(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUse
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class ThinkingTokens(StrictModel):
    thinking_tokens: int


class MessageUsage(StrictModel):
    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessagesResponse(StrictModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(StrictModel):
    input_tokens: int


class StartedMessage(MessagesResponse):
    """A message without content."""

    stop_reason: None  # type: ignore[assignment]  # not known yet


class MessageStart(StrictModel):
    type: Literal["message_start"]
    message: StartedMessage


class BlockStart(StrictModel):
    """The block has no content yet. `index` is its place in the message."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(StrictModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(StrictModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(StrictModel):
    type: Literal["signature_delta"]
    signature: Literal[""]


class InputJsonDelta(StrictModel):
    """The input of a call is the JSON of all its deltas, joined."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(StrictModel):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(StrictModel):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(StrictModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(StrictModel):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(StrictModel):
    type: Literal["message_stop"]


class Ping(StrictModel):
    type: Literal["ping"]


class MessageStreamEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessageError,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of one server-sent event, which is named by its type. The last event of a stream is message_stop, or an
    error."""


# Embeddings


class EmbeddingUsage(StrictModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(StrictModel):
    """Base64 encodes little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(StrictModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage


class PoolingData(StrictModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolingResponse(StrictModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: EmbeddingUsage


class ScoreData(StrictModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(StrictModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage


class GenerativeScoringResponse(StrictModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: Usage


class RerankDocument(StrictModel):
    text: str


class RerankResult(StrictModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(StrictModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


# Models and tokens


class ModelCard(StrictModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["quire"]
    root: str
    parent: None
    max_model_len: int


class ModelList(StrictModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(StrictModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(StrictModel):
    prompt: str


# State of the server


class VersionResponse(StrictModel):
    version: str


class ServerLoad(StrictModel):
    server_load: int = Field(ge=0)


# Admin routes


class RegisteredPrefix(StrictModel):
    id: str
    object: Literal["prefix"]
    tokens: int
    status: Literal["ready", "computing"]


class PrefixList(StrictModel):
    object: Literal["list"]
    data: list[RegisteredPrefix]
    capacity_tokens: int


class DeletedPrefix(StrictModel):
    id: str
    object: Literal["prefix"]
    deleted: Literal[True]


class CacheReset(StrictModel):
    pages: int = Field(ge=0)


class SleepStatus(StrictModel):
    is_sleeping: bool
    level: Literal[0, 1, 2]
    away: list[Literal["weights", "kv_cache"]]


class ServerInfo(StrictModel):
    version: str
    python: str
    platform: str
    packages: dict[str, str | None]
    config: dict[str, Any] | None
    plan: list[str]
    notices: list[str]
    cache: dict[str, Any]


class TokenizerInfo(BaseModel):
    """The settings of tokenizer_config.json. They may include further fields."""

    model_config = ConfigDict(extra="allow")
    tokenizer_class: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, Any]


# The OpenAPI document

STREAM_MODELS: dict[str, type[BaseModel]] = {
    "/v1/completions": Chunk,
    "/v1/chat/completions": Chunk,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": MessageStreamEvent,
}
QUERY_PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {
    "POST /sleep": {
        "level": {"type": "integer", "enum": list(SLEEP_LEVELS), "default": 1},
        "mode": {"type": "string", "enum": list(SLEEP_MODES), "default": SLEEP_MODES[0]},
    },
    "POST /wake_up": {
        "tags": {"type": "array", "items": {"type": "string", "enum": list(MEMORY_TAGS)}, "maxItems": MAX_TAGS},
    },
}
STATUS_DESCRIPTIONS = {
    400: "The request is invalid; the message names the field, the value and the limit",
    401: "No valid key",
    403: "No admin key",
    404: "No such model, prefix or stored response",
    408: "The body took too long to arrive",
    409: "A prefix with that name is registered, or requests are running",
    413: "The body is too large, or the prefix doesn't fit",
    500: "A defect of the server",
    503: "The queue is full, the engine sleeps, or the server is shutting down; Retry-After says when to retry",
}
SECURITY_SCHEME = "KeyOfTheServer"


def route_responses(method: str, path: str, model: type[BaseModel] | None) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route in the OpenAPI document, by status. `model` is that of its answer."""
    error: type[BaseModel] = MessageError if path.startswith(MESSAGES_PATH) else Error
    codes = {401: error, 500: error, 503: error}
    if method == "POST" and path != "/ping":
        codes |= dict.fromkeys((400, 404, 408, 413), error)
    if "{" in path:
        codes |= {404: Error}
    if "prefixes" in path:
        codes |= dict.fromkeys((400, 403, 409), Error)
    if path in ("/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/server_info"):
        codes |= {403: Error}
    if path == "/sleep":
        codes |= {409: Error}
    if path == "/tokenizer_info" or (method == "GET" and "responses" in path):
        codes |= {400: Error}
    if path == "/health":
        del codes[401]
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": model, "description": STATUS_DESCRIPTIONS[code]} for code, model in sorted(codes.items())
    }
    responses[200] = {"description": "The answer"} if model is None else {"model": model, "description": "The answer"}
    if path in ("/health", "/ping"):
        responses[503]["description"] = "The engine's loop hangs, or requests are not accepted; without a key no body"
    if method == "POST" and path in STREAM_MODELS:
        schema = {"type": "string", "description": STREAM_MODELS[path].__doc__}
        responses[200]["content"] = {"text/event-stream": {"schema": schema}}
    return responses


def query_parameters(method: str, path: str) -> dict[str, Any]:
    """Return the query parameters of a route in the OpenAPI document."""
    schemas = QUERY_PARAMETERS.get(f"{method} {path}", {})
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]}


def finish_openapi(document: dict[str, Any], requires_keys: bool) -> dict[str, Any]:
    """Complete FastAPI's OpenAPI document: remove responses that this server does not send, add chunks and keys."""
    bodies = {"/health": None, "/ping": None, "/metrics": {"text/plain": {"schema": {"type": "string"}}}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # a wrong type is a 400 here
            if path in bodies:
                content = bodies[path]
                operation["responses"]["200"].pop("content", None)
                if content is not None:
                    operation["responses"]["200"]["content"] = content
            if requires_keys and path != "/health":
                operation["security"] = [{SECURITY_SCHEME: []}]
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for model in STREAM_MODELS.values():
        schemas[model.__name__] = schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        for name, definition in schema.pop("$defs", {}).items():
            schemas.setdefault(name, definition)
    if requires_keys:
        scheme = {"type": "http", "scheme": "bearer", "description": "Or the key alone in the header x-api-key"}
        document["components"]["securitySchemes"] = {SECURITY_SCHEME: scheme}
    return document
