"""Reproduce PagedAttention Table 1 and the arithmetic of §3: bytes of weights and of KV, from the models' shapes alone.

The paper writes KB and GB for powers of ten and for powers of two; each result names the one that it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from papers.result import Reproduction, Result, equal, near
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FP16 = 2
GIB = 2**30
TOLERANCE = 0.02

# name -> GB of parameters, GB for KV cache, thousands of KV slots, as Table 1 gives them
TABLE_1 = {"opt-13b": (26, 12, 15.7), "opt-66b": (132, 21, 9.7), "opt-175b": (346, 264, 60.1)}


def spec_of(name: str) -> ModelSpec:
    return read_spec(named_config(name))


def table_1() -> Reproduction:
    """Compute parameters in 10^9 bytes, and the slots of a KV cache whose size is given in 2^30 bytes."""
    results = []
    for name, (parameters, cache, slots) in TABLE_1.items():
        spec = spec_of(name)
        ours = round(spec.parameters * FP16 / 1e9, 1)
        results.append(near("P-T1", f"{name}: parameters", parameters, ours, "GB (10^9 bytes)", TOLERANCE))
        thousands = round(cache * GIB / spec.token_bytes(FP16) / 1000, 1)
        results.append(near("P-T1", f"{name}: KV slots in {cache} GiB", slots, thousands, "thousands", TOLERANCE))
    return Reproduction(results, "", lambda: bars(results, "Table 1: parameters and KV slots of OPT"))


def kv_of_a_request() -> Reproduction:
    """Compute §3's numbers: 800 KB a token and 1.6 GB a request of OPT-13B."""
    spec = spec_of("opt-13b")
    token = spec.token_bytes(FP16)
    request = token * spec.max_len
    results = [
        equal("P-X1", "opt-13b: KV cache of a token", 800, token // 1024, "KB (1,024 bytes)"),
        equal("P-X1", "opt-13b: KV cache of 2,048 tokens", 1.6, request / 2**20 / 1000, "GB (1,000 MiB)"),
    ]
    return Reproduction(
        results, f"{token:,} bytes a token, {request:,} a request", lambda: bars(results, "KV cache of OPT-13B")
    )


def bars(results: list[Result], title: str) -> Figure:
    """Draw the paper's number and ours side by side, with a panel for each, since units differ."""
    from quire.bench.plots import COLOURS, figure

    columns = min(2, len(results))
    lines = -(-len(results) // columns)
    fig = figure(9, 1.0 + 1.3 * lines)
    for axes, result in zip(fig.subplots(lines, columns, squeeze=False).flat, results):
        bars = axes.barh(["ours", "paper"], [result.ours, result.paper], color=COLOURS[:2], height=0.6)
        axes.bar_label(bars, padding=4, fmt="%g")
        axes.set_xlim(0, 1.2 * max(result.ours, result.paper))
        axes.set_title(f"{result.what}, {result.unit}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title)
    return fig
