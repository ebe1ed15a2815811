"""What /v1/embeddings, /score and /rerank answer, for the OpenAPI document; as schemas.py."""

from __future__ import annotations

from typing import Literal

from quire.server.exact import StrictModel


class EmbeddingUsage(StrictModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(StrictModel):
    """Base64 is of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(StrictModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage


class ScoreData(StrictModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(StrictModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage


class RerankDocument(StrictModel):
    text: str


class RerankResult(StrictModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(StrictModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
