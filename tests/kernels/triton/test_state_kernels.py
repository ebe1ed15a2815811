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
from running_states import Row, Shape, Step, looped, numpy, step
from torch import Tensor

from quire.kernels import mamba_states
from quire.kernels.cpu import convolution
from quire.kernels.forward_batch import StateRows
from quire.kernels.mamba_states import SavedInputs, StatePlan, state_pages
from quire.kernels.triton import mamba_conv as conv
from quire.kernels.triton import mamba_scan
from quire.kernels.triton import mamba_scan as scan
from quire.protocol.model_spec import SavedInput
from quire.worker.recorded_steps import RecordingGuard, UnsupportedOp

KERNELS: dict[str, Any] = {
    "torch": (mamba_states.causal_conv, mamba_states.selective_scan),
    "Triton": (conv.causal_conv, scan.selective_scan),
    "deterministic": (conv.causal_conv, partial(scan.selective_scan, deterministic=True)),
    **({} if CUDA else {"native": (convolution.causal_conv, mamba_states.selective_scan)}),
}


BOTH = ("torch", "Triton") if CUDA else ("torch", "Triton", "native")


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


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([(3, 4), (0, 5), (9, 1)], Shape(run=1)),  # a state after each token, as speculation keeps them
        ([(3, 130), (0, 64), (1, 1)], Shape(6, 2, 3, 40)),  # more than a tile
        ([(3, 5), (0, 9), (8, 1)], Shape(20, 40)),  # more than a thread holds
        *(([(0, 9), (3, 1), (8, 2), (0, 1)], Shape(20, size, taps)) for size in (3, 16) for taps in (2, 3, 4)),
        *(([(5, 1), (0, 1), (8, 1)], Shape(132, size, taps, 4)) for size in (3, 16) for taps in (2, 3, 4)),
        *((rows, Shape(6, 2, 4, 512)) for rows in ([(0, 513)], [(0, 512), (511, 2), (700, 1)], [(512, 65), (1, 130)])),
    ],
)
def test_runs(rows: list[tuple[int, int]], shape: Shape) -> None:
    check_both(rows, shape)


def test_rows_in_parts() -> None:
    """Long rows, beside short ones: each part goes on from what the parts before it leave."""
    made = step([Row(3, 290), Row(0, 64), Row(41, 1), Row(79, 65)], Shape(6, 4, 3, 40))
    assert mamba_scan.scan_part_tokens(made.plan, len(made.x), 6) == 64
    check(made, "Triton")


@pytest.mark.parametrize("name", BOTH[::-1])
def test_padding(name: str) -> None:
    """Rows of no tokens in a plan of tiles, and slot 0 among rows of one: nothing but page 0 is written for them."""
    made = step([Row(3, 5), Row(0, 11), Row(8, 1)])
    plan = made.plan
    more = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert plan.tiles is not None
    padded = StatePlan(
        *(torch.cat((numbers, more)) for numbers in (plan.offsets, plan.lengths)),
        *(torch.cat((numbers, more + 3)) for numbers in (plan.starts, plan.read_pages)),
        torch.cat((plan.write_pages, plan.write_pages[:2])), plan.page_tokens,
        torch.cat((plan.tiles, plan.tiles.new_tensor([[3, 0], [4, 0]]))),
    )  # fmt: skip
    check(made, name, padded)
    made = step([Row(3, 1)])
    slots, positions = torch.tensor([0, 0, 1], device=DEVICE), torch.tensor([0, 0, 3], device=DEVICE)
    plan, want = StatePlan.for_decode(made.batch.tables[0], slots, positions, made.shape.run), looped(made)
    three = made.picked(torch.zeros(3, dtype=torch.int64, device=DEVICE))
    for got, wanted in zip(outputs(three, KERNELS[name], plan), (want.conv, want.scan)):
        near(got[2:], wanted)
    for page, state in want.ssm_states.items():
        near(made.cache.ssm[page], state)


@pytest.mark.parametrize("shape", [Shape(), Shape(20, 40), Shape(72, 16, 3, 4)])
@pytest.mark.parametrize("name", BOTH[::-1])
def test_states_are_advanced_later_over_some_tokens(name: str, shape: Shape) -> None:
    """Rows 0 and 3 have draft tokens: their outputs are computed, and no state of theirs is written. Then they are
    advanced over the first 4 tokens and the first one, from what was saved."""
    rows, (conv, scan) = [Row(3, 9), Row(6, 1), Row(0, 2), Row(7, 6)], KERNELS[name]
    made = step(rows, shape)
    channels, size = made.A.shape
    inputs = SavedInput(channels), SavedInput(channels), SavedInput(2 * size, is_fp32=True)
    saved = SavedInputs.allocate(20, inputs, made.x.dtype, made.x.device)
    batch, cache = made.batch, replace(made.cache, saved=saved)
    columns = np.stack((batch.slots, batch.starts, batch.lengths, batch.offsets, [1, 0, 0, 1]))
    state_rows = StateRows(columns, np.flatnonzero(np.repeat(columns[4], batch.lengths)))
    made = made._replace(cache=cache, batch=replace(batch, state_rows=state_rows))
    short = [rows[0]._replace(length=4), *rows[1:3], rows[3]._replace(length=1)]
    want, advanced = looped(made), looped(made._replace(rows=short))
    before, plan = [view.clone() for view in (cache.conv, cache.ssm)], made.plan
    for got, wanted in zip(outputs(made, KERNELS[name], plan), (want.conv, want.scan)):
        near(got, wanted)
    written = {made.page(row, position) for row, position in ((1, 6), (2, 1))}
    others = [page for page in range(len(cache.ssm)) if page not in written]
    for view, old in zip((cache.conv, cache.ssm), before):
        torch.testing.assert_close(view[others], old[others], atol=0, rtol=0, equal_nan=True)

    assert cache.saved is not None
    assert plan.saved_tokens is not None
    cache.saved.save(plan.saved_tokens, made.x, made.dt, made.B)
    x, steps, bc = cache.saved.first(len(plan.saved_tokens))
    slots, starts, lengths, offsets = torch.tensor([[1, 4], [3, 7], [4, 1], [0, 9]], device=DEVICE)
    tiles = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    pages = state_pages(batch.tables[0], slots, starts, lengths, shape.run, 4)
    later = StatePlan(offsets, lengths, starts, *pages, shape.run, tiles)
    conv(x, made.weight, made.conv_bias, cache, later)
    scan(x, steps, made.A, *bc.chunk(2, dim=1), made.D, steps, made.bias, cache, later)
    for view, old, states in zip((cache.conv, cache.ssm), before, (advanced.conv_states, advanced.ssm_states)):
        for page, state in states.items():
            near(view[page], state)
        others = [page for page in range(len(view)) if page not in states]
        torch.testing.assert_close(view[others], old[others], atol=0, rtol=0, equal_nan=True)


def test_no_bias() -> None:
    made = step([Row(0, 3)])
    want = looped(made._replace(conv_bias=torch.zeros_like(made.conv_bias))).conv
    for name in BOTH:
        near(KERNELS[name][0](made.x, made.weight, None, made.cache, made.plan), want)


@pytest.mark.parametrize("rows", [[Row(0, 1), Row(9, 1)], [Row(0, 70), Row(3, 2)]])
def test_no_activation(rows: list[Row]) -> None:
    for name in BOTH:
        made = step(rows)
        want = looped(made)
        got = KERNELS[name][0](made.x, made.weight, made.conv_bias, made.cache, made.plan, silu=False)
        near(got.double() * got.double().sigmoid(), want.conv)
        for page, state in want.conv_states.items():
            near(made.cache.conv[page], state)


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
    exact, want = looped(one), outputs(one, kernels)
    for got, wanted in zip(want, (exact.conv, exact.scan)):
        near(got, wanted)
    parts = [outputs(of_row(several, a, b, 3 + a), kernels) for a, b in pairwise(cuts)]
    for got, whole in zip(zip(*parts), want):
        assert torch.equal(torch.cat(got), whole[:12])
    pages = [one.page(0, 7), one.page(0, 14)]
    for a, b in ((one.cache.conv, several.cache.conv), (one.cache.ssm, several.cache.ssm)):
        assert torch.equal(a[pages], b[pages])


def test_no_rows() -> None:
    made, empty = step([Row(0, 1)]), torch.empty(0, dtype=torch.int64, device=DEVICE)
    plan = StatePlan.for_decode(made.batch.tables[0], empty, empty, made.shape.run)
    for kernels in KERNELS.values():
        assert [len(out) for out in outputs(made.picked(slice(0, 0)), kernels, plan)] == [0, 0]


def test_parts_that_lie_side_by_side_are_not_copied() -> None:
    both = torch.randn(5, 12, device=DEVICE)
    for B, C in ((both[:, :6], both[:, 6:]), (both[:, 6:], both[:, :6]), (both[:, :4], both[:, 4:8])):
        assert torch.equal(scan._interleave_bc(B, C), torch.cat((B, C), dim=1))
        assert torch.equal(scan._interleave_bc(B.half(), C.half()), torch.cat((B, C), dim=1).half().float())
    assert scan._interleave_bc(both[:, :6], both[:, 6:]).data_ptr() == both.data_ptr()


@pytest.mark.skipif(CUDA, reason="of a CPU")
def test_native_gates_and_plans() -> None:
    """Gates multiply before and after; a native plan of single tokens is torch's."""
    made = step([Row(3, 9), Row(0, 2), Row(17, 1)])
    x, before, after = made.x.repeat(1, 3).chunk(3, dim=1)
    before.copy_(made.z)
    after.copy_(made.dt)
    want = mamba_states.causal_conv(x * before, made.weight, None, made.cache, made.plan, silu=False) * after
    states = made.cache.conv.clone()
    again = step([Row(3, 9), Row(0, 2), Row(17, 1)])
    got = convolution.causal_conv(
        x, made.weight, None, again.cache, again.plan, silu=False, gates=(before, after)
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.cache.conv, states, atol=0, rtol=0, equal_nan=True)
    table, slots = torch.randint(1, 99, (6, 5)), torch.tensor([5, 0, 2, 3])
    positions = torch.tensor([0, 0, 7, 39])
    theirs, ours = (plan(table, slots, positions, 8) for plan in (StatePlan.for_decode, convolution.plan_decode))
    for name in ("offsets", "lengths", "starts", "read_pages", "write_pages"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_recording_does_not_read_a_plan() -> None:
    """Its values are computed when the recording is replayed."""
    groups = mamba_states.row_groups(step([Row(3, 1)]).plan)
    with pytest.raises(UnsupportedOp), RecordingGuard():
        next(groups)
