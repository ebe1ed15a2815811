"""Reproduce vAttention's arithmetic: its models (Table 5), tokens of a page and waste of a request (Table 8), bytes of
a token (§4) and addresses of a memory (§5.1.1), from the models' shapes and the layout of contiguous memory alone.

The paper writes KB and MB for powers of two, and its GB and TB are 1,000 and 10^6 of these MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from papers.closed_forms import bars, spec_of
from papers.result import Reproduction, Result, equal, measured
from quire.bench.document import table
from quire.memory.virtual.buffers import BufferLayout, max_waste_bytes, plan_buffers, split_workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF = 2  # bytes of a number
KIB, MIB = 2**10, 2**20
NATIVE = 2 * MIB  # what an unchanged CUDA driver maps
PAGES = {"64 KB": 64 * KIB, "128 KB": 128 * KIB, "256 KB": 256 * KIB, "2 MB": NATIVE}
OURS = ("sliced:8", "sliced")  # layouts beside the paper's
CROWD = 200  # requests: "even at such large batch sizes", §7.4

# name -> query heads, KV heads, layers, as Table 5 gives them; and the KB of a token's KV cache, §4
TABLE_5 = {"yi-6b": (32, 4, 32), "llama3-8b": (32, 8, 32), "yi-34b": (56, 8, 60)}
TOKEN_KB = {"yi-6b": 64, "llama3-8b": 128, "yi-34b": 240}


class Row(NamedTuple):
    """A line of Table 8: for each of PAGES, the number of tokens in one, and the MB that a request wastes at most."""

    tokens: Sequence[float]
    waste: Sequence[float]


TABLE_8 = {  # (model, tensor-parallel workers)
    ("yi-6b", 1): Row([64, 128, 256, 2048], [4, 8, 16, 128]),
    ("yi-6b", 2): Row([128, 256, 512, 4096], [8, 16, 32, 256]),
    ("llama3-8b", 1): Row([32, 64, 128, 1024], [4, 8, 16, 128]),
    ("llama3-8b", 2): Row([64, 128, 256, 2048], [8, 16, 32, 256]),
    ("yi-34b", 1): Row([32, 64, 128, 1024], [7.5, 15, 30, 240]),
    ("yi-34b", 2): Row([64, 128, 256, 2048], [15, 30, 60, 480]),
}


def on_workers(name: str, tensor: int, page: int, layout: str) -> list[BufferLayout]:
    """Return the buffers of each of `tensor` workers."""
    spec = spec_of(name)
    layer = spec.layers[0]
    return [
        plan_buffers(worker.layers, worker.kv_heads * layer.head_dim * HALF, page, layout)
        for worker in split_workers(len(spec.layers), layer.kv_heads, tensor)
    ]


# Table 5


def table_5() -> Reproduction:
    """Compare the models with the named configs."""
    results, rows = [], []
    for name, (heads, kv_heads, layers) in TABLE_5.items():
        spec = spec_of(name)
        kept = spec.layers[0]
        results += [
            equal("V-T5", f"{name}: query heads", heads, spec.heads),
            equal("V-T5", f"{name}: KV heads", kv_heads, kept.kv_heads),
            equal("V-T5", f"{name}: layers", layers, len(spec.layers)),
        ]
        rows.append((
            name, spec.heads // kept.kv_heads, kept.head_dim, round(spec.parameters / 1e9, 2),
            round(spec.parameters * HALF / 1e9, 1), spec.token_bytes(HALF) // KIB,
        ))  # fmt: skip
    head = ("model", "query heads a KV head", "head_dim", "10^9 parameters", "GB of weights", "KB a token")
    text = (
        "The paper's hardware: Yi-6B on one A100 of 80 GB, Llama-3-8B and Yi-34B on two (TP-2).\n"
        "One H200 keeps each of them. Weights and KV in numbers of two bytes:\n\n" + table(head, rows)
    )
    return Reproduction(results, text, _draw_heads)


def _draw_heads() -> Figure:
    """Draw which query heads share keys and values."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 4.2)
    for axes, name, colour in zip(fig.subplots(1, len(TABLE_5)), TABLE_5, COLOURS):
        spec = spec_of(name)
        kv_heads = spec.layers[0].kv_heads
        group = spec.heads // kv_heads
        for row in range(kv_heads):
            axes.scatter([0], [row], marker="s", s=130, color=colour)
            axes.scatter(range(2, 2 + group), [row] * group, marker="s", s=70, color=colour, alpha=0.35)
        axes.set_xticks([0, 1.5 + group / 2], ["KV", f"{group} query heads"])
        axes.set_yticks(range(kv_heads))
        axes.set_xlim(-1, 10.5)
        axes.set_ylim(7.8, -0.8)
        axes.set_title(f"{name}: {spec.heads} / {kv_heads} heads, {len(spec.layers)} layers", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Table 5: heads of the models")
    return fig


# Table 8


def table_8() -> Reproduction:
    """Compute all 48 numbers by the paper's layout, a buffer a layer, and by layouts with several layers a buffer."""
    results: list[Result] = []
    for (name, tensor), paper in TABLE_8.items():
        ours = row_of(name, tensor, "layer")
        results += [
            equal("V-T8", f"{name}, TP-{tensor}: tokens of a page of {', '.join(PAGES)}", paper.tokens, ours.tokens),
            equal("V-T8", f"{name}, TP-{tensor}: most waste of a request", paper.waste, ours.waste, "MB"),
        ]
    for name, tensor in TABLE_8:
        for layout in OURS:
            ours = row_of(name, tensor, layout)
            what = f"{name}, TP-{tensor}, {layout}"
            results.append(measured("V-T8", f"{what}: tokens of a page of {', '.join(PAGES)}", ours.tokens, ""))
            results.append(measured("V-T8", f"{what}: most waste of a request", ours.waste, "MB"))
    return Reproduction(results, _text_8(), _draw_8, [*_points()])


def row_of(name: str, tensor: int, layout: str) -> Row:
    """Return our line of the table. Fractions of tokens are rounded to hundredths."""
    found = [on_workers(name, tensor, page, layout) for page in PAGES.values()]
    tokens = [_plain(round(each[0].run_tokens / each[0].run_pages, 2)) for each in found]
    return Row(tokens, [_plain(max_waste_bytes(each) / MIB) for each in found])


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _points() -> Iterator[dict[str, object]]:
    for name, tensor in TABLE_8:
        for layout in ("layer", *OURS):
            row = row_of(name, tensor, layout)
            for page, tokens, waste in zip(PAGES, *row):
                yield {"model": name, "tensor": tensor, "layout": layout, "page": page, "tokens": tokens, "mb": waste}


def _text_8() -> str:
    """Return a table of 2 MB pages by layout: tokens of a page, and the worst-case waste of many requests."""
    rows = []
    for name, tensor in TABLE_8:
        for layout in ("layer", "sliced:4", *OURS):
            found = on_workers(name, tensor, NATIVE, layout)
            tokens = _plain(round(found[0].run_tokens / found[0].run_pages, 2))
            waste = max_waste_bytes(found)
            rows.append(
                (
                    name,
                    f"TP-{tensor}",
                    layout,
                    tokens,
                    waste // MIB,
                    found[0].num_buffers,
                    round(CROWD * waste / 2**30, 2),
                )
            )
    head = ("model", "workers", "layout", "tokens", "MB wasted", "pages mapped at once", f"GB by {CROWD} requests")
    crowd = [
        (size, *(round(CROWD * worst(max_waste_bytes(on_workers(*of, page, "layer")) for of in TABLE_8) / 2**30, 1)
                 for worst in (min, max)))
        for size, page in PAGES.items()
    ]  # fmt: skip
    eight = on_workers("yi-34b", 1, NATIVE, "sliced:8")[0]
    empty = 1 - eight.token_bytes / (eight.num_buffers * eight.stride)
    said = "; ".join(f"{size} {least:g} to {most:g}" for size, least, most in crowd)
    return (
        "Pages of 2 MB, by how many layers share a buffer (all workers together; pages mapped on each):\n\n"
        f"{table(head, rows)}\n\n"
        f'The paper (§7.4): "even at such large batch sizes" (about {CROWD}) "the maximum theoretical memory waste is\n'
        f'at most a few GBs". In GB, with its layout, for the least and the most of the six:\n{said}.\n'
        "Where tokens of a page are not whole, a token may lie in two pages, which are neighbours in addresses.\n"
        f"Where layers don't fill the last buffer, part of each page stays empty: {empty:.2%} of Yi-34B's in sliced:8."
    )


def _draw_8() -> Figure:
    """Draw the largest waste of a request, with the tokens of a page on each bar."""
    from quire.bench.plots import COLOURS, figure

    ways = [(f"layer, {size}", "layer", i) for i, size in enumerate(PAGES)]
    ways += [(f"{layout}, 2 MB", layout, len(PAGES) - 1) for layout in OURS]
    alphas = (0.3, 0.5, 0.7, 1.0, 1.0, 1.0)
    colours = (*[COLOURS[0]] * len(PAGES), COLOURS[2], COLOURS[1])
    fig = figure(12, 4.8)
    axes = fig.add_subplot()
    width = 0.85 / len(ways)
    for i, (label, layout, page) in enumerate(ways):
        found = [row_of(*of, layout) for of in TABLE_8]
        at = [x + (i - len(ways) / 2 + 0.5) * width for x in range(len(TABLE_8))]
        drawn = axes.bar(at, [row.waste[page] for row in found], width, color=colours[i], alpha=alphas[i], label=label)
        axes.bar_label(drawn, [f"{row.tokens[page]:g}" for row in found], padding=2, fontsize=7)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(2, 1024)
    axes.set_xticks(range(len(TABLE_8)), [f"{name}, TP-{tensor}" for name, tensor in TABLE_8])
    axes.set_ylabel("MB that a request wastes at most")
    axes.legend(fontsize=8, ncols=3, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Table 8: waste by page size, and tokens of a page (on the bars); sliced layouts beside it")
    return fig


# Sections 4 and 5.1.1


def token_and_addresses() -> Reproduction:
    """Compute the KV of a token, and the buffers of Yi-34B on two workers for 500 requests of 200K tokens."""
    results = [
        equal("V-X1", f"{name}: KV cache of a token", size, spec_of(name).token_bytes(HALF) // KIB, "KB")
        for name, size in TOKEN_KB.items()
    ]
    worker, _ = on_workers("yi-34b", 2, NATIVE, "layer")
    request, whole = worker.slot_bytes(200 * KIB), worker.buffer_bytes(500, 200 * KIB)
    results += [
        equal("V-M2", "yi-34b, TP-2: a token in a buffer", 4 * 128 * 2, worker.stride, "bytes"),
        equal("V-M2", "yi-34b, TP-2: a request of 200K tokens in a buffer", 200, request // MIB, "MB"),
        equal("V-M2", "yi-34b, TP-2: of a worker", 120, worker.num_buffers, "buffers"),
        equal("V-M2", "yi-34b, TP-2: a buffer for 500 requests", 100, whole // MIB / 1000, "GB (1,000 MB)"),
        equal(
            "V-M2", "yi-34b, TP-2: addresses of a worker", 12,
            worker.total_address_bytes(500, 200 * KIB) // MIB / 1e6, "TB (10^6 MB)",
        ),
    ]  # fmt: skip
    sliced, _ = on_workers("yi-34b", 2, NATIVE, "sliced")
    text = (
        f"A token takes {worker.stride:,} bytes in each of {worker.num_buffers} buffers. A request's place is whole "
        f"pages "
        f"here:\nof 200,000 tokens {worker.slot_bytes(200_000) / MIB:g} MB of 2 MB pages instead of "
        f"{200_000 * worker.stride / MIB:.1f}.\n"
        f"Sliced, {sliced.num_buffers} buffers of {sliced.buffer_bytes(500, 200 * KIB) / 2**40:.2f} TiB each take "
        f"the same "
        f"addresses: {sliced.total_address_bytes(500, 200 * KIB) / 2**40:.2f} TiB of the 128 that a process has."
    )
    title = "vAttention §4, §5.1.1: KV of a token, addresses of a memory"
    return Reproduction(results, text, partial(bars, results, title))
