"""Reproduce Jenga Figures 9, 10 and 11: the paper's interface for layer types under its own names, its sliding window
as written there, the access times and prefix lengths that it sets, and the prefixes that it finds valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from papers.result import DIFFERS, HOLDS, Reproduction, Result, equal, measured
from quire.bench.document import table
from quire.jenga import Evictor, LayerSupportsPrefixCache, Request, access, longest_prefix, policy_of
from quire.memory.paged import PagedMemory
from quire.memory.policies import POLICIES
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sequence import Sequence as Seq

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 2
TEXT = "ABCDEFGHIJ"
CACHED = ("ABCDEFGHI", "CDHIJ")  # of Figure 11, of self attention and of the window: as far as the text says
VALID = ([TEXT[:n] for n in range(1, 10)], ["ABCD", "ABCDEFGHI", "ABCDEFGHIJ"])
METHODS = {  # Figure 9a: the arguments of each
    "update_last_access": ["r", "time"],
    "set_prefix_length": ["r"],
    "get_possible_prefix": ["is_hit"],
}
TIMES = {  # Figure 10b: of each token's page, in self attention and in the window
    "A": (3, 1), "B": (3, 1), "C": (3, 3), "D": (3, 3), "E": (2, 2), "G": (3, 3),
}  # fmt: skip


class SlidingWindowLayer:
    """Figure 9b: a token attends to `sliding` tokens, itself included; a prefix needs its last `sliding` tokens. Near
    its start a request has fewer."""

    def __init__(self, sliding: int) -> None:
        self.sliding, self.evictor = sliding, Evictor()

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(max(r.len - self.sliding + 1, 1), r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def set_prefix_length(self, r: Request) -> None:
        for i in range(1, r.len + 1):
            self.evictor.set_prefix_length(r.page[i], i)

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        lengths = range(1, len(is_hit) + 1)
        return {p for p in lengths if all(is_hit[max(p - self.sliding, 0) : p])}


def self_attention() -> SlidingWindowLayer:
    """Return the same layer with an unlimited window."""
    return SlidingWindowLayer(2**20)


def figure_9() -> Reproduction:
    """Check the three methods, and the paper's class as a policy of the memory."""
    results = [equal("J-F9", f"{name}: arguments", arguments, _arguments(name)) for name, arguments in METHODS.items()]
    lines = len(inspect.getsource(SlidingWindowLayer).splitlines())
    ours, theirs = (_served(policies) for policies in (POLICIES, _policies()))
    results += [
        Result(
            "J-F9", "a layer type in fewer than 120 lines", True, lines < 120, "", HOLDS if lines < 120 else DIFFERS
        ),
        measured("J-F9", "the paper's sliding window, lines", lines, ""),
        equal("J-F9", "as a policy of the memory: it holds and finds as the built-in one", ours, theirs),
    ]
    text = (
        f"{inspect.getsource(SlidingWindowLayer)}\n"
        "Pages and lengths are counted from 1, as the paper's ranges are. Served with it over pages of 4 tokens, a\n"
        f"prompt of 40 and one that begins with it: tokens found and pages held of each type are {theirs}."
    )
    return Reproduction(results, text, lambda: _draw_9(ours, theirs))


def _arguments(name: str) -> list[str]:
    return [*inspect.signature(getattr(LayerSupportsPrefixCache, name)).parameters][1:]


def _policies() -> dict[str, Any]:
    """Return the memory's policies with the paper's class for windows. The built-in window contains the token itself,
    as the paper's does, but its prefix rule needs one token less: the paper's rule is that of a window longer by
    one."""
    return {**POLICIES, "window": policy_of(SlidingWindowLayer(WINDOW * 4), horizon=64)}


def _served(policies: Any) -> list[list[int]]:
    """Run two prompts, of which the second begins with the first. Return the tokens found in the cache, and the pages
    of either type."""
    ids = range(1, 200)
    groups = tuple(
        KVCacheGroup((i,), 64, 16, 64, ids, run_tokens=4, window=size, kind="full" if size is None else "window")
        for i, size in enumerate((None, WINDOW * 4))
    )
    memory = PagedMemory(
        KVCacheConfig(KVCacheLayout.PAGED, 200 * 64, 4, groups, 2), max_step_tokens=8, policies=policies
    )
    found = []
    for i, more in enumerate((0, 9)):
        seq = Seq(i + 1, list(range(40 + more)))
        admitted = memory.admit([seq], memory.max_step_tokens)
        assert isinstance(admitted, list), "there is room"
        seq.computed = seq.planned = admitted[0].reused_tokens
        while seq.computed < len(seq.tokens):
            end = min(seq.computed + memory.max_step_tokens, len(seq.tokens))
            assert memory.grow(seq, end), "there is room"
            seq.computed = seq.planned = end
            memory.commit(seq)
        found.append(
            [
                admitted[0].reused_tokens,
                *(sum(page > 0 for page in pages) for pages in memory.get_placement(seq).tables),
            ]
        )
        memory.free(seq)
        memory.check()
    return found


def _draw_9(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 3)
    labels = ("tokens found", "pages of full attention", "pages of the window")
    for axes, label, k in zip(fig.subplots(1, 3), labels, range(3)):
        for i, (name, found) in enumerate((("built in", ours), ("Figure 9b", theirs))):
            axes.bar(
                [j + 0.4 * (i - 0.5) for j in range(2)], [one[k] for one in found], 0.38, color=COLOURS[i], label=name
            )
        axes.set_xticks(range(2), ["first", "second"])
        axes.set_title(label, fontsize=9)
    fig.axes[0].legend(fontsize=8)
    fig.suptitle("Jenga Figure 9: two requests by the paper's layer type and by ours")
    return fig


def _pages(letters: str) -> list[int]:
    """Return a page table: page 0, which is none, then the code of each token's letter."""
    return [0, *map(ord, letters)]


def walk() -> list[SlidingWindowLayer]:
    """Run Figure 10's two requests, step by step."""
    layers = [self_attention(), SlidingWindowLayer(WINDOW)]
    access(layers, [_pages("ABCDEF")] * 2, 0, 4, time=1)
    access(layers, [_pages("ABCDEF")] * 2, 5, 5, time=2)
    access(layers, [_pages("ABCDGH")] * 2, 4, 5, time=3)
    return layers


def _times(layer: SlidingWindowLayer) -> dict[str, int]:
    return {chr(page): time for page, time in sorted(layer.evictor.last_access.items())}


def figure_10() -> Reproduction:
    """Check last access times, and the order of eviction that follows."""
    layers = walk()
    of = [_times(layer) for layer in layers]
    orders = ["".join(map(chr, layer.evictor.order())) for layer in layers]
    results = [
        equal("J-F10", f"{name}: last access of A, B, C, D, E, G", [times[i] for times in TIMES.values()],
              [of[i].get(letter) for letter in TIMES])
        for i, name in enumerate(("self attention", "sliding window"))
    ]  # fmt: skip
    lengths = {chr(page): length for page, length in layers[1].evictor.prefix_length.items()}
    results += [
        equal("J-F10", "lengths of A, B, C, D, G in either layer", [1, 2, 3, 4, 5], [lengths[one] for one in "ABCDG"]),
        equal("J-F10", "[E] is evicted before [C D G], in both layers", True,
              all(order.index("E") < min(map(order.index, "CDG")) for order in orders)),
        equal("J-F10", "[G] is evicted before [C D], in both layers", True,
              all(order.index("G") < min(map(order.index, "CD")) for order in orders)),
    ]  # fmt: skip
    rows = [(letter, of[0].get(letter), of[1].get(letter), lengths.get(letter)) for letter in TIMES]
    text = (
        f"{table(('token', 'self attention', 'sliding window', 'prefix length'), rows)}\n"
        f"Order of eviction: self attention {orders[0]}, sliding window {orders[1]}.\n"
        "Step 3 reads C D G where a window of 2 at G reads D G alone: the hit on ABCD asks for C and D."
    )
    return Reproduction(results, text, lambda: _draw_10(of))


def _draw_10(of: Sequence[dict[str, int]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 2.6)
    for axes, times, name in zip(fig.subplots(1, 2), of, ("self attention", "sliding window of 2")):
        bars = axes.bar(list(TIMES), [times[letter] for letter in TIMES], color=[COLOURS[times[t] - 1] for t in TIMES])
        axes.bar_label(bars)
        axes.set_ylim(0, 3.6)
        axes.set_yticks([1, 2, 3])
        axes.set_title(name, fontsize=9)
    fig.axes[0].set_ylabel("last access")
    fig.suptitle("Jenga Figure 10: last access after two requests")
    return fig


def figure_11() -> Reproduction:
    """Check valid prefixes, and the longest one that is valid for both."""
    layers = [self_attention(), SlidingWindowLayer(WINDOW)]
    hits = [[letter in cached for letter in TEXT] for cached in CACHED]
    found = [[TEXT[:p] for p in sorted(layer.get_possible_prefix(hit))] for layer, hit in zip(layers, hits)]
    longest = TEXT[: longest_prefix(layers, hits)]
    names = ("self attention", "sliding window of 2")
    results = [equal("J-F11", f"{name}: valid prefixes", list(VALID[i]), found[i]) for i, name in enumerate(names)]
    results.append(equal("J-F11", "the longest that is valid for both", "ABCDEFGHI", longest))
    text = (
        f"{table(('layer', 'cached', 'valid'), [(n, c, ', '.join(f)) for n, c, f in zip(names, CACHED, found)])}\n"
        "What is cached is inferred from the prefixes that the paper's text names; of F in the window it says nothing."
    )
    return Reproduction(results, text, lambda: _draw_11(hits, found))


def _draw_11(hits: Sequence[Sequence[bool]], found: Sequence[Sequence[str]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(8, 2.6)
    axes = fig.add_subplot()
    for line, (hit, valid) in enumerate(zip(hits, found)):
        for i, letter in enumerate(TEXT):
            axes.barh(line, 0.92, 0.6, left=i, color=COLOURS[2] if hit[i] else "#e0e0e0")
            axes.text(i + 0.46, line, letter, ha="center", va="center")
        for prefix in valid:
            axes.plot(len(prefix) - 0.04, line - 0.4, "v", color=COLOURS[1], markersize=6)
    axes.set_yticks([0, 1], ["self attention", "sliding window of 2"])
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    fig.suptitle("Jenga Figure 11: cached tokens (green), and where valid prefixes end")
    return fig
