"""Walk through the serving interface of vAttention: the pages of each reqId as requests come, grow and end, and what
each call returns. The library itself counts, over the driver that checks."""

from __future__ import annotations

import inspect
from typing import Any

from bench.fake_driver import FakeDriver
from papers.entry import Point
from quire import vattention
from quire.vattention import VAttention, init

PLACES, TOKENS = 3, 16  # most pages of a reqId, and tokens of a page


def small(pages: int, reqids: int = 2) -> VAttention:
    """Return a layer's two tensors, on the checking driver."""
    page = 64 * TOKENS
    return init(1, reqids, PLACES * TOKENS, 1, 32, 2, page, pages=pages, driver=FakeDriver(page))


def pages_of(cache: VAttention) -> tuple[tuple[int, ...], ...]:
    """Return the first buffer's pages of each reqId, numbered from 0, as the driver has mapped them."""
    driver, size, start = cache.driver, cache.buffers.slot_bytes(cache.max_len), cache.buffer_addresses[0]
    assert isinstance(driver, FakeDriver)
    places = [range(start + i * size, start + (i + 1) * size, driver.page) for i in range(cache.shape[0])]
    found = [[driver.page_at(place) for place in each] for each in places]
    return tuple(tuple(page for page in pages if page is not None) for pages in found)


def walk() -> list[Point]:
    """Return the moments of three requests in two reqIds: the `owners` of these ("" if none) and their `pages`, in
    token order."""
    cache = small(4)
    moments: list[Point] = []

    def seen(what: str, *owners: str) -> None:
        moments.append({"what": what, "owners": owners, "pages": pages_of(cache)})

    seen("(a) no physical memory", "", "")
    first = cache.alloc_reqid()
    cache.step([TOKENS, 0])
    seen("(b) R1 comes", "R1", "")
    second = cache.alloc_reqid()
    cache.step([TOKENS + 1, TOKENS])
    seen("(c) R1 grows, R2 comes", "R1", "R2")
    cache.free_reqid(first)
    cache.step([0, TOKENS])
    seen("(d) R1 has completed", "", "R2")
    third = cache.alloc_reqid()
    cache.step([2 * TOKENS, TOKENS])
    seen("(e) R3 comes", "R3", "R2")
    assert (first, second, third) == (0, 1, 0), "R3 has R1's reqId"
    cache.close()
    return moments


def interface() -> list[Point]:
    """Return one point with the arguments and results of the four calls and the pages that steps wait for, and for each
    call of a session the pages of each reqId."""
    calls = {"init": init, **{name: getattr(VAttention, name) for name in ("alloc_reqid", "free_reqid", "step")}}
    needs = {f"{name} needs": _needed(call) for name, call in calls.items()}
    extra = [*inspect.signature(vattention.init).parameters][len(needs["init needs"]) :]
    return [{**needs, "extra": extra, **_tensors(), **_answers(), **_waits()}, *_session()]


def _needed(call: Any) -> list[str]:
    """Return the positional arguments without a default."""
    return [one.name for one in inspect.signature(call).parameters.values()
            if one.name != "self" and one.default is one.empty and one.kind is not one.KEYWORD_ONLY]  # fmt: skip


def _tensors() -> Point:
    """Return the tensors of three layers, over real pages."""
    cache = init(3, 2, 256, 4, 32, 2, 4096, pages=8)
    try:
        shapes = sorted({tuple(tensor.shape) for tensor in cache.tensors})
        mapped = cache.counts().cached + cache.counts().active
        return {"tensors": len(cache.tensors), "shapes": [list(one) for one in shapes], "mapped": mapped}
    finally:
        cache.close()


def _answers() -> Point:
    """Return the answers of calls with two reqIds and four pages."""
    cache = small(4)
    reqids = [cache.alloc_reqid() for _ in range(3)]
    enough = cache.step([3 * TOKENS, TOKENS])
    before = pages_of(cache)
    short = cache.step([3 * TOKENS, 2 * TOKENS])
    unchanged = pages_of(cache) == before
    cache.free_reqid(0)
    after = cache.step([0, 2 * TOKENS])
    freed = cache.alloc_reqid()
    cache.close()
    return {"reqids": reqids[:2], "third": reqids[2], "freed": freed, "enough": enough, "short": short,
            "unchanged": unchanged, "after": after}  # fmt: skip


def _waits() -> Point:
    """Return the pages that steps wait for: while decoding, of a first prompt, and of a prompt in a freed reqId; and
    the share of free pages in percent below which cached ones are reclaimed."""
    cache = small(20, reqids=4)
    cache.alloc_reqid()
    for length in range(1, 2 * TOKENS + 1):
        cache.step([length, 0, 0, 0])
        cache.map_ahead()
    decoding = cache.counts().in_step - 1
    second = cache.alloc_reqid()
    before = cache.counts().in_step
    cache.step([2 * TOKENS, *(TOKENS * (second == reqid) for reqid in range(1, 4))])
    eager = cache.counts().in_step - before
    cache.close()
    cache = small(20, reqids=4)
    cache.alloc_reqid()
    cache.step([2 * TOKENS, 0, 0, 0])
    cache.free_reqid(0)
    reused = cache.alloc_reqid()
    before = cache.counts().in_step
    cache.step([2 * TOKENS * (reused == reqid) for reqid in range(4)])
    deferred, low = cache.counts().in_step - before, 100 * cache._low_water_pages() // cache.pages
    cache.close()
    return {"decoding": decoding, "deferred": deferred, "eager": eager, "low": low}


def _session() -> list[Point]:
    """Return the pages of three reqIds after each call, with eight pages."""
    cache, points = small(8, reqids=3), list[Point]()
    script: list[tuple[str, Any]] = [
        ("alloc_reqid", None), ("step", [16, 0, 0]), ("alloc_reqid", None), ("step", [17, 32, 0]),
        ("step", [33, 33, 0]), ("free_reqid", 1), ("step", [34, 0, 0]), ("alloc_reqid", None), ("step", [35, 48, 0]),
        ("alloc_reqid", None), ("step", [36, 48, 33]), ("step", [36, 48, 32]),
    ]  # fmt: skip
    for i, (call, given) in enumerate(script, 1):
        answer = getattr(cache, call)(*([] if given is None else [given]))
        shown = f"{i}. {call}({'' if given is None else given}){'' if answer is None else f' = {answer}'}"
        for reqid, pages in enumerate(pages_of(cache)):
            points.append({"call": shown, "reqid": f"pages of reqId {reqid}", "count": len(pages)})
    cache.close()
    return points
