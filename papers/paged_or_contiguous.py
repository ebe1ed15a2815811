"""Compare one kernel source over pages and over contiguous keys and values (vAttention Figures 3, 4 and 5).

Decodes, prompts, and pages of several sizes; Yi-6B's heads, one layer, on a GPU. The paper compared the kernels of
FlashAttention (3), FlashInfer (4) and vLLM (5) on an A100. Here both kernels of a pair are quire's; torch's own kernels
for contiguous memory are shown for reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from papers.dummy_engines import release
from papers.result import DIFFERS, HOLDS, Reproduction, Result, by_way, left_out
from quire.bench.document import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from quire.bench.placed_kv import Placed
    from quire.bench.replay import Call

HEADS, KV_HEADS, DIM, LAYERS = 32, 4, 128, 32  # Yi-6B's
PAGE = 16
BATCHES, CONTEXTS = (1, 4, 8, 16, 32), (2048, 4096, 8192, 16384, 32768)
MOST_DECODE = 12  # % that paging adds to a decode, in the paper; MOST_PROMPT: to a prompt
MOST_PROMPT = 14
PAGES, LONG, MANY = (16, 32, 64, 128), 16384, (1, 2, 4, 8, 16)  # Figure 5
SLOWER = {32: (1.0, 1.16), 64: (1.91, 3.31), 128: (1.91, 3.31)}  # than pages of 16
PROMPTS = (1, 2, 4, 8, 16)  # of a batch: Figure 4
MOST_TOKENS = 2**17  # of a point of Figure 4, unless --full
ON = "cuda"

Points = Sequence[dict[str, Any]]


# Figures 3 and 5: decodes


def decode_us(batch: int, context: int, page: int, contiguous: bool = False) -> float:
    """Return the microseconds of one layer's decode attention."""
    import torch

    from quire.bench.placed_kv import decode_calls, placed
    from quire.bench.replay import inputs, replayed

    several = min(inputs(2 * batch * KV_HEADS * context * DIM * 2), LAYERS)
    where = placed(batch, context, KV_HEADS, DIM, page, several, torch.bfloat16, HEADS, contiguous, ON)
    return 1e6 * replayed(decode_calls(where), 2)


def figure_3() -> Reproduction:
    """Compare decodes over pages of 16 tokens with contiguous ones. StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig3")
    points = []
    for batch in BATCHES:
        for context in CONTEXTS:
            paged, contiguous = (decode_us(batch, context, PAGE, way) for way in (False, True))
            points.append({"batch": batch, "context": context, "paged": paged, "contiguous": contiguous,
                           "overhead": 100 * (paged / contiguous - 1)})  # fmt: skip
    rows = [
        (p["batch"], p["context"], f"{p['paged']:.1f}", f"{p['contiguous']:.1f}", f"{p['overhead']:+.1f}")
        for p in points
    ]
    head = ("batch", "context", "paged us", "contiguous us", "paging adds %")
    return Reproduction(judged_3(points), table(head, rows), partial(draw_3, points), points)


def judged_3(points: Points) -> list[Result]:
    """Judge Figure 3: at most 12 % at any batch, and less where the KV cache is large."""
    most = {batch: max(p["overhead"] for p in points if p["batch"] == batch) for batch in BATCHES}
    results = [
        Result("V-F3", f"batch {batch}: paging adds to a decode's attention, at most of all contexts",
               f"up to {MOST_DECODE}", round(found, 1), "%", HOLDS if found <= MOST_DECODE else DIFFERS)
        for batch, found in most.items()
    ]  # fmt: skip
    first, last = points[0]["overhead"], points[-1]["overhead"]
    falls = HOLDS if last <= first else DIFFERS
    what = "paging adds less to the most and longest contexts than to one of 2K, by"
    return [*results, Result("V-F3", what, "more than 0", round(first - last, 1), "points of %", falls)]


def draw_3(data: Points) -> Figure:
    from quire.bench.plots import lines

    points = [{**p, "panel": "Yi-6B, one layer, pages of 16", "line": f"batch {p['batch']}"} for p in data]
    return lines(
        points, "context", "overhead", "line", "panel", "vAttention Figure 3: what paging adds to decodes",
        ("context, tokens", "% over the contiguous twin"), logarithmic=False,
    )  # fmt: skip


def figure_5() -> Reproduction:
    """Compare decodes of 16K tokens by page size. StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig5")
    points = [
        {"batch": batch, "page": page, "us": decode_us(batch, LONG, page)} for batch in MANY for page in PAGES
    ]  # fmt: skip
    by = {(p["batch"], p["page"]): p["us"] for p in points}
    rows = [(batch, *(f"{by[batch, page]:.1f}" for page in PAGES)) for batch in MANY]
    text = table(("batch", *(f"pages of {page}, us" for page in PAGES)), rows)
    return Reproduction(judged_5(points), text, partial(draw_5, points), points)


def judged_5(points: Points) -> list[Result]:
    """Judge Figure 5: large pages are slow in vLLM's kernel. A kernel here without that slowdown is a difference, not
    an error."""
    by = {(p["batch"], p["page"]): p["us"] for p in points}
    results = []
    for page, (low, high) in SLOWER.items():
        ratio = round(max(by[batch, page] / by[batch, PAGE] for batch in MANY), 2)
        holds = ratio <= high if page == 32 else ratio >= low
        what = f"pages of {page} tokens / pages of {PAGE}, the most of all batches"
        results.append(Result("V-F5", what, f"{low:g}-{high:g}", ratio, "times", HOLDS if holds else DIFFERS))
    return results


def draw_5(data: Points) -> Figure:
    from quire.bench.plots import lines

    points = [{**p, "panel": "Yi-6B, 16K tokens, one layer", "line": f"pages of {p['page']}"} for p in data]
    return lines(
        points, "batch", "us", "line", "panel", "vAttention Figure 5: decodes by page size", ("batch", "us")
    )  # fmt: skip


# Figure 4: prompts


def figure_4(full: bool = False) -> Reproduction:
    """Run whole prompts with every available kernel, over pages of 16 tokens and contiguous. StartupError on a CPU."""
    from quire.bench.replay import need_gpu

    need_gpu("quire reproduce vattention-fig4")
    points: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for batch in PROMPTS:
        for context in CONTEXTS:
            if full or batch * context <= MOST_TOKENS:
                points += _prompt_points(batch, context, missing)
    installed = find_spec("flashinfer") is not None
    missing["FlashInfer, paged and ragged"] = "this entry doesn't run it" if installed else "it is not installed"
    text = by_way(points, ("batch", "context"), "us", 0, ", us") + left_out(missing)
    return Reproduction(judged_4(points), text, partial(draw_4, points), points)


def _prompt_points(batch: int, context: int, missing: dict[str, str]) -> Iterator[dict[str, Any]]:
    import torch

    from quire.bench.placed_kv import placed
    from quire.bench.replay import replayed

    for contiguous in (False, True):
        where = placed(batch, context, KV_HEADS, DIM, PAGE, 1, torch.bfloat16, HEADS, contiguous, ON)
        ways: dict[str, Call] = {**prompt_calls(where, missing), **(torch_calls(where) if contiguous else {})}
        for way, call in ways.items():
            try:
                yield {"batch": batch, "context": context, "way": way, "us": 1e6 * replayed([call])}
            except RuntimeError as error:
                missing[way] = str(error).splitlines()[0][:120]
        del ways, where
        release()


def prompt_calls(
    where: Placed, missing: dict[str, str], start: int = 0, q: Tensor | None = None
) -> dict[str, partial[Tensor]]:
    """Return the quire prompt kernels that run over this memory.

    They compute the tokens of each sequence from `start` on, with queries q [total tokens, heads, dim]. `missing`
    receives the reasons for the others."""
    import numpy as np
    import torch

    from quire.kernels.triton import prefill
    from quire.kernels.triton.launch import supports_hopper_kernel

    cache, device = where.caches[0], where.slots.device
    batch, context, group = len(where.slots), int(where.lengths[0]), cache.heads // cache.kv_heads
    kernels: dict[str, tuple[Callable[..., Tensor], int]] = {
        "prompt": (
            prefill.prefill,
            prefill.tile_queries(cache.heads, cache.kv_heads, cache.head_dim, cache.dtype.itemsize),
        )
    }
    side = "contiguous" if cache.contiguous else "paged"
    if supports_hopper_kernel(device):
        from quire.kernels.triton import prefill_hopper

        if prefill_hopper.supports(cache):
            kernels["prompt_hopper"] = prefill_hopper.prefill, prefill_hopper.tile_queries(group)
        else:
            missing[f"prompt_hopper, {side}"] = "the kernel doesn't take it"
    else:
        missing["prompt_hopper"] = "it is for a Hopper GPU"
    count = context - start
    lengths, starts = np.full(batch, count), np.full(batch, start)
    slots = where.slots.cpu().numpy()
    if q is None:
        q = torch.randn(batch * count, cache.heads, cache.head_dim, dtype=cache.dtype, device=device)
    out, calls = torch.empty_like(q), dict[str, "partial[Tensor]"]()
    for name, (kernel, queries) in kernels.items():
        tiles = prefill.make_prefill_tiles(slots, starts, lengths, np.arange(batch) * count, queries)
        calls[f"{name}, {side}"] = partial(kernel, q, cache, where.tables, torch.from_numpy(tiles).to(device), out)
    return calls


def torch_calls(where: Placed) -> dict[str, Call]:
    """Return torch's own kernels over the same memory, which is contiguous for them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cache, slots = where.caches[0], len(where.slots)
    context, grouped = int(where.lengths[0]), cache.heads > cache.kv_heads
    q = torch.randn(slots, cache.heads, context, cache.head_dim, dtype=cache.dtype, device=where.slots.device)
    keys, values = (x[1 : slots + 1, :, :context] for x in (cache.keys, cache.values))

    def attend(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)

    names = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {f"{name}, contiguous": partial(attend, backend) for name, backend in names.items()}


def judged_4(points: Points) -> list[Result]:
    """Compare each kernel with its pair, then the best paged kernel with the best contiguous one."""
    by = {(p["batch"], p["context"], p["way"]): p["us"] for p in points}
    sizes = list(dict.fromkeys((p["batch"], p["context"]) for p in points))
    results = []
    for kernel in ("prompt", "prompt_hopper"):
        over = [100 * (by[*at, f"{kernel}, paged"] / by[*at, f"{kernel}, contiguous"] - 1) for at in sizes
                if (*at, f"{kernel}, paged") in by and (*at, f"{kernel}, contiguous") in by]  # fmt: skip
        if over:
            what = f"{kernel}: paging adds to a prompt's attention, at most of all prompts"
            verdict = HOLDS if max(over) <= MOST_PROMPT else DIFFERS
            results.append(Result("V-F4", what, f"up to {MOST_PROMPT}", round(max(over), 1), "%", verdict))
    best = [{side: min(us for (*where, way), us in by.items() if tuple(where) == at and way.endswith(side))
             for side in ("paged", "contiguous")} for at in sizes]  # fmt: skip
    over = [100 * (one["paged"] / one["contiguous"] - 1) for one in best]
    what = "the best paged kernel takes longer than the best contiguous one, at most of all prompts"
    verdict = HOLDS if 0 <= max(over) <= MOST_PROMPT else DIFFERS
    return [*results, Result("V-F4", what, f"up to {MOST_PROMPT}", round(max(over), 1), "%", verdict)]


def draw_4(data: Points) -> Figure:
    """Draw the TFLOP/s of each kernel: half of all token pairs, two products each."""
    from quire.bench.plots import lines

    points = [
        {**p, "rate": 2 * HEADS * DIM * p["batch"] * p["context"] ** 2 / p["us"] / 1e6, "panel": f"batch {p['batch']}"}
        for p in data
    ]
    return lines(
        points, "context", "rate", "way", "panel", "vAttention Figure 4: attention of prompts, Yi-6B",
        ("tokens of a prompt", "TFLOP/s"), logarithmic=False,
    )  # fmt: skip
