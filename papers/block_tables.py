"""Reproduce PagedAttention Figures 6 and 7: the block tables of one and of two requests, step by step.

The real memory and scheduler run the paper's words. The list of free blocks is set to the order in which the figures
use them. Physical block p of the paper is page p + 1 here, since page 0 is scratch; block numbers below are the
paper's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from papers.result import Reproduction, Result, equal
from quire.bench.document import table
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.memory.paged import PagedMemory
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SliceResult, StepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK = 4  # tokens
BLOCKS = 9
A = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth"]
B = ["It", "was", "the", "best", "of", "times", "it", "was"]


class Scripted(NamedTuple):
    """A request with a given output, which arrives before step `arrives`; its prompt is `words[:prompt]`."""

    name: str
    words: list[str]
    prompt: int
    arrives: int


class Entry(NamedTuple):
    """A line of a block table: the physical block of a logical one, and the number of filled positions."""

    physical: int
    filled: int


BUDGET = 64  # tokens of a step: more than the figures' prompts
Tables = dict[str, tuple[Entry, ...]]  # a block table for each request


def replay(requests: list[Scripted], free: list[int], steps: int) -> list[Tables]:
    """Return the block tables after each of `steps` steps. `free`: the free physical blocks, the next one first."""
    spec = ModelSpec("words", (LayerSpec(1, 1),), 64, 32, 1, 1, 1, 1)
    config = EngineConfig(page_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=BUDGET)
    geometry = build_kv_config(config, spec, MemorySize(BLOCKS * BLOCK, spec.max_len, 2))
    memory = PagedMemory(geometry, max_step_tokens=BUDGET, order=[block + 1 for block in free])
    scheduler = Scheduler(memory, token_budget=BUDGET, max_seqs=4, max_len=spec.max_len)
    numbers = {word: i for i, word in enumerate(word for request in requests for word in request.words)}
    running: dict[str, Sequence] = {}
    history = []
    for step in range(steps):
        for scripted in requests:
            if scripted.arrives == step:
                prompt = [numbers[word] for word in scripted.words[: scripted.prompt]]
                seq = running[scripted.name] = Sequence(scheduler.new_seq_id(), prompt)
                params = SamplingParams(max_tokens=len(scripted.words))
                request = Request(scripted.name, seq, params, arrival_time=step, max_tokens=len(scripted.words))
                scheduler.add(request)
        plan = scheduler.schedule()
        assert plan is not None, "there is nothing to plan"
        said = []
        for row in plan.slices:
            scripted = next(item for item in requests if item.name == scheduler.by_slot[row.slot][0].id)
            said.append(SliceResult((numbers[scripted.words[row.start + len(row.tokens)]],)))
        scheduler.update(plan, StepResult(tuple(said), 0.0))
        history.append({name: block_table(memory, seq) for name, seq in running.items()})
    memory.check()
    return history


def block_table(memory: PagedMemory, seq: Sequence) -> tuple[Entry, ...]:
    """Return the physical block and the number of filled positions of each logical block, as in the paper."""
    pages = memory.get_placement(seq).tables[0]
    return tuple(Entry(page - 1, min(seq.computed - i * BLOCK, BLOCK)) for i, page in enumerate(pages))


FIGURE_6 = [Scripted("A", A, 7, 0)]
FREE_6 = [7, 1, 3, 0, 2, 4, 5, 6, 8]
STEPS_6 = [  # (what the step does, the paper's block table after it)
    ("prompt", (Entry(7, 4), Entry(1, 3))),
    ("1st decoding step", (Entry(7, 4), Entry(1, 4))),
    ("2nd decoding step", (Entry(7, 4), Entry(1, 4), Entry(3, 1))),
]

FIGURE_7 = [Scripted("A", A, 7, 0), Scripted("B", B, 5, 1)]
FREE_7 = [7, 1, 5, 2, 3, 0, 4, 6, 8]
TABLES_7: Tables = {"A": (Entry(7, 4), Entry(1, 4), Entry(3, 1)), "B": (Entry(5, 4), Entry(2, 2))}


def figure_6() -> Reproduction:
    """Run one request of 7 prompt tokens: blocks 7 and 1, then 3."""
    history = replay(FIGURE_6, FREE_6, len(STEPS_6))
    results = [
        equal("P-F6", f"block table after the {what}: (physical block, filled)", _plain(paper), _plain(tables["A"]))
        for (what, paper), tables in zip(STEPS_6, history)
    ]
    return _reproduction(results, history, FIGURE_6, "Figure 6: block table translation")


def figure_7() -> Reproduction:
    """Run two requests at the same time: A in blocks 7, 1, 3 and B in 5, 2."""
    history = replay(FIGURE_7, FREE_7, 3)
    results: list[Result] = [
        equal("P-F7", f"block table of request {name}: (physical block, filled)", _plain(TABLES_7[name]), _plain(ours))
        for name, ours in history[-1].items()
    ]
    return _reproduction(results, history, FIGURE_7, "Figure 7: the KV cache of two requests")


def _plain(entries: tuple[Entry, ...]) -> list[list[int]]:
    return [list(entry) for entry in entries]


def _reproduction(results: list[Result], history: list[Tables], requests: list[Scripted], title: str) -> Reproduction:
    rows = [
        (step + 1, name, logical, entry.physical, entry.filled, " ".join(_words(requests, name, logical, entry)))
        for step, tables in enumerate(history)
        for name, entries in tables.items()
        for logical, entry in enumerate(entries)
    ]
    text = table(("step", "request", "logical", "physical", "filled", "tokens"), rows)
    return Reproduction(results, text, lambda: draw(history[-1], requests, title))


def _words(requests: list[Scripted], name: str, logical: int, entry: Entry) -> list[str]:
    words = next(request.words for request in requests if request.name == name)
    return words[logical * BLOCK : logical * BLOCK + entry.filled]


def draw(tables: Tables, requests: list[Scripted], title: str) -> Figure:
    """Draw logical blocks on the left, physical ones in the middle or on the right, and arrows between them."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4.6)
    axes = fig.add_subplot()
    centre = BLOCK + 1.5
    _grid(axes, centre, BLOCKS, [f"{i}" for i in range(BLOCKS)])
    axes.text(centre + BLOCK / 2, 0.9, "physical KV blocks", ha="center", va="bottom", weight="bold")
    for (name, entries), colour, left in zip(tables.items(), COLOURS, (0.0, 2 * BLOCK + 3.0)):
        top = (BLOCKS - len(entries)) // 2
        axes.text(
            left + BLOCK / 2, -top + 0.9, f"request {name}: logical KV blocks", ha="center", va="bottom", weight="bold"
        )
        _grid(axes, left, len(entries), [f"{i}" for i in range(len(entries))], top)
        for logical, entry in enumerate(entries):
            for i, word in enumerate(_words(requests, name, logical, entry)):
                for x, y in ((left + i, -top - logical), (centre + i, -entry.physical)):
                    axes.fill_between([x, x + 1], y, y + 0.8, color=colour, alpha=0.25, linewidth=0)
                    axes.text(x + 0.5, y + 0.4, word, ha="center", va="center", fontsize=9)
            right = left < centre
            start = (left + BLOCK if right else left - 0.45, 0.4 - top - logical)
            end = (centre - 0.45 if right else centre + BLOCK, 0.4 - entry.physical)
            axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.4})
    axes.set_title(title)
    axes.set_axis_off()
    return fig


def _grid(axes: Axes, left: float, count: int, labels: list[str], top: int = 0) -> None:
    """Draw `count` blocks of empty cells, numbered on the left."""
    for i in range(count):
        y = -top - i
        for j in range(BLOCK + 1):
            axes.plot([left + j, left + j], [y, y + 0.8], color="0.4", linewidth=0.8)
        for edge in (y, y + 0.8):
            axes.plot([left, left + BLOCK], [edge, edge], color="0.4", linewidth=0.8)
        axes.text(left - 0.1, y + 0.4, labels[i], ha="right", va="center", fontsize=9, color="0.3")
