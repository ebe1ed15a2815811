"""Reproduce vAttention Figure 12: the lines of a program that change when its attention kernel is replaced. The ways
below compute the same attention by several of torch's functions over memory with contiguous addresses; their
differences are counted.

Over paged memory a kernel has to be written or changed first; its cost in this engine is counted beside it.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.code_size import ROOT, code_lines
from papers.paging_issues import CHANGED
from papers.result import Reproduction, Result, at_most, cited, equal, measured
from quire.bench.document import table
from quire.vattention import init

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

MOST = 10  # lines
FIRST = "sdpa"
ADAPTERS = {  # files below the package that adapt kernels to --attention
    "torch's attention over contiguous memory": "kernels/contiguous.py",
    "torch's attention over paged memory": "kernels/sdpa.py",
    "our kernels over both, without the kernels": "kernels/triton/backend.py",
}


# Arguments: a request's queries [T, heads, D], of all its tokens or of the last one, and its keys and values
# [L, KV heads, D], views of virtual tensors.


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def sdpa_flash(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def sdpa_cudnn(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
    return out[0].transpose(0, 1)


def varlen_attn(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    sizes = len(query), len(keys)
    starts = [torch.tensor([0, size], dtype=torch.int32, device=query.device) for size in sizes]
    return _grouped(varlen_attn)(query, keys, values, *starts, *sizes, window_size=(-1, 0))


def _grouped(attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return torch's varlen_attn with several query heads per key head. Its signature depends on torch's version."""
    from quire.kernels.vendor import gqa_kwargs

    return partial(attend, **gqa_kwargs(attend))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    way.__name__: way for way in (sdpa, sdpa_flash, sdpa_cudnn, varlen_attn)
}
ON_A_CPU = ("sdpa", "sdpa_flash")


class Change(NamedTuple):
    """The change from one way to another: the removed and added lines, with their marks."""

    before: str
    after: str
    lines: list[str]


def change(before: str, after: str) -> Change:
    """Return the difference of two ways, without their names."""
    old, new = ([line for line in inspect.getsource(WAYS[name]).splitlines()[1:] if line] for name in (before, after))
    found = difflib.unified_diff(old, new, lineterm="", n=0)
    return Change(before, after, [line for line in found if line[:3] not in ("---", "+++") and line[0] in "+-"])


def figure_12() -> Reproduction:
    """Count every switch from one call to another, and compare the calls that run here over virtual tensors."""
    changes = [change(before, after) for before in WAYS for after in WAYS if before != after]
    worst = max(changes, key=lambda one: len(one.lines))
    results: list[Result] = [
        at_most("V-F12", f"lines changed from {one.before} to {one.after}", MOST, len(one.lines), "lines")
        for one in changes
        if one.before == FIRST
    ]
    results.append(
        at_most("V-F12", f"the most of any switch, {worst.before} to {worst.after}", MOST, len(worst.lines), "lines")
    )
    results += [
        equal("V-F12", f"{name}: over virtual tensors to the bit what it gives over ordinary ones", True, same)
        for name, same in compared().items()
    ]
    results += [cited("V-F12", what, lines, "see below", "lines") for what, lines in CHANGED.items()]
    adapters = {what: code_lines(ROOT / path) for what, path in ADAPTERS.items()}
    results += [measured("V-F12", f"--attention: {what}", lines, "lines of code") for what, lines in adapters.items()]
    listing = "\n".join(change(FIRST, "varlen_attn").lines)
    rows = [(one.before, one.after, len(one.lines)) for one in changes]
    text = (
        f"Lines that go and lines that come, each counted, imports too:\n\n{table(('from', 'to', 'lines'), rows)}\n\n"
        f"From {FIRST} to varlen_attn:\n\n{listing}\n\n"
        "That is a request at a time, as in the paper's figure. An engine also says which requests and tokens a step\n"
        "has: the adapters' lines are that, and the paged one's gather pages besides. A value of --attention is an\n"
        "adapter, its name in the config, and a line where the runner makes it; memory and scheduler know of none."
    )
    return Reproduction(results, text, lambda: _draw(changes, adapters))


def compared() -> dict[str, bool]:
    """Check for each layout, and each way that runs here, that outputs of a prompt and of a later token over virtual
    tensors equal those over plain ones."""
    import torch

    device, page, dtype, names = "cpu", 4096, torch.float32, [*ON_A_CPU]
    if torch.cuda.is_available():
        device, page, dtype, names = "cuda", 2**21, torch.bfloat16, [*WAYS]
    heads, dim, length, layers = 2, 64, 200, 2
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, 3 * heads, dim, generator=generator).to(device, dtype)
    kept = torch.randn(2 * layers, length, heads, dim, generator=generator).to(device, dtype)
    same = dict.fromkeys(names, True)
    for layout in ("layer", "sliced"):
        cache = init(
            layers, 2, length, heads, dim, dtype.itemsize, page, pages=60, layout=layout, device=device, dtype=dtype
        )
        cache.alloc_reqid()
        reqid = cache.alloc_reqid()
        assert cache.step([1, length]) == 0, "there are pages enough"
        virtual = [tensor[reqid] for tensor in cache.tensors]
        for place, plain in zip(virtual, kept):
            place.copy_(plain)
        for name, asks in itertools.product(names, (query, query[-1:])):
            ours, theirs = (WAYS[name](asks, some[-2], some[-1]) for some in (virtual, kept))
            same[name] &= bool((ours == theirs).all())
        del virtual, place
        cache.close()
    return same


def _draw(changes: list[Change], adapters: dict[str, int]) -> Figure:
    from quire.bench.plots import COLOURS, figure

    counted = {f"{one.before} to {one.after}": len(one.lines) for one in changes if one.before == FIRST}
    bars = [
        (COLOURS[4], CHANGED),
        (COLOURS[2], counted),
        (COLOURS[0], {f"--attention: {k}": v for k, v in adapters.items()}),
    ]
    fig = figure(9, 3.4)
    axes = fig.add_subplot()
    for colour, lengths in bars:
        drawn = axes.barh([*lengths], [*lengths.values()], color=colour, height=0.6)
        axes.bar_label(drawn, padding=4)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, 2000)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("lines; grey: for paging (paper); green: of a switch; blue: adapters")
    axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle("vAttention Figure 12: what replacing a kernel takes")
    return fig
