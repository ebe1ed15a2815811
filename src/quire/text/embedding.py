"""Embeddings: what a request with pooling brought, as vectors of length 1, so that their product is their cosine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

EMBEDDING_PARAMS = SamplingParams(pooling="auto", temperature=0, max_tokens=1, detokenize=False)


def embedding_vector(output: BranchOutput, dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    """float32 [hidden], or its first `dimensions` numbers, of length 1 or, without `normalize`, as the model gives it.
    InputError if there is none, Overloaded if it was ended before."""
    import numpy as np

    if output.finish_reason == "abort":
        raise Overloaded("the request was ended before its embeddings", retry_after=10)
    if not output.pooled:
        raise InputError(f"the text has no embedding: {output.stop_reason or output.finish_reason}", "input")
    found = np.array(output.pooled[:dimensions], dtype=np.float64)
    length = np.linalg.norm(found)
    return (found / length if normalize and length else found).astype(np.float32)


def cosine(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Of two vectors of length 1."""
    import numpy as np

    return float(np.dot(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)))
