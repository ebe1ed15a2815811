"""The family of `quire bench kernels` with weights in few bits: linear layers in the sizes of Llama-3-8B, and mixtures
of experts in those of GPT-OSS 20B and Qwen3 30B-A3B, beside the same layers in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.bench.replay import Call, Case, inputs
from quire.kernels.cpu.low_bit_linear import LowBitFormat
from quire.weights.low_bit import INT8_FORMAT, MXFP4_FORMAT, Q6_K_FORMAT

if TYPE_CHECKING:
    from quire.kernels.triton.low_bit import LowBitMatrix

AWQ_FORMAT, Q4_K_FORMAT = LowBitFormat(4, 128, 0, True), LowBitFormat(4, 256, 0, True)
FORMATS = {"AWQ": AWQ_FORMAT, "Q4_K": Q4_K_FORMAT, "Q6_K": Q6_K_FORMAT, "int8": INT8_FORMAT}
LINEARS = {"gate and up": (28672, 4096, "silu"), "down": (4096, 14336, None), "output": (4096, 4096, None)}
ROWS = (1, 8, 16, 32, 64, 128, 2048)
EXPERTS = {
    "GPT-OSS, MXFP4": (MXFP4_FORMAT, 32, 4, 2880, 2880), "Qwen3, AWQ": (AWQ_FORMAT, 128, 8, 2048, 768)
}  # fmt: skip
"""Format, experts, experts of a token, hidden and intermediate size."""
TOKENS = (1, 8, 64, 256, 4096)
COMPUTE_ROWS = 1024
"""The fewest rows for which cases are measured by the rate of products, not by the bytes of the weight."""


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def random_matrix(rows: int, columns: int, form: LowBitFormat, device: torch.device | str = "cuda") -> LowBitMatrix:
    """Return a weight [rows, columns] of random codes with equal scales."""
    from quire.kernels.triton.low_bit import LowBitMatrix

    steps, kind = -(-columns // (16 // form.gpu_bits * 32)), form.gpu_scales
    units = {"e2m1": (steps,), "halves": (steps, 2), "superblocks": (steps, 8 // form.gpu_bits + 1)}
    codes = torch.randint(-(2**15), 2**15, (steps, rows, 32), dtype=torch.int16, device=device)
    shape = (*units.get(kind, (columns // form.gpu_group,)), rows)
    scales = torch.full(shape, 0x70707070 if kind == "e2m1" else 0x20202020, dtype=torch.int32, device=device)
    return LowBitMatrix(codes, scales, kind, form.gpu_bits, form.gpu_group, columns)


def low_bit() -> Iterator[Case]:
    """Yield the cases: beside reading the weight or, from COMPUTE_ROWS rows on, beside the rate of a matrix product."""
    from quire.kernels.triton.fused_moe import fused_moe, route
    from quire.kernels.triton.linear import MAX_ROWS, gated_linear, linear
    from quire.kernels.triton.low_bit import low_bit_linear, low_bit_moe

    for name, (size, columns, activation) in LINEARS.items():
        plain = [_random(size, columns) for _ in range(inputs(size * columns * 2))]
        weights = {
            kind: [random_matrix(size, columns, form) for _ in range(inputs(size * form.gpu_row_bytes(columns)))]
            for kind, form in FORMATS.items()
        }
        for rows in ROWS:
            x, work, fits = _random(rows, columns), 2 * rows * size * columns, rows <= MAX_ROWS
            for kind, several in weights.items():
                calls: list[Call] = [
                    partial(low_bit_linear, x, each, activation=activation, pdl=True) for each in several
                ]
                moved = size * FORMATS[kind].gpu_row_bytes(columns)
                yield _case(f"{name}, {kind}", f"{rows} rows", calls, moved, work, rows)
            if fits and activation is not None:
                calls = [partial(gated_linear, x, each, activation, pdl=True) for each in plain]
            elif fits:
                calls = [partial(linear, x, each, pdl=True) for each in plain]
            else:
                calls = [partial(F.linear, x, each) for each in plain]
            yield _case(f"{name}, bf16", f"{rows} rows", calls, size * columns * 2, work, rows)
    for name, (form, experts, top, hidden, inner) in EXPERTS.items():
        few_bits = random_matrix(experts * 2 * inner, hidden, form), random_matrix(experts * hidden, inner, form)
        full = _random(experts, 2 * inner, hidden), _random(experts, hidden, inner)
        expert_bytes = 2 * inner * form.gpu_row_bytes(hidden) + hidden * form.gpu_row_bytes(inner)
        for tokens in TOKENS:
            x = _random(tokens, hidden)
            routings = [route(_random(tokens, experts), top, True) for _ in range(4)]
            active = sum(len(routing.expert_ids.unique()) for routing in routings) / len(routings)
            case, work = f"{tokens} tokens, {active:.0f} of {experts}", 2 * tokens * top * 3 * hidden * inner
            calls = [partial(low_bit_moe, x, routing, *few_bits, "silu", pdl=True) for routing in routings]
            yield _case(f"experts of {name}", case, calls, int(active * expert_bytes), work, tokens)
            calls = [partial(fused_moe, x, routing, *full, "silu", pdl=True) for routing in routings]
            yield _case(f"experts of {name}, in bf16", case, calls, int(active * 6 * hidden * inner), work, tokens)


def _case(kernel: str, case: str, calls: list[Call], moved: int, work: int, rows: int) -> Case:
    """Return a case of `rows` rows that reads `moved` bytes and computes `work` operations."""
    if rows >= COMPUTE_ROWS:
        return Case(kernel, case, calls, work, "compute")
    return Case(kernel, case, calls, moved)
