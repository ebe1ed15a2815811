"""What /v1/messages answers, for the OpenAPI document; as schemas.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire.server.exact import StrictModel


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


class ThinkingTokens(StrictModel):
    thinking_tokens: int


class MessageUsage(StrictModel):
    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessagesResponse(StrictModel):
    """A message. A stream's events are Anthropic's: message_start, those of the content blocks, message_delta and
    message_stop, or an error."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(StrictModel):
    input_tokens: int


class MessageErrorInfo(StrictModel):
    type: str
    message: str
    details: dict[str, Any] = Field({})


class MessageError(StrictModel):
    type: Literal["error"]
    error: MessageErrorInfo
