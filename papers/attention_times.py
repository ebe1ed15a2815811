"""Time attention over keys and values in pages, over contiguous ones, and over pages mapped next to each other in
virtual addresses: by our kernels, and by torch's own, which need contiguous keys and values.

A memory is named "paged, N" (pages of N tokens in random order), "contiguous", "virtual, L" (L: which layers share a
buffer), or, in `decodes`, "vllm 0.2.7, N": pages in that version's layout, for its kernel (see `vllm_paged`). `device`
and `kib`, the KiB of a device page, differ only in tests.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from papers.closed_forms import spec_of
from papers.dummy_engines import release
from papers.entry import Point, left_out
from quire.protocol.model_spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.attention import SDPBackend

    from quire.bench.kv_batches import KVBatch
    from quire.bench.replay import Call
    from quire.kernels.forward_batch import LayerCache

Found = TypeVar("Found")
Missing = dict[str, str]
"""What was not measured, by name, and why."""
APART = 0.05  # of the largest result: the largest difference of a kernel's result from fp32


# Memories


def over(
    memory: str, spec: ModelSpec, layers: int, batch: int, context: int, work: Callable[[KVBatch], Found],
    device: str = "cuda", kib: int = 2048, dtype: torch.dtype | None = None,
) -> Found:  # fmt: skip
    """Return the result of `work` over `batch` sequences of `context` random tokens in `layers` layers of the model;
    virtual memory has all of them."""
    import torch

    from quire.bench.kv_batches import random_kv

    kind, _, of = memory.partition(", ")
    dtype = dtype or torch.bfloat16
    try:
        if kind == "virtual":
            return on_mapped(spec, batch, context, of, work, device, kib, dtype)
        one = spec.layers[0]
        return work(random_kv(batch, context, one.kv_heads, one.head_dim, int(of or 1), layers, dtype, spec.heads,
                           kind == "contiguous", device))  # fmt: skip
    finally:
        release()


def on_mapped(
    spec: ModelSpec, batch: int, context: int, layout: str, work: Callable[[KVBatch], Found], on: str = "cuda",
    kib: int = 2048, dtype: torch.dtype | None = None,
) -> Found:  # fmt: skip
    """Return the result of `work` over `batch` sequences of `context` random tokens in all layers of the model, each
    contiguous in addresses, over pages in random order that the runner's store has mapped. `layout`: which layers share
    a buffer. `kib`: the KiB of a device page. `work` must not keep any of these tensors, or closing their memory raises
    DriverError."""
    import torch

    from quire.bench.kv_batches import KVBatch
    from quire.config import EngineConfig
    from quire.memory.page_layout import MemorySize
    from quire.memory.virtual.virtual_memory import build_virtual_kv_config
    from quire.protocol.step_plan import TableWrite
    from quire.worker.virtual.store import open_store

    dtype = dtype or torch.bfloat16
    config = EngineConfig.of(
        memory="virtual", virtual_layout=layout, virtual_page_kib=kib, max_num_seqs=batch, swap_gib=0.0
    )  # fmt: skip
    one = build_virtual_kv_config(config, spec, MemorySize(2**16 + 2 * context, context, dtype.itemsize)).groups[0]
    tokens = one.table_width * one.run_tokens // one.run_pages + one.run_tokens  # tokens of a sequence, in whole pages
    geometry = build_virtual_kv_config(config, spec, MemorySize(batch * tokens, context, dtype.itemsize))
    device = torch.device(on) if on == "cpu" else torch.device("cuda", torch.cuda.current_device())
    store = open_store(geometry, spec, dtype, device, False, is_contiguous=True)
    try:
        store.buffer.normal_()
        ids, width = list(geometry.groups[0].ids), geometry.groups[0].table_width
        assert len(ids) >= batch * width, f"{len(ids)} pages for {batch} sequences of {width}"
        random.Random(0).shuffle(ids)
        store.apply_page_ops(
            tuple(TableWrite(i + 1, 0, 0, tuple(ids[i * width : (i + 1) * width])) for i in range(batch))
        )
        slots, lengths = torch.arange(1, batch + 1, device=device), torch.full((batch,), context, device=device)
        return work(KVBatch(list(store.caches.values()), store.tables[0], slots, lengths))
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # whose locals are tensors
        raise
    finally:
        gc.collect()
        store.close()


# Decodes and whole prompts


def decodes(
    models: Mapping[str, Sequence[int]], contexts: Sequence[int], memories: Sequence[str], whole: bool = False,
    device: str = "cuda", kib: int = 2048,
) -> list[Point]:  # fmt: skip
    """Return the `ms` of the decode attention of all layers of each model, and the `us` of one, at each of its batch
    sizes, by our kernel, over virtual memory also by torch's, and over vLLM's pages by its kernel instead.

    With `whole` all layers and batch sizes share one memory, else each batch size has its own, of as many layers as
    exceed the GPU's cache."""
    from quire.bench.replay import inputs

    points: list[Point] = []
    missing: Missing = {}
    for model, batches in models.items():
        spec = spec_of(model)
        one, number = spec.layers[0], len(spec.layers)
        for context, memory in itertools.product(contexts, memories):
            print(f"{model}, {context} tokens, {memory}", file=sys.stderr)
            for some in [batches] if whole else [(batch,) for batch in batches]:
                few = min(inputs(2 * max(some) * one.kv_heads * context * one.head_dim * 2), number)
                work, layers = partial(_decodes, some, memory, missing), number if whole else few
                try:
                    found = over(memory, spec, layers, max(some), context, work, device, kib)
                except RuntimeError as error:
                    if not memory.startswith("virtual"):
                        raise
                    missing[f"{model}, {memory}"] = _first_line(error)
                    found = []
                points += [{"model": model, "context": context, "memory": memory, **p, "ms": number * p["us"] / 1000}
                           for p in found]  # fmt: skip
    return points + left_out(missing)


def _decodes(batches: Sequence[int], memory: str, missing: Missing, where: KVBatch) -> list[Point]:
    """Measure the first sequences of these numbers."""
    from torch.nn.attention import SDPBackend

    from papers import vllm_paged
    from quire.bench.kv_batches import decode_calls
    from quire.bench.replay import replayed

    points: list[Point] = []
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]  # other backends may write gigabytes of scores
    if where.slots.device.type == "cpu":
        fused.append(SDPBackend.MATH)
    for batch in batches:
        some = where._replace(slots=where.slots[:batch], lengths=where.lengths[:batch])
        if memory.startswith("vllm"):
            first, *rest = vllm_paged.decode_calls(some)
            wrong = _vllm_difference(first)
            if wrong:
                missing[f"{memory}, batch {batch}"] = wrong
                continue
            calls: list[Call] = [first, *rest]
        else:
            calls = decode_calls(some)
        points.append({"batch": batch, "way": memory, "us": 1e6 * replayed(calls, 2)})
        if memory.startswith("virtual"):
            way = f"torch, {memory}"
            try:
                points.append({"batch": batch, "way": way, "us": 1e6 * replayed(_sdpa(some, 1, fused), 2)})
            except RuntimeError as error:
                missing[f"{way}, batch {batch}"] = _first_line(error)
    return points


def _vllm_difference(call: partial[Tensor]) -> str:
    """Return how the results of the first and last sequence differ from the reference's in fp32, or ""."""
    import torch

    from quire.kernels.reference import paged_attention

    q, keys, values, tables, lengths, _, scale = call.args
    pages = tables[[0, -1]].flatten().long()
    k, v = keys[pages].permute(0, 1, 3, 2, 4).flatten(3), values[pages].transpose(2, 3)
    table = torch.arange(len(pages)).view(2, -1)
    expected = [
        paged_attention(q[i].float(), k, v, table[i], int(lengths[i]) - 1, scale=scale) for i in (0, -1)
    ]  # fmt: skip
    return _difference(call()[[0, -1]], torch.stack(expected))


def _sdpa(where: KVBatch, tokens: int, backends: list[SDPBackend] | SDPBackend) -> list[Call]:
    """Return the attention of each sequence's last tokens (1, or all) by torch's own kernels, in each layer."""
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    first, slots, context = where.caches[0], len(where.slots), int(where.lengths[0])
    q = torch.randn(slots, first.heads, tokens, first.head_dim, dtype=first.dtype, device=first.device)

    def attend(cache: LayerCache) -> None:
        k, v = (x[1 : slots + 1, :, :context] for x in (cache.keys, cache.values))
        with sdpa_kernel(backends):
            scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=cache.heads > cache.kv_heads)

    return [partial(attend, cache) for cache in where.caches]


def prompts(
    model: str, batches: Sequence[int], contexts: Sequence[int], memories: Sequence[str], most: int,
    device: str = "cuda",
) -> list[Point]:  # fmt: skip
    """Return the `us` of one layer's attention of whole prompts, at most `most` tokens in all, by each `kernel` that
    runs over each memory."""
    spec, points = spec_of(model), list[Point]()
    missing: Missing = {}
    for batch in batches:
        for context in (context for context in contexts if batch * context <= most):
            for memory in memories:
                found = over(memory, spec, 1, batch, context, partial(_whole_prompts, memory, missing), device)
                points += [{"batch": batch, "context": context, "memory": memory, **point} for point in found]
    return points + left_out(missing)


def _whole_prompts(memory: str, missing: Missing, where: KVBatch) -> list[Point]:
    from torch.nn.attention import SDPBackend

    from quire.bench.replay import replayed

    calls: dict[str, Call] = dict(prompt_calls(where, missing))
    if where.caches[0].contiguous:
        for name, backend in (("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION)):
            (calls[name],) = _sdpa(where, int(where.lengths[0]), backend)
    found: list[Point] = []
    for kernel, call in calls.items():
        try:
            found.append({"kernel": kernel, "way": f"{kernel}, {memory}", "us": 1e6 * replayed([call])})
        except RuntimeError as error:
            missing[f"{kernel}, {memory}"] = _first_line(error)
    return found


def prompt_calls(
    where: KVBatch, missing: Missing, start: int = 0, q: Tensor | None = None
) -> dict[str, partial[Tensor]]:  # fmt: skip
    """Return our prompt kernels that run over this memory.

    They compute the tokens of each sequence from `start` on, with queries q [total tokens, heads, dim]. `missing`
    receives the reasons for the others."""
    import torch

    from quire.kernels.triton import prefill
    from quire.kernels.triton.launch import supports_hopper_kernel

    cache, device = where.caches[0], where.slots.device
    batch, count = len(where.slots), int(where.lengths[0]) - start
    queries = prefill.tile_queries(cache.heads, cache.kv_heads, cache.head_dim, cache.dtype.itemsize)
    kernels: dict[str, tuple[Callable[..., Tensor], int]] = {"prompt": (prefill.prefill, queries)}
    if supports_hopper_kernel(device):
        from quire.kernels.triton import prefill_hopper

        if prefill_hopper.supports(cache):
            queries = prefill_hopper.tile_queries(cache.heads // cache.kv_heads)
            kernels["prompt_hopper"] = prefill_hopper.prefill, queries
        else:
            missing[f"prompt_hopper, {'contiguous' if cache.contiguous else 'paged'}"] = "the kernel doesn't take it"
    else:
        missing["prompt_hopper"] = "it is for a Hopper GPU"
    slots, lengths, starts = where.slots.cpu().numpy(), np.full(batch, count), np.full(batch, start)
    if q is None:
        q = torch.randn(batch * count, cache.heads, cache.head_dim, dtype=cache.dtype, device=device)
    out, calls = torch.empty_like(q), dict[str, "partial[Tensor]"]()
    for name, (kernel, queries) in kernels.items():
        tiles = prefill.make_prefill_tiles(slots, starts, lengths, np.arange(batch) * count, queries)
        calls[name] = partial(kernel, q, cache, where.tables, torch.from_numpy(tiles).to(device), out)
    return calls


# Prompts in chunks


def chunked_prompts(
    models: Sequence[str], lengths: Sequence[int], chunk: int, timed: Sequence[int], memories: Sequence[str],
    device: str = "cuda", kib: int = 2048, dtype: str = "bfloat16",
) -> list[Point]:  # fmt: skip
    """Return the `seconds` of the attention of prompts of each length in chunks, all layers, by each `kernel` whose
    results are right. Chunks of the numbers `timed` are measured, others interpolated: their time is linear in the
    tokens before."""
    import torch

    points: list[Point] = []
    missing: Missing = {}
    for model in models:
        spec = spec_of(model)
        for memory in memories:
            print(f"{model}, {memory}", file=sys.stderr)
            work = partial(_chunk_seconds, lengths, chunk, timed, missing)
            times = over(memory, spec, len(spec.layers), 1, lengths[-1], work, device, kib, getattr(torch, dtype))
            points += [
                {"model": model, "memory": memory, "kernel": kernel, "way": f"{kernel}, {memory}", "length": length,
                 "seconds": len(spec.layers) * whole_prompt(found, length, chunk)}
                for kernel, found in times.items()
                for length in lengths
            ]  # fmt: skip
    return points + left_out(missing)


def _chunk_seconds(
    lengths: Sequence[int], chunk: int, timed: Sequence[int], missing: Missing, where: KVBatch
) -> dict[str, dict[tuple[int, int], float]]:
    """Return by kernel the seconds of a chunk, {(start, tokens): seconds}."""
    from quire.bench.replay import replayed

    def until(end: int) -> KVBatch:
        return where._replace(lengths=where.lengths.clone().fill_(end))

    second = until(2 * chunk)
    found: dict[str, dict[tuple[int, int], float]] = {
        name: {} for name in right(chunk_calls(second, chunk, missing), second, chunk, missing)
    }
    for start, count in ((0, min(lengths[0], chunk)), *((number * chunk, chunk) for number in timed)):
        if start + count <= lengths[-1]:
            for name, call in chunk_calls(until(start + count), start, missing).items():
                if name in found:
                    found[name][start, count] = replayed([call])
    return found


def whole_prompt(times: Mapping[tuple[int, int], float], length: int, chunk: int) -> float:
    """Return the seconds of all of a prompt's chunks, given those of some: {(start, tokens): seconds}."""
    if length < chunk:
        return times[0, length]
    known = sorted((start, seconds) for (start, count), seconds in times.items() if count == chunk)
    starts, seconds = (np.array(one) for one in zip(*known))
    return float(np.interp(np.arange(0, length, chunk), starts, seconds).sum())


def chunk_calls(where: KVBatch, start: int, missing: Missing) -> dict[str, partial[Tensor]]:
    """Return by kernel the attention of the first sequence's tokens from `start` on: [tokens, heads, dim]. Kernels that
    can't compute it are left out, with the reason in `missing`."""
    import torch

    from quire.kernels import vendor

    cache, end = where.caches[0], int(where.lengths[0])
    first = where._replace(slots=where.slots[:1], lengths=where.lengths[:1])
    q = torch.randn(end - start, cache.heads, cache.head_dim, dtype=cache.dtype, device=cache.device)
    calls = prompt_calls(first, missing, start, q)
    if cache.contiguous:
        slot = int(where.tables[int(first.slots[0]), 0])
        k, v = (x[slot, :, :end] for x in (cache.keys, cache.values))
        for name, kernel in (("torch flash", vendor.flash), ("torch cuDNN", vendor.cudnn)):
            calls[name] = partial(kernel, q, k, v, start, cache.scale)
    return calls


def right(calls: Mapping[str, partial[Tensor]], where: KVBatch, start: int, missing: Missing) -> list[str]:
    """Return the kernels whose results agree with the reference in fp32, for some of the tokens from `start` on."""
    import torch

    from quire.kernels.reference import paged_attention

    found, cache, table = list[str](), where.caches[0], where.tables[int(where.slots[0])]
    count = int(where.lengths[0]) - start
    some = [*range(0, count, max(1, count // 16)), count - 1]
    for name, call in calls.items():
        try:
            results = call()[some]
        except RuntimeError as error:
            missing[name] = _first_line(error)
            continue
        q = call.args[0].float()
        expected = torch.stack([
            paged_attention(q[i], cache.keys, cache.values, table, start + i, scale=cache.scale) for i in some
        ])  # fmt: skip
        wrong = _difference(results, expected)
        if wrong:
            missing[name] = wrong
        else:
            found.append(name)
    return found


def _difference(results: Tensor, expected: Tensor) -> str:
    """Return how far results are from those expected, if that is too far, or ""."""
    apart = float((results.float() - expected).abs().max())
    return "" if apart <= APART * float(expected.abs().max()) else f"its results are {apart:.3g} from those in fp32"


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:120]


# Torch's attention on a CPU


def mapped_views(
    dtypes: Sequence[str], kib: Sequence[int], contexts: Sequence[int], queries: Sequence[int], layers: int = 4,
    rows: int = 4, heads: int = 8, dim: int = 64, turns: int = 40,
) -> list[Point]:  # fmt: skip
    """Return the `us` of torch's own attention on the CPU, over ordinary tensors and over views of mapped pages:
    medians of calls that alternate in one process and must give equal bits."""
    import torch

    from quire.vattention import init

    points: list[Point] = []
    for name, size in ((name, size) for name in dtypes for size in kib):
        dtype, longest, page = getattr(torch, name), max(contexts), size * 1024
        token = heads * dim * dtype.itemsize
        memory = init(layers, rows, longest, heads, dim, dtype.itemsize, page, pages=rows * -(-longest * token // page),
                      dtype=dtype)  # fmt: skip
        ids, order, lens = [memory.alloc_reqid() for _ in range(rows)], random.Random(0), [0] * rows
        while min(lens) < longest:  # a page at a time, so that no page is next to the one that follows it
            grows = order.choice([i for i in ids if lens[i] < longest])
            lens[grows] = min(lens[grows] + page // token, longest)
            assert memory.step(lens) == 0, "pages for all of them"
        tensors = {"mapped": list(memory.tensors)}
        tensors["ordinary"] = [torch.randn(rows, longest, heads, dim).to(dtype) for _ in memory.tensors]
        for i, ordinary in enumerate(tensors["ordinary"]):
            tensors["mapped"][i].copy_(ordinary)
        for context in contexts:
            for count in queries:
                where = {"dtype": name, "kib": size, "context": context, "queries": count}
                points += [
                    {**where, "way": way, "us": us} for way, us in _turns(tensors, context, count, turns).items()
                ]
        tensors.clear()
        memory.tensors = ()
        gc.collect()
        memory.close()
    return points


def _turns(tensors: dict[str, list[Tensor]], context: int, queries: int, turns: int) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    first = tensors["ordinary"][0]
    (rows, _, heads, dim), layers = first.shape, len(tensors["ordinary"]) // 2
    query = torch.randn(1, heads, queries, dim).to(first.dtype)
    spent: dict[str, list[float]] = {way: [] for way in tensors}
    for turn in range(-layers * rows, turns):  # those below 0 warm up
        layer, row = turn % layers, turn // layers % rows
        results = []
        for way in list(tensors)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            keys, values = (x[row, :context].transpose(0, 1)[None] for x in tensors[way][2 * layer : 2 * layer + 2])
            results.append(scaled_dot_product_attention(query, keys, values))
            spent[way].append(1e6 * (time.perf_counter() - began))
        assert torch.equal(*results), "other bits over mapped pages"
    return {way: median(times[-turns:]) for way, times in spent.items()}


def paged_or_not(
    models: Mapping[str, tuple[int, int, int]], batches: Sequence[int], contexts: Sequence[int]
) -> list[Point]:
    """Return the microseconds of one layer's decode attention: of our kernel over scattered pages (`paged`) and over
    contiguous ones, the same source, and of torch's (`sdpa`). `models` have query heads, key/value heads of 128, and
    layers."""
    return [
        {"model": model, "batch": batch, "context": context, **_paged_or_not(shape, batch, context)}
        for model, shape in models.items()
        for batch in batches
        for context in contexts
    ]


def _paged_or_not(shape: tuple[int, int, int], batch: int, context: int) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from quire.bench.kernels import DIM
    from quire.bench.kv_batches import decode_calls, random_kv
    from quire.bench.replay import inputs, replayed

    heads, kv_heads, layers = shape
    several = min(inputs(2 * batch * kv_heads * context * DIM * 2), layers)

    def ours(contiguous: bool) -> float:
        where = random_kv(batch, context, kv_heads, DIM, 16, several, torch.float16, heads, contiguous)
        return 1e6 * replayed(decode_calls(where), 2)

    paged, contiguous = ours(False), ours(True)
    q, *kv = (
        torch.randn(batch, count, length, DIM, dtype=torch.float16, device="cuda")
        for count, length in ((heads, 1), *((kv_heads, context),) * (2 * several))
    )
    attend = partial(scaled_dot_product_attention, q, enable_gqa=heads > kv_heads)
    calls = [partial(attend, k, v) for k, v in zip(kv[::2], kv[1::2])]
    return {"paged": paged, "contiguous": contiguous, "sdpa": 1e6 * replayed(calls, 2)}
