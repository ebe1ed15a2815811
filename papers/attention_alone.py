"""Reproduce vAttention Figure 9b on a GPU: the attention of a decode step alone, for three models at 16K tokens a
sequence. Our kernel runs over pages; ours and torch's contiguous kernels run over virtual memory. Times are sums over
all layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from papers.closed_forms import spec_of
from papers.dummy_engines import release
from papers.result import DIFFERS, HOLDS, Reproduction, Result, by_way, left_out, measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quire.bench.placed_kv import Placed
    from quire.bench.replay import Call
    from quire.kernels.forward_batch import LayerCache

CONTEXT = 16384
MODELS = {"yi-6b": (1, 8, 32), "llama3-8b": (1, 8, 32), "yi-34b": (1, 8, 16)}  # batches, and with --full
ALL = {"yi-6b": (1, 2, 4, 8, 16, 32), "llama3-8b": (1, 2, 4, 8, 16, 32), "yi-34b": (1, 2, 4, 8, 16)}
PAPER = {"yi-6b": 2.85, "llama3-8b": 1.45, "yi-34b": 2.62}  # vLLM's kernel / FlashAttention's, at most
PAGES = {False: (16,), True: (16, 128)}  # with --full
LAYOUTS = {"layer": 1.0, "sliced": 0.97}  # of the paged kernel's speed, at least: our own goal
ON, KIB = "cuda", 2048

Points = Sequence[dict[str, Any]]


def figure_9b(full: bool = False) -> Reproduction:
    """Measure milliseconds a step. Raise StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig9b")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for model in MODELS:
        print(model, file=sys.stderr)
        points += measured_of(model, full, missing)
    text = by_way(points, ("model", "batch"), "ms", 3, ", ms") + left_out(missing)
    return Reproduction(judged(points), text, partial(draw, points), points)


def measured_of(model: str, full: bool, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Measure the points of one model, with one memory at a time."""
    import torch

    from papers.mapped import on_mapped
    from quire.bench.placed_kv import placed

    spec, batches = spec_of(model), (ALL if full else MODELS)[model]
    points: list[dict[str, Any]] = []
    kept, layers = spec.layers[0], len(spec.layers)
    for page in PAGES[full]:
        where = placed(
            batches[-1], CONTEXT, kept.kv_heads, kept.head_dim, page, layers, torch.bfloat16, spec.heads, on=ON
        )
        points += _points(where, batches, f"paged, {page}")
        del where
        release()
    for layout in LAYOUTS:
        work = partial(_points, batches=batches, way=f"virtual, {layout}", missing=missing)
        try:
            points += on_mapped(spec, batches[-1], CONTEXT, layout, work, ON, KIB)
        except RuntimeError as error:
            missing[f"{model}, {layout}"] = str(error).splitlines()[0][:120]
        release()
    return [{"model": model, **point} for point in points]


def _points(
    where: Placed, batches: Sequence[int], way: str, missing: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Measure our kernel for the first sequences and, if `missing` is given, torch's own kernels. The reasons for
    kernels that can't run are added to `missing`."""
    from quire.bench.placed_kv import decode_calls
    from quire.bench.replay import replayed

    points, layers = [], len(where.caches)
    for batch in batches:
        some = where._replace(slots=where.slots[:batch], lengths=where.lengths[:batch])
        points.append({"batch": batch, "way": way, "ms": 1e3 * layers * replayed(decode_calls(some))})
        if missing is None:
            continue
        try:
            points.append({"batch": batch, "way": f"torch, {way}", "ms": 1e3 * layers * replayed(_torch_calls(some))})
        except RuntimeError as error:
            missing[f"torch, {way}, batch {batch}"] = str(error).splitlines()[0][:120]
    return points


def _torch_calls(where: Placed) -> list[Call]:
    """Return a decode step's attention in each layer by torch's own fused kernels, over the sequences in place."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cache, batch = where.caches[0], len(where.slots)
    q = torch.randn(batch, cache.heads, 1, cache.head_dim, dtype=cache.dtype, device=cache.device)

    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]  # other backends may write gigabytes of scores
    if cache.device.type == "cpu":
        fused.append(SDPBackend.MATH)

    def attend(one: LayerCache) -> None:
        k, v = (x[1 : batch + 1, :, :CONTEXT] for x in (one.keys, one.values))
        with sdpa_kernel(fused):
            scaled_dot_product_attention(q, k, v, enable_gqa=cache.heads > cache.kv_heads)

    return [partial(attend, one) for one in where.caches]


def judged(points: Points) -> list[Result]:
    """Judge the largest batch: no slower than the best paged kernel, and the share of the paper's gain."""
    results = []
    for model, most in PAPER.items():
        mine = [p for p in points if p["model"] == model]
        if not mine:
            continue
        batch = max(p["batch"] for p in mine)
        ms = {p["way"]: p["ms"] for p in mine if p["batch"] == batch}
        paged = min(value for way, value in ms.items() if way.startswith("paged"))
        for layout, least in LAYOUTS.items():
            if (found := ms.get(f"virtual, {layout}")) is not None:
                speed = round(paged / found, 3)
                what = f"{model}, batch {batch}, {layout}: speed / the best paged kernel's (at least {least:g})"
                results.append(Result("V-F9b", what, "about 1", speed, "times", HOLDS if speed >= least else DIFFERS))
            if (found := ms.get(f"torch, virtual, {layout}")) is not None:
                what = f"{model}, batch {batch}, {layout}: torch's own kernel's speed / the best paged kernel's"
                results.append(measured("V-F9b", what, round(paged / found, 3), "times"))
        unpaged = [value for way, value in ms.items() if "virtual" in way]
        if unpaged:
            gain = round(ms["paged, 16"] / min(unpaged), 2)
            what = f"{model}, batch {batch}: paged kernel, pages of 16 / the fastest contiguous one"
            verdict = HOLDS if gain >= most else DIFFERS
            results.append(Result("V-F9b", what, f"up to {most:g}", gain, "times", verdict))
    return results


def draw(data: Points) -> Figure:
    from quire.bench.plots import lines

    return lines(
        data, "batch", "ms", "way", "model", "vAttention Figure 9b: attention of a decode step, 16K tokens a sequence",
        ("batch", "ms, all layers"),
    )  # fmt: skip
