"""The routes of OpenAI's API and vLLM's additions, for one AsyncLLM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

import quire
from quire.async_llm import AsyncLLM
from quire.errors import InputError, input_error_at
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import PARAM_NAME
from quire.server.answer_size import AnswerBudget, EchoedPrompt, limit_answer
from quire.server.errors import Failure, UnknownModel
from quire.server.guards import TRUSTED, client_of
from quire.server.json_pieces import TokenIdStrings, TokenStrings, WritePace, WriterTurns, ids_json, texts_json
from quire.server.metrics import Metrics
from quire.server.reasoning import ModelReasoning, RequestReasoning
from quire.server.render import ChatRenderer, CompletionRenderer, Renderer, last_assistant_text
from quire.server.request_log import log_request
from quire.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PrefixRequest,
    RequestFields,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    TruncationFields,
    warning_header,
)
from quire.server.request_params import RequestRules, chat_params, check_known, completion_params, split_prompts
from quire.server.server_group import ServerGroup
from quire.server.streaming import EngineCall, EventStream, Json, JsonPiecesResponse, render_whole, respond
from quire.server.structured import structured_field
from quire.server.tool_choice import ToolChoice, read_tool_choice
from quire.text.chat_messages import drop_unknown_fields
from quire.text.images.loader import split_multi_modal
from quire.text.input_processor import Prompt, PromptTruncation
from quire.text.reasoning_parser import detect_reasoning_format
from quire.text.tool_parsers.formats import detect_tool_format
from quire.text.tools import Tool, read_tools

RESERVED_TEMPLATE_KWARGS = frozenset({
    "messages", "add_generation_prompt", "continue_final_message", "documents", "add_special_tokens", "tools", "self",
})  # fmt: skip


class PreparedChat(NamedTuple):
    """A chat request that is ready to be queued."""

    call: EngineCall
    prompt: Prompt
    params: SamplingParams
    tool_choice: ToolChoice
    reasoning: RequestReasoning | None
    warnings: list[str]  # for the header of the answer


class Service:
    """The routes. `model_names` are the names of the model; the first one is shown. `log_requests` logs each request.
    `server_group` is the whole server, of which this is one frontend. `tool_format` and `reasoning_format` are how the
    model writes tool calls and reasoning; None: detected from the chat template."""

    def __init__(
        self,
        llm: AsyncLLM,
        model_names: Sequence[str],
        metrics: Metrics,
        request_rules: RequestRules,
        log_requests: bool = False,
        server_group: ServerGroup | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        self.llm, self.input_processor, self.model_names = llm, llm.prompts, list(model_names)
        self.metrics, self.request_rules, self.log_requests = metrics, request_rules, log_requests
        self.token_strings = TokenStrings(self.input_processor)
        self.token_id_strings = TokenIdStrings(self.input_processor)
        self.server_group = server_group or ServerGroup()
        self.server_group.set_engine(llm, metrics)
        template, tokenizer = self.input_processor.chat_template, self.input_processor.tokenizer
        source = template.source if template is not None else ""
        self.tool_format = tool_format or detect_tool_format(source)
        self.reasoning = ModelReasoning(reasoning_format or detect_reasoning_format(source), tokenizer)
        self.answer_budget, self.writer_turns = AnswerBudget(self.server_group.num_frontends), WriterTurns()

    # Generation

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        self.check_model(body.model)
        params = completion_params(body, self.request_rules)
        truncation = self.truncation(body, params.max_tokens)
        _, images = split_multi_modal({"multi_modal_data": body.multi_modal_data})
        given = split_prompts(body.prompt)
        prompts = await self.input_processor.process_prompts(
            given, body.add_special_tokens, truncation, images, body.cache_salt or ""
        )
        scored = (body.logprobs or 0) + 1 if body.echo and params.num_logprobs >= 0 else 0
        scored += 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        echoed = EchoedPrompt(params.n, bool(body.echo or body.return_token_ids), scored)
        call, params = self._new_call("cmpl", body, prompts, params, echoed)
        renderer = CompletionRenderer(
            call.id, self.model_names[0], body, prompts, self._token_strings(body), self.writer_turns,
            self.input_processor,
        )  # fmt: skip
        return await self._respond(call, renderer, body, prompts, params, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        prepared = await self.prepare_chat("chatcmpl", body)
        call, prompts = prepared.call, [prepared.prompt]
        renderer = ChatRenderer(
            call.id, self.model_names[0], body, prompts, self._token_strings(body), self.writer_turns,
            prepared.tool_choice, prepared.reasoning,
        )  # fmt: skip
        return await self._respond(call, renderer, body, prompts, prepared.params, http, prepared.warnings)

    async def prepare_chat(self, id_prefix: str, body: ChatRequest) -> PreparedChat:
        """Return what a chat request asks for. `id_prefix` begins the answer's id. Nothing is queued."""
        self.check_model(body.model)
        tool_choice = read_tool_choice(body, self.tool_format)
        params = tool_choice.apply_to(chat_params(body, self.request_rules), body)
        max_tokens = params.max_tokens if params.max_tokens is not None else 1
        prompt = await self.render_chat(body, self.truncation(body, max_tokens), tool_choice.tools)
        continued = last_assistant_text(body) if body.continue_final_message else None
        reasoning = self.reasoning.for_request(body, prompt, continued)
        warnings: list[str] = []
        if tool_choice.mode in ("required", "named"):
            params, warnings = await self._constrain_to_tools(params, tool_choice, body)
        params = self.reasoning.apply_to(params, body, reasoning)
        scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        call, params = self._new_call(
            id_prefix, body, [prompt], params, EchoedPrompt(1, bool(body.return_token_ids), scored)
        )
        return PreparedChat(call, prompt, params, tool_choice, reasoning, warnings)

    async def _constrain_to_tools(
        self, params: SamplingParams, tool_choice: ToolChoice, body: ChatRequest
    ) -> tuple[SamplingParams, list[str]]:
        """Return parameters that constrain calls to the schemas of the tools, as far as the grammar supports them, and
        warnings about the rest."""
        try:
            params, dropped = await self.input_processor.nearest_supported(params)
        except InputError as error:
            free = tool_choice.apply_to(params, body, any_arguments=True).structured
            return replace(params, structured=free), [f"not enforced in tool calls: any parameters, as {error}"]
        return params, tool_choice.unenforced_warnings(dropped)

    def _new_call(
        self, id_prefix: str, body: SamplingFields, prompts: list[Prompt], params: SamplingParams, echoed: EchoedPrompt
    ) -> tuple[EngineCall, SamplingParams]:
        """Return the engine call of a request, which is not queued yet, and parameters for an answer within the
        limits."""
        params, size = limit_answer(
            params, [len(prompt.ids) for prompt in prompts], self.input_processor.max_len, echoed
        )
        return EngineCall(
            self.llm, f"{id_prefix}-{body.request_id or uuid.uuid4().hex}", self.answer_budget, size
        ), params

    def _token_strings(self, body: SamplingFields) -> TokenStrings:
        return self.token_id_strings if body.return_tokens_as_token_ids else self.token_strings

    async def _respond(
        self,
        call: EngineCall,
        renderer: Renderer,
        body: SamplingFields,
        prompts: list[Prompt],
        params: SamplingParams,
        http: Request,
        warnings: Sequence[str] = (),
    ) -> Response:
        headers = await self.submit(call, renderer, body, prompts, params, http, warnings)
        if not body.stream:
            return await respond(call, render_whole(call, renderer), headers, http.receive)
        options = body.stream_options or StreamOptions()
        return EventStream(call, renderer, headers, bool(options.include_usage), bool(options.continuous_usage_stats))

    async def submit(
        self, call: EngineCall, renderer: Renderer, body: SamplingFields, prompts: list[Prompt], params: SamplingParams,
        http: Request, warnings: Sequence[str] = (),
    ) -> dict[str, str]:  # fmt: skip
        """Queue the request. Return the headers of the answer, including `warnings`."""
        headers = self.warning_headers(body, prompts, warnings)
        try:
            await call.submit(
                prompts, params, salt=body.cache_salt or "", final_only=not body.stream, client=client_of(http)
            )
        except InputError as error:
            if error.param == PARAM_NAME:  # the engine's name of the field
                error.param = structured_field(body)
            raise
        if self.log_requests:
            log_request(call.id, prompts, params, http.scope)
        return headers

    def warning_headers(
        self, body: RequestFields, prompts: Sequence[Prompt], extra_warnings: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the Warning header: ignored fields, `extra_warnings`, and a prompt that begins with two BOS tokens."""
        bos = self.input_processor.tokenizer.bos_id if self.input_processor.tokenizer is not None else None
        twice = bos is not None and any(prompt.ids[:2] == [bos, bos] and prompt.text is not None for prompt in prompts)
        if twice:
            warning = "the prompt begins with two BOS tokens: leave out one, or set add_special_tokens to false"
            extra_warnings = (*extra_warnings, warning)
        return warning_header(body, self._unread_fields(body), extra_warnings)

    def truncation(self, body: TruncationFields, max_tokens: int | None) -> PromptTruncation | None:
        """Return how to truncate a prompt so that `max_tokens` fit after it, or None if the request does not ask for
        it."""
        if body.truncate_prompt_tokens is None:
            return None
        return self.input_processor.make_truncation(
            body.truncate_prompt_tokens, body.truncation_side == "right", max_tokens or 1
        )

    async def render_chat(
        self,
        body: ChatRequest | TokenizeRequest | EmbeddingRequest,
        truncation: PromptTruncation | None,
        tools: Sequence[Tool],
    ) -> Prompt:
        """Render a conversation as a prompt, with the tools that may be called. Runs on another thread, since the cost
        of a template is unknown."""
        given = dict(body.chat_template_kwargs or {})
        if taken := RESERVED_TEMPLATE_KWARGS & given.keys():
            raise InputError(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
        if body.reasoning_effort is not None and not self._unread_fields(body):
            given.setdefault("reasoning_effort", body.reasoning_effort)
        with input_error_at("messages", False):
            return await self.input_processor.process_chat_async(
                drop_unknown_fields(body.messages or []),
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
                bool(body.continue_final_message),
                documents=body.documents,
                add_special_tokens=bool(body.add_special_tokens),
                truncation=truncation,
                variables=given,
                salt=getattr(body, "cache_salt", None) or "",
                tools=tools,
            )

    def _unread_fields(self, body: RequestFields) -> list[str]:
        """Return ["reasoning_effort"] if the request has it and the template does not use it, else []: clients send it
        to any model. Raise InputError instead if unknown fields are refused."""
        template = self.input_processor.chat_template
        if getattr(body, "reasoning_effort", None) is None or (template and "reasoning_effort" in template.variables):
            return []
        if self.request_rules.strict:
            raise InputError("the chat template doesn't use reasoning_effort", "reasoning_effort")
        return ["reasoning_effort"]

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel if `model` is given and is not served."""
        if model is not None and model not in self.model_names:
            raise UnknownModel(
                f"the model {model[:60]!r} does not exist; this server has {self.model_names[0]!r}", "model"
            )

    # Text

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Return the token ids of a prompt or of a conversation."""
        self.check_model(body.model)
        check_known(body, self.request_rules.strict)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        truncation = self.truncation(body, 1)
        if body.messages is not None:
            prompt = await self.render_chat(body, truncation, read_tools(body.tools or []))
        else:
            assert body.prompt is not None, "one of the two is given"
            [prompt] = await self.input_processor.process_prompts(
                [body.prompt], body.add_special_tokens is not False, truncation
            )
        pieces = [f'{{"count":{len(prompt.ids)},"max_model_len":{self.input_processor.max_len},"tokens":']
        pace = WritePace(self.writer_turns)
        pieces += [*await ids_json(prompt.ids, pace), ',"token_strs":']
        pieces += (
            await texts_json(map(self.input_processor.id_to_token, prompt.ids), pace)
            if body.return_token_strs
            else ["null"]
        )
        return JsonPiecesResponse([*pieces, "}"], warning_header(body, self._unread_fields(body)))

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        self.check_model(body.model)
        check_known(body, self.request_rules.strict)
        tokenizer, vocab = self.input_processor.tokenizer, self.llm.limits.vocab_size
        if tokenizer is None:
            raise InputError("this model has no tokenizer", "tokens")

        def decode() -> str:
            if bad := next((token for token in body.tokens if not 0 <= token < vocab), None):
                raise InputError(f"token ids are integers from 0 to {vocab - 1}, got {str(bad)[:40]}", "tokens")
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        text = await self.input_processor.offload(len(body.tokens), decode)
        return JSONResponse({"prompt": text}, headers=warning_header(body))

    # Registered prefixes (admin routes)

    async def prefixes(self) -> Response:
        """Return all registered prefixes. Requests do not find those with the status `computing` yet."""
        prefixes, ready = await self.llm.prefixes()
        data = [
            {"id": name, "object": "prefix", "tokens": length, "status": "ready" if name in ready else "computing"}
            for name, length in prefixes.items()
        ]
        capacity = self.llm.account.sharing.prefix_capacity
        return JSONResponse({"object": "list", "data": data, "capacity_tokens": capacity})

    async def add_prefix(self, body: PrefixRequest) -> Response:
        """Register a text or token ids. Returns once requests can find the prefix."""
        check_known(body, self.request_rules.strict)
        if (body.text is None) == (body.token_ids is None):
            raise InputError("give either text or token_ids", "text")
        given = body.text if body.text is not None else body.token_ids
        assert given is not None, "one of the two is given"
        try:
            tokens = await self.llm.register_prefix(body.name, given)
        except InputError as error:
            if error.param in ("prompt", "prefix"):  # the engine's names of the field
                error.param = "text" if body.text is not None else "token_ids"
            raise
        registered = {"id": body.name, "object": "prefix", "tokens": tokens, "status": "ready"}
        return JSONResponse(registered, headers=warning_header(body))

    async def release_prefix(self, name: str) -> Response:
        """Release a registered prefix."""
        await self.llm.release_prefix(name)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    # State of the server

    async def models(self) -> Response:
        """Return the names of the model."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.model_names]})

    async def model(self, name: str) -> Response:
        """Return one of the model's names."""
        self.check_model(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> Json:
        card = {"id": name, "object": "model", "created": self.server_group.start_time, "owned_by": "quire"}
        return {**card, "root": self.model_names[0], "parent": None, "max_model_len": self.input_processor.max_len}

    async def health(self, http: Request) -> Response:
        """Return 200 if the engine's loop runs and requests are accepted, else 503. The reason is sent only to clients
        with a key, or if none is needed, since it may contain internal details."""
        state, other = self.llm.heartbeat(), self.server_group.problem()
        if state.alive and not state.stalled and self.llm.accepting and not other:
            return Response()
        if not http.scope.get(TRUSTED):
            return Response(status_code=503)
        reason = state.why if not state.alive or state.stalled else ""
        reason = reason or other or "the server is shutting down: no request is accepted"
        return Failure(503, reason).response(http.scope)

    async def version(self) -> Response:
        """Return quire's version."""
        return JSONResponse({"version": quire.__version__})

    async def load(self) -> Response:
        """Return the number of requests in the server."""
        return JSONResponse({"server_load": await self.server_group.load()})

    async def scrape(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return PlainTextResponse(await self.server_group.scrape(), media_type=CONTENT_TYPE_LATEST)
