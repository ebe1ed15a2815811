"""What the server answers, for its OpenAPI document: the shapes of every route's answers, errors included.

Answers are written by hand (render.py, pieces.py); nothing here runs when one is. Tests compare the two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.control.rest import LEVELS, TAGS
from quire.link.messages import MODES, MOST_TAGS
from quire.server.embedding_schemas import Embeddings, Ranking, Scores
from quire.server.errors import MESSAGES
from quire.server.exact import Exact
from quire.server.message_schemas import AnsweredMessage, CountedTokens, MessageError
from quire.server.response_schemas import DroppedResponse, Responded

Finish = Literal["stop", "length", "tool_calls", "abort", "error"] | None


class ErrorInfo(Exact):
    message: str
    type: str
    param: str | None
    code: int


class Error(Exact):
    error: ErrorInfo


class PromptTokensDetails(Exact):
    cached_tokens: int


class Usage(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Exact):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class CompletionLogprobs(Exact):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Exact):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs


class Completion(Exact):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: Usage


class NamedToken(Exact):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(NamedToken):
    top_logprobs: list[NamedToken]


class ChatLogprobs(Exact):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Exact):
    name: str
    arguments: str


class ToolCall(Exact):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Exact):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = Field([])


class ChatChoice(Exact):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(Exact):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs
    usage: Usage


class FunctionPiece(Exact):
    name: str = ""
    arguments: str


class ToolCallPiece(Exact):
    """The first of a call has its id, type and name; the arguments of all pieces joined are its arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionPiece


class Delta(Exact):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallPiece] = Field([])


class StreamedChoice(Exact):
    """A completion's chunk has `text`, a chat's `delta`."""

    index: int
    text: str = ""
    delta: Delta = Delta()
    logprobs: CompletionLogprobs | ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Chunk(Exact):
    """The data of one server-sent event; the last event of a stream that ends well is [DONE]."""

    id: str
    object: Literal["text_completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[StreamedChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class Tokens(Exact):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Exact):
    prompt: str


class ModelCard(Exact):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["quire"]
    root: str
    parent: None
    max_model_len: int


class ModelList(Exact):
    object: Literal["list"]
    data: list[ModelCard]


class RegisteredPrefix(Exact):
    id: str
    object: Literal["prefix"]
    tokens: int
    status: Literal["ready", "computing"]


class PrefixList(Exact):
    object: Literal["list"]
    data: list[RegisteredPrefix]
    capacity_tokens: int


class DroppedPrefix(Exact):
    id: str
    object: Literal["prefix"]
    deleted: Literal[True]


class Emptied(Exact):
    pages: int = Field(ge=0)


class Rest(Exact):
    is_sleeping: bool
    level: Literal[0, 1, 2]
    away: list[Literal["weights", "kv_cache"]]


class ServerInfo(Exact):
    version: str
    python: str
    platform: str
    packages: dict[str, str | None]
    config: dict[str, Any] | None
    plan: list[str]
    notices: list[str]
    cache: dict[str, Any]


class TokenizerInfo(BaseModel):
    """What tokenizer_config.json says, and more of it."""

    model_config = ConfigDict(extra="allow")
    tokenizer_class: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, Any]


class Version(Exact):
    version: str


class Load(Exact):
    server_load: int = Field(ge=0)


ANSWERS: dict[str, type[BaseModel] | None] = {
    "POST /v1/completions": Completion,
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/responses": Responded,
    "GET /v1/responses/{name}": Responded,
    "DELETE /v1/responses/{name}": DroppedResponse,
    "POST /v1/messages": AnsweredMessage,
    "POST /v1/messages/count_tokens": CountedTokens,
    "POST /v1/embeddings": Embeddings,
    "POST /score": Scores,
    "POST /rerank": Ranking,
    "GET /v1/models": ModelList,
    "GET /v1/models/{name:path}": ModelCard,
    "POST /tokenize": Tokens,
    "POST /detokenize": Text,
    "GET /health": None,
    "GET /ping": None,
    "POST /ping": None,
    "GET /version": Version,
    "GET /load": Load,
    "GET /metrics": None,
    "GET /v1/prefixes": PrefixList,
    "POST /v1/prefixes": RegisteredPrefix,
    "DELETE /v1/prefixes/{name}": DroppedPrefix,
    "POST /reset_prefix_cache": Emptied,
    "POST /sleep": Rest,
    "POST /wake_up": Rest,
    "GET /is_sleeping": Rest,
    "GET /server_info": ServerInfo,
    "GET /tokenizer_info": TokenizerInfo,
}
STREAMED: dict[str, type[BaseModel]] = {
    "/v1/completions": Chunk,
    "/v1/chat/completions": Chunk,
    "/v1/responses": Responded,
    "/v1/messages": AnsweredMessage,
}
PARAMETERS: dict[str, dict[str, dict[str, Any]]] = {  # behind a path's "?"
    "POST /sleep": {
        "level": {"type": "integer", "enum": list(LEVELS), "default": 1},
        "mode": {"type": "string", "enum": list(MODES), "default": MODES[0]},
    },
    "POST /wake_up": {
        "tags": {"type": "array", "items": {"type": "string", "enum": list(TAGS)}, "maxItems": MOST_TAGS},
    },
}
REASONS = {
    400: "What was asked can't be done; the message names the field, the value and the limit",
    401: "No valid key",
    403: "No admin key",
    404: "No such model, prefix or stored response",
    408: "The body took too long to arrive",
    409: "A prefix of that name is registered, or requests run",
    413: "The body is too large, or the prefix doesn't fit",
    500: "A defect of the server",
    503: "The queue is full, the engine sleeps, or the server is about to end; Retry-After says when to come back",
}
KEY = "KeyOfTheServer"


def responses(method: str, path: str) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, by status."""
    error: type[BaseModel] = MessageError if path.startswith(MESSAGES) else Error
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
    found: dict[int | str, dict[str, Any]] = {
        code: {"model": model, "description": REASONS[code]} for code, model in sorted(codes.items())
    }
    answer = ANSWERS[f"{method} {path}"]
    found[200] = {"description": "The answer"} if answer is None else {"model": answer, "description": "The answer"}
    if path in ("/health", "/ping"):
        found[503]["description"] = "The engine's loop hangs, or requests are not accepted; without a key no body"
    if method == "POST" and path in STREAMED:
        described = {"type": "string", "description": STREAMED[path].__doc__}
        found[200]["content"] = {"text/event-stream": {"schema": described}}
    return found


def parameters(method: str, path: str) -> dict[str, Any]:
    """What a route takes behind its path, for the document."""
    taken = PARAMETERS.get(f"{method} {path}", {})
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in taken.items()]}


def describe(document: dict[str, Any], asks_for_keys: bool) -> dict[str, Any]:
    """FastAPI's OpenAPI document, less what it says of answers that this server doesn't give."""
    bodies = {"/health": None, "/ping": None, "/metrics": {"text/plain": {"schema": {"type": "string"}}}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # a wrong type is a 400 here
            if path in bodies:
                content = bodies[path]
                operation["responses"]["200"].pop("content", None)
                if content is not None:
                    operation["responses"]["200"]["content"] = content
            if asks_for_keys and path != "/health":
                operation["security"] = [{KEY: []}]
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Chunk"] = Chunk.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schemas["Chunk"].pop("$defs", {}))
    if asks_for_keys:
        told = {"type": "http", "scheme": "bearer", "description": "Or the key alone in the header x-api-key"}
        document["components"]["securitySchemes"] = {KEY: told}
    return document
