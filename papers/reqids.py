"""Show the pages of each reqId as requests come, grow and end, and calls of the serving interface (vAttention Figure 7
and Table 4).

The library itself counts.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import Reproduction, Result, equal, measured
from quire import vattention
from quire.bench.document import table
from quire.vattention import VAttention, init
from quire.worker.virtual import FakeDriver

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REQIDS, PLACES, TOKENS = 2, 3, 16  # of Figure 7; most pages of a reqId, and tokens of a page
PAPER = {  # of Figure 7: pages of reqIds 0 and 1
    "(a) no physical memory": [0, 0],
    "(b) R1 comes": [1, 0],
    "(c) R1 grows, R2 comes": [2, 1],
    "(d) R1 has completed": [2, 1],
    "(e) R3 comes": [2, 1],
}


class Moment(NamedTuple):
    """The request of each reqId ("" if none), and its mapped pages in the K-cache, in token order."""

    what: str
    owners: tuple[str, ...]
    pages: tuple[tuple[int, ...], ...]


def small(pages: int, reqids: int = REQIDS) -> VAttention:
    """Return a layer's two tensors, on the checking driver."""
    page = 64 * TOKENS
    return init(1, reqids, PLACES * TOKENS, 1, 32, 2, page, pages=pages, driver=FakeDriver(page))


def walk() -> list[Moment]:
    """Run Figure 7 with the paper's calls. Pages are read from the driver."""
    cache = small(4)
    moments: list[Moment] = []

    def seen(*owners: str) -> None:
        moments.append(Moment([*PAPER][len(moments)], owners, pages_of(cache)))

    seen("", "")
    first = cache.alloc_reqid()
    cache.step([TOKENS, 0])
    seen("R1", "")
    second = cache.alloc_reqid()
    cache.step([TOKENS + 1, TOKENS])
    seen("R1", "R2")
    cache.free_reqid(first)
    cache.step([0, TOKENS])
    seen("", "R2")
    third = cache.alloc_reqid()
    cache.step([2 * TOKENS, TOKENS])
    seen("R3", "R2")
    assert (first, second, third) == (0, 1, 0), "R3 has R1's reqId"
    cache.close()
    return moments


def pages_of(cache: VAttention) -> tuple[tuple[int, ...], ...]:
    """Return the first buffer's pages of each reqId, numbered from 0, as the driver has mapped them."""
    driver, size = cache.driver, cache.buffers.slot_bytes(cache.max_len)
    assert isinstance(driver, FakeDriver)
    found = []
    for reqid in range(cache.shape[0]):
        places = range(
            cache.buffer_addresses[0] + reqid * size, cache.buffer_addresses[0] + (reqid + 1) * size, driver.page
        )
        found.append(tuple(page for place in places if (page := driver.page_at(place)) is not None))
    return tuple(found)


def figure_7() -> Reproduction:
    """Compare (a) to (e) with the paper."""
    moments = walk()
    results = [
        equal("V-F7", f"{what}: pages under reqIds 0 and 1", paper, [len(pages) for pages in moment.pages])
        for (what, paper), moment in zip(PAPER.items(), moments)
    ]
    r1, r3 = moments[2], moments[4]
    results.append(equal("V-F7", "(e): R3 has R1's reqId, and in it R1's pages", True, r3.pages[0] == r1.pages[0]))
    rows = [
        (m.what, *(f"{owner or '-'}: {', '.join(map(str, pages)) or '-'}" for owner, pages in zip(m.owners, m.pages)))
        for m in moments
    ]
    text = (
        f"Pages of {TOKENS} tokens in a K-cache for {REQIDS} requests of at most {PLACES * TOKENS} tokens:\n\n"
        f"{table(('', 'reqId 0', 'reqId 1'), rows)}\n\n"
        "The figure shows demand alone. With `map_ahead` after each step (§6.2) a page more would lie under reqId 1\n"
        "in (b), for whoever comes next, and under a request whose pages are full."
    )
    return Reproduction(results, text, lambda: _draw_walk(moments), [moment._asdict() for moment in moments])


def _draw_walk(moments: list[Moment]) -> Figure:
    from matplotlib.patches import Rectangle

    from quire.bench.plots import COLOURS, figure

    colours = {"R1": COLOURS[0], "R2": COLOURS[2], "R3": COLOURS[1], "": COLOURS[4]}
    fig = figure(11, 2.8)
    for axes, moment in zip(fig.subplots(1, len(moments)), moments):
        for reqid, (owner, pages) in enumerate(zip(moment.owners, moment.pages)):
            for at in range(PLACES):
                there = at < len(pages)
                face: dict[str, Any] = {"fill": False, "linestyle": ":"}
                if there:
                    face = {"facecolor": colours[owner], "alpha": 0.6}
                axes.add_patch(Rectangle((at, -1.5 * reqid), 0.92, 0.9, edgecolor="0.3", **face))
                if there:
                    axes.text(at + 0.46, 0.45 - 1.5 * reqid, f"page {pages[at]}", ha="center", va="center", fontsize=7)
            label = f"reqId {reqid}: {owner or ('inactive' if pages else 'unused')}"
            axes.text(0, 1.0 - 1.5 * reqid, label, fontsize=8)
        axes.set_title(moment.what, fontsize=9)
        axes.set_xlim(-0.1, PLACES)
        axes.set_ylim(-1.7, 1.4)
        axes.set_axis_off()
    fig.suptitle("vAttention Figure 7: a virtual tensor for two requests; dotted: addresses without memory")
    return fig


# Table 4

SIGNATURES = {  # the paper's arguments of each; N' and H' without their marks. It does not name a reqId and lengths
    "init": ["N", "B", "L", "H", "D", "P", "page_size"],
    "alloc_reqid": [],
    "free_reqid": ["reqid"],
    "step": ["seq_lens"],
}


def table_4() -> Reproduction:
    """Compare the arguments and results of the four calls, and the pages that §6.2 promises."""
    results = [
        equal("V-T4", f"{name}: arguments that it needs", paper, _needed(name)) for name, paper in SIGNATURES.items()
    ]
    results += [*_tensors(), *_answers(), *_optimisations()]
    results.append(
        measured("V-T4", "init: arguments of our own", [*inspect.signature(init).parameters][7:], "", "real")
    )
    text = (
        "`pages` are those made at start, of each buffer. Beside the four: `map_ahead`, for whoever has launched an\n"
        "iteration and wants no thread; `counts`; `close`. What the paper leaves open: with all reqIds active\n"
        "alloc_reqid answers -1; wrong ids and lengths are InputErrors; a call that is refused changes nothing."
    )
    return Reproduction(results, text, _draw_session)


def _needed(name: str) -> list[str]:
    """Return the positional arguments without a default."""
    of = getattr(vattention, name, None) or getattr(VAttention, name)
    parameters = inspect.signature(of).parameters.values()
    return [one.name for one in parameters
            if one.name != "self" and one.default is one.empty and one.kind is not one.KEYWORD_ONLY]  # fmt: skip


def _tensors() -> list[Result]:
    """Return the tensors of init, over real pages."""
    layers, shape = 3, (2, 256, 4, 32)
    reqids, length, heads, dim = shape
    cache = init(layers, reqids, length, heads, dim, 2, 4096, pages=8)
    try:
        shapes = sorted({tuple(tensor.shape) for tensor in cache.tensors})
        return [
            equal("V-M5", "init: tensors of 3 layers", 2 * layers, len(cache.tensors)),
            equal("V-M5", "init: shape of each, B x L x H x D", [list(shape)], [list(one) for one in shapes]),
            equal("V-M5", "init: pages mapped into them", 0, cache.counts().cached + cache.counts().active),
        ]
    finally:
        cache.close()


def _answers() -> list[Result]:
    cache = small(4)
    first, second, third = (cache.alloc_reqid() for _ in range(3))
    done = cache.step([3 * TOKENS, TOKENS])
    before = pages_of(cache)
    short = cache.step([3 * TOKENS, 2 * TOKENS])
    same = pages_of(cache) == before
    cache.free_reqid(0)
    again = cache.step([0, 2 * TOKENS])
    freed = cache.alloc_reqid()
    cache.close()
    return [
        equal("V-M6", "alloc_reqid: an integer from 0 to B - 1, of B = 2", [0, 1], [first, second]),
        measured("V-M6", "alloc_reqid: with all active", third, ""),
        equal("V-M6", "free_reqid: the id is inactive, and given out again", 0, freed),
        equal("V-M7", "step: success, with a page for each", 0, done),
        equal("V-M7", "step: failure, of 5 pages with 4 there", -1, short),
        measured("V-M7", "step: failure has changed nothing", same, ""),
        equal("V-M7", "step: success, when a request has been preempted", 0, again),
    ]


def _optimisations() -> list[Result]:
    """Return the pages that steps wait for, by optimization of §6.2."""
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
    return [
        equal("V-M10", "pages that decoding waits for, mapped ahead", 0, decoding),
        equal("V-M11", "pages mapped for a request no longer than the one before", 0, deferred),
        equal("V-M12", "pages that a mean prompt waits for, mapped eagerly", 0, eager),
        equal("V-M13", "cached pages are reclaimed when less is free than", 10, low, "%"),
    ]


def _draw_session() -> Figure:
    """Draw the pages of each reqId, call by call."""
    from quire.bench.plots import COLOURS, figure

    cache, labels, heights = small(8, reqids=3), list[str](), list[list[int]]()
    script: list[tuple[str, int | list[int]]] = [
        ("alloc_reqid", 0), ("step", [16, 0, 0]), ("alloc_reqid", 0), ("step", [17, 32, 0]), ("step", [33, 33, 0]),
        ("free_reqid", 1), ("step", [34, 0, 0]), ("alloc_reqid", 0), ("step", [35, 48, 0]), ("alloc_reqid", 0),
        ("step", [36, 48, 33]), ("step", [36, 48, 32]),
    ]  # fmt: skip
    for call, given in script:
        answer = getattr(cache, call)(given) if call != "alloc_reqid" else cache.alloc_reqid()
        shown = "" if call == "alloc_reqid" else str(given)
        labels.append(f"{call}({shown})" + ("" if answer is None else f" = {answer}"))
        heights.append([len(pages) for pages in pages_of(cache)])
    cache.close()
    fig = figure(10, 4.2)
    axes = fig.add_subplot()
    for reqid in range(3):
        below = [sum(each[:reqid]) for each in heights]
        each = [each[reqid] for each in heights]
        axes.bar(range(len(labels)), each, bottom=below, color=COLOURS[reqid], alpha=0.8, label=f"reqId {reqid}")
    axes.axhline(8, color="0.3", linestyle=":", linewidth=1)
    axes.set_ylabel("pages mapped, of 8 (dotted)")
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Table 4: a session through the interface, pages of 16 tokens")
    return fig
