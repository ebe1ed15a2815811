"""Geometries for tests that need no memory to make one."""

from __future__ import annotations

from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout

Layers = tuple[tuple[int, ...], int | None]
"""The layers of a group, and their window."""


def one_size(
    *sets: Layers, pages: int, page_bytes: int, slots: int, width: int, tokens: int, itemsize: int = 4, host: int = 0
) -> KVCacheConfig:
    """Groups whose pages have one size and are given to any of them: `pages` of them, the scratch page included, each
    of `tokens` tokens; `host` host pages."""
    groups = tuple(
        KVCacheGroup(
            layers, page_bytes, page_bytes // tokens, width, range(1, pages), range(1, host + 1), tokens, 1, window
        )
        for layers, window in sets
    )
    return KVCacheConfig(KVCacheLayout.PAGED, pages * page_bytes, slots, groups, itemsize, host * page_bytes)
