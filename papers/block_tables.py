"""Run scripted requests through the real memory and scheduler, and draw their block tables as PagedAttention Figures 6
and 7 do.

Physical block p of the paper is page p + 1 here, since page 0 is scratch; points have the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.memory.paged import PagedMemory
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence as Seq
from quire.protocol.step_plan import SliceResult, StepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK = 4  # tokens
BLOCKS = 9
BUDGET = 64  # tokens of a step: more than the prompts


class Scripted(NamedTuple):
    """A request with a given output, which arrives before step `arrives`; its prompt is `words[:prompt]`."""

    name: str
    words: list[str]
    prompt: int
    arrives: int


def replay(requests: Sequence[Scripted], free: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Return the block tables after each of `steps` steps: for each logical block its physical one, the number of
    filled positions and their words. `free`: the free physical blocks, the next one first."""
    spec = ModelSpec("words", (LayerSpec(1, 1),), 64, 32, 1, 1, 1, 1)
    config = EngineConfig(page_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=BUDGET)
    geometry = build_kv_config(config, spec, MemorySize(BLOCKS * BLOCK, spec.max_len, 2))
    memory = PagedMemory(geometry, max_step_tokens=BUDGET, order=[block + 1 for block in free])
    scheduler = Scheduler(memory, token_budget=BUDGET, max_seqs=4, max_len=spec.max_len)
    numbers = {word: i for i, word in enumerate(word for request in requests for word in request.words)}
    running: dict[str, Seq] = {}
    points = []
    for step in range(steps):
        for one in requests:
            if one.arrives == step:
                seq = running[one.name] = Seq(
                    scheduler.new_seq_id(), [numbers[word] for word in one.words[: one.prompt]]
                )
                params = SamplingParams(max_tokens=len(one.words))
                scheduler.add(Request(one.name, seq, params, arrival_time=step, max_tokens=len(one.words)))
        plan = scheduler.schedule()
        assert plan is not None, "there is nothing to plan"
        sampled = []
        for row in plan.slices:
            words = next(one.words for one in requests if one.name == scheduler.by_slot[row.slot][0].id)
            sampled.append(SliceResult((numbers[words[row.start + len(row.tokens)]],)))
        scheduler.update(plan, StepResult(tuple(sampled), 0.0))
        for one in requests:
            if one.name not in running:
                continue
            seq = running[one.name]
            for logical, page in enumerate(memory.get_placement(seq).tables[0]):
                words = one.words[logical * BLOCK : min(seq.computed, (logical + 1) * BLOCK)]
                points.append({
                    "step": step + 1, "request": one.name, "logical": logical, "physical": page - 1,
                    "filled": len(words), "tokens": " ".join(words),
                })  # fmt: skip
    memory.check()
    return points


def draw(title: str, points: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the tables after the last step: logical blocks on the left and right, physical ones in the middle, and
    arrows between them."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4.6)
    axes = fig.add_subplot()
    centre = BLOCK + 1.5
    for block in range(BLOCKS):
        _block(axes, centre, -block, block)
    axes.text(centre + BLOCK / 2, 0.9, "physical KV blocks", ha="center", weight="bold")
    last = [point for point in points if point["step"] == points[-1]["step"]]
    names = dict.fromkeys(point["request"] for point in last)
    for name, colour, left in zip(names, COLOURS, (0.0, 2 * BLOCK + 3.0)):
        mine = [point for point in last if point["request"] == name]
        top = -((BLOCKS - len(mine)) // 2)
        axes.text(left + BLOCK / 2, top + 0.9, f"request {name}: logical KV blocks", ha="center", weight="bold")
        for point in mine:
            logical, physical = top - point["logical"], -point["physical"]
            _block(axes, left, logical, point["logical"])
            for x, y in ((left, logical), (centre, physical)):
                _block(axes, x, y, None, colour, point["tokens"].split())
            start, end = (left + BLOCK, centre - 0.45) if left < centre else (left - 0.45, centre + BLOCK)
            arrow = {"arrowstyle": "->", "color": colour, "linewidth": 1.4}
            axes.annotate("", (end, physical + 0.4), (start, logical + 0.4), arrowprops=arrow)
    axes.set_title(title)
    axes.set_axis_off()
    return fig


def _block(
    axes: Axes, x: float, y: float, number: int | None, colour: str = "none", words: Sequence[str] = ("",) * BLOCK
) -> None:
    """Draw the cells of a block with their words, and its number on the left."""
    places = [x + i + 0.5 for i in range(len(words))]
    axes.bar(places, 0.8, 1.0, y, color=colour, alpha=None if colour == "none" else 0.25, edgecolor="0.4")
    for place, word in zip(places, words):
        axes.text(place, y + 0.4, word, ha="center", va="center", fontsize=9)
    if number is not None:
        axes.text(x - 0.1, y + 0.4, str(number), ha="right", va="center", fontsize=9, color="0.3")
