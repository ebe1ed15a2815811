"""Reproduce Jenga Figure 4: the number of prefix tokens that stay cached if eviction is balanced between layer types
and aligned, and if not. The real memory evicts; settings of its page pool turn each order off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from papers.result import DIFFERS, HOLDS, Reproduction, Result, equal, measured
from papers.unlike_serving import H100, Case, assumed, burst, serve
from quire.bench.document import table
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sequence import Sequence as Seq

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS: dict[str, dict[str, Any]] = {
    "balanced, aligned": {},
    "not balanced": {"balanced": False},
    "not aligned": {"aligned_pages": 0},
}
LENGTH = 24  # tokens of a text, pages of one token
# Gemma-2: its layer types have pages of one size, so that any layer can use any page and only the order decides.
CASE = Case("gemma-2-9b", H100, "docqa:24:6000@144", kv_gib=24.0, caching=True)


def memory_of(pages: int, window: int, **orders: Any) -> PagedMemory:
    """Return a memory of one layer of self attention and one with a window, over `pages` pages of one token."""
    ids = range(1, pages + 1)
    groups = tuple(
        KVCacheGroup((i,), 16, 16, 64, ids, run_tokens=1, window=size, kind="full" if size is None else "window")
        for i, size in enumerate((None, window))
    )
    geometry = KVCacheConfig(KVCacheLayout.PAGED, (pages + 1) * 16, 4, groups, 2)
    return PagedMemory(geometry, max_step_tokens=4, retention="slack", slack=0, **orders)


def ask(memory: PagedMemory, name: int, tokens: list[int], stays: bool = False) -> None:
    """Compute a prompt in chunks, and end the request unless `stays`."""
    seq = Seq(name, tokens)
    found = memory.admit([seq], memory.max_step_tokens)
    assert isinstance(found, list), "there is room for a prompt"
    seq.computed = seq.planned = found[0].reused_tokens
    while seq.computed < len(tokens):
        length = min(seq.computed + memory.max_step_tokens, len(tokens))
        assert memory.grow(seq, length), "there is room for its next tokens"
        seq.computed = seq.planned = length
        memory.commit(seq)
    memory.take_page_ops()
    if not stays:
        memory.free(seq)


def words(first: int, count: int = LENGTH) -> list[int]:
    return list(range(first, first + count))


def left(memory: PagedMemory, first: int) -> int:
    """Return the number of a text's tokens that another request would find in the cache."""
    return memory.prefix_cache.find_cached(Seq(99, [*words(first), 7])).tokens


def balance() -> dict[str, list[int]]:
    """Run example (a): two texts are read, then a third. Return how many tokens of the first two stay cached."""
    found = {}
    for name in ("balanced, aligned", "not balanced"):
        memory = memory_of(78, 4, **ORDERS[name])
        for i, first in enumerate((100, 200, 300)):
            ask(memory, i + 1, words(first))
        found[name] = [left(memory, first) for first in (100, 200)]
    return found


def alignment() -> dict[str, int]:
    """Run example (b): a second request evicts part of a cached text. Return how many of its tokens stay cached."""
    found = {}
    for name in ("balanced, aligned", "not aligned"):
        memory = memory_of(60, 64, **({"aligned_pages": 1} | ORDERS[name]))
        ask(memory, 1, words(100))
        ask(memory, 2, words(200, 10), stays=True)
        found[name] = left(memory, 100)
    return found


class Rate(NamedTuple):
    """A simulation with an eviction order: the share of prompt tokens found in the cache, and requests a second."""

    order: str
    retention: str
    hit_rate: float
    requests_per_s: float


def rates() -> list[Rate]:
    """Simulate questions about more documents than fit."""
    found = []
    for retention in ("paper", "boundary"):
        for name, orders in ORDERS.items():
            engine = CASE.plant("jenga", retention=retention).simulation().engine
            page_pool = cast(PagedMemory, engine.scheduler.memory).page_pool
            for setting, value in orders.items():
                setattr(page_pool, setting, value)
            run = serve(engine, burst(CASE.sketches()), CASE.spec, concurrency=1)
            found.append(Rate(name, retention, run.hit_rate, run.requests_per_s))
    return found


def figure_4() -> Reproduction:
    """Run both examples, and simulate hit rates."""
    found = balance(), alignment(), rates()
    data: Any = {"balance": found[0], "alignment": found[1], "rates": [one._asdict() for one in found[2]]}
    return Reproduction(judged(*found), text(*found), lambda: draw(data), data)


def judged(balanced: Mapping[str, list[int]], aligned: Mapping[str, int], found: Sequence[Rate]) -> list[Result]:
    """Judge that either order keeps more; the figure has no numbers."""
    best, other = balanced["balanced, aligned"], balanced["not balanced"]
    results = [
        equal("J-F4", "(a) balanced: of two texts the later one is left whole", [0, LENGTH], best, "tokens"),
        _claim("(a) not balanced: less is left", sum(other) < sum(best)),
        measured("J-F4", "(a) not balanced: of two texts is left", other, "tokens"),
        _claim("(b) not aligned: less of a text is left", aligned["not aligned"] < aligned["balanced, aligned"]),
        measured("J-F4", "(b) of a text is left, aligned and not", list(aligned.values()), "tokens"),
    ]
    for retention in dict.fromkeys(one.retention for one in found):
        of = {one.order: one for one in found if one.retention == retention}
        best_rate = of["balanced, aligned"].hit_rate
        for name in ("not balanced", "not aligned"):
            what = f"hit rate, retention {retention}: balanced and aligned / {name}"
            ratio = round(best_rate / of[name].hit_rate, 2) if of[name].hit_rate else None
            results.append(measured("J-F4", what, ratio, "times", "simulated"))
    return results


def _claim(what: str, holds: bool) -> Result:
    return Result("J-F4", what, True, holds, "", HOLDS if holds else DIFFERS)


def text(balanced: Mapping[str, list[int]], aligned: Mapping[str, int], found: Sequence[Rate]) -> str:
    rows = [(one.order, one.retention, f"{100 * one.hit_rate:.1f}%", f"{one.requests_per_s:.2f}") for one in found]
    two, one_text = (", ".join(f"{name} {value}" for name, value in of.items()) for of in (balanced, aligned))
    return (
        f"(a) tokens left of two texts of {LENGTH}: {two}\n(b) tokens left of a text of {LENGTH}: {one_text}\n"
        f"{CASE.model}, {CASE.budget:g} GiB for KV, {CASE.workload}, one at a time\n"
        f"{table(('order', 'retention', 'hit rate', 'requests/s'), rows)}\n"
        "Not balanced: a type that is short evicts pages of its own as long as it has any, however old others are.\n"
        f"Not aligned: of pages used equally long ago all of one type go first.\n{assumed()}"
    )


def draw(data: Mapping[str, Any]) -> Figure:
    """Draw the tokens left in the examples on the left, hit rates on the right."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 3.6)
    left_axes, right = fig.subplots(1, 2)
    bars = {f"(a) {name}": sum(value) for name, value in data["balance"].items()}
    bars |= {f"(b) {name}": value for name, value in data["alignment"].items()}
    drawn = left_axes.barh(list(bars), list(bars.values()), color=[COLOURS[0], COLOURS[1]] * 2)
    left_axes.bar_label(drawn, padding=3)
    left_axes.set_xlabel("tokens that another request finds")
    left_axes.invert_yaxis()
    names = [f"{one['order']}\nretention {one['retention']}" for one in data["rates"]]
    colours = [COLOURS[0] if one["order"] == "balanced, aligned" else COLOURS[1] for one in data["rates"]]
    drawn = right.barh(names, [100 * one["hit_rate"] for one in data["rates"]], color=colours)
    right.bar_label(drawn, fmt="%.1f", padding=3)
    right.set_xlabel("hit rate, % of prompts' tokens")
    right.tick_params(axis="y", labelsize=7)
    right.invert_yaxis()
    fig.suptitle("Jenga Figure 4: balanced and aligned eviction")
    return fig
