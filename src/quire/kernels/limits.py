"""How much is held at once: by attention through gathered pages, by the scoring of prompts, and by graphs; and what the
Triton kernels take. The memory plan counts with these numbers. No torch here."""

from __future__ import annotations

QUERY_TILE = 256
"""Queries of one sequence that are computed together."""

MAX_SCORES = 1 << 22
"""Numbers in one score matrix, all heads together."""

MAX_SCORED_POSITIONS = 256
"""Prompt positions whose logits over the vocabulary are held together."""

MAX_IMAGE_PARTS = 8
"""Parts of pictures that a tower encodes together."""

MAX_GRAPH_ROWS = 1024
"""Rows of the largest decode step that is replayed as a CUDA graph."""

MAX_GRAPH_TOKENS = 1024
"""Tokens of the largest step with prompts that is replayed as CUDA graphs."""

MAX_GQA_GROUP = 64
"""Query heads of a key head, at most, in the Triton kernels."""

MAX_HEAD_DIM = 256
"""Numbers of a head, at most, there."""

MAX_CPU_SPLITS = 16
"""Parts of a context that a CPU's kernels attend to apart, at most."""

MAX_INDEX_ROWS = 2**31 - 1
"""Rows of a tensor that are named by their numbers."""
