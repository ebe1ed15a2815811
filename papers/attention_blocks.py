"""Reproduce PagedAttention Figure 18: the cost of paging in the attention kernel (a), and the effect of the page size
on requests (b).

(a) One kernel source, with page tables and without. The paper compared its kernel with FasterTransformer's, on an A100.
(b) Fixed request rates, and a KV memory as small as the paper's, so that pages too large for their sequences waste it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.document import table
from quire.bench.drive import Decoding, Load, drive
from quire.bench.latency import latencies
from quire.bench.shapes import built
from quire.bench.workloads import Job, parse, poisson
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.startup.build import BuiltEngine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = 16
BATCHES, CONTEXTS = (8, 32), (64, 128, 256, 1024, 4096)
MODELS = {"OPT-13B": (40, 40, 40), "Llama-3-8B": (32, 8, 32)}  # query heads, key/value heads, layers; heads of 128
MOST_OVERHEAD = 0.26  # the most of the paper's 20-26 %, against another kernel than its own

SIZES = {False: (1, 8, 16, 32, 128, 256), True: (1, 2, 4, 8, 16, 32, 64, 128, 256)}  # tokens of a page; with --full all
TRACES = ("sharegpt", "alpaca")
# requests of each trace, with --full
REQUESTS = {"cpu": {"sharegpt": (8, 64), "alpaca": (24, 256)}, "cuda": {"sharegpt": (64, 400), "alpaca": (600, 2000)}}
RUNS = {"cpu": {"sharegpt": 3, "alpaca": 3}, "cuda": {"sharegpt": 1, "alpaca": 3}}  # each with other arrival times
KV_TOKENS = {"cpu": 2304, "cuda": 15_700}  # Table 1: OPT-13B has 12 GB for 15.7K tokens
LOAD = 0.9  # of the requests a second that pages of 16 tokens serve when all come at once, without the tail
MANY = 0.8  # of the requests; those finished later are the tail
CLOSE = 1.1  # latency / the best one's, to count as good
WORSE = 1.2  # latency / that of pages of 16 tokens, to count as much worse


class Kernel(NamedTuple):
    """Microseconds of one layer's decode attention."""

    model: str
    batch: int
    context: int
    paged: float
    contiguous: float
    sdpa: float

    @property
    def overhead(self) -> float:
        """Return the overhead of paging, as a share."""
        return self.paged / self.contiguous - 1


def figure_18a() -> Reproduction:
    """Measure the kernel's latency over scattered pages and over contiguous ones. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce fig18a")
    points = [
        _kernel(model, batch, context) for model in MODELS for batch in BATCHES for context in CONTEXTS
    ]  # fmt: skip
    results = [
        Result(
            "P-F18a", f"{p.model}, batch {p.batch}, context {p.context}: paging costs less than the paper's",
            "20-26", round(100 * p.overhead, 1), "%", HOLDS if p.overhead <= MOST_OVERHEAD else DIFFERS,
        )
        for p in points
    ]  # fmt: skip
    rows = [
        (p.model, p.batch, p.context, *(f"{value:.1f}" for value in (p.paged, p.contiguous, p.sdpa)),
         f"{100 * p.overhead:+.1f}")
        for p in points
    ]  # fmt: skip
    head = ("model", "batch", "context", "paged us", "contiguous us", "torch SDPA us", "paging adds %")
    return Reproduction(results, table(head, rows), partial(_draw_kernels, points))


def _kernel(model: str, batch: int, context: int) -> Kernel:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from quire.bench.kernels import DIM
    from quire.bench.placed_kv import decode_calls, placed
    from quire.bench.replay import inputs, replayed

    heads, kv_heads, layers = MODELS[model]
    several = min(inputs(2 * batch * kv_heads * context * DIM * 2), layers)

    def ours(contiguous: bool) -> float:
        where = placed(batch, context, kv_heads, DIM, PAGE, several, torch.float16, heads, contiguous)
        return 1e6 * replayed(decode_calls(where), 2)

    paged, contiguous = ours(False), ours(True)
    q, *kv = (
        torch.randn(batch, count, length, DIM, dtype=torch.float16, device="cuda")
        for count, length in ((heads, 1), *((kv_heads, context),) * (2 * several))
    )
    attend = partial(scaled_dot_product_attention, q, enable_gqa=heads > kv_heads)
    calls = [partial(attend, k, v) for k, v in zip(kv[::2], kv[1::2])]
    return Kernel(model, batch, context, paged, contiguous, 1e6 * replayed(calls, 2))


class Served(NamedTuple):
    """A trace at `rate` requests a second over pages of `page` tokens, in several runs. `normalised` is the paper's
    latency, of the median run: seconds a token, a mean over requests. `apart` is the ratio of the slowest run's latency
    to the fastest's. `mean_batch` is a mean over runs; `preemptions` is the sum."""

    trace: str
    page: int
    rate: float
    normalised: float
    mean_batch: float
    preemptions: int
    apart: float = 1.0


def figure_18b(full: bool = False) -> Reproduction:
    """Measure normalised latency by page size: OPT-13B with dummy weights on a GPU, the bundled model on a CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with _engine(device, PAGE) as made:
        rates = {trace: LOAD * _capacity(made.engine, _jobs(made, device, trace, full)) for trace in TRACES}
    points = []
    for page in SIZES[full]:
        with _engine(device, page) as made:
            for trace in TRACES:
                jobs = _jobs(made, device, trace, full)
                _serve(made.engine, jobs[:4], [0.0] * 4)  # warms up
                seeds = range(RUNS[device][trace])
                told = [_serve(made.engine, jobs, poisson(len(jobs), rates[trace], seed)) for seed in seeds]
                latency = [run["normalised"] for run in told]
                point = Served(
                    trace, page, rates[trace], median(latency), fmean(run["mean_batch"] for run in told),
                    sum(run["preemptions"] for run in told), max(latency) / min(latency),
                )  # fmt: skip
                points.append(point)
                print(f"fig18b: {trace}, pages of {page}: {point.normalised:.4g} s a token", file=sys.stderr)
    points.sort()
    rows = [
        (p.trace, p.page, f"{p.rate:.3g}", f"{1000 * p.normalised:.3g}", f"{p.apart:.2f}", f"{p.mean_batch:.1f}",
         p.preemptions)
        for p in points
    ]  # fmt: skip
    head = ("trace", "page", "requests/s", "normalised ms", "slowest / fastest run", "mean batch", "preemptions in all")
    text = table(head, rows)
    about = f"{'opt-13b, dummy weights' if device == 'cuda' else 'bundled model'}, {KV_TOKENS[device]:,} tokens of KV"
    return Reproduction(_verdicts(points), f"{about}\n{text}", partial(_draw_served, points))


@contextmanager
def _engine(device: str, page: int) -> Iterator[BuiltEngine]:
    with built(_config(device, page)) as made:
        made.engine.lift_queue_limit()
        yield made


def _jobs(made: BuiltEngine, device: str, trace: str, full: bool) -> list[Job]:
    return parse(f"{trace}@{REQUESTS[device][trace][full]}").jobs(made.spec.vocab_size)


def _capacity(engine: Engine, jobs: list[Job]) -> float:
    """Return requests a second when all come at once, measured in a second run."""
    burst = [_serve(engine, jobs, [0.0] * len(jobs)) for _ in range(2)]
    return float(burst[1]["capacity"])


def _config(device: str, page: int) -> EngineConfig:
    """Return a configuration whose KV memory has the same number of tokens for any page size."""
    largest = max(SIZES[True])
    tokens = -(-KV_TOKENS[device] // largest) * largest
    config = EngineConfig(
        device=device, page_size=page, kv_tokens=tokens, max_num_seqs=256, enable_prefix_caching=False,
        preemption="recompute", skip_tokenizer_init=True,
    )  # fmt: skip
    if device == "cpu":
        return replace(config, threads=1)
    return replace(config, model_config="opt-13b", dummy_weights=True)


def _serve(engine: Engine, jobs: list[Job], times: list[float]) -> dict[str, Any]:
    """Serve the jobs. Return the facts with `normalised`, seconds a token, and `capacity`, requests a second until a
    share of MANY is finished."""
    traces, facts = drive(engine, jobs, Load(times), Decoding())
    normalised = latencies(traces)["normalised_s"]
    assert normalised is not None, "no requests"
    ends = sorted(trace.events[-1][0] for trace in traces)
    many = max(1, int(MANY * len(ends)))
    return {**facts, "capacity": many / ends[many - 1], "normalised": normalised["mean"]}


def _verdicts(points: list[Served]) -> list[Result]:
    """Judge the figure's statements, with our ratio beside each."""
    by = {(p.trace, p.page): p.normalised for p in points}
    best = {trace: min(p.normalised for p in points if p.trace == trace) for trace in TRACES}

    def share(page: int) -> float:
        return by["sharegpt", page]

    def alpaca(page: int) -> float:
        return by["alpaca", page]

    sizes = sorted({p.page for p in points})
    good, largest = [page for page in sizes if 16 <= page <= 128], sizes[-1]
    return [
        _claim(f"ShareGPT: pages of 16 to 128 tokens, slowest / best of all (at most {CLOSE})",
               max(map(share, good)) / best["sharegpt"], CLOSE),
        _claim(f"Alpaca: pages of 16 and 32 tokens, slower / best of all (at most {CLOSE})",
               max(map(alpaca, [page for page in good if page <= 32])) / best["alpaca"], CLOSE),
        _claim(f"Alpaca: pages of {largest} tokens / pages of 16 (at least {WORSE})",
               alpaca(largest) / alpaca(PAGE), WORSE, above=True),
        _claim("ShareGPT: pages of 1 token / pages of 16 (at least 1)", share(1) / share(PAGE), 1.0, above=True),
    ]  # fmt: skip


def _claim(what: str, ratio: float, limit: float, above: bool = False) -> Result:
    holds = ratio >= limit if above else ratio <= limit
    return Result("P-F18b", what, None, round(ratio, 3), "ratio", HOLDS if holds else DIFFERS)


def _draw_kernels(points: list[Kernel]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    for axes, model in zip(fig.subplots(1, len(MODELS)), MODELS):
        for batch, style in zip(BATCHES, ("o-", "s--")):
            mine = [p for p in points if (p.model, p.batch) == (model, batch)]
            for name, colour in zip(("paged", "contiguous", "sdpa"), COLOURS):
                label = f"{name}, batch {batch}"
                axes.loglog(
                    [p.context for p in mine], [getattr(p, name) for p in mine], style, color=colour, label=label
                )
        axes.set_xticks(CONTEXTS, [str(context) for context in CONTEXTS])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("us a layer")
        axes.set_title(model)
        axes.legend(fontsize=8)
    fig.suptitle("Figure 18a: decode attention with page tables and without")
    return fig


def _draw_served(points: list[Served]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    fig = figure(7, 4)
    axes = fig.add_subplot()
    for trace, colour in zip(TRACES, COLOURS):
        mine = [p for p in points if p.trace == trace]
        axes.plot([p.page for p in mine], [1000 * p.normalised for p in mine], "o-", color=colour, label=trace)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({p.page for p in points})
    axes.set_xticks(sizes, [str(page) for page in sizes])
    axes.set_xlabel("tokens of a page")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.set_ylabel("normalised latency, ms a token")
    axes.set_title("Figure 18b: latency by page size, at a fixed request rate")
    axes.legend()
    return fig
