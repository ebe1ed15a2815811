"""Resolve a request: from the fields of its body to token ids, sampling parameters and the size of its answer.

Nothing is queued here. Bodies of other APIs are mapped to a ChatRequest first.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.errors import InputError, input_error_at
from quire.protocol.sampling_params import SamplingParams
from quire.server.answer_size import AnswerSize, EchoedPrompt, limit_answer
from quire.server.errors import UnknownField, UnknownModel
from quire.server.reasoning import ModelReasoning, RequestReasoning
from quire.server.request_models import (
    EMPTY_VALUES,
    REFUSED_FIELDS,
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestFields,
    TokenizeRequest,
    TruncationFields,
    unknown_fields,
    warning_header,
)
from quire.server.request_params import (
    RequestRules,
    chat_params,
    check_batch,
    completion_params,
    last_assistant_text,
    split_prompts,
)
from quire.server.tool_choice import NO_TOOLS, ToolChoice, read_tool_choice
from quire.text.chat_messages import drop_unknown_fields
from quire.text.images.loader import split_multi_modal
from quire.text.input_processor import InputProcessor, Prompt, PromptTruncation
from quire.text.reasoning_parser import detect_reasoning_format
from quire.text.tool_parsers.formats import detect_tool_format
from quire.text.tools import Tool, other_tools

RESERVED_TEMPLATE_KWARGS = frozenset({
    "messages", "add_generation_prompt", "continue_final_message", "documents", "add_special_tokens", "tools", "self",
})  # fmt: skip


class Generation(NamedTuple):
    """A completion or chat that is ready to be queued. `warnings` are for the header of the answer."""

    id: str
    request: Any  # a CompletionRequest or ChatRequest
    prompts: list[Prompt]
    params: SamplingParams
    size: AnswerSize
    tool_choice: ToolChoice = NO_TOOLS
    reasoning: RequestReasoning | None = None
    warnings: Sequence[str] = ()


class RequestResolver:
    """Resolves requests for a model that is called `model_names`. `tool_format` and `reasoning_format` are how the
    model writes tool calls and reasoning; None: detected from the chat template."""

    def __init__(
        self,
        input_processor: InputProcessor,
        model_names: Sequence[str],
        rules: RequestRules,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        self.input_processor, self.model_names, self.rules = input_processor, list(model_names), rules
        template, tokenizer = input_processor.chat_template, input_processor.tokenizer
        source = template.source if template is not None else ""
        self.template_variables = template.variables if template is not None else frozenset()
        self.tool_format = tool_format or detect_tool_format(source)
        self.reasoning = ModelReasoning(reasoning_format or detect_reasoning_format(source), tokenizer)

    async def completion(self, body: CompletionRequest) -> Generation:
        """Return what a completion request asks for."""
        self.check(body)
        params = completion_params(body, self.rules)
        truncation = self.truncation(body, params.max_tokens)
        _, images = split_multi_modal({"multi_modal_data": body.multi_modal_data})
        prompts = await self.input_processor.process_prompts(
            split_prompts(body.prompt), body.add_special_tokens, truncation, images, body.cache_salt or "",
            min_output=params.min_output,
        )  # fmt: skip
        scored = (body.logprobs or 0) + 1 if body.echo and params.num_logprobs >= 0 else 0
        scored += 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        echoed = EchoedPrompt(params.n, bool(body.echo or body.return_token_ids), scored)
        return self._generation("cmpl", body, prompts, params, echoed)

    async def chat(self, id_prefix: str, body: ChatRequest, min_output: int | None = 1) -> Generation:
        """Return what a chat request asks for. `id_prefix` begins the answer's id. A prompt must leave room for
        `min_output` tokens; None: it may have any length, to be counted."""
        self.check(body)
        is_batch = isinstance(body, BatchChatRequest)
        if is_batch:
            check_batch(body)
        tool_choice = read_tool_choice(body, self.tool_format)
        params = tool_choice.apply_to(chat_params(body, self.rules), body)
        truncation = self.truncation(body, params.max_tokens)
        prompts, reasonings = list[Prompt](), list[RequestReasoning | None]()
        for at, messages in enumerate(body.conversations):
            try:
                prompts.append(await self.render_chat(body, truncation, tool_choice.tools, messages, min_output))
            except InputError as error:
                error.args = (f"{error} (conversation {at})" if is_batch else str(error),)
                raise
            continued = last_assistant_text(messages) if body.continue_final_message else None
            reasonings.append(self.reasoning.for_request(body, prompts[-1], continued))
        reasoning = reasonings[0]
        if any(other != reasoning for other in reasonings):
            raise InputError(
                "the prompts of some conversations begin the reasoning, and those of others do not: send each to "
                "/v1/chat/completions",
                "messages",
            )
        warnings: list[str] = []
        if tool_choice.mode in ("required", "named"):
            try:  # constrain calls to the schemas of the tools, as far as the grammar supports them
                params, dropped = await self.input_processor.nearest_supported(params)
                warnings = tool_choice.unenforced_warnings(dropped)
            except InputError as error:
                params = tool_choice.apply_to(params, body, any_arguments=True)
                warnings = [f"not enforced in tool calls: any parameters, as {error}"]
        params = self.reasoning.apply_to(params, body, reasoning)
        scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        echoed = EchoedPrompt(1, bool(body.return_token_ids), scored)
        generation = self._generation(id_prefix, body, prompts, params, echoed)
        return generation._replace(tool_choice=tool_choice, reasoning=reasoning, warnings=warnings)

    def _generation(
        self,
        id_prefix: str,
        body: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        params: SamplingParams,
        echoed: EchoedPrompt,
    ) -> Generation:
        lengths = [len(prompt.ids) for prompt in prompts]
        params, size = limit_answer(params, lengths, self.input_processor.max_len, echoed)
        return Generation(f"{id_prefix}-{body.request_id or uuid.uuid4().hex}", body, prompts, params, size)

    def check(self, body: RequestFields) -> None:
        """Raise UnknownModel if the request names a model that is not served, InputError for a field that is not
        supported or, if the server is strict, not known."""
        self.check_model(getattr(body, "model", None))
        for name, value in (body.model_extra or {}).items():
            if name in REFUSED_FIELDS and value not in EMPTY_VALUES:
                raise InputError(f"{name} is not supported", name)
        if getattr(body, "chat_template", None) is not None:
            raise InputError("chat_template can't be set by a request: start with --chat-template", "chat_template")
        if self.rules.strict and (names := unknown_fields(body)):
            raise UnknownField(f"there is no field {names[0][:60]!r} (this server was started with --strict)", names[0])

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel if `model` is given and is not served."""
        if model is not None and model not in self.model_names:
            raise UnknownModel(
                f"the model {model[:60]!r} does not exist; this server has {self.model_names[0]!r}", "model"
            )

    def truncation(self, body: TruncationFields, max_tokens: int | None = 1) -> PromptTruncation | None:
        """Return how to truncate a prompt so that `max_tokens` fit after it, or None if the request does not ask for
        it."""
        if body.truncate_prompt_tokens is None:
            return None
        keep_first = body.truncation_side == "right"
        return self.input_processor.make_truncation(
            body.truncate_prompt_tokens, keep_first, 1 if max_tokens is None else max_tokens
        )

    async def render_chat(
        self,
        body: ChatRequest | TokenizeRequest | EmbeddingRequest,
        truncation: PromptTruncation | None,
        tools: Sequence[Tool],
        messages: Sequence[Any] | None = None,
        min_output: int | None = 1,
    ) -> Prompt:
        """Render a conversation as a prompt: `messages`, or else those of `body`, with the tools that may be called.
        Runs on another thread, since the cost of a template is unknown. `min_output` is that of `chat`."""
        given = dict(body.chat_template_kwargs or {})
        if taken := RESERVED_TEMPLATE_KWARGS & given.keys():
            raise InputError(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
        if body.reasoning_effort is not None and "reasoning_effort" in self.template_variables:
            given.setdefault("reasoning_effort", body.reasoning_effort)
        with input_error_at("messages", False):
            return await self.input_processor.process_chat_async(
                drop_unknown_fields((body.messages if messages is None else messages) or []),
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
                bool(body.continue_final_message),
                documents=body.documents,
                add_special_tokens=bool(body.add_special_tokens),
                truncation=truncation,
                variables=given,
                salt=getattr(body, "cache_salt", None) or "",
                tools=tools,
                min_output=min_output,
            )

    def warning_headers(
        self, body: RequestFields, prompts: Sequence[Prompt] = (), warnings: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the Warning header: ignored fields, `warnings`, notes on the prompts, and a prompt that begins with
        two BOS tokens."""
        warnings = (*warnings, *(note for prompt in prompts for note in prompt.notes))
        bos = self.input_processor.tokenizer.bos_id if self.input_processor.tokenizer is not None else None
        if bos is not None and any(prompt.ids[:2] == [bos, bos] and prompt.text is not None for prompt in prompts):
            twice = "the prompt begins with two BOS tokens: leave out one, or set add_special_tokens to false"
            warnings = (*warnings, twice)
        return warning_header(body, self._unread_fields(body), warnings)

    def _unread_fields(self, body: RequestFields) -> list[str]:
        """Return the names of known fields without effect: tools that are not functions, and reasoning_effort, which
        clients send to any model, if the template does not use it. Raise InputError instead if the server is strict."""
        unread = [f"tools[{i}] ({kind})" for i, kind in other_tools(getattr(body, "tools", None) or ()).items()]
        if getattr(body, "reasoning_effort", None) is not None and "reasoning_effort" not in self.template_variables:
            unread.append("reasoning_effort")
        if unread and self.rules.strict:
            raise InputError(f"{unread[0]} has no effect here", unread[0].partition("[")[0])
        return unread
