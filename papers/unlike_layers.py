"""Compute Jenga Figures 3 and 7 and the arithmetic of §2, from shapes.

Figure 3 is the waste of uniform pages where layers need different tokens; Figure 7 is the addresses of each layer's
pages in two layouts, compared with the runner's own views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.closed_forms import bars, spec_of
from papers.layer_kinds import GEMMA2_9B, GEMMA2_27B, MLLAMA, Kind, named
from papers.result import DIFFERS, HOLDS, Reproduction, Result, equal, measured
from quire.bench.document import table
from quire.memory.jenga.page_sizes import wasted_fraction
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT, IMAGE = 43, 6193  # mean tokens of a request of MMMU-pro (§3.2)
ARTICLE = 92_408  # of arXiv-QA (§7.2)
LONGEST = {"Gemma-2": 8192, "Ministral": 131_072}  # most tokens of a request


class Need(NamedTuple):
    """A kind of layers, the units of it that a request needs, and those that uniform pages hold."""

    kind: Kind
    needed: int
    held: int


def waste(needs: Sequence[Need]) -> float:
    """Return the unneeded share of a request's uniform pages, in per cent. All layers must have equal bytes per
    token."""
    assert len({need.kind.unit_bytes for need in needs}) == 1, "layers keep different bytes of a token"
    return float(100 * wasted_fraction(needs[0].held, [(need.kind.layers, need.needed) for need in needs]))


def of_length(kinds: Sequence[Kind], tokens: int) -> list[Need]:
    """Return the needs of a request of `tokens` tokens, which uniform pages hold in every layer."""
    return [Need(kind, kind.needed(tokens), tokens) for kind in kinds]


def of_images(kinds: Sequence[Kind], text: int, image: int) -> list[Need]:
    """Return the needs of a request with images: cross-attention layers need image tokens, all others text tokens."""
    return [Need(kind, image if kind.unit == "image token" else text, text + image) for kind in kinds]


def cases() -> dict[str, tuple[str, float | None, list[Need]]]:
    """Return label -> model, the paper's per cent if given, the request."""
    ministral = named("ministral-8b")
    return {
        f"Llama 3.2 11B Vision, {TEXT} text and {IMAGE:,} image tokens": (
            "Llama 3.2 Vision", 79.6, of_images(MLLAMA, TEXT, IMAGE),
        ),
        f"Gemma-2 9B, {LONGEST['Gemma-2']:,} tokens": (
            "Gemma-2 9B", 25.0, of_length(GEMMA2_9B, LONGEST["Gemma-2"])
        ),
        f"Gemma-2 27B, {LONGEST['Gemma-2']:,} tokens": (
            "Gemma-2 27B", 25.0, of_length(GEMMA2_27B, LONGEST["Gemma-2"])
        ),
        f"Ministral 8B, {LONGEST['Ministral']:,} tokens": (
            "Ministral 8B", 56.25, of_length(ministral, LONGEST["Ministral"])
        ),
        f"Ministral 8B, {ARTICLE:,} tokens (arXiv-QA's mean)": (
            "Ministral 8B", None, of_length(ministral, ARTICLE)
        ),
    }  # fmt: skip


def figure_3() -> Reproduction:
    """Compare the waste of §3.2 and of the figure's five layers; also at the mean length of the paper's data set."""
    found = cases()
    results = [
        measured("J-F3", f"{what}: wasted", round(waste(needs), 2), "%")
        if paper is None
        else Result("J-F3", f"{what}: wasted", paper, round(waste(needs), 2), "%",
                    HOLDS if round(waste(needs), _digits(paper)) == paper else DIFFERS)
        for what, (_, paper, needs) in found.items()
    ]  # fmt: skip
    rows = [
        (model, need.kind.name, need.kind.layers, f"{need.needed:,}", f"{need.held:,}", f"{waste([need]):.2f}%")
        for model, _, needs in found.values()
        for need in needs
    ]
    head = ("model", "layers", "count", "needed", "held by uniform pages", "of these wasted")
    text = (
        f"{table(head, rows)}\n"
        "The longest request is the worst one; of shorter ones less is wasted, and of those within a window nothing.\n"
        "What serving wastes over time: jenga-fig16."
    )
    data = {what: waste(needs) for what, (_, _, needs) in found.items()}
    return Reproduction(results, text, lambda: _draw_3(found), data)


def _digits(number: float) -> int:
    """Return the digits after the decimal point."""
    return len(f"{number:g}".partition(".")[2])


def _draw_3(found: dict[str, tuple[str, float | None, list[Need]]]) -> Figure:
    """Draw a bar for each case: the need of each kind, and the waste."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(9, 4)
    axes = fig.add_subplot()
    for line, needs in enumerate(needs for _, _, needs in found.values()):
        whole, left = sum(need.kind.layers * need.held for need in needs), 0.0
        for need, colour in zip(needs, COLOURS):
            used = 100 * need.kind.layers * need.needed / whole
            axes.barh(line, used, left=left, color=colour)
            left += used
        axes.barh(line, 100 - left, left=left, color="#d9d9d9", hatch="//", edgecolor="white")
        axes.text(99, line, f"{100 - left:.1f} % wasted", ha="right", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [label.replace(", ", "\n", 1) for label in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("% of what uniform pages take: first kind of layers, second kind, wasted")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("Jenga Figure 3, §3.2: memory that uniform pages waste")
    return fig


def kv_of_llama() -> Reproduction:
    """Check §2: 10,000 tokens of Llama 3.1 8B take about 1.2 GB."""
    size = 10_000 * spec_of("llama3.1-8b").token_bytes(2)
    what = "llama3.1-8b: KV cache of 10,000 tokens"
    ours = round(size / 2**30, 2)
    results = [
        Result("J-X2", what, 1.2, ours, "GB (2^30 bytes)", HOLDS if round(ours, 1) == 1.2 else DIFFERS),
        measured("J-X2", what, round(size / 1e9, 2), "GB (10^9 bytes)"),
    ]
    return Reproduction(results, f"{size:,} bytes", lambda: bars(results[:1], "Jenga §2: KV cache of Llama 3.1 8B"))


# Figure 7

SELF, CROSS, LAYER = 3, 2, 128  # layers of the example of §4.1, and the bytes per token of each
LARGE = 768
PAGES = 3  # large pages
NAMES = [*(f"self.{i}" for i in range(1, SELF + 1)), *(f"cross.{i}" for i in range(1, CROSS + 1))]


class Place(NamedTuple):
    """The address parameters of a layer's pages that a kernel receives: the first page and the stride, in bytes."""

    start: int
    page: int

    def address(self, page_id: int) -> int:
        return self.start + page_id * self.page


def layer_page(layer: int, pages: int) -> Place:
    """Return layout (a): memory is divided into layers, each layer into pages."""
    return Place(layer * pages * LAYER, LAYER)


def page_layer(layer: int, layers: int) -> Place:
    """Return layout (b): memory is divided into pages, each page into layers."""
    return Place(layer * LAYER, layers * LAYER)


def views() -> dict[str, Place]:
    """Return layout (c): the same from the tensors that kernels receive here."""
    import torch

    from quire.worker.cache_views import layer_caches

    layer = LayerSpec(1, LAYER // (2 * 2))
    spec = ModelSpec("the example of §4.1", (layer,) * (SELF + CROSS), 64, 32, 32, 1, 1, 1)
    groups = tuple(
        KVCacheGroup(layers, len(layers) * LAYER, len(layers) * LAYER, 8,
              range(LARGE // (len(layers) * LAYER), PAGES * LARGE // (len(layers) * LAYER)), run_tokens=1)
        for layers in (tuple(range(SELF)), tuple(range(SELF, SELF + CROSS)))
    )  # fmt: skip
    geometry = KVCacheConfig(KVCacheLayout.PAGED, PAGES * LARGE, 2, groups, 2, large_bytes=LARGE)
    buffer = torch.zeros(PAGES * LARGE // 2, dtype=torch.bfloat16)
    caches = layer_caches(buffer, geometry, spec)
    return {
        name: Place(cache.keys.data_ptr() - buffer.data_ptr(), cache.keys.stride(0) * cache.keys.itemsize)
        for name, cache in zip(NAMES, caches.values())
    }


def figure_7() -> Reproduction:
    """Compare the addresses of (a) and (b), and check that (c) gives those of (b) from a start, a size and an id."""
    ours = views()
    results: list[Result] = []
    for i, name in enumerate(NAMES):
        of, layers = (i, SELF) if i < SELF else (i - SELF, CROSS)
        wanted = page_layer(of, layers)
        what = f"{name}: start_ptr, page_size"
        results.append(equal("J-F7", what, [wanted.start, wanted.page], list(ours[name]), "bytes"))
    results.append(
        equal("J-F7", "a small page is consecutive: its layers follow one another", True, _consecutive(ours))
    )
    results.append(equal("J-F7", "bytes of a large page, by either kind", [LARGE, LARGE], _large(ours), "bytes"))
    pages = PAGES * LARGE // ((SELF + CROSS) * LAYER)
    rows = [
        (name, f"{layer_page(i, pages).start} + {LAYER} p", f"{ours[name].start} + {ours[name].page} p",
         ", ".join(str(ours[name].address(p)) for p in range(PAGES * LARGE // ours[name].page)))
        for i, name in enumerate(NAMES)
    ]  # fmt: skip
    head = ("layer", "(a) layer-page: address of page p", "(b), (c) page-layer", "addresses of all its pages")
    text = (
        f"{SELF} layers of self attention (small pages of {SELF * LAYER} bytes) and {CROSS} of cross attention "
        f"({CROSS * LAYER}); {PAGES} large pages of {LARGE} bytes\n{table(head, rows)}\n"
        "In (a) a page is a slice in each layer's part, so a page can't go from one kind to another. In (b) it is one\n"
        "run of bytes. Starts and sizes are those of the tensors that kernels read here; no kernel knows of layouts."
    )
    data: Any = {name: place._asdict() for name, place in ours.items()}
    return Reproduction(results, text, lambda: _draw_7(ours), data)


def _consecutive(ours: dict[str, Place]) -> bool:
    """Return True if page p of each kind begins where p - 1 ends, with its layers in order."""
    kinds = NAMES[:SELF], NAMES[SELF:]
    return all(
        [ours[name].address(p) for p in range(3) for name in names] == list(range(0, 3 * len(names) * LAYER, LAYER))
        for names in kinds
    )


def _large(ours: dict[str, Place]) -> list[int]:
    """Return the bytes of a large page, from each kind's small pages."""
    return [ours[name].address(LARGE // ours[name].page) - ours[name].start for name in ("self.1", "cross.1")]


def _draw_7(ours: dict[str, Place]) -> Figure:
    """Draw memory from left to right, a block for each page of a layer: (a), and (b) with large page 1 for text."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 3.4)
    above, below = fig.subplots(2, 1)
    pages = PAGES * LARGE // ((SELF + CROSS) * LAYER)
    for i, name in enumerate(NAMES):
        for p in range(pages):
            _block(above, layer_page(i, pages).address(p), f"{name}\np{p}", COLOURS[i])
        own = (1,) if i < SELF else (0, 2)
        ratio = LARGE // ours[name].page
        for p in (large * ratio + k for large in own for k in range(ratio)):
            _block(below, ours[name].address(p), f"{name}\np{p}", COLOURS[i])
    for axes, title in ((above, "(a) layer-page partition"), (below, "(b) page-layer partition: large pages of 768")):
        axes.set_xlim(0, PAGES * LARGE)
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(0, PAGES * LARGE + 1, LARGE // 2))
    fig.suptitle("Jenga Figure 7: bytes of a layer's pages")
    return fig


def _block(axes: Any, at: int, label: str, colour: str) -> None:
    axes.barh(0.5, LAYER, 0.9, left=at, color=colour, edgecolor="white", alpha=0.8)
    axes.text(at + LAYER / 2, 0.5, label, ha="center", va="center", fontsize=6)
