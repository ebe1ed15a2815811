"""The gated delta rule, in plain torch and in Triton, equals a loop over tokens in fp64: outputs, and the states at
every border; what isn't a row's page is neither read nor written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from grids import CUDA, DEVICE, DTYPES, INFINITE, random
from running_states import Row, numpy, silu
from torch import Tensor

from quire.kernels import delta_rule
from quire.kernels.mamba_states import StatePlan, make_state_tiles, state_pages
from quire.kernels.triton import delta_rule as kernels

BOTH: dict[str, Any] = {"torch": delta_rule, "Triton": kernels}


class Shape(NamedTuple):
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 12
    value_dim: int = 10
    run: int = 8


PLAIN = Shape()


class Step(NamedTuple):
    """Rows of a step, and what a layer gives the operation; inputs are parts of wider rows, as a layer's are."""

    shape: Shape
    rows: Sequence[Row]
    table: Tensor
    states: Tensor
    qkv: Tensor
    ba: Tensor
    A: Tensor
    dt_bias: Tensor

    @property
    def plan(self) -> StatePlan:
        lengths = np.array([row.length for row in self.rows])
        starts = np.array([row.start for row in self.rows])
        run = self.shape.run
        width = int(((starts + lengths - 1) // run - starts // run).max()) + 1
        slots = torch.arange(1, len(lengths) + 1, device=DEVICE)
        offsets, there, first = (
            torch.from_numpy(x).to(DEVICE) for x in (np.cumsum(lengths) - lengths, lengths, starts)
        )
        tiles = None if (lengths == 1).all() else torch.from_numpy(make_state_tiles(lengths)).to(DEVICE)
        pages = state_pages(self.table, slots, first, there, run, width)
        return StatePlan(offsets, there, first, *pages, run, tiles)

    def page(self, row: int, position: int) -> int:
        return int(self.table[row + 1, position // self.shape.run])


def step(
    rows: Sequence[tuple[int, int]], shape: Shape = PLAIN, dtype: torch.dtype = torch.float32,
    kept: torch.dtype = torch.float32,
) -> Step:  # fmt: skip
    """Pages that must not be read are NaN; the ones that rows start from are random."""
    total, width = sum(length for _, length in rows), -(-max(map(sum, rows)) // shape.run)
    order = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.cat((torch.zeros(1, width, dtype=torch.int64), order.view(len(rows), width))).to(DEVICE)
    key_heads, heads, key_dim, value_dim, _ = shape
    buffer = torch.full((len(order) + 1, 2, heads, key_dim, value_dim), torch.nan, dtype=kept, device=DEVICE)
    numbers = 2 * key_heads * key_dim + heads * value_dim
    made = Step(
        shape, [Row(*row) for row in rows], table, buffer[:, 1],
        random(total, numbers + 3, dtype=dtype)[:, :numbers], random(total, 2 * heads + 1, dtype=dtype, seed=1)[:, 1:],
        -torch.exp(random(heads, seed=2)), random(heads, seed=3),
    )  # fmt: skip
    for i, row in enumerate(made.rows):
        if row.start:
            made.states[made.page(i, row.start - 1)] = random(heads, key_dim, value_dim, seed=4 + i).to(kept)
    return made


def looped(step: Step) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Outputs, and states by page: token by token, from the states that the pages hold now."""
    qkv, ba, A, dt_bias = (numpy(x) for x in (step.qkv, step.ba, step.A, step.dt_bias))
    key_heads, heads, key_dim, value_dim, _ = step.shape
    out, states, t = np.zeros((len(qkv), heads, value_dim)), {}, 0
    for i, row in enumerate(step.rows):
        S = np.zeros((heads, key_dim, value_dim))
        if row.start:
            S = numpy(step.states[step.page(i, row.start - 1)])
        for position in range(row.start, row.start + row.length):
            q, k, v = np.split(qkv[t], [key_heads * key_dim, 2 * key_heads * key_dim])
            q, k = (np.repeat(x.reshape(key_heads, key_dim), heads // key_heads, axis=0) for x in (q, k))
            q, k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (q, k))
            rate, decay = 1 / (1 + np.exp(-ba[t, :heads])), np.exp(A * np.logaddexp(0, ba[t, heads:] + dt_bias))
            S = S * decay[:, None, None]
            u = rate[:, None] * (v.reshape(heads, value_dim) - np.einsum("hkv,hk->hv", S, k))
            S = S + k[:, :, None] * u[:, None]
            out[t] = np.einsum("hkv,hk->hv", S, q) / np.sqrt(key_dim)
            states[step.page(i, position)] = S
            t += 1
    return out.reshape(len(qkv), -1), states


def near(got: Tensor, want: np.ndarray) -> None:
    """Within fp32's errors, and one rounding to got's dtype. (The interpreter cuts off where a GPU rounds.)"""
    half = (0.51 if CUDA else 1.01) * torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 0.0
    np.testing.assert_allclose(numpy(got), want, rtol=half + 5e-5, atol=5e-5)


def run(made: Step, name: str, plan: StatePlan | None = None) -> Tensor:
    result: Tensor = BOTH[name].gated_delta_rule(
        made.qkv, made.ba, made.A, made.dt_bias, made.states, made.plan if plan is None else plan
    )
    return result


def check(made: Step, name: str) -> None:
    (want, written), before = looped(made), made.states.clone()
    near(run(made, name), want)
    for page, state in written.items():
        near(made.states[page], state)
    others = [page for page in range(len(before)) if page not in written]
    torch.testing.assert_close(made.states[others], before[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*BOTH][::-1])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 11])
def test_rows_of_all_lengths(start: int, name: str) -> None:
    """Around runs of 8, from a state and from none; beside one another, and each alone."""
    rows = [(start, length) for length in (1, 3, 7, 8, 9, 17)]
    for some in (rows, *([row] for row in rows)):
        check(step(some), name)


@pytest.mark.parametrize("name", [*BOTH][::-1])
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(3, 4), (0, 5), (9, 1)], Shape(run=1)),
        ([(3, 130), (0, 64), (1, 1)], Shape(1, 2, 4, 3, 512)),  # more than a chunk
        ([(5, 1), (0, 1), (8, 1)], Shape(3, 3, 8, 130)),  # more columns than a program has
        ([(5, 2), (0, 9)], Shape(1, 3, 40, 8, 4)),
    ],
)
def test_shapes(rows: list[tuple[int, int]], shape: Shape, name: str) -> None:
    check(step(rows, shape), name)


@INFINITE
@pytest.mark.parametrize("name", [*BOTH][::-1])
def test_states_that_are_forgotten_or_kept(name: str) -> None:
    """Decays far below what exp tells from 0, and near 1; rates near 0 and 1."""
    made = step([(3, 70), (0, 1)], Shape(1, 2, 4, 3))
    for factor in (1e4, 1e-6):
        check(made._replace(A=made.A * factor), name)
    check(made._replace(ba=made.ba * 40), name)


@pytest.mark.parametrize("name", [*BOTH][::-1])
def test_pages_below_0_are_not_written(name: str) -> None:
    made = step([(3, 9), (0, 2)])
    plan, before = made.plan, made.states.clone()
    unwritten = StatePlan(
        plan.offsets, plan.lengths, plan.starts, plan.read_pages, plan.write_pages * 0 - 1, plan.page_tokens, plan.tiles
    )
    near(run(made, name, unwritten), looped(made)[0])
    torch.testing.assert_close(made.states, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [*dict.fromkeys((*DTYPES, torch.bfloat16))])
@pytest.mark.parametrize("name", [*BOTH][::-1])
def test_dtypes(dtype: torch.dtype, kept: torch.dtype, name: str) -> None:
    for rows in ([(3, 5), (0, 8), (8, 1)], [(3, 1), (0, 1)]):
        check(step(rows, dtype=dtype, kept=kept), name)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 12), (0, 5, 12), (0, 11, 12)])
def test_bits_do_not_depend_on_cuts_nor_neighbours(cuts: tuple[int, ...]) -> None:
    whole = step([(3, 12), (0, 5)])
    want = run(whole, "Triton")
    parts, again = [], step([(3, 12), (0, 5)])
    for first, end in pairwise(cuts):
        rows = [Row(3 + first, end - first)]
        part = again._replace(rows=rows, qkv=again.qkv[first:end], ba=again.ba[first:end])
        parts.append(run(part, "Triton"))
    assert torch.equal(torch.cat(parts), want[:12])
    pages = [whole.page(0, 7), whole.page(0, 14)]
    assert torch.equal(whole.states[pages], again.states[pages])


PLANTED: dict[str, tuple[str, Any]] = {
    "keys that keep their length": ("_unit", lambda x: x),
    "a chunk that forgets the one before": ("CHUNK", 5),
    "states that are not written": ("write_pages", lambda states, pages, values: None),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = PLANTED[bug]
    if name == "CHUNK":
        inner = delta_rule._run_chunk
        monkeypatch.setattr(delta_rule, "_run_chunk", lambda *args: inner(*args[:5], args[5] * 0))
    monkeypatch.setattr(delta_rule, name, wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(step([(3, 12), (0, 9)]), "torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*BOTH][::-1])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(5, 3, 10), (1, 4, 128), (0, 1, 4)])
def test_gated_norm(tokens: int, heads: int, dim: int, name: str, dtype: torch.dtype) -> None:
    x, weight = random(tokens, heads * dim, dtype=dtype), random(dim, seed=2)
    wide = random(tokens, heads * dim + 2, dtype=dtype, seed=1)
    got = BOTH[name].gated_norm(x, wide[:, 2:], weight, 1e-3)
    each = numpy(x).reshape(tokens, heads, dim)
    normed = each / np.sqrt((each * each).mean(2, keepdims=True) + 1e-3) * numpy(weight)
    near(got, normed.reshape(x.shape) * silu(numpy(wide[:, 2:])))
