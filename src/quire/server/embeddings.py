"""/v1/embeddings, /pooling, /score and /rerank: embeddings of texts by the served model, and their cosines. A
generative model is used as a bi-encoder: each text is embedded on its own, and pairs are not read together.
/generative_scoring reads a query and an item together, and returns the probability of a token after them."""

from __future__ import annotations

import base64
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded, input_error_at
from quire.protocol.sampling_params import SamplingParams
from quire.server.answer_size import MAX_TOKENS, AnswerSize, EchoedPrompt, embeddings_size, limit_answer
from quire.server.errors import rename_param
from quire.server.json_pieces import JsonPieces, logprob_json
from quire.server.render import UsageCounter
from quire.server.request_models import (
    MAX_INPUTS,
    EmbeddingRequest,
    GenerativeScoringRequest,
    ModelFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.request_params import split_prompts
from quire.server.streaming import respond
from quire.text.embedding import EMBEDDING_PARAMS, cosine, embedding_vector
from quire.text.input_processor import Prompt
from quire.text.tools import read_tools

if TYPE_CHECKING:
    import numpy as np

    from quire.server.service import Service

TEMPLATE_FIELDS = (
    "add_generation_prompt", "continue_final_message", "documents", "tools", "reasoning_effort", "chat_template_kwargs",
)  # fmt: skip
Body = EmbeddingRequest | ScoreRequest | RerankRequest


class EmbeddingRoutes:
    """The routes of embeddings and scores."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def embeddings(self, body: EmbeddingRequest, http: Request) -> Response:
        """Embed texts, token ids or a conversation."""
        return await self._embed("embd", "embedding", body, http)

    async def pooling(self, body: PoolingRequest, http: Request) -> Response:
        """Embed as /v1/embeddings does; the answer has vLLM's form."""
        if body.task not in (None, "embed"):
            raise InputError(f'task must be "embed", got {body.task[:40]!r}', "task")
        return await self._embed("pool", "pooling", body, http)

    async def _embed(self, kind: str, object_name: str, body: EmbeddingRequest, http: Request) -> Response:
        """Embed texts, token ids or a conversation. `kind` is "embd" for OpenAI's form of the answer, "pool" for
        vLLM's."""
        if (body.input is None) == (body.messages is None):
            raise InputError("give either input or messages", "input")
        if body.input is not None:
            for name in TEMPLATE_FIELDS:
                if getattr(body, name) not in (None, False, [], {}):
                    raise InputError(f"{name} goes with messages, and input was given: leave it out", name)
        as_bytes = body.encoding_format == "base64"
        for name in ("embed_dtype", "endianness"):
            if getattr(body, name) is not None and not as_bytes:
                raise InputError(f'{name} is for encoding_format "base64"; numbers in JSON have neither', name)
        if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
            raise InputError("normalize and use_activation mean the same, but their values differ", "normalize")
        given = [body.messages] if body.input is None else split_prompts(body.input, "input", MAX_INPUTS)
        dtype = body.embed_dtype or "float32"
        big = body.endianness == "big" or (body.endianness == "native" and sys.byteorder == "big")

        def written(vectors: list[np.ndarray], usage: str) -> JsonPieces:
            numbers = [_base64(one, dtype, big) if as_bytes else _floats(one) for one in vectors]
            member = "embedding" if kind == "embd" else "data"
            data = [f'{{"object":"{object_name}","index":{at},"{member}":{one}}}' for at, one in enumerate(numbers)]
            if kind == "pool":
                return self._list_json(kind, data, usage)
            return ['{"object":"list","model":', self._model_json, ',"data":[', ",".join(data), f'],"usage":{usage}}}']

        name = "input" if body.messages is None else "messages"
        return await self._respond(kind, body, name, given, _field_paths(name, given), http, written)

    async def score(self, body: ScoreRequest, http: Request) -> Response:
        """Return the cosines of pairs of texts: one text with each of several, or two lists of equal length."""
        name_1, given_1 = _only_field(body, ("text_1", "queries", "data_1"))
        name_2, given_2 = _only_field(body, ("text_2", "documents", "data_2"))
        first, second = ([one] if isinstance(one, str) else list(one) for one in (given_1, given_2))
        if not first or not second or len(first) not in (1, len(second)):
            raise InputError(
                f"{name_1} has {len(first)} texts, {name_2} has {len(second)}: {name_1} must have one, or as many as "
                f"{name_2}",
                name_1,
            )
        _check_num_texts(name_2, len(first) + len(second))
        places = [*_field_paths(name_1, given_1), *_field_paths(name_2, given_2)]

        def written(vectors: list[np.ndarray], usage: str) -> JsonPieces:
            lefts, rights = vectors[: len(first)], vectors[len(first) :]
            lefts = lefts if len(lefts) == len(rights) else lefts * len(rights)
            data = [
                f'{{"index":{at},"object":"score","score":{cosine(*pair)!r}}}'
                for at, pair in enumerate(zip(lefts, rights))
            ]
            return self._list_json("score", data, usage)

        return await self._respond("score", body, name_2, [*first, *second], places, http, written)

    async def rerank(self, body: RerankRequest, http: Request) -> Response:
        """Return documents sorted by their cosine with the query."""
        _check_num_texts("documents", 1 + len(body.documents))
        if not body.documents:
            raise InputError("documents must have at least one entry", "documents")
        if body.top_n is not None and body.top_n < 1:
            raise InputError(f"top_n must be at least 1, got {str(body.top_n)[:40]}", "top_n")

        def written(vectors: list[np.ndarray], usage: str) -> JsonPieces:
            query, *others = vectors
            scores = [cosine(query, other) for other in others]
            best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
            pieces = [f'{{"id":"rerank-{uuid.uuid4().hex}","model":{self._model_json},"results":[']
            for place, at in enumerate(best):
                text = (
                    "" if body.return_documents is False else f',"document":{json.dumps({"text": body.documents[at]})}'
                )
                pieces.append(f'{"," if place else ""}{{"index":{at},"relevance_score":{scores[at]!r}{text}}}')
            return [*pieces, f'],"usage":{usage}}}']

        given, places = [body.query, *body.documents], ["query", *_field_paths("documents", body.documents)]
        return await self._respond("rerank", body, "documents", given, places, http, written)

    async def generative_scoring(self, body: GenerativeScoringRequest, http: Request) -> Response:
        """Return for each item the probability that the first label token follows the query and the item."""
        resolver, limits = self.service.resolver, self.service.llm.limits
        resolver.check(body)
        _check_salt(body)
        for token in body.label_token_ids:
            if not 0 <= token < limits.vocab_size:
                raise InputError(
                    f"label_token_ids has {str(token)[:40]}; token ids are integers from 0 to {limits.vocab_size - 1}",
                    "label_token_ids",
                )
        places, process = _field_paths("items", body.items), self.service.input_processor.process_prompts
        [query] = await process([body.query], body.add_special_tokens, field_names=["query"])
        items = await process(split_prompts(body.items, "items", MAX_INPUTS), False, field_names=places)
        total = len(query.ids) * len(items) + sum(len(item.ids) for item in items)
        if total > MAX_TOKENS:
            raise InputError(f"the items have {total} tokens with the query; at most {MAX_TOKENS} are scored", "items")
        prompts = []
        for place, item in zip(places, items):
            prompts.append(Prompt(None, item.ids + query.ids if body.item_first else query.ids + item.ids))
            with input_error_at(place, True):
                limits.check_length(len(prompts[-1].ids))
        params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=body.label_token_ids, detokenize=False)
        params, size = limit_answer(params, [len(prompt.ids) for prompt in prompts], limits.max_len, EchoedPrompt())

        def write(outputs: Sequence[BranchOutput]) -> JsonPieces:
            usage = UsageCounter(prompts)
            for at, output in enumerate(outputs):
                usage.add(at, at, output)
            data = [
                f'{{"index":{at},"object":"score","score":{logprob_json(_label_score(output, body.apply_softmax))}}}'
                for at, output in enumerate(outputs)
            ]
            return self._list_json("generative-scoring", data, usage.total_json())

        with rename_param("prompt", "items"):
            return await self._submit("generative-scoring", prompts, params, size, body, http, write)

    def _list_json(self, kind: str, data: Sequence[str], usage: str) -> JsonPieces:
        """Return an answer in the form of vLLM's lists. `data` are its entries, as JSON."""
        head = f'{{"id":"{kind}-{uuid.uuid4().hex}","object":"list","created":{int(time.time())},'
        return [head, f'"model":{self._model_json},"data":[', ",".join(data), f'],"usage":{usage}}}']

    @property
    def _model_json(self) -> str:
        return json.dumps(self.service.render_settings.model)

    async def _respond(
        self, kind: str, body: Body, name: str, given: Sequence[Any], field_paths: Sequence[str], http: Request,
        write_answer: Callable[[list[np.ndarray], str], JsonPieces],
    ) -> Response:  # fmt: skip
        """Embed `given` and return the response that `write_answer` makes of the embeddings and the usage. Errors call
        the field `name` and its entries `field_paths`."""
        resolver, limits = self.service.resolver, self.service.llm.limits
        resolver.check(body)
        _check_salt(body)
        options = body if isinstance(body, EmbeddingRequest) else EmbeddingRequest()
        limits.check_embedding(options.dimensions)
        if "" in given:
            place = field_paths[given.index("")]
            raise InputError(f"{place} is empty: a text must have at least one character", place.partition("[")[0])
        with rename_param("prompt", name):
            truncation = resolver.truncation(body, EMBEDDING_PARAMS.max_tokens)
            if options.messages is not None:
                tools = read_tools(options.tools or [])
                min_output = EMBEDDING_PARAMS.min_output
                prompts = [await resolver.render_chat(options, truncation, tools, min_output=min_output)]
                if prompts[0].images:
                    raise InputError("images can't be embedded: send text parts only", "messages")
            else:
                special = options.add_special_tokens is not False
                prompts = await self.service.input_processor.process_prompts(
                    given, special, truncation, field_names=field_paths, min_output=EMBEDDING_PARAMS.min_output
                )
            size = embeddings_size(len(given), limits.hidden, name)

            def write(outputs: Sequence[BranchOutput]) -> JsonPieces:
                normalize = False not in (options.normalize, options.use_activation)
                vectors = [embedding_vector(output, options.dimensions, normalize) for output in outputs]
                tokens = sum(len(prompt.ids) for prompt in prompts)
                return write_answer(vectors, f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}')

            return await self._submit(kind, prompts, EMBEDDING_PARAMS, size, body, http, write)

    async def _submit(
        self, kind: str, prompts: list[Prompt], params: SamplingParams, size: AnswerSize, body: Any, http: Request,
        write: Callable[[Sequence[BranchOutput]], JsonPieces],
    ) -> Response:  # fmt: skip
        """Submit prompts that have one output each. Return the response that `write` makes of the outputs."""
        service = self.service
        call = await service.submit(f"{kind}-{uuid.uuid4().hex}", prompts, params, size, body, http)

        async def whole() -> JsonPieces:
            outputs = [output for _, output in await call.outputs().collect()]
            numbers = sum(len(output.pooled) for output in outputs)
            return await service.input_processor.offload(numbers, lambda: write(outputs))

        return await respond(call, whole(), service.resolver.warning_headers(body, prompts), http.receive)


def _check_salt(body: ModelFields) -> None:
    if body.cache_salt == "":
        raise InputError("cache_salt must not be empty", "cache_salt")


def _only_field(body: ScoreRequest, names: Sequence[str]) -> tuple[str, str | list[str]]:
    """Return the name and value of the only one of these fields that is given."""
    given = [(name, value) for name in names if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise InputError(f"give one of {', '.join(names)}, got {len(given)} of them", names[0])
    return given[0]


def _label_score(output: BranchOutput, among_labels: bool) -> float:
    """Return the probability of the first token that has a log-probability. With `among_labels`, it is the probability
    among the tokens that have one, else among all. Raise InputError if there is no score, and Overloaded if the request
    was aborted."""
    if output.finish_reason == "abort":
        raise Overloaded("the request was aborted before its scores", retry_after=10)
    if output.finish_reason == "error":
        raise InputError(f"an item has no score: {output.stop_reason}", "items")
    logprobs = output.top_logprobs[0].logprobs
    if not among_labels:
        return math.exp(logprobs[0])
    largest = max(logprobs)
    return math.exp(logprobs[0] - largest) / sum(math.exp(logprob - largest) for logprob in logprobs)


def _check_num_texts(name: str, number: int) -> None:
    if number > MAX_INPUTS:
        raise InputError(f"there are {number} texts in all; at most {MAX_INPUTS} are embedded at once", name)


def _field_paths(name: str, given: str | Sequence[Any]) -> list[str]:
    """Return the names of a field's texts in errors."""
    return [name] if isinstance(given, str) else [f"{name}[{at}]" for at in range(len(given))]


def _base64(numbers: np.ndarray, dtype: str, big: bool) -> str:
    """Return the bytes of the numbers, in base64 as a JSON string. A bfloat16 is the upper half of a float32, rounded
    to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = numbers.astype("<f4").view("<u4")
        encoded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    else:
        encoded = numbers.astype("<f2" if dtype == "float16" else "<f4")
    return json.dumps(base64.b64encode((encoded.byteswap() if big else encoded).tobytes()).decode())


def _floats(numbers: np.ndarray) -> str:
    """Return the numbers as a JSON list. Nine digits identify a float32."""
    return "[" + ",".join(["%.9g"] * len(numbers)) % tuple(numbers.tolist()) + "]"
