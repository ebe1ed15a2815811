"""How much attention through gathered pages holds at once; the memory plan counts with these numbers. No torch here."""

from __future__ import annotations

TILE = 256
"""Queries of one sequence that are computed together."""

MAX_SCORES = 1 << 22
"""Numbers in one score matrix, all heads together."""
