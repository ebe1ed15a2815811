"""How much is held at once: by attention through gathered pages, and by graphs of decode steps. The memory plan counts
with these numbers. No torch here."""

from __future__ import annotations

TILE = 256
"""Queries of one sequence that are computed together."""

MAX_SCORES = 1 << 22
"""Numbers in one score matrix, all heads together."""

MOST_GRAPH_ROWS = 1024
"""Rows of the largest decode step that is replayed as a CUDA graph."""
