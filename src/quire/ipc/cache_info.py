"""The KV memory's shape, by the names that dashboards know."""

from __future__ import annotations

from collections import Counter

from quire.memory.answers import Account
from quire.protocol.model_spec import KVCacheConfig


def kv_cache_info(geometry: KVCacheConfig, max_len: int, account: Account) -> dict[str, object]:
    """vLLM's names, and ours: `num_blocks` and `page_bytes` of each pool of pages, or of each group of layers where all
    have all of the memory in common, in large pages of `large_page_bytes`. `num_gpu_blocks` times `block_size`
    is the size in tokens, of which every layer takes a place."""
    pools = {group.ids: group for group in geometry.groups}  # unlike pages have one each
    users = Counter(group.ids for group in geometry.groups)
    shape = {
        "block_size": [group.run_tokens for group in pools.values()],
        "num_blocks": [len(ids) for ids in pools],
        "page_bytes": [group.page_bytes for group in pools.values()],
    }
    if geometry.large_bytes:
        tokens = geometry.tokens_in_large_pages()
    else:
        tokens = min(len(ids) // users[ids] // group.run_pages * group.run_tokens for ids, group in pools.items())
    facts: dict[str, object] = {name: ",".join(map(str, dict.fromkeys(sizes))) for name, sizes in shape.items()}
    if geometry.large_bytes:
        facts["large_page_bytes"] = geometry.large_bytes
    return facts | {
        "layout": geometry.layout.value,
        "num_gpu_blocks": tokens // min(shape["block_size"]),
        "num_cpu_blocks": account.sharing.host_pages,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": f"{tokens / max_len:.2f}",
        "kv_cache_memory_bytes": account.usage.total,
    }
