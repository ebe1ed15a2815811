"""Embeddings: pooled outputs as vectors of length 1, so that their dot product is their cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

EMBEDDING_PARAMS = SamplingParams(pooling="auto", temperature=0, detokenize=False)


def embedding_vector(output: BranchOutput, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """Return float32 [hidden], or its first `dimensions` numbers, scaled to length 1 unless `normalize` is False. Raise
    InputError if there is none, and Overloaded if the request was aborted."""
    import numpy as np

    if output.finish_reason == "abort":
        raise Overloaded("the request was ended before its embeddings", retry_after=10)
    if not output.pooled:
        raise InputError(f"the text has no embedding: {output.stop_reason or output.finish_reason}", "input")
    vector = np.array(output.pooled[:dimensions], dtype=np.float64)
    length = np.linalg.norm(vector)
    return (vector / length if normalize and length else vector).astype(np.float32)


def cosine(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Return the cosine similarity of two vectors of length 1."""
    import numpy as np

    return float(np.dot(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)))
