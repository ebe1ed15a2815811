"""Compute the compatible page of each of the paper's models, exact and with padding, from shapes alone (Jenga §4.4).

MAX and GCD pages are shown as the alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from papers.layer_kinds import (
    EMBEDDED,
    GEMMA2_2B,
    GEMMA2_9B,
    GEMMA2_27B,
    JAMBA_ATTENTION,
    LLAMA_1B,
    LLAMA_70B,
    MLLAMA,
    Kind,
    attention,
    drafted,
    jamba,
    named,
)
from papers.result import DIFFERS, HOLDS, Reproduction, Result, equal, measured
from quire.bench.document import table
from quire.memory.jenga.page_sizes import LayerType, PagePlan, gcd_page, max_page, plan_pages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = 16  # tokens
MIB = 2**20
PAPER_RATIO, PAPER_TOKENS = 84, 1344  # of Jamba: its large page in small ones, tokens of its MAX page


def models() -> dict[str, list[Kind]]:
    """Return the models of §7.1: those of Table 1, those with vision embeddings, and targets with their drafts
    (§7.4)."""
    ministral, llama = named("ministral-8b"), named("llama3-8b")
    return {
        "Llama 3.2 11B Vision": MLLAMA,
        "Gemma-2 9B": GEMMA2_9B,
        "Gemma-2 27B": GEMMA2_27B,
        "Ministral 8B": ministral,
        "Jamba 52B, states in 16 bits": jamba(2),
        "Jamba 52B, states in 32 bits": jamba(4),
        "character.ai 8B": [attention("global", 2, 8, 128), attention("window 1,024", 16, 8, 128, 1024)],
        "character.ai 70B": [attention("global", 5, 8, 128), attention("window 1,024", 40, 8, 128, 1024)],
        "PyramidKV 8B": [attention(f"budget {i}", 4, 8, 128) for i in range(1, 9)],
        "PyramidKV 70B": [attention(f"budget {i}", 10, 8, 128) for i in range(1, 9)],
        "Llama 3 8B": llama,
        "Llama 3 70B": LLAMA_70B,
        "Llama 3.2 11B Vision, embeddings cached": [*MLLAMA, EMBEDDED],
        "LLaVA-OneVision 7B": [attention("full", 28, 4, 128), _embedding(3584)],
        "InternVL2 8B": [attention("full", 32, 8, 128), _embedding(4096)],
        "Phi-3 Vision 4B": [attention("full", 32, 32, 96), _embedding(3072)],
        "PaliGemma2 10B": [*GEMMA2_9B, _embedding(3584)],
        "Llama 8B and its draft of 1B": drafted(llama, LLAMA_1B),
        "Llama 70B and its draft of 1B": drafted(LLAMA_70B, LLAMA_1B),
        "Ministral 8B and its draft of 1B": drafted(ministral, LLAMA_1B),
        "Gemma-2 27B and its draft of 2B": drafted(GEMMA2_27B, GEMMA2_2B),
    }


def _embedding(hidden: int) -> Kind:
    return EMBEDDED._replace(unit_bytes=2 * hidden)


class Planned(NamedTuple):
    """A model's plans, and its MAX and GCD page in bytes."""

    kinds: Sequence[Kind]
    exact: PagePlan
    chosen: PagePlan
    largest: int
    divisor: int

    @property
    def ratio(self) -> int:
        """Return the small pages of the smallest kind in an exact large page."""
        return max(self.exact.small_pages_per_large)

    @property
    def padded(self) -> float:
        """Return the largest padding of a kind, in per cent of its page."""
        return max(100 * pad / kind.page_bytes for pad, kind in zip(self.chosen.padding, self.chosen.types))

    @property
    def max_tokens(self) -> float:
        """Return the tokens of a MAX page without padding, for the layers with the fewest bytes per token."""
        return self.largest / min(kind.bytes for kind in self.kinds if kind.unit != "state")


def planned(kinds: Sequence[Kind]) -> Planned:
    """Plan the pages with quire's planner, for pages of PAGE tokens, or of one state."""
    types = [LayerType(kind.name, kind.bytes * (1 if kind.unit == "state" else PAGE)) for kind in kinds]
    return Planned(kinds, plan_pages(types, None), plan_pages(types), max_page(types), gcd_page(types))


def planner_table() -> Reproduction:
    """Compute the table, and the numbers of §4.4 for Jamba."""
    found = {name: planned(kinds) for name, kinds in models().items()}
    jambas = [name for name in found if name.startswith("Jamba")]
    largest = max(found, key=lambda name: found[name].ratio)
    results = [
        Result("J-X1", "the model with the largest LCM, in its small pages", "Jamba", largest, "",
               HOLDS if largest in jambas else DIFFERS),
    ]  # fmt: skip
    for name in jambas:
        one = found[name]
        results += [
            equal("J-X1", f"{name}: LCM, exact", PAPER_RATIO, one.ratio, "small pages"),
            measured(
                "J-X1",
                f"{name}: LCM, padded by {one.padded:.1f} %",
                max(one.chosen.small_pages_per_large),
                "small pages",
            ),
            equal("J-X1", f"{name}: tokens of a MAX page", PAPER_TOKENS, round(one.max_tokens), "tokens"),
        ]
    half = planned([JAMBA_ATTENTION._replace(unit_bytes=JAMBA_ATTENTION.unit_bytes // 2), eight_bit_state()])
    what = "Jamba 52B, KV in 8 bits, states of 48 bytes a channel"
    results += [
        equal("J-X1", f"{what}: LCM", PAPER_RATIO, half.ratio, "small pages"),
        equal("J-X1", f"{what}: tokens of a MAX page", PAPER_TOKENS, round(half.max_tokens), "tokens"),
    ]
    data = {
        name: {
            "large": one.exact.large_bytes,
            "padded": one.chosen.large_bytes,
            "ratios": one.chosen.small_pages_per_large,
        }
        for name, one in found.items()
    }
    return Reproduction(results, _text(found), lambda: _draw(found), data)


def eight_bit_state() -> Kind:
    """Return the state that gives the paper's numbers: per channel 16 numbers of 16 bits and 4 inputs of 32 bits."""
    return Kind("state", 28, 8192 * (4 * 4 + 16 * 2), 1, "state")


def _text(found: dict[str, Planned]) -> str:
    head = ("model", "pages, KiB", "LCM, MiB", "of small pages", "padded by", "then MiB", "of small pages", "MAX, KiB",
            "GCD, KiB")  # fmt: skip
    rows = []
    for name, one in found.items():
        pages = list(dict.fromkeys(f"{kind.name} {kind.page_bytes / 1024:g}" for kind in one.exact.types))
        shown = ", ".join(pages if len(pages) < 5 else [pages[0], "...", pages[-1]])
        moved = one.chosen != one.exact
        rows.append((
            name, shown, f"{one.exact.large_bytes / MIB:g}", "/".join(map(str,
            dict.fromkeys(one.exact.small_pages_per_large))),
            f"{one.padded:.1f} %" if moved else "-", f"{one.chosen.large_bytes / MIB:g}" if moved else "-",
            "/".join(map(str, dict.fromkeys(one.chosen.small_pages_per_large))) if moved else "-",
            f"{one.largest / 1024:g}",
            f"{one.divisor / 1024:g}",
        ))  # fmt: skip
    return (
        f"bfloat16, pages of {PAGE} tokens or of one state\n{table(head, rows)}\n"
        "The paper doesn't say in which formats Jamba's keys, values and states were. From the published shape (28\n"
        "states of 8,192 channels, 16 numbers and 3 inputs each; 4 layers of attention) 84 doesn't follow, in 16 bits\n"
        "or in 32; with KV in 8 bits and 48 bytes a channel it would. Pages are padded where the LCM is above 16 MiB,\n"
        "if 3 % of a page is enough to bring it down: of Gemma-2 27B with its draft, 23 and 13 layers, nothing does."
    )


def _draw(found: dict[str, Planned]) -> Figure:
    """Draw large pages in small ones, exact and as planned."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 7)
    axes = fig.add_subplot()
    names = list(found)
    for shift, label, colour, plans in (
        (-0.2, "LCM, exact", COLOURS[0], [one.exact for one in found.values()]),
        (0.2, "as planned, padded where it is large", COLOURS[2], [one.chosen for one in found.values()]),
    ):
        places = [i + shift for i in range(len(names))]
        drawn = axes.barh(places, [max(plan.small_pages_per_large) for plan in plans], 0.38, color=colour, label=label)
        axes.bar_label(drawn,
        [f"{max(plan.small_pages_per_large)} ({plan.large_bytes / MIB:g} MiB)" for plan in plans], fontsize=6,
                       padding=3)  # fmt: skip
    axes.axvline(PAPER_RATIO, color="0.3", linestyle=":", label="the paper's Jamba")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=300)
    axes.set_xlabel("small pages of the smallest kind in a large page")
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("Jenga §4.4: compatible pages of the paper's models")
    return fig
