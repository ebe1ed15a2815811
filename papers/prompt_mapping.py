"""Measure a prompt of 16K tokens with its pages mapped on demand, and with pages already mapped (vAttention Figure 11).

Three models with dummy weights on a GPU, in pages of 2 MB; a small shape on a CPU, in page sizes that a GPU lacks.
Prompts run one after another. With mapping on demand each prompt gets a slot without pages, since those of the previous
prompt are unmapped. With all optimizations it gets the previous slot with its pages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from papers.dummy_engines import PAGED, SHAPES, dummy, release, virtual
from papers.result import DIFFERS, HOLDS, MEASURED, Reproduction, Result, left_out
from quire.bench.document import table
from quire.errors import StartupError
from quire.models.named_configs import named_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.core.engine import Engine

LENGTH = {"cuda": 16384, "cpu": 2048}
REPEATS = 3
PAPER = {64: 1.15, 128: 1.07, 256: 1.03, 2048: 1.03}  # KB of a page -> limit on the time, relative to no mapping
NOTHING = 1.03  # of the time over pages, at most, to count as 1.00
CPU_PAGES = (64, 128, 256, 2048)
LAYOUTS = ("layer", "sliced")
CPU_TOKENS = 2**15  # of the memory
SMALL = {
    **named_config("llama-125m"), "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "dtype": "float32",
}  # fmt: skip

Points = Sequence[dict[str, Any]]


def figure_11() -> Reproduction:
    """Measure the paper's models on a GPU, or a small one on a CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = list(SHAPES) if device == "cuda" else ["small"]
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for model in models:
        for way, settings in ways(device).items():
            print(f"{model}, {way}", file=sys.stderr)
            try:
                points += _run(model, way, settings, device)
            except StartupError as error:
                missing[f"{model}, {way}"] = str(error)[:160]
            release()
    rows = [
        (p["model"], p["way"], f"{p['ms']:.1f}", f"{p['ratio']:.3f}", p["base"], p["maps"], f"{p['stalled_ms']:.2f}")
        for p in compared(points)
    ]
    head = ("model", "way", "prompt ms", "ratio", "to", "pages mapped first", "ms for that")
    said = left_out(missing)
    if device == "cpu":
        said += f"\nA small shape of {SMALL['num_hidden_layers']} layers, prompts of {LENGTH['cpu']:,} tokens."
    return Reproduction(judged(points), table(head, rows) + said, partial(draw, points), points)


def ways(device: str) -> dict[str, dict[str, Any]]:
    """Return settings by name: paged; mapped on demand, by page size; and all optimizations."""
    found: dict[str, dict[str, Any]] = {"paged": PAGED}
    if device == "cuda":
        found |= {f"2048 KB, {layout}, sync": virtual(layout, False) for layout in LAYOUTS}
        return found | {f"2048 KB, {layout}, all on": virtual(layout) for layout in LAYOUTS}
    found |= {f"{kib} KB, layer, sync": {**virtual("layer", False), "virtual_page_kib": kib} for kib in CPU_PAGES}
    return found | {"64 KB, layer, all on": {**virtual("layer"), "virtual_page_kib": 64}}


def _run(model: str, way: str, settings: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """Return the medians over several prompts."""
    from quire.bench import contexts

    length = LENGTH[device]
    budget = length + 2 * (REPEATS + 1)  # a whole prompt in a step, with the decoding sequences
    small = {"threads": 1, "device": "cpu", "kv_tokens": CPU_TOKENS}
    more = {"max_num_batched_tokens": budget, **settings, **(small if device == "cpu" else {})}
    seen = []
    with dummy(SMALL if model == "small" else model, length + 64, REPEATS + 1, **more) as made:
        engine = made.engine
        engine.depth = 1
        for i in range(REPEATS + 1):
            seen.append(_prompt(engine, f"row-{i}", length))
            contexts.stop(engine)
            if way.endswith("sync"):
                _unmap_free_slots(engine)
        del engine
    del made
    seconds, maps, stalled = zip(*seen[1:])  # the first one compiles kernels
    return [{"model": model, "way": way, "ms": 1000 * median(seconds), "maps": median(maps),
             "stalled_ms": 1000 * median(stalled)}]  # fmt: skip


def _unmap_free_slots(engine: Engine) -> None:
    from quire.bench.shapes import local_runner
    from quire.memory.virtual.virtual_memory import VirtualMemory

    store: Any = local_runner(engine).store
    for slot in cast(VirtualMemory, engine.scheduler.memory).forget_free_slots():
        store.unmap_slot(slot)


def _prompt(engine: Engine, name: str, length: int) -> tuple[float, int, float]:
    """Return the seconds to a prompt's first token, the pages mapped on its critical path, and the seconds of
    mapping."""
    from quire.bench.contexts import TOKEN
    from quire.bench.shapes import local_runner
    from quire.protocol.sampling_params import SamplingParams

    store: Any = local_runner(engine).store
    before = getattr(store, "mapping_stats", None)
    began = time.perf_counter()
    engine.add(name, [TOKEN] * length, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False))
    while not any(output.request_id == name and output.tokens for output in engine.step()):
        pass
    seconds = time.perf_counter() - began
    if before is None:
        return seconds, 0, 0.0
    after = store.mapping_stats
    return (
        seconds,
        after.maps - after.overlapped - before.maps + before.overlapped,
        after.stall_seconds - before.stall_seconds,
    )


def compared(points: Points) -> list[dict[str, Any]]:
    """Return the points with `ratio`.

    For mapping on demand it is to all optimizations in the same layout, where kernels and addresses are equal; for all
    optimizations it is to paged memory."""
    ms = {(p["model"], p["way"]): p["ms"] for p in points}
    found = []
    for p in points:
        layout = p["way"].split(", ")[1] if p["way"].endswith("sync") else ""
        on = (way for model, way in ms if model == p["model"] and way.endswith(f"{layout}, all on"))
        base = next(on, "paged") if layout else "paged"
        if p["model"] == "small" and layout:  # a small shape's times vary by more than the maps take
            found.append({**p, "ratio": p["ms"] / (p["ms"] - p["stalled_ms"]), "base": "without its maps"})
        elif (p["model"], base) in ms:
            found.append({**p, "ratio": p["ms"] / ms[p["model"], base], "base": base})
    return found


def judged(points: Points) -> list[Result]:
    """Judge 2 MB pages on a GPU against the paper, and all optimizations against no mapping; a CPU is only measured."""
    results = []
    for p in compared(points):
        if p["way"] == "paged":
            continue
        everything = p["way"].endswith("all on")
        paper = 1.0 if everything else PAPER[int(p["way"].split()[0])]
        ratio = round(p["ratio"], 3)
        good = ratio <= (NOTHING if everything else paper)
        verdict = MEASURED if p["model"] == "small" else HOLDS if good else DIFFERS
        what = f"{p['model']}, {p['way']}: a prompt / {p['base']}"
        results.append(Result("V-F11", what, paper if everything else f"up to {paper}", ratio, "times", verdict))
    return results


def draw(data: Points) -> Figure:
    from quire.bench.plots import COLOURS, figure

    models = list(dict.fromkeys(p["model"] for p in data))
    fig = figure(4 * len(models) + 3, 4)
    for axes, model in zip(fig.subplots(1, len(models), squeeze=False).flat, models):
        mine = [p for p in compared(data) if p["model"] == model]
        colours = [COLOURS[1 if "sync" in p["way"] else 2 if "all on" in p["way"] else 0] for p in mine]
        bars = axes.bar([p["way"].replace(", ", "\n") for p in mine], [p["ms"] for p in mine], color=colours)
        axes.bar_label(bars, [f"{p['ratio']:.2f}x" for p in mine], fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(model, fontsize=10)
        axes.set_ylabel("ms until the first token")
    fig.suptitle("vAttention Figure 11: a prompt, with pages mapped first and not")
    return fig
