"""Compile the kernels for a GPU that isn't here, in bf16.

`compile_for.py CAPABILITY SHARED_MEMORY MULTIPROCESSORS EVERY` compiles each kernel's first launch and every EVERY-th
of the others, and prints, for each of them, the kernel's name, its bytes of shared memory, how many times one
thread of it tells others that a group of warps is done before that is sure, and how many of its sums leave the choice
of what is rounded to the compiler, as JSON.

`compile_for.py CAPABILITY SHARED_MEMORY MULTIPROCESSORS EVERY together` compiles some kernels in threads, as several
processes do at once. It waits for a line that says which of how many processes it is, and prints how many kernels it
compiled and how many it found on disk.

`compile_for.py CAPABILITY SHARED_MEMORY MULTIPROCESSORS EVERY apart` compiles some kernels in processes of their own,
and prints what became of that, as JSON.

Triton is given a driver that knows a target and no device, and every launch only compiles. A process of its own: the
tests beside this one use the interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels.forward_batch import HeadNorms, LayerCache
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.kernels.triton import (
    activation,
    all_reduce,
    copy_engine_allreduce,
    copy_engine_pair,
    copy_pages,
    decode,
    delta_rule,
    fast_launch,
    fp8_linear,
    fused_moe,
    linear,
    low_bit,
    mamba_conv,
    mamba_scan,
    norm,
    prefill,
    prefill_hopper,
    rope_write,
    sampling,
    ssd,
    vocab_parallel_sampling,
)
from quire.kernels.triton.compile_locks import compile_once
from quire.kernels.triton.compile_process import KernelCompiler
from quire.kernels.triton.linear_tiles import BULK_TILES

CAPABILITY, SHARED, COUNT, EVERY = (int(word) for word in sys.argv[1:5])
PDL = CAPABILITY >= 90
DTYPE = torch.bfloat16
HEADS = {  # query heads, key/value heads, their size, window (below 0: a chunk)
    "Llama-3-8B": (32, 8, 128, None), "windows": (32, 8, 128, 4096), "chunks": (40, 8, 128, -8192),
    "OPT-13B": (40, 40, 128, None), "Gemma-2-9B": (16, 8, 256, None), "many queries": (64, 1, 64, None),
    "Gemma-4-31B": (32, 4, 512, None),
}  # fmt: skip


class Driver:
    """As much of Triton's as compiling asks for."""

    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": SHARED})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def hasty(ptx: str) -> int:
    """Count instructions with which one thread gives shared memory away before all of its group have read it: arrivals
    at a barrier in memory, and bulk copies into shared memory, with no barrier of the group since its last wait. An
    arrival with expect_tx only announces the bytes of a copy, so it does not count."""
    count, waited = 0, False
    waits = r"mbarrier\.try_wait|wgmma\.wait_group|cp\.async\.wait_group"
    for match in re.finditer(
        rf"({waits})|bar\.sync|(mbarrier\.arrive\.(?!expect_tx)|cp\.async\.bulk\.tensor\.\dd\.shared)", ptx
    ):
        count += bool(match[2]) and waited
        waited = bool(match[1]) or (waited and bool(match[2]))
    return count


def vague(llir: str) -> int:
    """Sums of two products in LLVM's code: one of them may be fused with the sum, and LLVM chooses which."""
    products = set(re.findall(r"(%\S+) = fmul (?:\w+ )*float ", llir))
    sums = re.findall(r"= f(?:add|sub) (?:\w+ )*float ([^\s,]+), ([^\s,]+)", llir)
    return sum(left in products and right in products for left, right in sums)


def watch() -> list[tuple[str, int, int, int]]:
    """From now on launches only compile, or not even that; what they compiled."""
    seen: list[tuple[str, int, int, int]] = []
    asked: Counter[str] = Counter()
    run = JITFunction.run

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        asked[self.fn.__name__] += 1
        if (asked[self.fn.__name__] - 1) % EVERY:
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        code = kernel.asm
        seen.append((self.fn.__name__, kernel.metadata.shared, hasty(code["ptx"]), vague(code["llir"])))
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]
    fast_launch.FastLauncher.__getitem__ = lambda self, grid: self.kernel[grid]  # type: ignore[method-assign]
    return seen


def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def attend() -> None:
    """Decode in all its shapes, prompts, rotation."""
    for heads, kv, dim, window in HEADS.values():
        keys, values = zeros(64, 2, kv, 16, dim).unbind(1)
        bound = {"chunk": -window} if window is not None and window < 0 else {"window": window}
        cache = LayerCache(keys, values, heads, 1.0, **bound)
        tables = ints(3, 8)
        every = (heads, kv, dim, window) == HEADS["Llama-3-8B"]
        for batch in decode.representative_batches(1024, cache, torch.device("cpu")) if every else (1, 1024):
            splits = decode.choose_splits(batch, kv, COUNT)
            decode.decode(zeros(batch, heads, dim), cache, tables, ints(batch), ints(batch), splits=splits, pdl=PDL)
        rows = ints(256)
        for shared in {1, decode.num_shared_rows(6, cache)}:
            decode.decode(
                zeros(256, heads, dim), cache, tables, rows, rows, splits=2, pdl=PDL, rows=rows, shared_rows=shared
            )
        if every:
            with_sinks = replace(cache, sinks=torch.zeros(heads))
            decode.decode(zeros(8, heads, dim), with_sinks, tables, ints(8), ints(8), splits=4, pdl=PDL)
            prefill.prefill(zeros(4, heads, dim), with_sinks, tables, zeros(3, 4, dtype=torch.int32))
        for small in (False, True):
            for whole, in_window in ((False, False), (True, False), (True, True)):
                prefill.prefill(
                    zeros(4, heads, dim), cache, tables, zeros(3, 4 + whole, dtype=torch.int32), small=small,
                    bidirectional=whole, in_window=in_window,
                )  # fmt: skip
        if CAPABILITY == 90 and prefill_hopper.supports(cache):
            apart = replace(cache, values=zeros(64, 2, kv, 16, dim)[:, 0], softcap=50.0)
            for one in (cache, replace(cache, contiguous=True), apart):
                prefill_hopper.prefill(zeros(4, heads, dim), one, tables, zeros(3, 4, dtype=torch.int32))
        qkv = zeros(4, heads + 2 * kv, dim)
        turns = torch.zeros(64, 2, dim // 2)
        short, wide = (SimpleNamespace(weight=weight, eps=1e-6) for weight in (zeros(dim), torch.zeros(dim)))
        given = (None, HeadNorms(short, short), HeadNorms(wide, wide), HeadNorms(short, short, short))
        for norms, rows in ((norms, rows) for norms in given for rows in (qkv, qkv[:, : heads + kv])):
            rope_write.rope_write(
                rows, rows[:, :heads], cache, tables, ints(4), ints(4), rotary=turns, norms=norms, pdl=PDL
            )


def layers() -> None:
    """Norms, activations, products."""
    for rows in (1, 32, 256):
        x = zeros(rows, 4096)
        norm.rms_norm(x, zeros(4096), 1e-5, delta=zeros(rows, 4096), pdl=PDL)
        activation.act_and_mul(zeros(rows, 2 * 14336), "silu", pdl=PDL)
    wide = torch.zeros(3584)  # Gemma's weights are float32
    norm.rms_norm(zeros(4, 3584), wide, 1e-6, delta=zeros(4, 3584), post_norm_weight=wide, pdl=PDL)
    activation.softcap(zeros(4, 256_000), 30.0, pdl=PDL)
    norm.rms_norm_parts(zeros(4, 288), (zeros(256), zeros(16), zeros(16)), 1e-6, pdl=PDL)
    norm.layer_norm(zeros(4, 5120), zeros(5120), zeros(5120), 1e-5, delta=zeros(4, 5120), pdl=PDL)
    activation.act(zeros(4, 20480), "relu", zeros(20480), pdl=PDL)
    if CAPABILITY >= 89:
        in_fp8()
    if SHARED < linear.MIN_SHARED_MEMORY:
        return
    for rows in (1, 2, 9, 32):
        for size, depth in ((6144, 4096), (4096, 4096), (4096, 14336)):
            linear.linear(zeros(rows, depth), zeros(size, depth), pdl=PDL)
        linear.gated_linear(zeros(rows, 4096), zeros(2 * 14336, 4096), "silu", pdl=PDL)
    linear.batch_invariant_gated_linear(zeros(2, 4096), zeros(2 * 14336, 4096), "silu", pdl=PDL)
    if CAPABILITY == 90:  # bulk copies, as if these tensors were on a GPU
        linear._bulk_copies = lambda *tensors: True
        linear._multiprocessors = lambda device: COUNT  # type: ignore[assignment]
        for tile in BULK_TILES:
            linear.any_rows_tile = lambda *shape, tile=tile: tile
            linear.batch_invariant_linear(zeros(128, 4096), zeros(4096, 4096), zeros(4096), pdl=PDL)


def states() -> None:
    """Jamba's, and more of a channel than a thread holds; of single tokens and of prompts."""
    for inner, size, ssm in ((8192, 16, torch.float32), (8192, 16, DTYPE), (3072, 64, torch.float32)):
        cache = StateCache(zeros(4, inner, 3), zeros(4, inner, size, dtype=ssm))
        xz, small, wide = zeros(4, 2 * inner), zeros(4, size), torch.zeros(inner)
        tiles = zeros(1, 2, dtype=torch.int32)
        for some, width in ((None, 1), (tiles, 1), (tiles, 4)):  # the last is for rows in parts
            plan = StatePlan(*ints(4, 4), ints(4, width), 512, some)
            mamba_conv.causal_conv(xz[:, :inner], zeros(inner, 4), zeros(inner), cache, plan, pdl=PDL)
            A = torch.zeros(inner, size)
            mamba_scan.selective_scan(
                xz[:, :inner], zeros(4, inner), A, small, small, wide, xz[:, inner:], wide, cache, plan, pdl=PDL
            )


def heads_with_states() -> None:
    """Mamba-2's in Granite 4 H-Small and in a wide and a narrow shape, of single tokens and of prompts; and gated
    norms."""
    for heads, dim, groups, size, ssm in (
        (128, 64, 1, 128, torch.float32),
        (8, 128, 8, 256, DTYPE),
        (4, 16, 1, 16, DTYPE),
    ):
        cache = StateCache(zeros(4, 8, 3), zeros(4, heads, dim, size, dtype=ssm))
        inner, of_states, wide = heads * dim, groups * size, torch.zeros(heads)
        x, b, c = torch.split(zeros(4, inner + 2 * of_states), [inner, of_states, of_states], dim=1)
        x, b, c = x.unflatten(1, (heads, dim)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
        for some in (None, zeros(1, 2, dtype=torch.int32)):
            plan = StatePlan(*ints(4, 4), ints(4, 2), 512, some)
            ssd.ssd_scan(x, zeros(4, heads), wide, b, c, wide, wide, (0.0, float("inf")), cache, plan)
        ssd.gated_norm(x.flatten(1), zeros(4, inner), zeros(inner), groups, 1e-5)


def delta_rules() -> None:
    """Qwen3-Next's, and in a narrow shape; of single tokens and of prompts."""
    for keys, heads, key_dim, value_dim, ssm in ((16, 32, 128, 128, torch.float32), (3, 3, 40, 24, DTYPE)):
        states, wide, values = zeros(4, heads, key_dim, value_dim, dtype=ssm), torch.zeros(heads), heads * value_dim
        both = zeros(128, 2 * keys * key_dim + 2 * values)
        for some in (None, zeros(6, 2, dtype=torch.int32)):
            plan = StatePlan(*ints(4, 4), ints(4, 2), 512, some)
            delta_rule.gated_delta_rule(both[:, :-values], zeros(128, 2 * heads), wide, wide, states, plan, pdl=PDL)
        delta_rule.gated_norm(zeros(4, values), both[:4, -values:], zeros(value_dim), 1e-6, pdl=PDL)


def mixtures() -> None:
    """Of one token, of a batch, of prompts; weights in FP8 too, with scales by row and by group; of all experts, and of
    one rank's."""
    shapes, half = ((16, 2 * 1024, 4096), (16, 4096, 1024)), (None, None)
    kinds = [([torch.empty(shape, dtype=DTYPE) for shape in shapes], half)]
    for group in (4096, 128) if CAPABILITY >= 89 else ():
        scales = [torch.zeros(max(depth // group, 1), 16 * rows) for _, rows, depth in shapes]
        kinds.append(([torch.empty(shape, dtype=linear.E4M3) for shape in shapes], tuple(scales)))
    for tokens in (1, 64, 512, 8192):
        routing = fused_moe.route(zeros(tokens, 16), 2, False, tokens > 1, pdl=PDL)
        for (gate_up, down), scales in kinds:
            fused_moe.fused_moe(zeros(tokens, 4096), routing, gate_up, down, "silu", scales, pdl=PDL)
        biases = zeros(2 * 1024 * 16), zeros(4096 * 16)
        fused_moe.fused_moe(zeros(tokens, 4096), routing, *kinds[0][0], "clamped_swiglu", biases=biases, pdl=PDL)
    for tokens in (1, 64):
        routing = fused_moe.route(zeros(tokens, 32), 2, False, tokens > 1, own=range(16, 32), pdl=PDL)
        for (gate_up, down), scales in kinds:
            fused_moe.fused_moe(zeros(tokens, 4096), routing, gate_up, down, "silu", scales, pdl=PDL)


def low_bit_matrix(rows: int, columns: int, kind: str = "zeros") -> low_bit.LowBitMatrix:
    steps, group = -(-columns // (4 * low_bit.GPU_WIDTH)), 32 if kind == "e2m1" else 128
    codes = zeros(steps, rows, low_bit.GPU_WIDTH, dtype=torch.int16)
    return low_bit.LowBitMatrix(codes, zeros(steps, rows, dtype=torch.int32), kind, 4, group, columns)


def in_few_bits() -> None:
    """Products with weights in few bits, of linear layers and experts."""
    made = low_bit_matrix
    for rows, (size, depth) in ((1, (4096, 14336)), (64, (28672, 4096)), (512, (28672, 4096))):
        kind = "silu" if size > depth else None
        low_bit.low_bit_linear(zeros(rows, depth), made(size, depth), None, kind, deterministic=rows > 64, pdl=PDL)
    low_bit.expand(made(28672, 4096), DTYPE, pdl=PDL)
    matrices = made(16 * 2048, 4096), made(16 * 4096, 1024)
    for tokens in (1, 512):
        routing = fused_moe.route(zeros(tokens, 16), 2, False, pdl=PDL)
        low_bit.low_bit_moe(zeros(tokens, 4096), routing, *matrices, "silu", pdl=PDL)
    routing = fused_moe.route(zeros(1, 16), 2, False, False, own=range(8), pdl=PDL)
    gate_up, down = made(8 * 5760, 2880, "e2m1"), made(8 * 2880, 2880, "e2m1")
    biases = zeros(8 * 5760), zeros(8 * 2880)
    low_bit.low_bit_moe(zeros(1, 2880), routing, gate_up, down, "clamped_swiglu", biases, pdl=PDL)
    low_bit.low_bit_linear(zeros(5, 2880), gate_up, None, "clamped_swiglu", pdl=PDL)


def in_fp8() -> None:
    """Products with weights in FP8, with scales by row and by group."""
    fp8_linear.quantize_rows(zeros(4, 14336), pdl=PDL)
    for size, depth in ((6144, 4096), (4096, 14336)):
        weight = zeros(size, depth, dtype=linear.E4M3)
        for scale in (torch.zeros(1, size), torch.zeros(depth // 128, size)):
            for rows in (33, 128):
                linear.batch_invariant_linear(zeros(rows, depth), weight, None, scale, pdl=PDL)
            for rows in (1, 2, 9, 32) if SHARED >= linear.MIN_SHARED_MEMORY else ():
                linear.linear(zeros(rows, depth), weight, None, scale, pdl=PDL)
                linear.gated_linear(zeros(rows, depth), weight, "silu", scale, pdl=PDL)
            for rows in (2, 17, 33) if SHARED >= linear.MIN_SHARED_MEMORY else ():
                fp8_linear.fp8_linear_few_rows(zeros(rows, depth), weight, None, scale, pdl=PDL)
                fp8_linear.gated_fp8_linear(zeros(rows, depth), weight, "silu", scale, pdl=PDL)


def of_two(x: Tensor) -> Tensor:
    """As gathered from two ranks."""
    return x.expand(2, *x.shape).contiguous()


def samples() -> None:
    vocab, last = 128_256, ints(4)
    for rows in (1, 64):
        scratch = sampling.SamplingScratch.allocate(rows, vocab, torch.device("cpu"))
        logits, params = zeros(rows, vocab), torch.zeros(rows, 4, dtype=torch.float64)
        tokens, faults, slots, owners, seeds = ints(rows), ints(rows), ints(rows), ints(rows), ints(rows)
        sampling.greedy(logits, slots, last, tokens, faults, scratch, PDL)
        for cut in (False, True):
            sampling.sample(logits, params, owners, seeds, seeds, slots, last, tokens, faults, scratch, cut, PDL)
        own = vocab_parallel_sampling.VocabShard(64_128, 64_128)
        part = logits[:, :64_128]
        best = of_two(vocab_parallel_sampling.local_max(part, own, PDL))
        vocab_parallel_sampling.merge(best, vocab, None, slots, last, tokens, faults, PDL)
        peaks = torch.zeros(rows)
        borders = vocab_parallel_sampling.find_thresholds(part, own, params, peaks, of_two, PDL)
        for kept in (None, (peaks, borders)):
            scores = vocab_parallel_sampling.local_scores(part, own, params, owners, seeds, seeds, kept, PDL)
            vocab_parallel_sampling.merge(of_two(scores), vocab, owners, slots, last, tokens, faults, PDL)
    copy_pages.copy_pages(zeros(8, 4096), ints(2), ints(2))
    copy_pages.copy_rows(zeros(8, 4096), zeros(8, 4096), ints(2), ints(2), 8)


def sums() -> None:
    """Over ranks."""
    for ranks in (2, 4, 8):
        peers = all_reduce.PeerBuffers(ints(ranks), ints(all_reduce.PROGRAMS), ints(1), ranks - 1, ranks, 1 << 20)
        for size in (8192, 5120):
            for rows in (1, 4):
                x, delta, weight, wide = zeros(rows, size), zeros(rows, size), zeros(size), torch.zeros(size)
                for shots in (1, 2):
                    all_reduce.all_reduce(peers, delta, shots=shots, pdl=PDL)
                    all_reduce.all_reduce_norm(peers, x, delta, weight, None, 1e-5, shots=shots, pdl=PDL)
                    all_reduce.all_reduce_norm(peers, x, delta, weight, weight, 1e-5, shots=shots, pdl=PDL)
                    all_reduce.all_reduce_norm(
                        peers, x, delta, wide, None, 1e-5, post_norm_weight=wide, shots=shots, pdl=PDL
                    )
        all_reduce.all_gather(peers, zeros(4, 64128), pdl=PDL)
    for rank, ranks in ((0, 2), (1, 2), (1, 3), (1, 4), (1, 8)):
        peers = all_reduce.PeerBuffers(
            ints(ranks), ints(all_reduce.PROGRAMS), ints(1), rank, ranks, 1 << 20, (0,) * ranks, 256 << 20
        )
        norm = copy_engine_pair.all_reduce_norm_pair if ranks == 2 else copy_engine_allreduce.all_reduce_norm_owned
        for size in (8192, 5120):
            x, delta, weight, wide = zeros(4, size), zeros(4, size), zeros(size), torch.zeros(size)
            for given in ((weight, None, None), (weight, weight, None), (wide, None, wide)):
                norm(peers, 3, 2, x, delta, *given[:2], 1e-5, given[2], zeros(4, size))
            norm(peers, 4, 2, None, delta, None, None, 0.0, None, None)
            if ranks > 2:
                copy_engine_allreduce.reduce_owned(peers, delta, slice(1, 3), 0, 2)


def cache_hits() -> Counter[bool]:
    """Return counts of what this process compiles from now on, and of what it finds on disk."""
    seen = Counter[bool]()
    triton.knobs.compilation.listener = lambda **report: seen.update([report["cache_hit"]])
    return seen


def apart() -> None:
    seen, compiler, target = cache_hits(), KernelCompiler(2), ["cuda", CAPABILITY, 32]
    result: dict[str, Any] = {}
    bad = [
        ("os", "path"),
        ("quire.kernels.limits", "MAX_GRAPH_ROWS"),
        (norm.__name__, "rms_norm"),
        (norm.__name__, "_"),
    ]
    result["refused"] = [compiler.request(*names, "{}", target) for names in bad]
    result["refused"].append(compiler.request(norm.__name__, "_norm", "{", target))  # a kernel, and bad JSON

    def launch(rows: int) -> None:
        norm.rms_norm(zeros(rows, 256), zeros(256), 1e-5, delta=zeros(rows, 256))
        low_bit.expand(low_bit_matrix(256, 256), DTYPE)  # with inline assembly, and constants of its module
        cache = LayerCache(*zeros(8, 2, 1, 16, 64).unbind(1), 4, 1.0)  # for two kernels that call the same functions
        decode.decode(zeros(rows, 4, 64), cache, ints(3, 8), ints(rows), ints(rows), splits=2, pdl=PDL)

    def hits(step: Any) -> list[int]:
        seen.clear()
        step()
        return [seen[False], seen[True]]

    def at_once() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(launch, [4] * 4))

    with compile_once(compiler):
        result["at once"] = hits(at_once), compiler.num_requests - len(result["refused"])
        if compiler._process is not None:
            compiler._process.kill()
        result["dead"] = hits(lambda: norm.rms_norm(zeros(4, 512), zeros(512), 1e-5))
        result["later"] = hits(lambda: norm.rms_norm(zeros(4, 1024), zeros(1024), 1e-5)), compiler.num_requests
    compiler.close()
    print(json.dumps(result))


def together() -> None:
    seen, sizes = cache_hits(), (256, 512, 1024, 2048, 4096)

    def task(size: int) -> None:
        norm.rms_norm(zeros(4, size), zeros(size), 1e-5, delta=zeros(4, size))
        activation.act_and_mul(zeros(4, 2 * size), "silu")

    print("ready", flush=True)
    rank, ranks = (int(word) for word in sys.stdin.readline().split())
    begin = len(sizes) * rank // ranks
    with compile_once(), ThreadPoolExecutor(3) as pool:
        list(pool.map(task, sizes[begin:] + sizes[:begin]))
    print(seen[False], seen[True])


if __name__ == "__main__":
    driver.set_active(Driver())
    if sys.argv[5:]:
        watch()
        {"together": together, "apart": apart}[sys.argv[5]]()
        sys.exit()
    decode.multiprocessors = lambda device: COUNT  # type: ignore[assignment]
    for module in (decode, linear, low_bit, fused_moe, delta_rule, ssd):
        module.shared_memory = lambda device: SHARED  # type: ignore[attr-defined]
    launches, compiler, seen = watch(), KernelCompiler(3), cache_hits()
    with compile_once(compiler):
        attend()
        layers()
        states()
        heads_with_states()
        delta_rules()
        mixtures()
        in_few_bits()
        samples()
        sums()
    compiler.close()
    assert not seen[False], "all kernels compile in other processes too, and are found here"
    print(json.dumps(launches))
