"""What the bytes of a memory's pages are used for, by category and by layer type, and how pages are shared: counted
when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.control.memory.answers import Sharing, TypeUsage, Usage
from quire.control.memory.policies import MediaPolicy

if TYPE_CHECKING:
    from quire.control.memory.paged import PagedMemory


def filled_in(memory: PagedMemory) -> list[int]:
    """Bytes of tokens in used pages, a group."""
    found = []
    for g, group in enumerate(memory.groups):
        policy = memory.policies[g]
        if isinstance(policy, MediaPolicy):
            found.append(_rows_in(memory, g, policy))
            continue
        full = group.full_bytes
        holders = [(one.tables[g], one.held - one.gone[g]) for one in memory.residents.values()]
        holders += [(prefix.tables[g], len(prefix.tokens)) for prefix in memory.prefixes.registered.values()]
        filled: dict[int, int] = {}  # bytes in pages that aren't full, as the fullest of their users has it
        for pages, tokens in holders:
            for i in range(group.whole(tokens), len(pages)):
                filled[pages[i]] = max(filled.get(pages[i], 0), group.filled(i, tokens))
        found.append(memory.pages.used[g] * full - sum(full - held for held in filled.values()))
    return found


def _rows_in(memory: PagedMemory, g: int, policy: MediaPolicy) -> int:
    """Bytes of rows in the used pages of pictures: of each one's last page perhaps a part."""
    group, empty = policy.group, dict[int, int]()
    for seq in memory.residents.values():
        stop = 0
        for medium in seq.media:
            stop += group.pages(medium.rows)
            if stop <= len(seq.tables[g]):
                empty[seq.tables[g][stop - 1]] = group.pages(medium.rows) * group.run_tokens - medium.rows
    rows = memory.pages.used[g] * group.run_tokens - sum(count for page, count in empty.items() if page)
    return rows * group.token_bytes


def usage_of(memory: PagedMemory, filled: list[int]) -> Usage:
    """By category; `filled` as above."""
    sizes = [group.page_bytes for group in memory.groups]
    taken = sum(used * size for used, size in zip(memory.pages.used, sizes))
    space = memory.pages.space(sizes)
    return Usage(sum(filled), space.cached, 0, taken - sum(filled), space.external, space.free)


def types_of(memory: PagedMemory, filled: list[int]) -> tuple[TypeUsage, ...]:
    """By layer type. Groups of one type are added up."""
    found: dict[str, TypeUsage] = {}
    cached_pages = memory.pages.cached_pages
    for g, (group, held) in enumerate(zip(memory.groups, filled)):
        name = group.kind if group.window is None else f"{group.kind}-{group.window}"
        _, used, internal, cached = found.get(name, (name, 0, 0, 0))
        internal += memory.pages.used[g] * group.page_bytes - held
        found[name] = TypeUsage(name, used + held, internal, cached + cached_pages[g] * group.page_bytes)
    return tuple(found.values())


def sharing_of(memory: PagedMemory) -> Sharing:
    """How pages are shared, swapped and pinned."""
    tables = distinct = 0
    names, pins = memory.pages.names, memory.prefixes.pins
    for g, group in enumerate(memory.groups):
        named = sum(len(resident.tables[g]) - resident.first[g] for resident in memory.residents.values())
        idle = sum(at == g and names(g, page) == count for (at, page), count in pins.items())  # no sequence's, now
        tables += named * group.page_bytes
        distinct += (memory.pages.used[g] - idle) * group.page_bytes
    registered, host = memory.prefixes.registered.values(), memory.swap.host
    return Sharing(
        tables, tables - distinct, memory.copies, memory.swap.out_bytes, memory.swap.in_bytes,
        host.total, sum(host.used),
        len(registered), sum(len(prefix.tokens) for prefix in registered),
        min(group.until(kept) for group, kept in zip(memory.groups, memory.prefixes.set_aside)),
        memory.prefixes.queries, memory.prefixes.hits, memory.prefixes.full_hits,
        memory.gallery.runs, memory.gallery.parts, memory.gallery.hits,
    )  # fmt: skip
