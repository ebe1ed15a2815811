"""What an engine says of its pages to whoever watches: each page once, as the tables have it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter, defaultdict
from typing import Any

import pytest
import soak as soaking
from memories import Build, reserved
from traces import Trace

from quire.core import snapshot as scenes
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.request_queue import ORDER_STEP
from quire.core.snapshot import CACHED, FIRST_OWNER, FREE, NUM_OWNERS, PINNED, SHARED, take_snapshot
from quire.memory.paged import PagedMemory
from quire.memory.virtual.virtual_memory import VirtualMemory

NAMES = ["paged-4", "window", "mixed", "large", "states", "virtual-4", "cross-4", "large-vision-4", "vision-unlike",
         "uncached"]  # fmt: skip
WITHOUT_SWAPS = ["window", "mixed", "large", "large-vision-4"]  # in so short a run


def _check(engine: Engine, told: dict[str, Any]) -> None:
    memory = engine.scheduler.memory
    assert isinstance(memory, PagedMemory)
    assert json.loads(json.dumps(told)) == told
    holding = [*engine.requests.values(), *engine.scheduler.running]
    order = {
        seq.id: request.order // ORDER_STEP
        for request in holding
        for seq in (*request.live_seqs, *request.finished_seqs)
    }
    tables, owner = Counter[tuple[int, int]](), dict[tuple[int, int], int]()
    for id, resident in memory.seq_pages.items():
        for g, table in enumerate(resident.tables):
            places = [(g, page) for page in table[resident.first_page[g] :]]
            tables.update(places)
            owner |= dict.fromkeys(places, order[id])
    held = 0
    for g, group in enumerate(told["groups"]):
        named = memory.count_refs()[g]
        cells = b64decode(group["cells"])
        assert len(cells) == group["pages"] == len(memory.groups[g].ids)
        assert group["used"] == len(named) == sum(cell > CACHED for cell in cells)
        assert group["cached"] == memory.page_pool.num_cached[g] == cells.count(CACHED)
        assert group["shared"] == cells.count(SHARED)
        assert group["saved"] == sum(count - 1 for (at, _), count in tables.items() if at == g)
        held += len(named) * group["page_bytes"]
        for at, cell in enumerate(cells):
            place = g, memory.groups[g].ids.start + at
            pins = memory.prefix_cache.pin_counts[place] > 0
            if tables[place] + pins > 1:
                assert cell == SHARED
            elif pins:
                assert cell == PINNED
            elif tables[place]:
                assert cell == FIRST_OWNER + owner[place] % NUM_OWNERS
    saved = sum(group["saved"] * group["page_bytes"] for group in told["groups"])
    assert saved == told["sharing"]["saved"]
    _check_host(engine, memory, told)
    usage = told["bytes"]
    taken = usage["used"] + usage["reserved"] + usage["internal"]
    assert held <= taken if isinstance(memory, VirtualMemory) else held == taken  # the former maps ahead of tokens, too
    assert {one["id"] for one in told["requests"]} <= engine.requests.keys()
    states = Counter(one["state"] for one in told["requests"])
    assert all(states[state] <= told[state] for state in ("waiting", "running", "swapped"))  # less those that ended


def _check_host(engine: Engine, memory: PagedMemory, told: dict[str, Any]) -> None:
    """Host pages are those of the tables of sequences that were swapped out."""
    order = {seq.id: request.order // ORDER_STEP for request in engine.requests.values() for seq in request.live_seqs}
    for g, group in enumerate(told["groups"]):
        host = group["host"]
        named = defaultdict[int, list[int]](list)
        for id, resident in memory.swap.seq_pages.items():
            for page in filter(None, resident.tables[g]):
                named[page - memory.swap.host_id_offset[g]].append(order[id])
        ids = memory.groups[g].host_ids
        assert (host["pages"], host["used"], host["per"]) == (len(ids), len(named), 1)
        assert host["shared"] == sum(len(owners) > 1 for owners in named.values())
        cells = b64decode(host["cells"]) or bytes(len(ids))
        for id, cell in zip(ids, cells, strict=True):
            owners = named.get(id, [])
            assert cell == (FREE if not owners else SHARED if len(owners) > 1 else FIRST_OWNER + owners[0] % NUM_OWNERS)
    assert sum(group["host"]["used"] for group in told["groups"]) == told["sharing"]["host_pages_used"]


@pytest.mark.parametrize("name", NAMES)
def test_every_page_is_what_the_tables_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = Engine.step, Counter[str]()

    def watched(engine: Engine) -> list[BranchOutput]:
        outputs = step(engine)
        if engine.stats.steps % 7 == 0 or engine.scheduler.swapped:
            told = take_snapshot(engine)
            _check(engine, told)
            shared = any(group["shared"] for group in told["groups"])
            swapped = any(group["host"]["used"] for group in told["groups"])
            seen.update(shared=shared, swapped=swapped, looks=1)
        return outputs

    monkeypatch.setattr(Engine, "step", watched)
    soaking.soak(60, name=name)
    assert seen["looks"] > 10
    assert seen["shared"] > 2
    assert seen["swapped"] > 2 or name in WITHOUT_SWAPS


def test_cells_stand_for_several_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    step, looks = Engine.step, []

    def watched(engine: Engine) -> list[BranchOutput]:
        outputs = step(engine)
        monkeypatch.setattr(scenes, "MAX_CELLS", 1 << 14)
        whole = take_snapshot(engine)["groups"][0]
        monkeypatch.setattr(scenes, "MAX_CELLS", 10)
        few = take_snapshot(engine)["groups"][0]
        cells, shown = b64decode(whole["cells"]), b64decode(few["cells"])
        per = few["per"]
        assert per == -(-len(cells) // 10) > 1
        assert list(shown) == [max(cells[i : i + per]) for i in range(0, len(cells), per)]
        assert few["used"] == whole["used"]
        looks.append(max(shown))
        return outputs

    monkeypatch.setattr(Engine, "step", watched)
    soaking.soak(12)
    assert max(looks) >= FIRST_OWNER


def test_memory_without_pages_is_told_in_bytes() -> None:
    memory = reserved("orca-oracle", page_size=4)(Build(tokens=160, chunk=64, max_seqs=12, host=24))
    trace = Trace(memory, seed=1, depth=1, budget=64, max_seqs=12, preemption="auto")
    engine, trace.scheduler.memory = trace.engine, memory
    engine.runner = trace.runner.runner
    for i in range(6):
        trace.add(trace.draw(trace.rng, str(i)))
    told = [take_snapshot(engine)]
    while engine.has_unfinished_requests:
        engine.step()
        told.append(take_snapshot(engine))
    assert all(one["groups"] == [] for one in told)
    assert max(one["bytes"]["used"] for one in told) > 0
    assert {sum(one["bytes"].values()) for one in told} == {memory.account().usage.total}
