"""The gated delta rule, in plain torch and in Triton, equals a loop over tokens in fp64: outputs, and the states at
every border; what isn't a row's page is neither read nor written. Long rows, by chunks, also equal transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from grids import CUDA, DEVICE, DTYPES, INFINITE, random
from running_states import Row, numpy, padded, plan_of, random_table, silu
from torch import Tensor

from quire.kernels import delta_rule
from quire.kernels.mamba_states import StatePlan
from quire.kernels.triton import delta_rule as kernels

BOTH: dict[str, Any] = {"torch": delta_rule, "Triton": kernels}
ONE_BY_ONE = SimpleNamespace(gated_delta_rule=partial(kernels.gated_delta_rule, deterministic=True))
RULES: dict[str, Any] = {**BOTH, "deterministic": ONE_BY_ONE}


class Shape(NamedTuple):
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 12
    value_dim: int = 10
    run: int = 8


PLAIN = Shape()
CHUNKS = Shape(1, 2, 16, 16, 128)


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
        return plan_of(self.rows, self.table, self.shape.run)

    def page(self, row: int, position: int) -> int:
        return int(self.table[row + 1, position // self.shape.run])


def step(
    rows: Sequence[tuple[int, int]], shape: Shape = PLAIN, dtype: torch.dtype = torch.float32,
    kept: torch.dtype = torch.float32,
) -> Step:  # fmt: skip
    """Pages that must not be read are NaN; the ones that rows start from are random."""
    total, width = sum(length for _, length in rows), -(-max(map(sum, rows)) // shape.run)
    table = random_table(len(rows), width)
    key_heads, heads, key_dim, value_dim, _ = shape
    buffer = torch.full((len(rows) * width + 1, 2, heads, key_dim, value_dim), torch.nan, dtype=kept, device=DEVICE)
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
    result: Tensor = RULES[name].gated_delta_rule(
        made.qkv, made.ba, made.A, made.dt_bias, made.states, made.plan if plan is None else plan
    )
    return result


def check(made: Step, name: str, near: Callable[[Tensor, np.ndarray], None] = near) -> None:
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


def near_by_chunks(got: Tensor, want: np.ndarray) -> None:
    """As `near`. With inputs in 16 bits the sums that only outputs have are of terms that are rounded to them, and what
    the others lack adds up in states."""
    eps = torch.finfo(got.dtype).eps
    np.testing.assert_allclose(numpy(got), want, rtol=max(eps, 1e-3), atol=max(2 * eps, 5e-4))


@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 128, 200, 513])
@pytest.mark.parametrize("start", [0, 3, 64, 127])
def test_chunks_of_rows_of_all_lengths(start: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows by chunks, also short ones; beside one another, and each alone."""
    monkeypatch.setattr(kernels, "RECURRENT_TOKENS", 0)
    check(step([(start, length)], CHUNKS), "Triton")
    check(step([(0, 5), (start, length), (64, 1), (200, 70)], CHUNKS), "Triton")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(3, 130), (0, 64), (9, 1), (0, 65), (70, 200)], CHUNKS),
        ([(63, 130), (0, 65)], Shape(2, 6, 12, 10, 64)),
        ([(0, 70)], Shape(1, 2, 40, 66, 192)),  # more columns than a program has
        ([(0, 700), (5, 3)], Shape(1, 1, 16, 16, 512)),
        ([(1, 200), (95, 66), (96, 65), (2, 1)], Shape(run=96)),  # runs end in chunks
        ([(1, 70), (31, 98), (32, 65)], Shape(run=16)),
        ([(39, 90)], Shape(run=20)),
        ([(1, 70)], Shape(run=8)),  # too short for chunks
    ],
)
def test_prompts(rows: list[tuple[int, int]], shape: Shape, name: str) -> None:
    check(step(rows, shape), name)


@INFINITE
@pytest.mark.parametrize("name", RULES)
def test_prompts_whose_states_are_forgotten_or_kept(name: str) -> None:
    """Decays far below what exp tells from 0, of exp(-20), and none; rates near 0 and 1; and keys that are all alike,
    of which powers of a chunk's system are large."""
    made = step([(3, 140), (0, 1), (0, 65)], CHUNKS)
    for factor in (1e4, 20.0, 1e-9):
        check(made._replace(A=made.A * factor), name)
    check(made._replace(A=made.A * 0 - 20, ba=made.ba * 0, dt_bias=made.dt_bias * 0 + float(np.log(np.e - 1))), name)
    check(made._replace(ba=made.ba * 40), name)
    alike = made._replace(A=made.A * 1e-9, ba=made.ba * 0 + 20)
    alike.qkv[:] = alike.qkv[:1]
    check(alike, name)


@pytest.mark.parametrize("length", [15, 64, 65, 200])
def test_prompts_equal_transformers(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    monkeypatch.setattr(kernels, "RECURRENT_TOKENS", 0)
    made = step([(128, length)], Shape(2, 4, 16, 24, 512))
    key_heads, heads, key_dim, value_dim, _ = made.shape
    keys = key_heads * key_dim
    parts = zip(made.qkv.split((keys, keys, heads * value_dim), dim=1), (key_dim, key_dim, value_dim))
    q, k, v = (x.unflatten(1, (-1, dim))[None] for x, dim in parts)
    q, k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))  # not all versions repeat them
    b, a = made.ba.chunk(2, dim=1)
    g, page = made.A * F.softplus(a + made.dt_bias), made.page(0, 127)
    want, state = qwen3_next.torch_chunk_gated_delta_rule(
        q, k, v, g[None], b.sigmoid()[None], initial_state=made.states[page][None].clone(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    near(run(made, "Triton"), numpy(want[0].flatten(1)))
    near(made.states[page], numpy(state[0]))


def test_rows_without_tokens_and_pages_that_are_not_written_by_chunks() -> None:
    """As in a graph: tiles that are not needed are of a row without tokens."""
    made = step([(3, 150), (2, 80)], CHUNKS)
    before, (want, states) = made.states.clone(), looped(made)
    near(run(made, "Triton", padded(made.plan, 2)), want)
    own = [made.page(0, position) for position in (3, 152)]
    for page in own:
        near(made.states[page], states[page])
    others = [page for page in range(len(before)) if page not in own]
    torch.testing.assert_close(made.states[others], before[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [*dict.fromkeys((*DTYPES, torch.bfloat16))])
def test_dtypes_of_prompts(dtype: torch.dtype, kept: torch.dtype) -> None:
    for shape in (CHUNKS, Shape(1, 2, 128, 128, 512))[: 1 + CUDA]:  # the interpreter is slow
        made = step([(3, 200), (64, 65), (1, 1)], shape, dtype=dtype, kept=kept)
        check(made, "Triton", near if dtype == torch.float32 else near_by_chunks)
        check(made._replace(A=made.A * 1e-6, ba=made.ba * 20), "Triton", near_by_chunks)


@pytest.mark.parametrize(("name", "cuts"), [("Triton", (0, 77, 205, 270)), ("deterministic", (0, 70, 71, 150, 270))])
def test_bits_of_prompts_do_not_depend_on_cuts_nor_neighbours(name: str, cuts: tuple[int, ...]) -> None:
    """By chunks, if cuts are where chunks begin and all rows are computed by chunks."""
    start, rows = 51, [(51, 270), (0, 100)]
    whole, again = step(rows, CHUNKS), step(rows, CHUNKS)
    want, parts = run(whole, name), []
    for first, end in pairwise(cuts):
        part = again._replace(rows=[Row(start + first, end - first)], qkv=again.qkv[first:end], ba=again.ba[first:end])
        parts.append(run(part, name))
    assert torch.equal(torch.cat(parts), want[:270])
    pages = [whole.page(0, position) for position in (51, 128, 320)]
    assert torch.equal(whole.states[pages], again.states[pages])


@triton.jit
def _unsolved(system, SIZE: tl.constexpr, PRODUCT: tl.constexpr):
    i = tl.arange(0, SIZE)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0) - system


@pytest.mark.skipif(CUDA, reason="a compiled kernel keeps its functions")
def test_a_planted_bug_of_chunks_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_invert", _unsolved)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(step([(3, 130)], CHUNKS), "Triton")


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
