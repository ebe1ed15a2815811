"""Mamba-2's scan, in plain torch and in Triton, equals a loop over tokens in fp64: outputs, and the states at every
border; what isn't a row's page is neither read nor written. And its gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from grids import CUDA, DEVICE, DTYPES, random
from running_states import Row, numpy, padded, plan_of, random_table
from torch import Tensor

from quire.kernels import ssd
from quire.kernels.mamba_states import StateCache, StatePlan
from quire.kernels.triton import ssd as kernels

SCANS: dict[str, Any] = {
    "torch": ssd.ssd_scan,
    "Triton": kernels.ssd_scan,
    "deterministic": partial(kernels.ssd_scan, deterministic=True),
}
LIMITS = (0.01, 2.0)


class Shape(NamedTuple):
    heads: int = 4
    dim: int = 6
    groups: int = 2
    size: int = 10
    run: int = 8


PLAIN = Shape()


class Step(NamedTuple):
    """Rows of a step, and what a layer gives the operation; inputs are parts of wider rows, as a layer's are."""

    shape: Shape
    rows: Sequence[Row]
    table: Tensor
    states: Tensor
    numbers: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor
    bias: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, heads, dim], B and C [T, groups, size]."""
        heads, dim, groups, size, _ = self.shape
        x, b, c = torch.split(self.numbers, [heads * dim, groups * size, groups * size], dim=1)
        return x.unflatten(1, (heads, dim)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))

    @property
    def plan(self) -> StatePlan:
        return plan_of(self.rows, self.table, self.shape.run)

    def page(self, row: int, position: int) -> int:
        return int(self.table[row + 1, position // self.shape.run])

    def scan(self, name: str, plan: StatePlan | None = None) -> Tensor:
        x, b, c = self.inputs
        cache = StateCache(self.states, self.states, page_tokens=self.shape.run)
        return SCANS[name](x, self.dt, self.A, b, c, self.D, self.bias, LIMITS, cache, plan or self.plan)


def step(
    rows: Sequence[tuple[int, int]], shape: Shape = PLAIN, dtype: torch.dtype = torch.float32,
    kept: torch.dtype = torch.float32,
) -> Step:  # fmt: skip
    """Pages that must not be read are NaN; the ones that rows start from are random."""
    total, width = sum(length for _, length in rows), -(-max(map(sum, rows)) // shape.run)
    table = random_table(len(rows), width)
    heads, dim, groups, size, _ = shape
    buffer = torch.full((len(rows) * width + 1, 2, heads, dim, size), torch.nan, dtype=kept, device=DEVICE)
    numbers = heads * dim + 2 * groups * size
    made = Step(
        shape, [Row(*row) for row in rows], table, buffer[:, 1],
        random(total, numbers + 3, dtype=dtype)[:, :numbers], random(total, heads + 1, dtype=dtype, seed=1)[:, 1:],
        -torch.exp(random(heads, seed=2)), random(heads, seed=3), random(heads, seed=4),
    )  # fmt: skip
    for i, row in enumerate(made.rows):
        if row.start:
            made.states[made.page(i, row.start - 1)] = random(heads, dim, size, seed=5 + i).to(kept)
    return made


def looped(step: Step) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Outputs, and states by page: token by token, from the states that the pages hold now."""
    x, b, c, dt, A, D, bias = (numpy(part) for part in (*step.inputs, step.dt, step.A, step.D, step.bias))
    heads, dim, groups, size, _ = step.shape
    out, states, t = np.zeros((len(x), heads, dim)), {}, 0
    for i, row in enumerate(step.rows):
        h = np.zeros((heads, dim, size))
        if row.start:
            h = numpy(step.states[step.page(i, row.start - 1)])
        for position in range(row.start, row.start + row.length):
            delta = np.clip(np.logaddexp(0, dt[t] + bias), *LIMITS)
            own, read = (np.repeat(part[t], heads // groups, axis=0) for part in (b, c))
            h = np.exp(delta * A)[:, None, None] * h + (delta[:, None] * x[t])[:, :, None] * own[:, None]
            out[t] = np.einsum("hpn,hn->hp", h, read) + D[:, None] * x[t]
            states[step.page(i, position)] = h
            t += 1
    return out, states


def near(got: Tensor, want: np.ndarray, inputs: torch.dtype = torch.float32) -> None:
    """With inputs in 16 bits the products of a chunk have a larger error than fp32."""
    within = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[got.dtype]
    within = within if inputs == torch.float32 else max(within, 1e-4)
    torch.testing.assert_close(got.double().cpu(), torch.from_numpy(want), atol=within, rtol=within)


def check(made: Step, name: str) -> None:
    want, states = looped(made)
    before = made.states.clone()
    near(made.scan(name), want)
    for page, state in states.items():
        near(made.states[page], state, made.numbers.dtype)
    others = [page for page in range(len(before)) if page not in states]
    torch.testing.assert_close(made.states[others], before[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(0, 1), (7, 1), (8, 1), (21, 1)], PLAIN),
        ([(0, 9), (5, 1), (3, 30), (8, 2)], PLAIN),
        ([(0, 150), (15, 1)], Shape(2, 16, 1, 16, 512)),
        ([(3, 100)], Shape(3, 5, 3, 40, 16)),
        ([(7, 20), (0, 3)], Shape(2, 80, 2, 3, 4)),
    ],
)
def test_rows_and_runs(rows: list[tuple[int, int]], shape: Shape, name: str) -> None:
    check(step(rows, shape), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [*dict.fromkeys((*DTYPES, torch.bfloat16))])
def test_dtypes(dtype: torch.dtype, kept: torch.dtype) -> None:
    """States are computed in fp32, and rounded when they are written."""
    for rows in ([(3, 5), (0, 8), (8, 1)], [(3, 1), (0, 1), (8, 1)]):
        for name in SCANS:
            check(step(rows, Shape(2, 16, 1, 16), dtype=dtype, kept=kept), name)


@pytest.mark.parametrize("name", SCANS)
def test_padding_and_pages_that_are_not_written(name: str) -> None:
    """Rows of no tokens; and a row with draft tokens, whose states stay as they are."""
    made = step([(3, 6), (2, 12)])
    before, (want, states) = made.states.clone(), looped(made)
    near(made.scan(name, padded(made.plan, 1)), want)
    own = [made.page(0, position) for position in (3, 8)]
    for page in own:
        near(made.states[page], states[page])
    others = [page for page in range(1, len(before)) if page not in own]  # page 0 may hold anything
    torch.testing.assert_close(made.states[others], before[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", SCANS)
def test_decays_that_leave_nothing(name: str) -> None:
    """delta A far below what exp tells from 0."""
    made = step([(0, 30), (5, 9)])
    check(made._replace(A=made.A * 1e4), name)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 12), (0, 5, 12), (0, 8, 12)])
def test_bits_do_not_depend_on_cuts(cuts: tuple[int, ...]) -> None:
    """Outputs and states of a row, alone and cut into steps."""
    one, several = step([(3, 12)]), step([(3, 12)])
    whole = one.scan("deterministic")
    parts = [
        several._replace(
            rows=[Row(3 + a, b - a)], numbers=several.numbers[a:b], dt=several.dt[a:b]
        ).scan("deterministic")
        for a, b in pairwise(cuts)
    ]  # fmt: skip
    assert torch.equal(torch.cat(parts), whole)
    pages = [one.page(0, 7), one.page(0, 14)]
    assert torch.equal(one.states[pages], several.states[pages])


@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32])
@pytest.mark.parametrize(("groups", "size"), [(1, 40), (3, 8), (2, 300)])
def test_gated_norms(groups: int, size: int, dtype: torch.dtype) -> None:
    both, weight = random(5, 2 * groups * size, dtype=dtype), random(groups * size, dtype=dtype, seed=1)
    x, gate = both.chunk(2, dim=1)
    v, z = numpy(x), numpy(gate)
    v = (v * z / (1 + np.exp(-z))).reshape(5, groups, size)
    want = (v / np.sqrt((v * v).mean(2, keepdims=True) + 1e-3)).reshape(5, -1) * numpy(weight)
    for one in (ssd.gated_norm, kernels.gated_norm):
        near(one(x, gate, weight, groups, 1e-3), want)
    own = slice(0, size // 2)  # half of one group, and the means of the squares of all of it
    half = ssd.gated_norm(x[:, own], gate[:, own], weight[own], 1, 1e-3, lambda _: x.new_tensor((v**2).mean(2)[:, :1]))
    near(half, want[:, own])
