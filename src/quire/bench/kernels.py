"""`quire bench kernels`: every kernel over its grid of sizes, as a share of the device's ceilings, which are measured
first.

A family is one function that yields cases; sizes are those of a Llama-3-8B, in bf16, or for some families those of one
rank of another (`--tp`, `--model-config`: quire.bench.rank_kernels). With `--tune` tiles are measured instead
(quire.bench.tune). Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.bench import cpu_kernels
from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.kernel_states import crossed, delta_rules, experts, ssd, states
from quire.bench.kv_batches import KVBatch, decode_calls, random_kv, random_tensor, with_drafts
from quire.bench.low_bit_kernels import low_bit
from quire.bench.rank_kernels import DECODES, LAYERS, LLAMA_8B, PAGE, Shape, decodes, products, shape_of
from quire.bench.replay import Call, Case, ceilings, inputs, need_gpu, result, timed
from quire.config import VENDOR_ATTENTIONS
from quire.errors import StartupError
from quire.kernels.forward_batch import LayerCache
from quire.worker.host_pool import HostPool

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, DEPTH = LLAMA_8B[:7]
PROMPTS = (512, 2048, 4096, 8192, 32768)
DRAFTED = [(batch, context, rows) for rows in (4, 6) for batch in (1, 8, 64) for context in (512, 2048, 8192)]
CHUNKS = ((512, 7680), (2048, 30720))  # tokens of a chunk, and the tokens before it
WINDOWED = ((8192, 0, 4096), (8192, 73728, 32768), (2048, 30720, 4096))
CHUNKED, CHUNK = 32768, 8192  # tokens of a prompt, and of a step
TOKENS = (1, 32, 256, 8192)


def copies() -> Iterator[Case]:
    """Yield copies on write: pages of 128 bytes to 2 MiB (16 tokens), up to 4096 in a launch, and one by one."""
    from quire.kernels.triton.copy_pages import copy_pages

    for size in (128, 2**14, 2**17, 2**21):
        pages = torch.zeros(min(2**33 // size, 2**20), size // 8, dtype=torch.int64, device="cuda")
        for count in (1, 64, 512, 4096):
            if 2 * count <= len(pages):
                orders = [torch.randperm(len(pages), device="cuda") for _ in range(inputs(2 * count * size))]
                calls = [partial(copy_pages, pages, o[:count], o[count : 2 * count]) for o in orders]
                yield Case("copy_pages", f"{count} x {_size(size)}", calls, 2 * count * size)
                if count <= 512:
                    pairs = [list(zip(o[:count].tolist(), o[count : 2 * count].tolist())) for o in orders[:4]]
                    single: list[Call] = [partial(_one_by_one, pages, some) for some in pairs]
                    yield Case("single copies", f"{count} x {_size(size)}", single, 2 * count * size)


def _one_by_one(pages: Tensor, pairs: list[tuple[int, int]]) -> None:
    for src, dst in pairs:
        pages[dst].copy_(pages[src])


def swaps() -> Iterator[Case]:
    """Yield swaps of 128 MiB or 4096 pages to the host and back, in pages of 4 KiB to 16 MiB (128 tokens)."""
    for size in (2**12, 2**14, 2**16, 2**17, 2**18, 2**20, 2**21, 2**24):
        count = min(2**27 // size, 4096)
        pages = torch.zeros(2 * count, size // 2, dtype=torch.bfloat16, device="cuda")
        pool = HostPool({size: pages}, 2 * count * size)
        rng = np.random.default_rng(0)
        moves = dict(zip(rng.permutation(2 * count)[:count].tolist(), rng.permutation(2 * count).tolist()))
        for name, move in (("swap out", _swap_out), ("swap in", HostPool.swap_in)):
            yield Case(name, f"{count} x {_size(size)}", [partial(move, pool, moves, size)], count * size, "link")


def _swap_out(pool: HostPool, moves: dict[int, int], size: int) -> None:
    pool.swap_out(moves, size)
    pool.wait_swapped_out(moves.values(), size)  # so that the timed stream waits for them


def sdpa() -> Iterator[Case]:
    """Yield torch's own attention over contiguous keys and values, for comparison."""
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    for batch, context in DECODES:
        size = 2 * batch * KV_HEADS * context * DIM * 2
        kv = [
            [random_tensor(batch, KV_HEADS, context, DIM) for _ in range(2)] for _ in range(min(inputs(size), LAYERS))
        ]
        query = random_tensor(batch, HEADS, 1, DIM)
        yield Case("sdpa decode", f"{batch} x {context}", [partial(attend, query, *pair) for pair in kv], size)
    for length in PROMPTS:
        q, k, v = random_tensor(1, HEADS, length, DIM), *(random_tensor(1, KV_HEADS, length, DIM) for _ in range(2))
        for name, backend in (("sdpa", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            prompt: list[Call] = [partial(_with, backend, partial(attend, q, k, v, is_causal=True))]
            yield Case(f"{name} prompt", f"1 x {length}", prompt, _causal(length), "compute")


def _with(backend: SDPBackend, call: Call) -> None:
    with sdpa_kernel(backend):
        call()


def wide() -> Iterator[Case]:
    """Yield decode attention with heads of 256 (Gemma-2-9B): plain, and with a softcap and a window."""
    for batch, context in DECODES:
        size = 2 * batch * KV_HEADS * context * 256 * 2
        where = random_kv(batch, context, KV_HEADS, 256, PAGE, min(inputs(size), LAYERS), torch.bfloat16, 2 * KV_HEADS)
        capped = where._replace(caches=[replace(cache, softcap=50.0, window=4096) for cache in where.caches])
        for name, one in (("decode of 256", where), ("decode of 256, capped", capped)):
            if context <= 4096 or one is where:
                yield Case(name, f"{batch} x {context}", decode_calls(one), size)


def drafted() -> Iterator[Case]:
    """Yield decode attention with several rows a sequence, as draft tokens are verified: each row reads keys and values
    for itself, or all share a read. Both count as one read; a call of one row is there for comparison."""
    for batch, context, rows in DRAFTED:
        size = 2 * batch * KV_HEADS * context * DIM * 2
        where = random_kv(batch, context, KV_HEADS, DIM, PAGE, min(inputs(size), LAYERS), torch.bfloat16, HEADS)
        several, case = with_drafts(where, rows - 1), f"{batch} x {rows} rows x {context}"
        yield Case("decode of one row", f"{batch} x 1 row x {context}", decode_calls(where), size)
        yield Case("decode, rows apart", case, decode_calls(several), size)
        yield Case("decode, rows shared", case, decode_calls(several, rows - 1), size)


def prompts() -> Iterator[Case]:
    """Yield causal attention over pages, for whole prompts and chunks: the kernel for every GPU, and Hopper's own."""
    for length, start in (*((length, 0) for length in PROMPTS), *CHUNKS):
        where = random_kv(1, start + length, KV_HEADS, DIM, PAGE, 1, torch.bfloat16, HEADS)
        q, out = random_tensor(length, HEADS, DIM), random_tensor(length, HEADS, DIM)
        for name, attend, queries in _ours(where.caches[0]):
            call = partial(attend, q, where.caches[0], where.tables, _tiles(where, start, length, queries), out)
            case = f"1 x {length}" + (f" after {start}" if start else "")
            yield Case(name, case, [call], _causal(start + length) - _causal(start), "compute")


def windowed() -> Iterator[Case]:
    """Yield causal attention of prompt chunks with a window, as (tokens, tokens before them, window). Only the
    operations within the window count."""
    for length, start, window in WINDOWED:
        where = random_kv(1, start + length, KV_HEADS, DIM, PAGE, 1, torch.bfloat16, HEADS)
        cache, q, out = replace(where.caches[0], window=window), *(random_tensor(length, HEADS, DIM) for _ in range(2))
        seen = int(np.minimum(np.arange(start, start + length) + 1, window).sum())
        for name, attend, queries in _ours(cache):
            call = partial(attend, q, cache, where.tables, _tiles(where, start, length, queries), out)
            case = f"1 x {length} after {start}, window {window}"
            yield Case(name, case, [call], 4 * HEADS * DIM * seen, "compute")


def _ours(cache: LayerCache) -> Iterator[tuple[str, Any, int]]:
    """Yield our prompt kernels for this cache, with the queries of their tiles."""
    from quire.kernels.triton import prefill as prompt
    from quire.kernels.triton.launch import supports_hopper_kernel

    side, shape = "contiguous" if cache.contiguous else "paged", (cache.heads, cache.kv_heads, cache.head_dim)
    yield f"prompt {side}", prompt.prefill, prompt.tile_queries(*shape, cache.dtype.itemsize)
    if supports_hopper_kernel(cache.device):
        from quire.kernels.triton import prefill_hopper

        if prefill_hopper.supports(cache):
            yield "prompt Hopper", prefill_hopper.prefill, prefill_hopper.tile_queries(shape[0] // shape[1])


def _tiles(where: KVBatch, start: int, length: int, queries: int) -> Tensor:
    """Return the tiles of `length` tokens of the first sequence, from `start` on."""
    from quire.kernels.triton.prefill import make_prefill_tiles

    slot, starts, lengths, offset = np.array([int(where.slots[0]), start, length, 0], dtype=np.int64)[:, None]
    return torch.from_numpy(make_prefill_tiles(slot, starts, lengths, offset, queries)).to(where.slots.device)


def chunks() -> Iterator[Case]:
    """Yield causal attention of a long prompt in chunks: over pages, and over contiguous tokens laid out as in virtual
    memory, where torch's kernels are measured too."""
    case, dtype = f"1 x {CHUNKED} by {CHUNK}", torch.bfloat16
    for layout, layers in (("", 0), (", layer", 1), (f", sliced:{DEPTH}", DEPTH)):
        if layers:
            keys, values = (random_tensor(1, CHUNKED, layers, KV_HEADS, DIM)[:, :, 0].transpose(1, 2) for _ in range(2))
            zero, one = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int64).cuda()
            cache = LayerCache(keys, values, HEADS, DIM**-0.5, contiguous=True)
            where = KVBatch([cache], zero, one, one * CHUNKED)
        else:
            where = random_kv(1, CHUNKED, KV_HEADS, DIM, PAGE, 1, dtype, HEADS)
        for name, call in chunked(where, CHUNK).items():
            yield Case(name + layout, case, [call], _causal(CHUNKED), "compute")


def chunked(where: KVBatch, chunk: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Return, by kernel, the attention of all tokens of the first sequence in chunks: outputs [tokens, heads, dim].
    Kernels that the device doesn't support are left out."""
    from quire.kernels.triton.vendor_backend import VendorBackend

    cache, end = where.caches[0], int(where.lengths[0])
    q = torch.randn(end, cache.heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
    parts = [(start, q[start : start + chunk]) for start in range(0, end, chunk)]
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    for name, attend, queries in _ours(cache):
        calls[name] = [
            partial(attend, some, cache, where.tables, _tiles(where, start, len(some), queries), torch.empty_like(some))
            for start, some in parts
        ]
    slot = int(where.tables[int(where.slots[0]), 0])
    keys, values = cache.keys[slot], cache.values[slot]
    for name in VENDOR_ATTENTIONS if cache.contiguous else ():
        backend = VendorBackend(name)
        try:
            backend.check_cache(cache)
        except StartupError as error:
            print(error, file=sys.stderr)
            continue
        calls[name] = [
            partial(
                backend.kernel, some, keys[:, : start + len(some)], values[:, : start + len(some)], start, cache.scale
            )
            for start, some in parts
        ]
    return {name: partial(_each, some) for name, some in calls.items()}


def _each(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    return [call() for call in calls]


def _causal(length: int) -> int:
    """Return the operations of causal attention: two products over half of all pairs."""
    return 2 * HEADS * DIM * length**2


def small() -> Iterator[Case]:
    """Yield the small kernels of a step: norm with the residual sum, rotation with the KV write, gated activation."""
    from quire.kernels.triton.activation import act_and_mul
    from quire.kernels.triton.norm import rms_norm
    from quire.kernels.triton.rope_write import rope_write

    weight, angles = random_tensor(HIDDEN), torch.randn(8192, 2, DIM // 2, device="cuda")
    width = HEADS + 2 * KV_HEADS
    for tokens in TOKENS:
        several = range(inputs(tokens * HIDDEN * 8))
        norms = [[random_tensor(tokens, HIDDEN) for _ in range(3)] for _ in several]
        calls: list[Call] = [partial(rms_norm, x, weight, 1e-5, delta=delta, out=out) for x, delta, out in norms]
        yield Case("rms_norm", f"{tokens} x {HIDDEN}", calls, tokens * HIDDEN * 2 * 4)
        at = random_kv(tokens, 64, KV_HEADS, DIM, PAGE, 1, torch.bfloat16, HEADS)
        pairs = [(random_tensor(tokens, width, DIM), random_tensor(tokens, HEADS, DIM)) for _ in several]
        where = (at.caches[0], at.tables, at.slots, at.lengths - 1)
        calls = [partial(rope_write, qkv, q, *where, rotary=angles) for qkv, q in pairs]
        yield Case("rope_write", f"{tokens} x {width} heads", calls, tokens * width * DIM * 2 * 2)
        both = [(random_tensor(tokens, 2 * FFN), random_tensor(tokens, FFN)) for _ in range(inputs(tokens * FFN * 6))]
        calls = [partial(act_and_mul, gate_up, "silu", out=out) for gate_up, out in both]
        yield Case("gate", f"{tokens} x {FFN}", calls, tokens * FFN * 2 * 3)


def sampling() -> Iterator[Case]:
    """Yield the greedy choice over the vocabulary."""
    from quire.kernels.triton.sampling import SamplingScratch, greedy

    for rows in (1, 32, 256, 1024):
        scratch = SamplingScratch.allocate(rows, VOCAB, torch.device("cuda"), has_truncation=False)
        slots = torch.arange(1, rows + 1, device="cuda")
        last, tokens, faults = (torch.zeros(rows + 1, dtype=torch.int64, device="cuda") for _ in range(3))
        several = [random_tensor(rows, VOCAB) for _ in range(inputs(rows * VOCAB * 2))]
        calls = [partial(greedy, logits, slots, last, tokens[1:], faults[1:], scratch) for logits in several]
        yield Case("greedy", f"{rows} x {VOCAB}", calls, rows * VOCAB * 2)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "copies": copies, "swaps": swaps, "sdpa": sdpa, "decodes": partial(decodes, LLAMA_8B), "wide": wide,
    "drafted": drafted, "prompts": prompts, "windowed": windowed, "chunks": chunks, "small": small,
    "linears": partial(products, LLAMA_8B), "sampling": sampling, "states": states, "ssd": ssd, "experts": experts,
    "crossed": crossed, "delta": delta_rules, "low_bit": low_bit,
}  # fmt: skip
SHAPED: dict[str, Callable[[Shape], Iterator[Case]]] = {"decodes": decodes, "linears": products}


def asked(args: argparse.Namespace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the families by name: all, or with --tp or --model-config those that have a rank's sizes. Raise
    StartupError for others."""
    known, kind = FAMILIES, "family"
    if args.tp is not None or args.model_config is not None:
        shape = shape_of(args.model_config or "llama3-8b", 1 if args.tp is None else args.tp)
        kind = "family of --tp and --model-config"
        known = {name: partial(family, shape) for name, family in SHAPED.items()}
    names = args.family or list(known)
    for name in names:
        if name not in known:
            raise StartupError(f"there is no {kind} {name[:40]!r} of kernels", f"Known: {', '.join(known)}")
    return {name: known[name] for name in names}


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "ranks", tp=(None, "GPU only: decodes and linears with the sizes of one of N ranks"))
    group.add_argument("--family", action="append", metavar="NAME",
                       help="copies, swaps, decodes, ..., or, on a CPU, products, kv; may be given repeatedly "
                            "(default: all of a GPU's)")  # fmt: skip
    group.add_argument("--model-config", metavar="NAME", help="Llama config of these sizes (default: llama3-8b)")
    group = add_numbers(parser, "tiles", seconds=(300, "with --tune: the time in all"))
    group.add_argument("--tune", action="store_true",
                       help="measure tiles near those of this card's table, and write a table of the fastest to --out; "
                            "--family is linear, experts, low_bit, decode or a part of one, such as linear/half "
                            "(default: all)")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the ceilings, then a result for each case; with --tune the lines of a table of tiles."""
    if args.tune:
        if args.tp is not None or args.model_config is not None:
            raise StartupError("--tune has sizes of its own", "Leave out --tp and --model-config")
        need_gpu("quire bench kernels --tune")
        from quire.bench import tune

        return tune.run(args)
    if cpu_kernels.asked(args.family) and args.tp is args.model_config is None:
        return cpu_kernels.run(args)
    families = asked(args)
    need_gpu("quire bench kernels")
    torch.manual_seed(0)
    most = ceilings()
    results = [
        {"kernel": "ceiling", "case": name, "us": None, "rate": rate / 1e12, "bound": name.partition("_")[0],
         "unit": "TFLOP/s" if name == "compute" else "TB/s", "share": 1.0}
        for name, rate in most._asdict().items()
    ]  # fmt: skip
    for family in families.values():
        for case in family():
            results.append(result(case, timed(case), most.of(case)))
            print(f"{case.kernel}, {case.case}: {short(results[-1]['us'])} us", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return results


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the results, a line a case or a measured entry."""
    if "entry" in results[0]:
        from quire.bench import tune

        return tune.show(results)
    rows = [
        (r["kernel"], r["case"], short(r["us"]), f"{r['rate']:.4g}", r["unit"], f"{100 * r['share']:.0f}")
        for r in results
    ]
    return table(("kernel", "case", "us", "rate", "unit", "% of ceiling"), rows)


def more(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the card, which the document of a table of tiles has beside its entries; nothing for other results."""
    if "entry" not in results[0]:
        return {}
    from quire.kernels.triton.tiles import own_card

    gpu, capability, bytes_per_s, _ = own_card(torch.device("cuda"))
    return {"card": {"gpu": gpu, "capability": capability, "bytes_per_s": bytes_per_s}}


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 2**20 else f"{count >> 10} KiB" if count >= 2**10 else f"{count} B"
