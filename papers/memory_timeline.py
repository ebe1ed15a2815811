"""Reproduce Jenga Figure 16 by simulation: the contents of a device's memory over time, in the paper's five categories,
for requests whose mean length is constant and for lengths that grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result, measured, near
from papers.unlike_serving import BESIDE, H100, LABELS, SHARE, Case, Memory, assumed, simulated
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATIC = Case("ministral-8b", H100, "longdoc@60")  # D5
DYNAMIC = STATIC._replace(workload="ramp:38000:118000@60")  # D6
TRACES = {"static": STATIC, "dynamic": DYNAMIC}
COMPARED = ("uniform", "jenga")
PAPER_WASTE = {"uniform": 38.2, "jenga": 0.04}  # per cent of the KV memory, mean of both traces
PAPER_SHARE = (27.8, 54.5)  # per cent of self attention in the allocated memory, dynamic trace: least and most
TOLERANCE = 0.2
MOST_WASTE = 0.1  # per cent
SAMPLED = 0.5  # seconds
SMOOTH = 20.0  # seconds over which a share is averaged
EDGE = 0.1  # of the time at either end, while the memory fills and empties


class Timeline(NamedTuple):
    """The memory of a run over time."""

    trace: str
    rule: str
    moments: list[Memory]

    def inner(self) -> list[Memory]:
        """Return the samples without both ends."""
        last = self.moments[-1].time
        return [one for one in self.moments if EDGE * last <= one.time <= (1 - EDGE) * last]

    def wasted(self) -> float:
        """Return the wasted per cent of allocated memory, a mean over time."""
        found = self.inner()
        return 100 * sum(one.wasted for one in found) / sum(one.allocated for one in found)

    def shares(self) -> list[float]:
        """Return the per cent of self attention in the memory that tokens need, each averaged over SMOOTH seconds."""
        found, shares = self.inner(), []
        for one in found:
            near_it = [other for other in found if abs(other.time - one.time) <= SMOOTH / 2]
            shares.append(100 * sum(x.full for x in near_it) / sum(x.full + x.window for x in near_it))
        return shares


def figure_16() -> Reproduction:
    """Run both traces under both rules."""
    found = [
        Timeline(trace, rule, simulated(case, rule, sampled=SAMPLED).memory)
        for trace, case in TRACES.items()
        for rule in COMPARED
    ]
    data: Any = [one._replace(moments=thinned(one.moments))._asdict() for one in found]
    results = [result._replace(real_or_simulated="simulated") for result in judged(found)]
    return Reproduction(results, _text(found), lambda: draw(data), data)


def thinned(moments: Sequence[Memory], most: int = 300) -> list[Memory]:
    return list(moments[:: max(1, -(-len(moments) // most))])


def judged(found: Sequence[Timeline]) -> list[Result]:
    """Judge the waste, a mean of both traces, and the range of self attention's share."""
    results = []
    for rule in COMPARED:
        mine = [one for one in found if one.rule == rule]
        mean = round(sum(one.wasted() for one in mine) / len(mine), 2)
        if rule == "jenga":
            what = f"{LABELS[rule]}: wasted, both traces (limit: {MOST_WASTE:g})"
            verdict = HOLDS if mean <= MOST_WASTE else DIFFERS
            results.append(Result("J-F16", what, PAPER_WASTE[rule], mean, "%", verdict))
        else:
            what = f"{LABELS[rule]}: wasted, both traces (within {TOLERANCE:.0%})"
            results.append(near("J-F16", what, PAPER_WASTE[rule], mean, "%", TOLERANCE))
        results += [
            measured("J-F16", f"{LABELS[rule]}: wasted, {one.trace} trace", round(one.wasted(), 2), "%") for one in mine
        ]
    shares = next(one for one in found if (one.trace, one.rule) == ("dynamic", "jenga")).shares()
    for what, paper, ours in (("least", PAPER_SHARE[0], min(shares)), ("most", PAPER_SHARE[1], max(shares))):
        label = f"dynamic trace: {what} share of self attention (within {TOLERANCE:.0%})"
        results.append(near("J-F16", label, paper, round(ours, 1), "%", TOLERANCE))
    return results


def _text(found: Sequence[Timeline]) -> str:
    rows = []
    for one in found:
        inner = one.inner()
        whole = sum(x.allocated + x.free for x in inner)
        parts = [100 * sum(getattr(x, name) for x in inner) / whole for name in ("full", "window", "wasted", "free")]
        running = sum(x.running for x in inner) / len(inner)
        rows.append((one.trace, LABELS[one.rule], *(f"{part:.2f}%" for part in parts), f"{running:.2f}"))
    head = ("trace", "pages", "used, self", "used, window", "wasted", "unallocated", "requests that run")
    return (
        f"{STATIC.label}, {STATIC.budget:.1f} GiB for KV; static: {STATIC.workload}, dynamic: {DYNAMIC.workload}; all "
        f"at once\n{table(head, rows)}\n"
        "Means over the time, of the KV memory. Used: what tokens in flight and to come read. Wasted: what is\n"
        "allocated beside that. The paper gives no lengths; the dynamic trace's are chosen so that self attention's\n"
        "share can be the paper's: 9 of 36 layers see all, so of L tokens it is 9 L / (9 L + 27 min(L, 32,768)).\n"
        f"{assumed()}"
    )


def draw(data: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw stacked categories over time, with a panel for each trace and rule, as in the figure."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(12, 6)
    fixed = {"weights": STATIC.spec.parameters * 2 / 1e9, "reserved": ((1 - SHARE) * H100.memory + BESIDE) / 1e9}
    for axes, one in zip(fig.subplots(2, 2).flat, data):
        moments = [Memory(*moment) for moment in one["moments"]]
        times = [moment.time for moment in moments]
        parts = {name: [size] * len(times) for name, size in fixed.items()}
        for name, field in (("used, self", "full"), ("used, window", "window"), ("wasted", "wasted"),
                            ("unallocated", "free")):  # fmt: skip
            parts[name] = [getattr(moment, field) / 1e9 for moment in moments]
        colours = (COLOURS[4], "#bdbdbd", COLOURS[0], COLOURS[2], "#c62828", "#f0f0f0")
        axes.stackplot(times, *parts.values(), labels=list(parts), colors=colours)
        axes.set_title(f"{one['trace']} trace, {LABELS[one['rule']]}", fontsize=9)
        axes.set_xlabel("seconds")
        axes.set_ylabel("GB")
    fig.axes[0].legend(fontsize=7, loc="lower right")
    fig.suptitle("Jenga Figure 16: memory over time, Ministral 8B (simulated)")
    return fig
