"""What /v1/responses answers, for the OpenAPI document; as schemas.py."""

from __future__ import annotations

from typing import Any, Literal

from quire.server.exact import StrictModel

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(StrictModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[str]


class OutputMessage(StrictModel):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCall(StrictModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(StrictModel):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[str]
    content: list[ReasoningText]


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


class ResponsesResponse(StrictModel):
    """A response. `store`: whether it is kept. A stream's events are OpenAI's, response.created to response.completed,
    .incomplete or .failed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | FunctionCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: None


class DeletedResponse(StrictModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
