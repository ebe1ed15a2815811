"""What the routes do: OpenAI's API and vLLM's additions over one AsyncLLM."""

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

RESERVED_TEMPLATE_KWARGS = frozenset({"messages", "add_generation_prompt", "continue_final_message", "documents",
"add_special_tokens",
                      "tools", "self"})  # fmt: skip


class PreparedChat(NamedTuple):
    """A chat that can be queued."""

    call: EngineCall
    prompt: Prompt
    params: SamplingParams
    tool_choice: ToolChoice
    reasoning: RequestReasoning | None
    warnings: list[str]  # what its answer is to warn of


class Service:
    """`model_names` are the model's names; the first is the one shown. `log_requests` logs each. `server_group` are the
    whole server that this is a front of. `tool_format` is how the model writes calls, `reasoning_format` how it writes
    thoughts; None: as its template says."""

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
        self.llm, self.input_processor, self.model_names, self.metrics, self.request_rules = (
            llm,
            llm.prompts,
            list(model_names),
            metrics,
            request_rules,
        )
        self.token_strings, self.token_id_strings = (
            TokenStrings(self.input_processor),
            TokenIdStrings(self.input_processor),
        )
        self.server_group = server_group or ServerGroup()
        self.server_group.set_engine(llm, metrics)
        template = self.input_processor.chat_template
        taught = template.source if template is not None else ""
        self.tool_format = tool_format or detect_tool_format(taught)
        self.reasoning = ModelReasoning(
            reasoning_format or detect_reasoning_format(taught), self.input_processor.tokenizer
        )
        self.answer_budget, self.writer_turns, self.log_requests = (
            AnswerBudget(self.server_group.num_frontends),
            WriterTurns(),
            log_requests,
        )

    # Generation

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        self.check_model(body.model)
        params = completion_params(body, self.request_rules)
        cut = self.truncation(body, params.max_tokens)
        _, pictures = split_multi_modal({"multi_modal_data": body.multi_modal_data})
        given = split_prompts(body.prompt)
        prompts = await self.input_processor.process_prompts(
            given, body.add_special_tokens, cut, pictures, body.cache_salt or ""
        )
        scored = (body.logprobs or 0) + 1 if body.echo and params.num_logprobs >= 0 else 0
        scored += 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        shown = EchoedPrompt(params.n, bool(body.echo or body.return_token_ids), scored)
        call, params = self._new_call("cmpl", body, prompts, params, shown)
        renderer = CompletionRenderer(
            call.id, self.model_names[0], body, prompts, self._token_strings(body), self.input_processor
        )
        return await self._respond(call, renderer, body, prompts, params, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        asked = await self.prepare_chat("chatcmpl", body)
        call, prompts = asked.call, [asked.prompt]
        renderer = ChatRenderer(
            call.id, self.model_names[0], body, prompts, self._token_strings(body), asked.tool_choice, asked.reasoning
        )
        return await self._respond(call, renderer, body, prompts, asked.params, http, asked.warnings)

    async def prepare_chat(self, id_prefix: str, body: ChatRequest) -> PreparedChat:
        """What a chat asks for; `id_prefix` is what the answer's id begins with. Nothing is queued."""
        self.check_model(body.model)
        box = read_tool_choice(body, self.tool_format)
        params = box.apply_to(chat_params(body, self.request_rules), body)
        max_tokens = params.max_tokens if params.max_tokens is not None else 1
        prompt = await self.render_chat(body, self.truncation(body, max_tokens), box.tools)
        thinking = self.reasoning.for_request(
            body, prompt, last_assistant_text(body) if body.continue_final_message else None
        )
        said: list[str] = []
        if box.mode in ("required", "named"):
            params, said = await self._constrain_to_tools(params, box, body)
        params = self.reasoning.apply_to(params, body, thinking)
        scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        call, params = self._new_call(
            id_prefix, body, [prompt], params, EchoedPrompt(1, bool(body.return_token_ids), scored)
        )
        return PreparedChat(call, prompt, params, box, thinking, said)

    async def _constrain_to_tools(
        self, params: SamplingParams, tool_choice: ToolChoice, body: ChatRequest
    ) -> tuple[SamplingParams, list[str]]:
        """Parameters that hold calls to their tools' parameters as far as there is a grammar for them, and what is to
        be said of the rest."""
        try:
            params, lost = await self.input_processor.nearest_supported(params)
        except InputError as error:
            free = tool_choice.apply_to(params, body, any_arguments=True).structured
            return replace(params, structured=free), [f"not enforced in tool calls: any parameters, as {error}"]
        return params, tool_choice.unenforced_warnings(lost)

    def _new_call(
        self, id_prefix: str, body: SamplingFields, prompts: list[Prompt], params: SamplingParams, echoed: EchoedPrompt
    ) -> tuple[EngineCall, SamplingParams]:
        """The engine requests to come, and their parameters with an answer within its limits."""
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
        """Queue what was asked for. The headers of the answer, which warn of what is `warnings`, too."""
        headers = self.warning_headers(body, prompts, warnings)
        try:
            await call.submit(
                prompts, params, salt=body.cache_salt or "", final_only=not body.stream, client=client_of(http)
            )
        except InputError as error:
            if error.param == PARAM_NAME:  # what the engine calls it
                error.param = structured_field(body)
            raise
        if self.log_requests:
            log_request(call.id, prompts, params, http.scope)
        renderer.pace.writer_turns = self.writer_turns
        return headers

    def warning_headers(
        self, body: RequestFields, prompts: Sequence[Prompt], extra_warnings: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return the Warning header: ignored fields, what is `extra_warnings`, and a prompt that begins with two "
        "BOS tokens."""
        bos = self.input_processor.tokenizer.bos_id if self.input_processor.tokenizer is not None else None
        twice = bos is not None and any(prompt.ids[:2] == [bos, bos] and prompt.text is not None for prompt in prompts)
        told = "the prompt begins with two BOS tokens: leave out one, or set add_special_tokens to false"
        return warning_header(body, self._unread_fields(body), (*extra_warnings, told) if twice else extra_warnings)

    def truncation(self, body: TruncationFields, max_tokens: int | None) -> PromptTruncation | None:
        """How to cut a prompt so that it leaves room for `max_tokens`, if that is asked for."""
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
        """A conversation as a prompt, with tools to call. Templates are programs of unknown cost, so always on another
        thread."""
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
        """The name of a reasoning_effort that the template doesn't read: clients send it to any model. InputError for
        it if unknown fields are refused."""
        template = self.input_processor.chat_template
        if getattr(body, "reasoning_effort", None) is None or (template and "reasoning_effort" in template.variables):
            return []
        if self.request_rules.strict:
            raise InputError("the chat template reads no reasoning_effort", "reasoning_effort")
        return ["reasoning_effort"]

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            raise UnknownModel(
                f"the model {model[:60]!r} does not exist; this server has {self.model_names[0]!r}", "model"
            )

    # Text

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a conversation."""
        self.check_model(body.model)
        check_known(body, self.request_rules.strict)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        cut = self.truncation(body, 1)
        if body.messages is not None:
            prompt = await self.render_chat(body, cut, read_tools(body.tools or []))
        else:
            [prompt] = await self.input_processor.process_prompts(
                [body.prompt], body.add_special_tokens is not False, cut
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
        """The text of token ids."""
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
        """All of them. `computing` ones are found by no request yet."""
        found, ready = await self.llm.prefixes()
        data = [
            {"id": name, "object": "prefix", "tokens": length, "status": "ready" if name in ready else "computing"}
            for name, length in found.items()
        ]
        capacity = self.llm.account.sharing.prefix_capacity
        return JSONResponse({"object": "list", "data": data, "capacity_tokens": capacity})

    async def add_prefix(self, body: PrefixRequest) -> Response:
        """Register a text or token ids; answers once requests find it."""
        check_known(body, self.request_rules.strict)
        if (body.text is None) == (body.token_ids is None):
            raise InputError("give either text or token_ids", "text")
        given = body.text if body.text is not None else body.token_ids
        assert given is not None, "one of the two is given"
        try:
            tokens = await self.llm.register_prefix(body.name, given)
        except InputError as error:
            if error.param in ("prompt", "prefix"):  # what the engine calls it
                error.param = "text" if body.text is not None else "token_ids"
            raise
        found = {"id": body.name, "object": "prefix", "tokens": tokens, "status": "ready"}
        return JSONResponse(found, headers=warning_header(body))

    async def release_prefix(self, name: str) -> Response:
        """Let go of one."""
        await self.llm.release_prefix(name)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    # Facts

    async def models(self) -> Response:
        """The names that this server answers to."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.model_names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self.check_model(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> Json:
        card = {"id": name, "object": "model", "created": self.server_group.start_time, "owned_by": "quire"}
        return {**card, "root": self.model_names[0], "parent": None, "max_model_len": self.input_processor.max_len}

    async def health(self, http: Request) -> Response:
        """200 while the engine's loop turns and requests are accepted, else 503. The body is empty, but for the cause,
        which is told to who has a key or needs none: it may name what is not everybody's business."""
        state, other = self.llm.heartbeat(), self.server_group.problem()
        if state.alive and not state.stalled and self.llm.accepting and not other:
            return Response()
        if not http.scope.get(TRUSTED):
            return Response(status_code=503)
        ill = state.why if not state.alive or state.stalled else ""
        return Failure(503, ill or other or "the server is shutting down: no request is accepted").response(http.scope)

    async def version(self) -> Response:
        """quire's version."""
        return JSONResponse({"version": quire.__version__})

    async def load(self) -> Response:
        """Requests in the server."""
        return JSONResponse({"server_load": await self.server_group.load()})

    async def scrape(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(await self.server_group.scrape(), media_type=CONTENT_TYPE_LATEST)
