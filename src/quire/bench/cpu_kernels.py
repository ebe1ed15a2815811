"""`quire bench kernels --family products` on a CPU: our kernels over a grid of sizes, compared with oneDNN and with the
machine's read and multiply rates in the same run; and `--family kv` (quire.bench.cpu_kv).

Several copies of a case's weights are used in turn, so that they are read from memory, as a model's are. Ours run as
one recorded program, without Python.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.bench import cpu_kv
from quire.errors import StartupError
from quire.kernels.cpu import linear
from quire.kernels.cpu.library import Library
from quire.kernels.cpu.library_loader import library, use_threads
from quire.kernels.cpu.weight_arena import weight_arena
from quire.layers.linear import pack_onednn

SHAPES = {
    "SmolLM2-135M": {
        "qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576),
    },
    "125M": {"qkv": (1280, 768), "o": (768, 768), "gate_up": (4096, 768), "down": (768, 2048), "head": (32000, 768)},
    "500M": {
        "qkv": (2560, 1536), "o": (1536, 1536), "gate_up": (8192, 1536), "down": (1536, 4096), "head": (32000, 1536),
    },
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 512, 2048)
FEW = 64  # rows up to which a product may be limited by reading the weight
READ = 1 << 28  # bytes
BEYOND_CACHE = 1 << 27
MOST_INPUTS, MOST_REPEATS, SECONDS = 64, 40, 0.4
PRODUCT = 2048  # rows, columns and width of the product that measures the machine's multiply rate


class Rates(NamedTuple):
    """Bytes/s of a plain read, and operations/s of oneDNN's product in this dtype."""

    memory: float
    compute: float


def best(call: Callable[[], object]) -> float:
    """Return the least seconds of a call: other processes only make it slower."""
    least, end, count = float("inf"), time.perf_counter() + SECONDS, 0
    while count < 3 or (count < MOST_REPEATS and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        least, count = min(least, time.perf_counter() - start), count + 1
    return least


def rates(own: Library, dtype: torch.dtype) -> Rates:
    """Measure the rates now, with all of the library's threads."""
    data, chunks = weight_arena().allocate(1, READ, torch.uint8).fill_(1), 16 * own.threads
    sums = torch.empty(chunks, dtype=torch.int32)
    size = READ // chunks // 512 * 512
    seconds = best(lambda: own.call("read_all", chunks, data, size, sums))
    a, b = (torch.ones(PRODUCT, PRODUCT, dtype=dtype) for _ in range(2))
    return Rates(size * chunks / seconds, 2 * PRODUCT**3 / best(lambda: torch.mm(a, b)))


def _library() -> Library:
    own = library()
    if own is None:
        raise StartupError("the kernels for CPUs aren't built", "Install quire where there is a C++ compiler")
    return own


def kv() -> Iterator[dict[str, Any]]:
    """Yield decode steps over keys and values in bf16 and in 8 bits."""
    use_threads(None)
    own = _library()
    most = rates(own, torch.bfloat16)
    yield _line("ceiling", f"a plain read, {own.threads} threads", None, most.memory / 1e9, "GB/s", 1.0)
    yield from cpu_kv.contexts_in_turn(own, most.memory)


def products() -> Iterator[dict[str, Any]]:
    """Yield linear layers, and gated ones with their activation, in bf16 and fp32."""
    own = _library()
    for dtype in (torch.bfloat16, torch.float32):
        name, most = linear.DTYPES[dtype], rates(own, dtype)
        yield _line("ceiling", f"{name}, a plain read", None, most.memory / 1e9, "GB/s", 1.0)
        yield _line("ceiling", f"{name}, a product of {PRODUCT}^3", None, most.compute / 1e9, "GFLOP/s", 1.0)
        for model, matrices in SHAPES.items():
            for matrix, (size, width) in matrices.items():
                yield from _matrix(own, most, f"{model} {matrix} {name}", torch.empty(size, width, dtype=dtype))


def _matrix(own: Library, most: Rates, case: str, like: Tensor) -> Iterator[dict[str, Any]]:
    size = like.numel() * like.element_size()
    several = range(max(1, min(MOST_INPUTS, BEYOND_CACHE // size)))
    gated = "gate_up" in case
    ours = [linear.PackedLinear(like.normal_(), None, "silu" if gated else None, gated) for _ in several]
    theirs = [made for _ in several if (made := pack_onednn(like, None)) is not None]
    for rows in ROWS:
        x = torch.randn(rows, like.shape[1]).to(like.dtype)
        few = several if rows <= FEW else several[:2]
        with own.record() as tape:
            for i in few:
                linear.linear(x, ours[i])
        calls: dict[str, Callable[[], object]] = {f"ours, {own.path.stem}": partial(own.run, tape)}
        if theirs:
            calls["oneDNN"] = partial(_call_each, theirs[: len(few)], x)
        for kernel, call in calls.items():
            seconds = best(call) / len(few)
            amount, unit, top = (size, "GB/s", most.memory) if rows < FEW else (
                2 * rows * like.numel(), "GFLOP/s", most.compute)  # fmt: skip
            rate = amount / seconds
            yield _line(
                kernel, f"{case}, {rows} rows, {own.threads} threads", seconds * 1e6, rate / 1e9, unit, rate / top
            )


def _call_each(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    return [product(x) for product in products]


def _line(kernel: str, case: str, us: float | None, rate: float, unit: str, share: float) -> dict[str, Any]:
    bound = "memory" if unit == "GB/s" else "compute"
    return {"kernel": kernel, "case": case, "us": us, "rate": rate, "bound": bound, "unit": unit, "share": share}


FAMILIES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"products": products, "kv": kv}


def asked(names: Sequence[str] | None) -> bool:
    """Return True if all these families are for CPUs."""
    return bool(names) and set(names or ()) <= set(FAMILIES)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each case."""
    torch.manual_seed(0)
    results = []
    with torch.inference_mode():
        for name in args.family:
            for one in FAMILIES[name]():
                results.append(one)
                print(f"{one['kernel']:16} {one['case']:50} {one['rate']:8.1f} {one['unit']}", file=sys.stderr)
    return results
