"""/v1/embeddings, /score and /rerank: embeddings of texts by the served model, and their cosines. A generative model is
used as a bi-encoder: each text is embedded on its own, and pairs are not read together."""

from __future__ import annotations

import base64
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from quire.errors import InputError
from quire.server.answer_size import embeddings_size
from quire.server.errors import rename_param
from quire.server.json_pieces import JsonPieces
from quire.server.request_models import MAX_INPUTS, EmbeddingRequest, RerankRequest, ScoreRequest
from quire.server.request_params import split_prompts
from quire.server.streaming import respond
from quire.text.embedding import EMBEDDING_PARAMS, cosine, embedding_vector
from quire.text.tools import read_tools

if TYPE_CHECKING:
    import numpy as np

    from quire.server.service import Service

TEMPLATE_FIELDS = (
    "add_generation_prompt", "continue_final_message", "documents", "tools", "reasoning_effort", "chat_template_kwargs",
)  # fmt: skip
Body = EmbeddingRequest | ScoreRequest | RerankRequest


class EmbeddingRoutes:
    """The routes of embeddings."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def embeddings(self, body: EmbeddingRequest, http: Request) -> Response:
        """Embed texts, token ids or a conversation."""
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
            data = [f'{{"object":"embedding","index":{at},"embedding":{one}}}' for at, one in enumerate(numbers)]
            return ['{"object":"list","model":', self._model_json, ',"data":[', ",".join(data), f'],"usage":{usage}}}']

        name = "input" if body.messages is None else "messages"
        return await self._respond("embd", body, name, given, _field_paths(name, given), http, written)

    async def score(self, body: ScoreRequest, http: Request) -> Response:
        """Return the cosines of pairs of texts: one text with each of several, or two lists of equal length."""
        first, second = ([one] if isinstance(one, str) else list(one) for one in (body.text_1, body.text_2))
        if not first or not second or len(first) not in (1, len(second)):
            raise InputError(
                f"text_1 has {len(first)} texts, text_2 has {len(second)}: text_1 must have one, or as many as text_2",
                "text_1",
            )
        _check_num_texts("text_2", len(first) + len(second))
        places = [*_field_paths("text_1", body.text_1), *_field_paths("text_2", body.text_2)]

        def written(vectors: list[np.ndarray], usage: str) -> JsonPieces:
            lefts, rights = vectors[: len(first)], vectors[len(first) :]
            lefts = lefts if len(lefts) == len(rights) else lefts * len(rights)
            data = [
                f'{{"index":{at},"object":"score","score":{cosine(*pair)!r}}}'
                for at, pair in enumerate(zip(lefts, rights))
            ]
            head = f'{{"id":"score-{uuid.uuid4().hex}","object":"list","created":{int(time.time())},'
            head += f'"model":{self._model_json}'
            return [head, ',"data":[', ",".join(data), f'],"usage":{usage}}}']

        return await self._respond("score", body, "text_2", [*first, *second], places, http, written)

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

    @property
    def _model_json(self) -> str:
        return json.dumps(self.service.render_settings.model)

    async def _respond(
        self, kind: str, body: Body, name: str, given: Sequence[Any], field_paths: Sequence[str], http: Request,
        write_answer: Callable[[list[np.ndarray], str], JsonPieces],
    ) -> Response:  # fmt: skip
        """Embed `given` and return the response that `write_answer` makes of the embeddings and the usage. Errors call
        the field `name` and its entries `field_paths`."""
        service, resolver, limits = self.service, self.service.resolver, self.service.llm.limits
        resolver.check(body)
        if body.cache_salt == "":
            raise InputError("cache_salt must not be empty", "cache_salt")
        options = body if isinstance(body, EmbeddingRequest) else EmbeddingRequest()
        limits.check_embedding(options.dimensions)
        if "" in given:
            place = field_paths[given.index("")]
            raise InputError(f"{place} is empty: a text must have at least one character", place.partition("[")[0])
        with rename_param("prompt", name):
            truncation = resolver.truncation(body)
            if options.messages is not None:
                prompts = [await resolver.render_chat(options, truncation, read_tools(options.tools or []))]
                if prompts[0].images:
                    raise InputError("images can't be embedded: send text parts only", "messages")
            else:
                special = options.add_special_tokens is not False
                prompts = await service.input_processor.process_prompts(
                    given, special, truncation, field_names=field_paths
                )
            size, id = embeddings_size(len(given), limits.hidden, name), f"{kind}-{uuid.uuid4().hex}"
            call = await service.submit(id, prompts, EMBEDDING_PARAMS, size, body, http)

        async def whole() -> JsonPieces:
            outputs = await call.outputs().collect()

            def write() -> JsonPieces:
                normalize = False not in (options.normalize, options.use_activation)
                vectors = [embedding_vector(output, options.dimensions, normalize) for _, output in outputs]
                tokens = sum(len(prompt.ids) for prompt in prompts)
                return write_answer(vectors, f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}')

            return await service.input_processor.offload(limits.hidden * len(outputs), write)

        return await respond(call, whole(), resolver.warning_headers(body, prompts), http.receive)


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
