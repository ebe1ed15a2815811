"""The convolution and the scan, in plain torch and in Triton, equal a loop over tokens in fp64: outputs, and the states
at every border; what isn't a row's page is neither read nor written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from grids import CUDA, DEVICE, DTYPES
from running_states import TOKENS, Row, Shape, Step, looped, numpy, step
from torch import Tensor

from quire.data.kernels import states
from quire.data.kernels.batch import Batch
from quire.data.kernels.states import StatePlan
from quire.data.kernels.triton import conv, scan, scan_prompt

KERNELS: dict[str, Any] = {
    "torch": (states.causal_conv, states.selective_scan),
    "Triton": (conv.causal_conv, scan.selective_scan),
    "deterministic": (conv.causal_conv, partial(scan.selective_scan, deterministic=True)),
}


BOTH = ("torch", "Triton")


def near(got: Tensor, want: np.ndarray, looser: float = 1.0) -> None:
    """Within fp32's errors, and one rounding to got's dtype. (The interpreter cuts off where a GPU rounds.)"""
    half = (0.51 if CUDA else 1.01) * torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 0.0
    np.testing.assert_allclose(numpy(got), want, rtol=half + 5e-5 * looser, atol=5e-5 * looser)


def outputs(made: Step, kernels: Any, plan: StatePlan | None = None) -> tuple[Tensor, Tensor]:
    plan, (conv, scan) = made.plan if plan is None else plan, kernels
    args = (made.x, made.dt, made.A, made.B, made.C, made.D, made.z, made.bias)
    return conv(made.x, made.weight, made.conv_bias, made.cache, plan), scan(*args, made.cache, plan)


def check(made: Step, name: str, plan: StatePlan | None = None) -> None:
    want, before = looped(made), [view.clone() for view in (made.cache.conv, made.cache.ssm)]
    for got, wanted in zip(outputs(made, KERNELS[name], plan), (want.conv, want.scan)):
        near(got, wanted)
    for view, old, written in zip((made.cache.conv, made.cache.ssm), before, (want.conv_states, want.ssm_states)):
        for page, state in written.items():
            near(view[page], state)
        others = [page for page in range(len(view)) if page not in written]
        torch.testing.assert_close(view[others], old[others], atol=0, rtol=0, equal_nan=True)


def check_both(rows: Sequence[tuple[int, int]], *shape: Any, **types: torch.dtype) -> None:
    for name in BOTH:
        check(step([Row(*row) for row in rows], *shape, **types), name)


LENGTHS, STARTS = (1, 3, 7, 8, 9, 17), (0, 1, 7, 8, 11)


@pytest.mark.parametrize("start", STARTS)
def test_rows_of_all_lengths(start: int) -> None:
    """Around runs of 8, from a state and from none; beside one another, and each alone."""
    rows = [(start, length) for length in LENGTHS]
    for some in (rows, *([row] for row in rows)):
        check_both(some)


@pytest.mark.parametrize("d_state", [3, 16])
@pytest.mark.parametrize("d_conv", [2, 3, 4])
def test_shapes(d_conv: int, d_state: int) -> None:
    check_both([(0, 9), (3, 1), (8, 2), (0, 1)], Shape(20, d_state, d_conv))
    check_both([(5, 1), (0, 1), (8, 1)], Shape(132, d_state, d_conv, 4))


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(3, 4), (0, 5), (9, 1)], Shape(run=1)),  # a state after each token, as speculation keeps them
        ([(3, 130), (0, 64), (1, 1)], Shape(6, 2, 3, 40)),  # more than a tile
        *((rows, Shape(6, 2, 4, 512)) for rows in ([(0, 513)], [(0, 512), (511, 2), (700, 1)], [(512, 65), (1, 130)])),
    ],
)
def test_runs(rows: list[tuple[int, int]], shape: Shape) -> None:
    check_both(rows, shape)


GRID = [Row(start, length) for start in (0, 1, 511, 512, 700) for length in (1, 3, 511, 512, 513, 1025)]


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_grid_of_512_in_torch(taps: int) -> None:
    check(step(GRID, Shape(6, 3, taps, 512)), "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("ssm", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("taps", "size"), [(2, 8), (3, 128), (4, 16)])
def test_the_grid_of_512_on_a_gpu(taps: int, size: int, dtype: torch.dtype, ssm: torch.dtype) -> None:
    """Rows of all lengths from all starts in one step, and each of the single tokens' in one of their own."""
    shape = Shape(200, size, taps, 512)
    check(step(GRID, shape, dtype, ssm), "Triton")
    for name in ("Triton", "deterministic")[: 1 + (size <= scan.MOST_UNROLLED)]:
        check(step([row for row in GRID if row.length == 1], shape, dtype, ssm), name)


@pytest.mark.gpu
def test_a_captured_step_goes_on() -> None:
    """A graph holds the plan too: replayed at later positions, it finds pages by the table that is there then."""
    whole, parts = step([Row(0, 20)] * 2), step([Row(0, 20)] * 2)
    want, still = looped(whole), parts.picked(torch.arange(2, device=DEVICE))
    slots, positions = torch.tensor([1, 2], device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def advance() -> tuple[Tensor, Tensor]:
        plan = StatePlan.single(still.batch.tables[0], slots, positions, still.shape.run)
        return outputs(still, KERNELS["Triton"], plan)

    advance()  # compiles; position 0 is computed again below
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        conv_out, scan_out = advance()
    for t in range(20):
        positions.fill_(t)
        for name in TOKENS:
            getattr(still, name).copy_(getattr(parts, name)[[t, 20 + t]])
        graph.replay()
        near(conv_out, want.conv[[t, 20 + t]])
        near(scan_out, want.scan[[t, 20 + t]])


def test_rows_in_parts() -> None:
    """Long rows, beside short ones: each part goes on from what the parts before it leave."""
    made = step([Row(3, 290), Row(0, 64), Row(41, 1), Row(79, 65)], Shape(6, 4, 3, 40))
    assert scan_prompt.part_tokens(made.plan, len(made.x), 6) == 64
    check(made, "Triton")


def test_a_polynomial_for_exponentials() -> None:
    """Some of a channel's states by it, in both of a thread's channels."""
    made = step([Row(3, 9), Row(0, 13)], Shape(72, 4))
    want, out, bc = looped(made), torch.empty_like(made.x), torch.cat((made.B, made.C), dim=1)
    how = scan_prompt.Unrolled(tile=2, groups=2, fma=3)
    args = (made.x, made.dt, made.A, bc, made.D, made.z, made.bias, out, made.cache.ssm, made.plan)
    options = {"RUN": 8, "INNER": 72, "SIZE": 4, "BIAS": True, "PDL": False}
    scan_prompt.prompts(*args, 0, options, how)
    near(out, want.scan)
    for page, state in want.ssm_states.items():
        near(made.cache.ssm[page], state)


@pytest.mark.parametrize("name", list(KERNELS))
def test_tokens_one_by_one_equal_a_prompt(name: str) -> None:
    """A step a token, by the plan that is made on the device, after the half of a prompt."""
    whole, parts = step([Row(0, 20)] * 2), step([Row(0, 20)] * 2)
    want, got = looped(whole), torch.zeros(2, 20, whole.shape.d_inner, device=DEVICE)

    def run(first: int, end: int, plan: StatePlan) -> None:
        at = torch.tensor([20 * row + t for row in range(2) for t in range(first, end)], device=DEVICE)
        _, y = outputs(parts.picked(at), KERNELS[name], plan)
        got[:, first:end] = y.view(2, end - first, -1)

    run(0, 10, step([Row(0, 10)] * 2)._replace(cache=parts.cache, batch=half(parts.batch)).plan)
    for t in range(10, 20):
        positions = torch.full((2,), t, device=DEVICE)
        run(t, t + 1, StatePlan.single(parts.batch.tables[0], torch.tensor([1, 2], device=DEVICE), positions, 8))
    near(got.view(40, -1), want.scan)
    for row in range(2):
        for page in {whole.page(row, t) for t in range(20)}:
            near(parts.cache.conv[page], want.conv_states[page])
            near(parts.cache.ssm[page], want.ssm_states[page])


def half(batch: Batch) -> Batch:
    """The first ten of twenty tokens of its rows."""
    count = len(batch.lengths)
    return Batch(
        batch.tokens[: 10 * count], batch.positions, batch.token_slots, batch.ends, batch.slots, batch.starts,
        np.full(count, 10), np.arange(count) * 10, batch.asked, batch.tables,
    )  # fmt: skip


@pytest.mark.parametrize("name", BOTH[::-1])
def test_padding(name: str) -> None:
    """Rows of no tokens in a plan of tiles, and slot 0 among rows of one: nothing but page 0 is written for them."""
    made = step([Row(3, 5), Row(0, 11), Row(8, 1)])
    plan = made.plan
    more = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert plan.tiles is not None
    padded = StatePlan(
        *(torch.cat((numbers, more)) for numbers in (plan.offsets, plan.lengths)),
        *(torch.cat((numbers, more + 3)) for numbers in (plan.starts, plan.reads)),
        torch.cat((plan.writes, plan.writes[:2])), plan.run_tokens,
        torch.cat((plan.tiles, plan.tiles.new_tensor([[3, 0], [4, 0]]))),
    )  # fmt: skip
    check(made, name, padded)
    made = step([Row(3, 1)])
    slots, positions = torch.tensor([0, 0, 1], device=DEVICE), torch.tensor([0, 0, 3], device=DEVICE)
    plan, want = StatePlan.single(made.batch.tables[0], slots, positions, made.shape.run), looped(made)
    three = made.picked(torch.zeros(3, dtype=torch.int64, device=DEVICE))
    for got, wanted in zip(outputs(three, KERNELS[name], plan), (want.conv, want.scan)):
        near(got[2:], wanted)
    for page, state in want.ssm_states.items():
        near(made.cache.ssm[page], state)


def test_no_bias() -> None:
    made = step([Row(0, 3)])
    want = looped(made._replace(conv_bias=torch.zeros_like(made.conv_bias))).conv
    for name in BOTH:
        with_silu, plain = (
            KERNELS[name][0](made.x, made.weight, None, made.cache, made.plan, *kind) for kind in ((), (None,))
        )
        near(with_silu, want)
        torch.testing.assert_close(torch.nn.functional.silu(plain), with_silu)


@pytest.mark.parametrize("name", BOTH[::-1])
def test_decays_that_leave_nothing(name: str) -> None:
    """delta A far below what exp tells from 0, and delta's own input far above what exp can hold."""
    made = step([Row(0, 9), Row(5, 4)])
    check(made._replace(A=made.A * 1e4), name)
    check(made._replace(dt=made.dt * 60), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ssm", [*dict.fromkeys((*DTYPES, torch.bfloat16))])
def test_dtypes(dtype: torch.dtype, ssm: torch.dtype) -> None:
    """States are computed in fp32, and rounded when they are written."""
    check_both([(3, 5), (0, 8), (8, 1)], Shape(72, 16), dtype=dtype, ssm=ssm)
    check_both([(3, 1), (0, 1), (8, 1)], Shape(72, 16), dtype=dtype, ssm=ssm)


def of_row(made: Step, first: int, end: int, start: int) -> Step:
    """Some of the first row's tokens, the first of which is at `start` in the sequence: a step of its own."""
    part = step([Row(start, end - first)], made.shape)
    batch = replace(part.batch, tables=[made.batch.tables[0][:2]])
    return made.picked(slice(first, end))._replace(rows=part.rows, batch=batch)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 12), (0, 5, 12), (0, 8, 12), (0, 11, 12)])
def test_bits_do_not_depend_on_cuts_nor_neighbours(cuts: tuple[int, ...]) -> None:
    """Outputs and states of a row, alone, cut into steps, and beside others."""
    kernels = KERNELS["deterministic"]
    one, several = step([Row(3, 12), Row(0, 5)]), step([Row(3, 12), Row(0, 5)])
    want = outputs(one, kernels)
    parts = [outputs(of_row(several, a, b, 3 + a), kernels) for a, b in pairwise(cuts)]
    for got, whole in zip(zip(*parts), want):
        assert torch.equal(torch.cat(got), whole[:12])
    pages = [one.page(0, 7), one.page(0, 14)]
    for a, b in ((one.cache.conv, several.cache.conv), (one.cache.ssm, several.cache.ssm)):
        assert torch.equal(a[pages], b[pages])


def test_both_scans_leave_the_same_bits() -> None:
    """A state has the same bits by the kernel for prompts and by the one for single tokens."""
    rows = [Row(3, 1), Row(0, 1), Row(8, 1)]
    one, other = step(rows, Shape(72, 16)), step(rows, Shape(72, 16))
    outputs(one, KERNELS["Triton"])
    outputs(other, KERNELS["deterministic"])
    assert torch.equal(one.cache.ssm.nan_to_num(), other.cache.ssm.nan_to_num())


def test_more_states_than_a_thread_holds() -> None:
    made = step([Row(3, 5), Row(0, 9), Row(8, 1)], Shape(20, 40))
    check(made, "Triton")
    with pytest.raises(AssertionError, match="more than a thread holds"):
        outputs(made, KERNELS["deterministic"])


def test_no_rows() -> None:
    made, empty = step([Row(0, 1)]), torch.empty(0, dtype=torch.int64, device=DEVICE)
    plan = StatePlan.single(made.batch.tables[0], empty, empty, made.shape.run)
    for kernels in KERNELS.values():
        assert [len(out) for out in outputs(made.picked(slice(0, 0)), kernels, plan)] == [0, 0]


def test_what_a_kernel_refuses() -> None:
    made = step([Row(0, 2)])
    for name, value in {"A": made.A.bfloat16(), "D": made.D.double(), "bias": made.bias[:4]}.items():
        with pytest.raises(AssertionError, match=r"in fp32|of a channel|another layer"):
            outputs(made._replace(**{name: value}), KERNELS["Triton"])


def test_parts_that_lie_side_by_side_are_not_copied() -> None:
    both = torch.randn(5, 12, device=DEVICE)
    for B, C in ((both[:, :6], both[:, 6:]), (both[:, 6:], both[:, :6]), (both[:, :4], both[:, 4:8])):
        assert torch.equal(scan._beside(B, C), torch.cat((B, C), dim=1))
        assert torch.equal(scan._beside(B.half(), C.half()), torch.cat((B, C), dim=1).half().float())
    assert scan._beside(both[:, :6], both[:, 6:]).data_ptr() == both.data_ptr()
