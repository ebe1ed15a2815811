"""What /v1/embeddings, /score and /rerank answer, for the OpenAPI document; as schemas.py."""

from __future__ import annotations

from typing import Literal

from quire.server.exact import Exact


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
