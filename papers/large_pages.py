"""Reproduce Jenga Figures 6 and 8 with the real page pool: the large pages that contain a request's small pages, and
those freed when it ends. The pool's large page 0 is scratch; numbers below begin at the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import Reproduction, Result, equal, measured
from quire.bench.document import table
from quire.memory.jenga.page_sizes import LayerType, plan_pages
from quire.memory.jenga.two_level_pool import ASSOCIATIONS, TwoLevelPagePool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGE, TEXT = 256, 384  # bytes of a small page, of one token: §4.1
IMAGES, TEXTS = 4, 2  # tokens of the request <IMG><IMG><IMG><IMG>Hello World
KINDS = ("image", "text")
PER_LARGE, TOKENS = 4, 8  # of Figure 8: small pages of a large one, and of each of two requests


class Taken(NamedTuple):
    """A small page: its token, its id within its group, and the large page that contains it."""

    token: str
    kind: int
    page: int
    large: int


def reserved(pages: TwoLevelPagePool, group: int, count: int, owner: int) -> list[int]:
    """Allocate `count` pages of a group; there must be room."""
    needs = [0] * len(pages.small_pages_per_large)
    needs[group] = count
    assert pages.reserve(needs), f"there is no room for {count} pages of group {group}"
    return pages.allocate(group, count, owner)


def walk() -> tuple[int, list[Taken], list[int]]:
    """Run Figure 6's example. Return the bytes of a large page, the request's pages in the order of use, and the
    numbers of free large pages before the request, during it, and after it."""
    plan = plan_pages([LayerType("image", IMAGE), LayerType("text", TEXT)])
    pages = TwoLevelPagePool(plan.small_pages_per_large, 3, "paper")
    free, found = [len(pages.free_large)], list[Taken]()
    for kind, count, name in ((0, 3, "<IMG>"), (1, TEXTS, "Hello World"), (0, IMAGES - 3, "<IMG>")):
        ratio = plan.small_pages_per_large[kind]
        for i, page in enumerate(reserved(pages, kind, count, owner=1)):
            found.append(Taken(name.split()[i % len(name.split())], kind, page - ratio, page // ratio - 1))
    free.append(len(pages.free_large))
    pages.decref_tables(
        [[one.page + plan.small_pages_per_large[kind] for one in found if one.kind == kind] for kind in range(2)]
    )
    pages.remove_owner(1)
    free.append(len(pages.free_large))
    return plan.large_bytes, found, free


def figure_6() -> Reproduction:
    """Reproduce the example of §4.1."""
    large, found, free = walk()
    of = [[one for one in found if one.kind == kind] for kind in range(2)]
    results = [
        equal("J-F6", f"compatible page of {IMAGE} and {TEXT} bytes", 768, large, "bytes"),
        equal("J-F6", "large pages of image tokens", [0, 2], sorted({one.large for one in of[0]})),
        equal("J-F6", "large pages of text tokens", [1], sorted({one.large for one in of[1]})),
        equal("J-F6", "small pages of image tokens", IMAGES, len(of[0])),
        equal("J-F6", "small pages of text tokens, by their ids", [2, 3], [one.page for one in of[1]]),
        equal("J-M2", "large pages free before the request, with it, and after it", [3, 0, 3], free),
    ]
    rows = [(one.token, KINDS[one.kind], one.large, one.page) for one in found]
    text = (
        f"{table(('token', 'kind', 'large page', 'small page, by its kind'), rows)}\n"
        "The figure doesn't say in which order pages were taken; here 3 images, which fill a large page, then the\n"
        "text, then the fourth image."
    )
    data: Any = [one._asdict() for one in found]
    return Reproduction(results, text, lambda: _draw_6(found), data)


def _draw_6(found: Sequence[Taken]) -> Figure:
    from matplotlib.patches import Rectangle

    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 2)
    axes = fig.add_subplot()
    for one in found:
        size = (IMAGE, TEXT)[one.kind]
        axes.add_patch(Rectangle((one.page * size, 0), size, 1, facecolor=COLOURS[one.kind], edgecolor="white"))
        label = f"{one.token}\nP{one.page}"
        axes.text((one.page + 0.5) * size, 0.5, label, ha="center", va="center", color="white", fontsize=8)
    axes.set_xlim(0, 3 * 768)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xticks([0, 768, 1536, 2304])
    axes.set_xlabel("bytes: three large pages of 768")
    fig.suptitle("Jenga Figure 6: small pages of image tokens (256 bytes) and of text tokens (384)")
    return fig


# Figure 8


class Ended(NamedTuple):
    """The result after two requests took pages in the way `how`. `before` and `owners`: for each large page, the
    request of each of its small pages ("" if empty), before and after A ended. `back`: the number of large pages that
    are free again, of at most `bound`."""

    association: str
    how: str
    before: tuple[tuple[str, ...], ...]
    owners: tuple[tuple[str, ...], ...]
    back: int
    bound: int


def ended(association: str, how: str) -> Ended:
    """Let requests A and B take TOKENS pages each, then end A. `how`: "one by one", in turn, as requests decode, or "at
    once", as prompts are computed."""
    pages = TwoLevelPagePool([PER_LARGE], 2 * TOKENS // PER_LARGE, association)
    held: dict[int, list[int]] = {0: [], 1: []}
    each = 1 if how == "one by one" else TOKENS
    for _ in range(0, TOKENS, each):
        for owner in held:
            held[owner] += reserved(pages, 0, each, owner)
    before, bound = _owners(pages, held), pages.num_active[0]
    pages.decref_tables([held.pop(0)])
    pages.remove_owner(0)
    return Ended(association, how, before, _owners(pages, held), bound - pages.num_active[0], bound)


def _owners(pages: TwoLevelPagePool, held: dict[int, list[int]]) -> tuple[tuple[str, ...], ...]:
    of = {page: "AB"[owner] for owner, mine in held.items() for page in mine}
    large = range(1, pages.num_large + 1)
    return tuple(tuple(of.get(i * PER_LARGE + k, "") for k in range(PER_LARGE)) for i in large)


def figure_8() -> Reproduction:
    """Reproduce (a) and (b) with the associations "none" and "paper", and with our "bulk"."""
    found = [ended(association, how) for how in ("one by one", "at once") for association in ASSOCIATIONS]
    of = {(one.association, one.how): one for one in found}
    naive, aware = of["none", "one by one"], of["paper", "one by one"]
    unit = f"of {aware.bound} large pages"
    results: list[Result] = [
        equal("J-F8", "(a) not request-aware: large pages that come back with A", 0, naive.back, unit),
        equal("J-F8", "(b) request-aware: large pages that come back with A", TOKENS // PER_LARGE, aware.back, unit),
    ]
    for one in found:
        if one.association == "bulk" or one.how == "at once":
            what = f"{one.association}, pages taken {one.how}: large pages that come back with A"
            results.append(measured("J-F8", what, one.back, unit))
    rows = [(one.association, one.how, _shown(one.before), _shown(one.owners), one.back) for one in found]
    text = (
        f"{table(('association', 'pages taken', 'A and B', 'after A', 'come back'), rows)}\n"
        "bulk gives a request whole large pages of what it takes at once, and puts together what it takes one by one:\n"
        "where a large page has many small ones, every request's own tail costs more than it saves."
    )
    return Reproduction(results, text, lambda: _draw_8(found), [one._asdict() for one in found])


def _shown(owners: Sequence[Sequence[str]]) -> str:
    return " ".join("".join(owner or "." for owner in large) for large in owners)


def _draw_8(found: Sequence[Ended]) -> Figure:
    from quire.bench.plots import figure

    fig = figure(11, 4)
    for axes, one in zip(fig.subplots(2, len(found) // 2).flat, found):
        _boxes(axes, one.before, 1.2)
        _boxes(axes, one.owners, 0)
        axes.set_title(f"{one.association}, {one.how}", fontsize=9)
        axes.set_xlim(-4, len(one.owners) * (PER_LARGE + 0.5))
        axes.set_ylim(-0.2, 2.3)
        axes.set_axis_off()
        axes.text(-4, 1.6, "A and B", fontsize=8, va="center")
        axes.text(-4, 0.4, f"after A\n{one.back} back", fontsize=8, va="center")
    fig.suptitle("Jenga Figure 8: large pages of 4 small ones, two requests")
    return fig


def _boxes(axes: Axes, owners: Sequence[Sequence[str]], bottom: float) -> None:
    from matplotlib.patches import Rectangle

    from quire.bench.plots import COLOURS

    colours = {"A": COLOURS[0], "B": COLOURS[1], "": "#f0f0f0"}
    for i, large in enumerate(owners):
        for k, owner in enumerate(large):
            box = Rectangle((i * (PER_LARGE + 0.5) + k, bottom), 1, 0.8, facecolor=colours[owner], edgecolor="white")
            axes.add_patch(box)
