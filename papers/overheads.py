"""Measure two overheads that PagedAttention gives no figure for: one page table per layer instead of one for all layers
(footnote 1), and the host time of a step.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import control
from papers.result import Reproduction, at_most, equal, near
from quire.bench.document import table
from quire.config import EngineConfig, Experiment
from quire.core.engine import Engine
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCOPES = ("model", "layer")
REPEATS = 5
STEPS = 200
TIME_TOLERANCE = 0.1
MOST_TOKENS = 2**24
LIMITS_US = {1: 100, 256: 2000, 1000: 6000}  # running sequences -> microseconds a step
SHAPE = {
    **named_config("llama-125m"),
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 1024,
}
PROMPTS = [[3 + (7 * i + j) % 200 for j in range(17 + 5 * i)] for i in range(8)]
OUTPUT = 32


def table_scope() -> Reproduction:
    """Compare one page table per layer with one for all, on a small LLaMA shape with dummy weights in float32.

    The tokens must be equal. The time is the median ratio."""
    engines = {scope: _engine(scope) for scope in SCOPES}
    tokens: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    for _ in range(REPEATS):  # in turn, so that noise on the machine affects both alike
        for scope, engine in engines.items():
            began = time.perf_counter()
            tokens[scope] = _generate(engine)
            seconds[scope].append(time.perf_counter() - began)
    for engine in engines.values():
        engine.close()
    ratio = round(median(layer / model for layer, model in zip(seconds["layer"], seconds["model"])), 3)
    same = sum(a == b for a, b in zip(tokens["model"], tokens["layer"]))
    results = [
        equal("P-M9", "requests whose tokens are the same with one table a layer", len(PROMPTS), same, "requests"),
        near("P-M9", "time with one table a layer / one for all", 1.0, ratio, "ratio", TIME_TOLERANCE),
    ]
    rows = [(scope, *(f"{1000 * value:.1f}" for value in seconds[scope])) for scope in SCOPES]
    text = table(("tables by", *(f"run {i + 1}, ms" for i in range(REPEATS))), rows)
    return Reproduction(results, text, lambda: _draw_scopes(seconds))


def _engine(scope: str) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        return build(_config(folder, scope)).engine


def _config(folder: str, scope: str) -> EngineConfig:
    return EngineConfig(
        model=folder, dummy_weights=True, skip_tokenizer_init=True, dtype="float32", threads=1,
        kv_tokens=4096, enable_prefix_caching=False, experiment=Experiment(table_scope=scope),
    )  # fmt: skip


def _generate(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[int(output.request_id)] += output.tokens
    return tokens


def step_overhead() -> Reproduction:
    """Measure the median microseconds of planning, memory and output processing, at short and 32K contexts."""
    loads = [(count, context) for context in (128, 32768) for count in LIMITS_US if count * context < MOST_TOKENS]
    costs = [control.step_cost(count, context, STEPS) for count, context in loads]
    results = [
        at_most(
            "P-M33",
            f"control plane, {cost['sequences']} sequences of {cost['context']} tokens",
            LIMITS_US[cost["sequences"]],
            round(cost["step_us"]["p50"], 1),
            "us a step",
        )
        for cost in costs
    ]
    return Reproduction(results, control.show(costs), lambda: _draw_costs(costs))


def _draw_scopes(seconds: dict[str, list[float]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(6, 3.6)
    axes = fig.add_subplot()
    for scope, colour in zip(SCOPES, COLOURS):
        label = "one table a layer" if scope == "layer" else "one table for all layers"
        axes.plot(range(1, REPEATS + 1), [1000 * value for value in seconds[scope]], "o-", color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, REPEATS + 1))
    axes.set_xlabel("run")
    axes.set_ylabel(f"ms for {len(PROMPTS)} requests of {OUTPUT} tokens")
    axes.set_title("Page tables by model or by layer (footnote 1)")
    axes.legend()
    return fig


def _draw_costs(costs: list[dict[str, Any]]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(7, 4)
    axes = fig.add_subplot()
    contexts = list(dict.fromkeys(cost["context"] for cost in costs))
    for context, colour, marker in zip(contexts, COLOURS, "os"):
        points = [(cost["sequences"], cost["step_us"]["p50"]) for cost in costs if cost["context"] == context]
        axes.loglog(*zip(*points), marker + "-", color=colour, label=f"contexts of {context:,} tokens")
    axes.loglog(list(LIMITS_US), list(LIMITS_US.values()), "k_", markersize=16, label="limit")
    axes.set_xlabel("running sequences")
    axes.set_ylabel("median us a step")
    axes.set_title("What the control plane costs a step")
    axes.legend()
    return fig
