"""Snapshots of an engine: its pages, queues and requests, for the dashboard. They cost nothing unless requested."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any

from quire.core.engine import Engine
from quire.core.outputs import EngineStats
from quire.core.request import Request
from quire.core.request_queue import ORDER_STEP
from quire.memory.page_tables import PageTables
from quire.protocol.kv_cache_config import KVCacheGroup

FREE, CACHED, SHARED, PINNED, FIRST_OWNER = range(5)
"""Codes of pages in a snapshot: free or of another group; cached (unused, can be hit by a prefix); in several page
tables; of a registered prefix; from FIRST_OWNER on, of one request: FIRST_OWNER + its arrival % NUM_OWNERS. Host pages,
which hold swapped sequences, are free, shared or of one request."""
NUM_OWNERS = 256 - FIRST_OWNER
MAX_CELLS = 1 << 14  # of a group; with more pages, a cell stands for several and has the greatest of their codes
MAX_REQUESTS = 128  # that are listed
MAX_NAME_CHARS = 80


def take_snapshot(engine: Engine) -> dict[str, Any]:
    """Return a snapshot as JSON values: counts since the start, the recorded steps, queues, bytes by category, pages by
    group, requests. Call it on the engine's thread, between two steps."""
    scheduler, stats = engine.scheduler, engine.stats
    memory: Any = scheduler.memory
    account = memory.account()
    # Requests that have ended may still be in a step in flight.
    holding = {*engine.requests.values(), *scheduler.running}
    owners = {request: FIRST_OWNER + request.order // ORDER_STEP % NUM_OWNERS for request in holding}
    colours = {seq.id: owners[request] for request in holding for seq in (*request.live_seqs, *request.finished_seqs)}
    shown = sorted(engine.requests.values(), key=lambda request: request.order)[:MAX_REQUESTS]
    return {
        "steps": stats.steps, "rows": stats.rows, "computed": stats.computed_tokens,
        "prompts": stats.prompt_tokens, "generated": stats.generated_tokens, "step_seconds": stats.step_seconds,
        "last": [*map(list, engine.step_history.steps)] if engine.step_history is not None else [],
        "finished": dict(stats.finished), "preempted": dict(scheduler.preemption_counts),
        "waiting": len(scheduler.waiting), "running": len(scheduler.running), "swapped": len(scheduler.swapped),
        "drafts": _draft_snapshot(stats) if scheduler.speculator is not None else None,
        "bytes": account.usage._asdict(), "sharing": account.sharing._asdict(),
        "groups": _group_snapshots(memory, colours) if isinstance(memory, PageTables) else [],
        "requests": [_request_snapshot(request, memory, colours) for request in shown],
        "requests_in_all": len(engine.requests),
    }  # fmt: skip


def _draft_snapshot(stats: EngineStats) -> dict[str, float]:
    return {"accepted": stats.acceptance_rate, "length": stats.mean_accepted_length}


def _group_snapshots(memory: Any, owner_codes: Mapping[int, int]) -> list[dict[str, Any]]:
    pinned = [list[int]() for _ in memory.groups]
    for g, page in getattr(memory.prefix_cache, "pin_counts", {}):
        pinned[g].append(page)
    snapshots = []
    for g, group in enumerate(memory.groups):
        cells, saved = _page_cells(memory, g, group, owner_codes, pinned[g])
        counts = [cells.count(kind) for kind in range(FIRST_OWNER)]
        common = memory.kv_config.large_bytes > 0 or sum(other.ids == group.ids for other in memory.groups) > 1
        snapshots.append({
            "kind": group.kind, "window": group.window, "layers": len(group.layers), "page_bytes": group.page_bytes,
            "page_tokens": group.run_tokens, "pages": len(cells), "used": len(cells) - counts[FREE] - counts[CACHED],
            "shared": counts[SHARED], "saved": saved, "pinned": counts[PINNED], "cached": counts[CACHED],
            "common": common, **_encode_cells(cells), "host": _host_snapshot(memory, g, group, owner_codes),
        })  # fmt: skip
    return snapshots


def _host_snapshot(memory: Any, g: int, group: KVCacheGroup, owner_codes: Mapping[int, int]) -> dict[str, Any]:
    """Return the host pages of a group, without cells if none is used."""
    cells = bytearray(len(group.host_ids))
    swap: Any = getattr(memory, "swap", None)
    if swap is not None and swap.seq_pages:
        start = group.host_ids.start + swap.host_id_offset[g]
        for id, resident in swap.seq_pages.items():
            _mark_pages(cells, start, filter(None, resident.tables[g]), owner_codes.get(id, FIRST_OWNER))
    used = len(cells) - cells.count(FREE)
    encoded = _encode_cells(cells) if used else {"per": 1, "cells": ""}
    return {"pages": len(cells), "used": used, "shared": cells.count(SHARED), **encoded}


def _encode_cells(cells: bytearray) -> dict[str, Any]:
    """Return how many pages a cell stands for, and the cells in base64."""
    per = -(-len(cells) // MAX_CELLS) or 1
    size = -(-len(cells) // per)
    shown = cells if per == 1 else bytes(map(max, zip(*(cells[i::per].ljust(size, b"\0") for i in range(per)))))
    return {"per": per, "cells": b64encode(shown).decode()}


def _page_cells(
    memory: Any, g: int, group: KVCacheGroup, owner_codes: Mapping[int, int], pinned: list[int]
) -> tuple[bytearray, int]:
    """Return the codes of a group's pages, and how many more pages sequences would need if they shared none."""
    start, named = group.ids.start, 0
    cells = bytearray(len(group.ids))
    for id, resident in memory.seq_pages.items():
        pages = resident.tables[g][resident.first_page[g] :]
        named += len(pages)
        _mark_pages(cells, start, pages, owner_codes.get(id, FIRST_OWNER))
    saved = named - len(cells) + cells.count(FREE)
    for page in pinned:
        cells[page - start] = SHARED if cells[page - start] else PINNED
    for page in memory.page_pool.iter_cached(g):
        cells[page - start] = CACHED
    return cells, saved


def _mark_pages(cells: bytearray, start: int, pages: Iterable[int], owner_code: int) -> None:
    """Set the codes of a table's pages. `start` is the id of the first cell's page."""
    for page in pages:
        cells[page - start] = SHARED if cells[page - start] else owner_code


def _request_snapshot(request: Request, memory: Any, owner_codes: Mapping[int, int]) -> dict[str, Any]:
    longest = max(request.live_seqs, key=lambda seq: len(seq.tokens), default=None)
    residents = [memory.seq_pages[seq.id] for seq in request.live_seqs if seq.id in memory.seq_pages]
    pages = sum(len(table) - resident.first_page[g] for resident in residents if hasattr(resident, "tables")
                for g, table in enumerate(resident.tables))  # fmt: skip
    return {
        "id": request.id[:MAX_NAME_CHARS], "state": request.status.value, "branches": len(request.live_seqs),
        "colour": owner_codes.get(longest.id, FREE) if longest is not None else FREE, "prompt": request.prompt_len,
        "tokens": len(longest.tokens) - request.prompt_len if longest is not None else 0,
        "computed": longest.computed if longest is not None else 0, "pages": pages, "found": request.cached_tokens,
        "preempted": request.preemptions,
    }  # fmt: skip
