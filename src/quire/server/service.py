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
from quire.errors import InputError, about
from quire.server.errors import Failure, UnknownModel
from quire.server.guards import TRUSTED, client_of
from quire.server.metrics import Metrics
from quire.server.peers import Peers
from quire.server.pieces import Numbers, Pace, Turns, Words, numbers, strings
from quire.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Fields,
    PrefixRequest,
    Sampling,
    StreamOptions,
    TokenizeRequest,
    Truncation,
    warnings,
)
from quire.server.reasoning import Reasoning, Thinking
from quire.server.render import ChatRenderer, CompletionRenderer, Renderer, last_said
from quire.server.request_log import log_request
from quire.server.sampling import Terms, chat_params, check_known, completion_params, completion_prompts
from quire.server.size import Held, Shown, bounded
from quire.server.stream import Call, EventStream, Json, WholeAnswer, respond, whole
from quire.server.structured import field_of
from quire.server.tools import Toolbox, toolbox
from quire.text.calls.formats import format_of
from quire.text.messages import without_stray
from quire.text.prompts import Cut, Prompt
from quire.text.sight import pictured
from quire.text.thoughts import thoughts_of
from quire.text.tools import Tool, read_tools
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.structured import NAME

RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "documents", "add_special_tokens",
                      "tools", "self"})  # fmt: skip


class Asked(NamedTuple):
    """A chat that can be queued."""

    call: Call
    prompt: Prompt
    params: SamplingParams
    box: Toolbox
    thinking: Thinking | None
    said: list[str]  # what its answer is to warn of


class Service:
    """`names` are the model's names; the first is the one shown. `log_requests` logs each. `peers` are the whole server
    that this is a front of. `tool_format` is how the model writes calls, `thoughts` how it writes thoughts; None: as
    its template says."""

    def __init__(
        self,
        llm: AsyncLLM,
        names: Sequence[str],
        metrics: Metrics,
        terms: Terms,
        log_requests: bool = False,
        peers: Peers | None = None,
        tool_format: str | None = None,
        thoughts: str | None = None,
    ) -> None:
        self.llm, self.prompts, self.names, self.metrics, self.terms = llm, llm.prompts, list(names), metrics, terms
        self.words, self.numbers = Words(self.prompts), Numbers(self.prompts)
        self.peers = peers or Peers()
        self.peers.join(llm, metrics)
        template = self.prompts.chat_template
        taught = template.source if template is not None else ""
        self.tool_format = tool_format or format_of(taught)
        self.reasoning = Reasoning(thoughts or thoughts_of(taught), self.prompts.tokenizer)
        self.held, self.turns, self.log_requests = Held(self.peers.count), Turns(), log_requests

    # Generation

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue prompts."""
        self.check_model(body.model)
        params = completion_params(body, self.terms)
        cut = self.cut(body, params.max_tokens)
        _, pictures = pictured({"multi_modal_data": body.multi_modal_data})
        given = completion_prompts(body.prompt)
        prompts = await self.prompts.read(given, body.add_special_tokens, cut, pictures, body.cache_salt or "")
        scored = (body.logprobs or 0) + 1 if body.echo and params.top >= 0 else 0
        scored += 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        shown = Shown(params.n, bool(body.echo or body.return_token_ids), scored)
        call, params = self._call("cmpl", body, prompts, params, shown)
        renderer = CompletionRenderer(call.id, self.names[0], body, prompts, self._words(body), self.prompts)
        return await self._answer(call, renderer, body, prompts, params, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        asked = await self.asked("chatcmpl", body)
        call, prompts = asked.call, [asked.prompt]
        renderer = ChatRenderer(call.id, self.names[0], body, prompts, self._words(body), asked.box, asked.thinking)
        return await self._answer(call, renderer, body, prompts, asked.params, http, asked.said)

    async def asked(self, kind: str, body: ChatRequest) -> Asked:
        """What a chat asks for; `kind` is what the answer's id begins with. Nothing is queued."""
        self.check_model(body.model)
        box = toolbox(body, self.tool_format)
        params = box.applied(chat_params(body, self.terms), body)
        max_tokens = params.max_tokens if params.max_tokens is not None else 1
        prompt = await self.render(body, self.cut(body, max_tokens), box.tools)
        thinking = self.reasoning.of(body, prompt, last_said(body) if body.continue_final_message else None)
        said: list[str] = []
        if box.choice in ("required", "named"):
            params, said = await self._held_to(params, box, body)
        params = self.reasoning.applied(params, body, thinking)
        scored = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
        call, params = self._call(kind, body, [prompt], params, Shown(1, bool(body.return_token_ids), scored))
        return Asked(call, prompt, params, box, thinking, said)

    async def _held_to(
        self, params: SamplingParams, box: Toolbox, body: ChatRequest
    ) -> tuple[SamplingParams, list[str]]:
        """Parameters that hold calls to their tools' parameters as far as there is a grammar for them, and what is to
        be said of the rest."""
        try:
            params, lost = await self.prompts.nearest(params)
        except InputError as error:
            free = box.applied(params, body, free=True).structured
            return replace(params, structured=free), [f"not enforced in tool calls: any parameters, as {error}"]
        return params, box.loosened(lost)

    def _call(
        self, kind: str, body: Sampling, prompts: list[Prompt], params: SamplingParams, shown: Shown
    ) -> tuple[Call, SamplingParams]:
        """The engine requests to come, and their parameters with an answer within its limits."""
        params, size = bounded(params, [len(prompt.ids) for prompt in prompts], self.prompts.max_len, shown)
        return Call(self.llm, f"{kind}-{body.request_id or uuid.uuid4().hex}", self.held, size), params

    def _words(self, body: Sampling) -> Words:
        return self.numbers if body.return_tokens_as_token_ids else self.words

    async def _answer(
        self,
        call: Call,
        renderer: Renderer,
        body: Sampling,
        prompts: list[Prompt],
        params: SamplingParams,
        http: Request,
        said: Sequence[str] = (),
    ) -> Response:
        headers = await self.queue(call, renderer, body, prompts, params, http, said)
        if not body.stream:
            return await respond(call, whole(call, renderer), headers, http.receive)
        options = body.stream_options or StreamOptions()
        return EventStream(call, renderer, headers, bool(options.include_usage), bool(options.continuous_usage_stats))

    async def queue(
        self, call: Call, renderer: Renderer, body: Sampling, prompts: list[Prompt], params: SamplingParams,
        http: Request, said: Sequence[str] = (),
    ) -> dict[str, str]:  # fmt: skip
        """Queue what was asked for. The headers of the answer, which warn of what is `said`, too."""
        headers = self.headers(body, prompts, said)
        try:
            await call.submit(
                prompts, params, salt=body.cache_salt or "", patient=not body.stream, client=client_of(http)
            )
        except InputError as error:
            if error.param == NAME:  # what the engine calls it
                error.param = field_of(body)
            raise
        if self.log_requests:
            log_request(call.id, prompts, params, http.scope)
        renderer.pace.turns = self.turns
        return headers

    def headers(self, body: Fields, prompts: Sequence[Prompt], said: Sequence[str] = ()) -> dict[str, str]:
        """Return the Warning header: ignored fields, what is `said`, and a prompt that begins with two BOS tokens."""
        bos = self.prompts.tokenizer.bos_id if self.prompts.tokenizer is not None else None
        twice = bos is not None and any(prompt.ids[:2] == [bos, bos] and prompt.text is not None for prompt in prompts)
        told = "the prompt begins with two BOS tokens: leave out one, or set add_special_tokens to false"
        return warnings(body, self._unread(body), (*said, told) if twice else said)

    def cut(self, body: Truncation, max_tokens: int | None) -> Cut | None:
        """How to cut a prompt so that it leaves room for `max_tokens`, if that is asked for."""
        if body.truncate_prompt_tokens is None:
            return None
        return self.prompts.cut(body.truncate_prompt_tokens, body.truncation_side == "right", max_tokens or 1)

    async def render(
        self, body: ChatRequest | TokenizeRequest | EmbeddingRequest, cut: Cut | None, tools: Sequence[Tool]
    ) -> Prompt:
        """A conversation as a prompt, with tools to call. Templates are programs of unknown cost, so always on another
        thread."""
        given = dict(body.chat_template_kwargs or {})
        if taken := RESERVED & given.keys():
            raise InputError(f"chat_template_kwargs can't set {min(taken)!r}", "chat_template_kwargs")
        if body.reasoning_effort is not None and not self._unread(body):
            given.setdefault("reasoning_effort", body.reasoning_effort)
        with about("messages", False):
            return await self.prompts.converse(
                without_stray(body.messages or []),
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
                bool(body.continue_final_message),
                documents=body.documents,
                add_special_tokens=bool(body.add_special_tokens),
                cut=cut,
                variables=given,
                salt=getattr(body, "cache_salt", None) or "",
                tools=tools,
            )

    def _unread(self, body: Fields) -> list[str]:
        """The name of a reasoning_effort that the template doesn't read: clients send it to any model. InputError for
        it if unknown fields are refused."""
        template = self.prompts.chat_template
        if getattr(body, "reasoning_effort", None) is None or (template and "reasoning_effort" in template.variables):
            return []
        if self.terms.strict:
            raise InputError("the chat template reads no reasoning_effort", "reasoning_effort")
        return ["reasoning_effort"]

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.names:
            raise UnknownModel(f"the model {model[:60]!r} does not exist; this server has {self.names[0]!r}", "model")

    # Text

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a conversation."""
        self.check_model(body.model)
        check_known(body, self.terms.strict)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages", "prompt")
        cut = self.cut(body, 1)
        if body.messages is not None:
            prompt = await self.render(body, cut, read_tools(body.tools or []))
        else:
            [prompt] = await self.prompts.read([body.prompt], body.add_special_tokens is not False, cut)
        pieces = [f'{{"count":{len(prompt.ids)},"max_model_len":{self.prompts.max_len},"tokens":']
        pace = Pace(self.turns)
        pieces += [*await numbers(prompt.ids, pace), ',"token_strs":']
        pieces += await strings(map(self.prompts.piece, prompt.ids), pace) if body.return_token_strs else ["null"]
        return WholeAnswer([*pieces, "}"], warnings(body, self._unread(body)))

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        self.check_model(body.model)
        check_known(body, self.terms.strict)
        tokenizer, vocab = self.prompts.tokenizer, self.llm.limits.vocab_size
        if tokenizer is None:
            raise InputError("this model has no tokenizer", "tokens")

        def decode() -> str:
            if bad := next((token for token in body.tokens if not 0 <= token < vocab), None):
                raise InputError(f"token ids are integers from 0 to {vocab - 1}, got {str(bad)[:40]}", "tokens")
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        text = await self.prompts.apart(len(body.tokens), decode)
        return JSONResponse({"prompt": text}, headers=warnings(body))

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
        check_known(body, self.terms.strict)
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
        return JSONResponse(found, headers=warnings(body))

    async def drop_prefix(self, name: str) -> Response:
        """Let go of one."""
        await self.llm.release_prefix(name)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    # Facts

    async def models(self) -> Response:
        """The names that this server answers to."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self.check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> Json:
        card = {"id": name, "object": "model", "created": self.peers.started, "owned_by": "quire"}
        return {**card, "root": self.names[0], "parent": None, "max_model_len": self.prompts.max_len}

    async def health(self, http: Request) -> Response:
        """200 while the engine's loop turns and requests are accepted, else 503. The body is empty, but for the cause,
        which is told to who has a key or needs none: it may name what is not everybody's business."""
        state, other = self.llm.heartbeat(), self.peers.why()
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
        return JSONResponse({"server_load": await self.peers.load()})

    async def scrape(self) -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(await self.peers.scrape(), media_type=CONTENT_TYPE_LATEST)
