"""What the bytes of a memory's pages are used for, by category and by layer type, and how pages are shared: counted
when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.memory.answers import Sharing, TypeUsage, Usage
from quire.memory.policies import ImagePolicy

if TYPE_CHECKING:
    from quire.memory.paged import PagedMemory


def count_filled_bytes(memory: PagedMemory) -> list[int]:
    """Bytes of tokens in used pages, a group."""
    found = []
    for g, group in enumerate(memory.groups):
        policy = memory.policies[g]
        if isinstance(policy, ImagePolicy):
            found.append(_count_embed_bytes(memory, g, policy))
            continue
        full = group.payload_bytes
        holders = [(one.tables[g], one.requested_tokens - one.pruned_tokens[g]) for one in memory.seq_pages.values()]
        holders += [
            (prefix.tables[g], len(prefix.tokens)) for prefix in memory.prefix_cache.registered_prefixes.values()
        ]
        filled: dict[int, int] = {}  # bytes in pages that aren't full, as the fullest of their users has it
        for pages, tokens in holders:
            for i in range(group.num_full_pages(tokens), len(pages)):
                filled[pages[i]] = max(filled.get(pages[i], 0), group.payload_of_page(i, tokens))
        found.append(memory.page_pool.used[g] * full - sum(full - held for held in filled.values()))
    return found


def _count_embed_bytes(memory: PagedMemory, g: int, policy: ImagePolicy) -> int:
    """Bytes of rows in the used pages of pictures: of each one's last page perhaps a part."""
    group, empty = policy.group, dict[int, int]()
    for seq in memory.seq_pages.values():
        stop = 0
        for medium in seq.images:
            stop += group.num_pages(medium.num_embeds)
            if stop <= len(seq.tables[g]):
                empty[seq.tables[g][stop - 1]] = (
                    group.num_pages(medium.num_embeds) * group.run_tokens - medium.num_embeds
                )
    rows = memory.page_pool.used[g] * group.run_tokens - sum(count for page, count in empty.items() if page)
    return rows * group.token_bytes


def compute_usage(memory: PagedMemory, filled: list[int]) -> Usage:
    """By category; `filled` as above."""
    sizes = [group.page_bytes for group in memory.groups]
    taken = sum(used * size for used, size in zip(memory.page_pool.used, sizes))
    space = memory.page_pool.count_unused_bytes(sizes)
    return Usage(sum(filled), space.cached, 0, taken - sum(filled), space.external, space.free)


def compute_type_usage(memory: PagedMemory, filled: list[int]) -> tuple[TypeUsage, ...]:
    """By layer type. Groups of one type are added up."""
    found: dict[str, TypeUsage] = {}
    cached_pages = memory.page_pool.num_cached
    for g, (group, held) in enumerate(zip(memory.groups, filled)):
        name = group.kind if group.window is None else f"{group.kind}-{group.window}"
        _, used, internal, cached = found.get(name, (name, 0, 0, 0))
        internal += memory.page_pool.used[g] * group.page_bytes - held
        found[name] = TypeUsage(name, used + held, internal, cached + cached_pages[g] * group.page_bytes)
    return tuple(found.values())


def compute_sharing(memory: PagedMemory) -> Sharing:
    """How pages are shared, swapped and pinned."""
    tables = distinct = 0
    names, pins = memory.page_pool.ref_count, memory.prefix_cache.pin_counts
    for g, group in enumerate(memory.groups):
        named = sum(len(resident.tables[g]) - resident.first_page[g] for resident in memory.seq_pages.values())
        idle = sum(at == g and names(g, page) == count for (at, page), count in pins.items())  # no sequence's, now
        tables += named * group.page_bytes
        distinct += (memory.page_pool.used[g] - idle) * group.page_bytes
    registered, host = memory.prefix_cache.registered_prefixes.values(), memory.swap.host_pool
    return Sharing(
        tables, tables - distinct, memory.copies, memory.swap.out_bytes, memory.swap.in_bytes,
        host.total, sum(host.used),
        len(registered), sum(len(prefix.tokens) for prefix in registered),
        min(group.tokens_in_pages(kept) for group, kept in zip(memory.groups, memory.prefix_cache.pinned_capacity)),
        memory.prefix_cache.queries, memory.prefix_cache.hits, memory.prefix_cache.full_hits,
        memory.encoder_cache.runs, memory.encoder_cache.parts_encoded, memory.encoder_cache.hits,
    )  # fmt: skip
