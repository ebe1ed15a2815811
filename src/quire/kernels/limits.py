"""Limits on working memory (attention through gathered pages, scoring of prompts, graphs), and on the shapes that the
kernels take. The memory plan uses these numbers. Does not import torch."""

from __future__ import annotations

QUERY_TILE = 256
"""Queries of one sequence that are computed together."""

MAX_SCORES = 1 << 22
"""Numbers in one score matrix, all heads together."""

MAX_SCORED_POSITIONS = 256
"""Prompt positions whose logits over the vocabulary are in memory together."""

MAX_IMAGE_PARTS = 8
"""Parts of images that a vision tower encodes together."""

MAX_GRAPH_ROWS = 1024
"""Rows of the largest decode step that is replayed as a CUDA graph."""

MAX_GRAPH_TOKENS = 1024
"""Tokens of the largest step with prompts that is replayed as CUDA graphs."""

MAX_GQA_GROUPS = {256: 64, 512: 16}
"""Head sizes up to these -> the most query heads that share a key head in the Triton kernels."""

MAX_CPU_SPLITS = 16
"""The most splits of one context in the CPU kernels."""

MAX_INDEX_ROWS = 2**31 - 1
"""The most rows of a tensor that torch.index_select can index."""


def max_hidden_rows(max_step_tokens: int) -> int:
    """Return the most rows of a step whose hidden states are kept, the padding of graphs included."""
    return max(max_step_tokens, MAX_GRAPH_TOKENS)
