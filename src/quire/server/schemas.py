"""What the server answers, for its OpenAPI document: the shapes of every route's answers, errors included.

Answers are written by hand (render.py, pieces.py); nothing here runs when one is. Tests compare the two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length", "tool_calls", "abort", "error"] | None


class Exact(BaseModel):
    """All fields, and no others. Those that have a default may be left out."""

    model_config = ConfigDict(extra="forbid")


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
    tool_calls: list[ToolCall] = []


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
    tool_calls: list[ToolCallPiece] = []


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


class EmbeddingUsage(Exact):
    prompt_tokens: int
    total_tokens: int


class Embedding(Exact):
    """Base64 is of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Exact):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Score(Exact):
    index: int
    object: Literal["score"]
    score: float


class Scores(Exact):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Document(Exact):
    text: str


class Ranked(Exact):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Exact):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


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


class Version(Exact):
    version: str


class Load(Exact):
    server_load: int = Field(ge=0)


ANSWERS: dict[str, type[Exact] | None] = {
    "POST /v1/completions": Completion,
    "POST /v1/chat/completions": ChatCompletion,
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
}
REASONS = {
    400: "What was asked can't be done; the message names the field, the value and the limit",
    401: "No valid key",
    403: "No admin key",
    404: "No such model or prefix",
    408: "The body took too long to arrive",
    409: "A prefix of that name is registered",
    413: "The body is too large, or the prefix doesn't fit",
    500: "A defect of the server",
    503: "The queue is full, or the server is about to end; Retry-After says when to come back",
}
KEY = "KeyOfTheServer"


def responses(method: str, path: str) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, by status."""
    codes = {401: Error, 500: Error, 503: Error}
    if method == "POST" and path != "/ping":
        codes |= dict.fromkeys((400, 404, 408, 413), Error)
    if "models/" in path or method == "DELETE":
        codes |= {404: Error}
    if "prefixes" in path:
        codes |= dict.fromkeys((400, 403, 409), Error)
    if path == "/health":
        del codes[401]
    found: dict[int | str, dict[str, Any]] = {
        code: {"model": model, "description": REASONS[code]} for code, model in sorted(codes.items())
    }
    answer = ANSWERS[f"{method} {path}"]
    found[200] = {"description": "The answer"} if answer is None else {"model": answer, "description": "The answer"}
    if path in ("/health", "/ping"):
        found[503] = {"description": "The engine's loop hangs, or requests are not accepted"}
    if path.endswith("completions"):
        found[200]["content"] = {"text/event-stream": {"schema": {"type": "string", "description": Chunk.__doc__}}}
    return found


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
        document["components"]["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    return document
