"""Families of `quire bench kernels`: running states (one token a row, and whole prompts) and mixtures of experts, in
the sizes of Jamba 52B; the gated delta rule, in those of Qwen3-Next 80B; cross attention to images, in those of Llama
3.2 11B Vision.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.bench.replay import Call, Case, inputs
from quire.kernels.mamba_states import StateCache, StatePlan, make_state_tiles

HIDDEN, FFN, EXPERTS, TOP = 4096, 14336, 16, 2
INNER, SIZE, TAPS = 8192, 16, 4
LAYERS, RUN = 28, 512
DELTA_KEYS, DELTA_HEADS = 16, 32
ROWS = (1, 8, 64, 256)
PICTURE, KV_HEADS, HEADS, DIM, PAGE = 6404, 8, 32, 128, 16
PROMPTS = ((8, 8192), (1, 8192), (64, 128))  # rows, and tokens of each row
DELTA_PROMPTS = ((1, 128), (1, 512), (1, 2048), *PROMPTS)


class Weights(NamedTuple):
    """The weights of a layer that the two operations use."""

    conv: Tensor
    bias: Tensor
    A: Tensor
    wide: Tensor


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _weights() -> Weights:
    A = -torch.arange(1.0, SIZE + 1, device="cuda").repeat(INNER, 1)
    return Weights(_random(INNER, TAPS), _random(INNER), A, torch.zeros(INNER, device="cuda"))


def zero_states(pages: int, ssm: torch.dtype) -> list[StateCache]:
    """Return zero states of all layers, in pages that hold one layer after another."""
    sizes = INNER * (TAPS - 1) * 2, INNER * SIZE * ssm.itemsize
    page = LAYERS * sum(sizes)
    flat = torch.zeros(pages * page, dtype=torch.uint8, device="cuda")

    def view(at: int, width: int, dtype: torch.dtype) -> Tensor:
        strides = (page // dtype.itemsize, width, 1)
        return flat.view(dtype).as_strided((pages, INNER, width), strides, at // dtype.itemsize)

    starts = [layer * sum(sizes) for layer in range(LAYERS)]
    return [
        StateCache(view(at, TAPS - 1, torch.bfloat16), view(at + sizes[0], SIZE, ssm), page_tokens=RUN) for at in starts
    ]


def states() -> Iterator[Case]:
    """Yield the cases of one token a row, with states in fp32 and in bf16; then of prompts, by the bytes of their
    tokens."""
    weights = _weights()
    for ssm in (torch.float32, torch.bfloat16):
        name = str(ssm).removeprefix("torch.")
        for rows in ROWS:
            yield from _steps(rows, ssm, name, weights)
        for rows, length in PROMPTS:
            yield from _prompts(rows, length, ssm, name, weights)


def delta_rules() -> Iterator[Case]:
    """Yield the cases of the gated delta rule in the sizes of Qwen3-Next 80B, with states in fp32.

    Rows of one token are measured by the bytes of their states. Prompts, token by token and by chunks, are measured by
    the bytes of their tokens; by chunks also by the operations of products, those of the inverses aside."""
    from quire.kernels.triton.delta_rule import CHUNK, gated_delta_rule

    channels, values = 2 * DELTA_KEYS * DIM + DELTA_HEADS * DIM, DELTA_HEADS * DIM
    wide = torch.zeros(DELTA_HEADS, device="cuda")

    def calls(rows: int, length: int, plans: list[StatePlan], deterministic: bool = False) -> list[Call]:
        qkv, ba = _random(rows * length, channels), _random(rows * length, 2 * DELTA_HEADS)
        last = max(int(plan.write_pages.max()) for plan in plans)
        states = torch.zeros((last + 1, DELTA_HEADS, DIM, DIM), device="cuda")
        run = partial(gated_delta_rule, qkv, ba, wide - 1, wide, states, pdl=True, deterministic=deterministic)
        return [partial(run, plan=plan) for plan in plans]

    for rows in ROWS:
        moved = 2 * rows * values * DIM * 4
        pages = torch.arange(1, inputs(moved) * rows + 1, device="cuda").view(-1, rows, 1)
        slots, positions = torch.arange(rows, device="cuda"), torch.full((rows,), RUN // 4, device="cuda")
        plans = [StatePlan.for_decode(table, slots, positions, RUN) for table in pages]
        yield Case("delta rule, a token a row", f"{rows} rows", calls(rows, 1, plans), moved)
    for rows, length in DELTA_PROMPTS:
        total, plans = rows * length, [_prompt_plan(rows, length)]
        moved, case = total * (channels + values) * 2, f"{rows} x {length}"
        yield Case("delta rule of prompts, token by token", case, calls(rows, length, plans, True), moved)
        by_chunks = calls(rows, length, plans)
        yield Case("delta rule of prompts, by chunks", case, by_chunks, moved)
        # For each token and head: 3 products with a state, 2 of keys with keys or queries, 2 with values.
        operations = 2 * total * DELTA_HEADS * (3 * DIM * DIM + 2 * CHUNK * DIM + 2 * CHUNK * DIM)
        yield Case("delta rule of prompts, by chunks, products", case, by_chunks, operations, "compute")


def ssd() -> Iterator[Case]:
    """Yield the cases of Mamba-2's scan in the sizes of Granite 4 H-Small: one token a row, by the bytes of the states,
    and prompts, by those of their tokens."""
    from quire.kernels.triton.ssd import ssd_scan

    heads, dim, size, limits = 128, 64, 128, (0.0, float("inf"))
    A, D, bias = -torch.arange(1.0, heads + 1, device="cuda"), *torch.zeros(2, heads, device="cuda")

    def case(name: str, text: str, tokens: int, pages: int, plans: list[StatePlan], moved: int) -> Case:
        states = torch.zeros(pages, heads, dim, size, device="cuda")
        cache = StateCache(states, states, page_tokens=RUN)
        x, b, c = torch.split(_random(tokens, heads * dim + 2 * size), [heads * dim, size, size], dim=1)
        x, b, c, dt = x.unflatten(1, (heads, dim)), b[:, None], c[:, None], _random(tokens, heads)
        calls: list[Call] = [partial(ssd_scan, x, dt, A, b, c, D, bias, limits, cache, plan) for plan in plans]
        return Case(name, text, calls, moved)

    for rows in ROWS:
        moved = 2 * rows * heads * dim * size * 4
        groups = inputs(moved)
        order = (torch.randperm(rows * groups, device="cuda") + 1).view(groups, rows, 1)
        slots, positions = torch.arange(rows, device="cuda"), torch.full((rows,), RUN // 4, device="cuda")
        plans = [StatePlan.for_decode(table, slots, positions, RUN) for table in order]
        yield case("Mamba-2, a token a row", f"{rows} rows", rows, rows * groups + 1, plans, moved)
    for rows, length in PROMPTS:
        plan, total = _prompt_plan(rows, length), rows * length
        moved = total * 2 * (2 * heads * dim + 2 * size)
        yield case("Mamba-2 of prompts", f"{rows} x {length}", total, plan.write_pages.numel() + 1, [plan], moved)


def _steps(rows: int, ssm: torch.dtype, name: str, weights: Weights) -> Iterator[Case]:
    moved = rows * INNER * SIZE * ssm.itemsize * 2 + rows * INNER * 2 * 4 + INNER * SIZE * 4
    groups = -(-inputs(moved) // LAYERS)
    caches = zero_states(rows * groups + 1, ssm)
    order = (torch.randperm(rows * groups, device="cuda") + 1).view(groups, rows, 1)
    slots, positions = torch.arange(rows, device="cuda"), torch.full((rows,), RUN // 4, device="cuda")
    plans = [StatePlan.for_decode(table, slots, positions, RUN) for table in order]
    tokens, conv_moved = _tokens(rows), rows * INNER * 2 * (2 * (TAPS - 1) + 2)
    pairs = [(cache, plan) for plan in plans for cache in caches]
    conv, scan = _calls(tokens, weights, pairs)
    yield Case("conv, a token a row", f"{rows} rows", conv, conv_moved)
    yield Case(f"scan, a token a row, {name}", f"{rows} rows", scan, moved)


def _prompts(rows: int, length: int, ssm: torch.dtype, name: str, weights: Weights) -> Iterator[Case]:
    total, plan = rows * length, _prompt_plan(rows, length)
    caches = zero_states(plan.write_pages.numel() + 1, ssm)[:1]
    conv, scan = _calls(_tokens(total), weights, [(caches[0], plan)])
    case = f"{rows} x {length}"
    yield Case("conv of prompts", case, conv, total * INNER * 2 * 2)
    yield Case(f"scan of prompts, {name}", case, scan, total * (4 * INNER + 2 * SIZE) * 2)


def _prompt_plan(rows: int, length: int) -> StatePlan:
    """Return the plan of prompts, each row with pages of its own from page 1 on."""
    runs = -(-length // RUN)
    pages = torch.arange(1, rows * runs + 1, device="cuda").view(rows, runs)
    lengths = torch.full((rows,), length, device="cuda")
    zero, tiles = torch.zeros_like(lengths), torch.from_numpy(make_state_tiles(np.full(rows, length))).cuda()
    return StatePlan(torch.arange(rows, device="cuda") * length, lengths, zero, zero - 1, pages, RUN, tiles)


class Tokens(NamedTuple):
    x: Tensor
    z: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


def _tokens(count: int) -> Tokens:
    """Return inputs laid out as in a layer: parts of two products."""
    xz, numbers = _random(count, 2 * INNER), _random(count, 256 + 2 * SIZE)
    x, z = xz.chunk(2, dim=1)
    B, C = numbers[:, 256:].chunk(2, dim=1)
    return Tokens(x, z, _random(count, INNER), B, C)


def _calls(
    tokens: Tokens, weights: Weights, pairs: list[tuple[StateCache, StatePlan]]
) -> tuple[list[Call], list[Call]]:
    from quire.kernels.triton.mamba_conv import causal_conv
    from quire.kernels.triton.mamba_scan import selective_scan

    t, w = tokens, weights
    conv: list[Call] = [partial(causal_conv, t.x, w.conv, w.bias, *pair, pdl=True) for pair in pairs]
    scan: list[Call] = [
        partial(selective_scan, t.x, t.dt, w.A, t.B, t.C, w.wide, t.z, w.wide, *pair, pdl=True) for pair in pairs
    ]
    return conv, scan


def experts() -> Iterator[Case]:
    """Yield the cases of a mixture-of-experts layer, the choice of experts included: against reading the weights of the
    chosen ones, and for prompts against the rate of a matrix product. In bf16, and in FP8 if the GPU supports it."""
    from quire.kernels.triton.fused_moe import fused_moe, route
    from quire.weights.fp8 import E4M3, has_fp8_matmul

    none = (None, None)
    scales = torch.ones(1, EXPERTS * 2 * FFN, device="cuda"), torch.ones(1, EXPERTS * HIDDEN, device="cuda")
    several = [(_random(EXPERTS, 2 * FFN, HIDDEN), _random(EXPERTS, HIDDEN, FFN)) for _ in range(2)]
    formats: dict[str, list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | tuple[None, None]]]]
    formats = {"experts": [(pair, none) for pair in several]}
    if has_fp8_matmul(torch.bfloat16, torch.device("cuda")):
        formats["experts, FP8"] = [((gate_up.to(E4M3), down.to(E4M3)), scales) for gate_up, down in several]
    for rows in (1, 8, 64, 256, 2048, 8192):
        x, logits = _random(rows, HIDDEN), _random(rows, EXPERTS)
        one, active = 3 * HIDDEN * FFN, len(route(logits, TOP, False).expert_ids.unique())

        def mixture(pair: tuple[Tensor, Tensor], by: tuple[Tensor | None, Tensor | None]) -> None:
            routing = route(logits, TOP, False, rows > 1, pdl=True)  # noqa: B023
            fused_moe(x, routing, *pair, "silu", by, pdl=True)  # noqa: B023

        for name, layers in formats.items():
            calls: list[Call] = [partial(mixture, pair, by) for pair, by in layers]
            if rows <= 256:
                moved = active * one * layers[0][0][0].element_size()
                yield Case(name, f"{rows} rows, {active} of {EXPERTS}", calls, moved)
            else:
                yield Case(name, f"{rows} rows", calls, 2 * rows * TOP * one, "compute")


def crossed() -> Iterator[Case]:
    """Yield the cases of cross attention: one token of each row attends to all rows of its own image. All page tables
    form one column, as in a runner (worker/cross_attention.py)."""
    from quire.bench.kv_batches import decode_calls, random_kv

    for rows in (1, 8, 32):
        size = 2 * rows * KV_HEADS * PICTURE * DIM * 2
        where = random_kv(rows, PICTURE, KV_HEADS, DIM, PAGE, min(inputs(size), LAYERS), torch.bfloat16, HEADS)
        width = where.tables.shape[1]
        column = where._replace(tables=where.tables.view(-1, 1), slots=where.slots * width)
        yield Case("cross attention", f"{rows} x {PICTURE}", decode_calls(column), size)
