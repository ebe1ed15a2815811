"""Count the memory of a request [t0 i0 i1 i2 i3 t1] after each step, in chunks of 3 tokens (Jenga Figure 12).

The embeddings of its image are in pages of their own (a), or in the pages of later keys and values (b). The scheduler
and the memory are the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from papers.result import Reproduction, Result, at_most, equal, measured
from quire.bench.document import table
from quire.sim.embeddings import StepUsage, figure_12

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT, PICTURE, CHUNK = (1, 1), 4, 3
WAYS = {"pages": "(a) embeddings in pages of their own", "inside": "(b) in pages of keys and values to come",
        "off": "kept nowhere"}  # fmt: skip
# The paper's timelines, one tuple per step: tokens computed, tokens with keys and values after it, slots allocated
# for more, embeddings during the step and after it. (a) is the list of §6.2 with steps (1) and (2) merged; for (b) the
# paper says that all slots are allocated at the first chunk, and that embeddings take none in addition.
PAPER = {
    "pages": [(3, 3, 0, 4, 2), (3, 6, 0, 2, 0), (1, 7, 0, 0, 0)],
    "inside": [(3, 3, 3, 0, 0), (3, 6, 0, 0, 0), (1, 7, 0, 0, 0)],
}
RUNS = {"pages": 1, "inside": 1, "off": 2}  # encoder runs; off: one for each chunk that needs the image


def seen(step: StepUsage) -> tuple[int, int, int, int, int]:
    """Return the step in the form of PAPER."""
    return step.tokens, step.kv, step.free_places, step.embeddings, step.leftover_embeddings


def peak(steps: Sequence[StepUsage]) -> int:
    """Return the maximum held after a step: keys, values and embeddings, in tokens."""
    return max(step.kv + step.free_places + step.leftover_embeddings for step in steps)


def timelines() -> Reproduction:
    """Run both of the figure's modes, and the mode without a cache."""
    found = {way: figure_12(way, TEXT, PICTURE, CHUNK) for way in WAYS}
    data: Any = {way: [_document(step) for step in steps] for way, steps in found.items()}
    return Reproduction(judged(found), text(found), lambda: draw(data), data)


def _document(step: StepUsage) -> dict[str, Any]:
    """Return a step with the field names of the JSON document."""
    return {
        "tokens": step.tokens, "encodes": step.encodes, "kv": step.kv, "places": step.free_places,
        "embeddings": step.embeddings, "behind": step.leftover_embeddings,
    }  # fmt: skip


def judged(found: Mapping[str, Sequence[StepUsage]]) -> list[Result]:
    """Compare each step with the paper's, then encoder runs and peaks: at most a chunk above all tokens."""
    results = []
    for way, steps in PAPER.items():
        for i, step in enumerate(steps):
            mine = seen(found[way][i]) if i < len(found[way]) else ()
            what = f"{WAYS[way]}, step {i + 1}: tokens, KV, places, embeddings in it and behind it"
            results.append(equal("J-F12", what, " ".join(map(str, step)), " ".join(map(str, mine))))
    for way, count in RUNS.items():
        runs = sum(step.encodes for step in found[way])
        results.append(equal("J-F12", f"{WAYS[way]}: encoder runs", count, runs, "runs"))
    tokens = sum(TEXT) + PICTURE
    results.append(at_most("J-F12", f"{WAYS['pages']}: peak behind a step, of {tokens} prompt tokens",
                           tokens + 1 + CHUNK, peak(found["pages"]), "tokens"))  # fmt: skip
    inside, off = peak(found["inside"]), peak(found["off"])
    results.append(equal("J-F12", f"{WAYS['inside']}: peak, of what it is without embeddings", off, inside, "tokens"))
    results.append(measured("J-F12", f"{WAYS['pages']}: peak in a step",
                            max(step.kv + step.embeddings for step in found["pages"]), "tokens"))  # fmt: skip
    return results


def text(found: Mapping[str, Sequence[StepUsage]]) -> str:
    head = ("embeddings", "step", "computes", "encodes", "KV", "places", "embeddings in it", "behind it")
    rows = [
        (
            WAYS[way],
            i + 1,
            step.tokens,
            "yes" if step.encodes else "-",
            step.kv,
            step.free_places,
            step.embeddings,
            step.leftover_embeddings,
        )
        for way, steps in found.items()
        for i, step in enumerate(steps)
    ]
    return f"[t0 i0 i1 i2 i3 t1], chunks of {CHUNK} tokens, pages of one token, then a decode\n{table(head, rows)}"


def draw(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw a panel for each mode, with a bar for each step and a second one for the remaining embeddings."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(4 * len(data), 3.4)
    for axes, (way, steps) in zip(fig.subplots(1, len(data), squeeze=False, sharey=True).flat, data.items()):
        places, below = range(1, len(steps) + 1), [0] * len(steps)
        parts = {"keys and values": "kv", "places for more": "places", "embeddings": "embeddings"}
        for (label, name), colour in zip(parts.items(), COLOURS):
            heights = [step[name] for step in steps]
            axes.bar(places, heights, 0.5, bottom=below, color=colour, label=label)
            below = [low + height for low, height in zip(below, heights)]
        for i, step in zip(places, steps):
            if step["encodes"]:
                axes.annotate("encodes", (i, below[i - 1]), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(places)
        axes.set_ylim(0, 9)
        axes.set_xlabel("step")
        axes.set_title(WAYS[way], fontsize=9)
    fig.axes[0].set_ylabel("tokens")
    fig.axes[-1].legend(handles=fig.axes[0].containers, fontsize=7, loc="upper left")
    fig.suptitle("Jenga Figure 12: keys and values, and a picture's embeddings")
    return fig
