"""States in pages, rows of a step over them, and what becomes of both: a loop over tokens in fp64, in plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from grids import DEVICE, random
from torch import Tensor

from quire.kernels.forward_batch import ForwardBatch
from quire.kernels.mamba_states import StateCache, StatePlan, make_state_tiles, state_pages


class Shape(NamedTuple):
    d_inner: int = 40
    d_state: int = 4
    d_conv: int = 4
    run: int = 8


PLAIN = Shape()
TOKENS = ("x", "z", "dt", "B", "C")


class Row(NamedTuple):
    start: int
    length: int


class Step(NamedTuple):
    """Rows of a step, with what a layer gives its two operations. The rows have pages of their own in random order."""

    shape: Shape
    rows: Sequence[Row]
    cache: StateCache
    batch: ForwardBatch
    x: Tensor  # these two are parts of one product, as a layer's are
    z: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor
    bias: Tensor
    weight: Tensor
    conv_bias: Tensor

    @property
    def plan(self) -> StatePlan:
        return StatePlan.from_batch(self.batch, self.cache)

    def picked(self, at: Tensor | slice) -> Step:
        """Only some of the tokens, or some again."""
        return self._replace(**{name: getattr(self, name)[at] for name in TOKENS})

    def page(self, row: int, position: int) -> int:
        """Where the state after the token at `position` lies."""
        return int(self.batch.tables[0][row + 1, position // self.shape.run])


def random_table(rows: int, width: int) -> Tensor:
    """Pages 1 to rows * width in random order, after slot 0 of page 0."""
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)) + 1
    return torch.cat((torch.zeros(1, width, dtype=torch.int64), order.view(rows, width))).to(DEVICE)


def plan_of(rows: Sequence[Row], table: Tensor, run: int) -> StatePlan:
    """The plan of rows in the slots from 1 on of a table whose pages hold runs of `run` tokens."""
    lengths, starts = (np.array([getattr(row, name) for row in rows]) for name in ("length", "start"))
    width = int(((starts + lengths - 1) // run - starts // run).max()) + 1
    slots = torch.arange(1, len(lengths) + 1, device=DEVICE)
    offsets, there, first = (torch.from_numpy(x).to(DEVICE) for x in (np.cumsum(lengths) - lengths, lengths, starts))
    tiles = None if (lengths == 1).all() else torch.from_numpy(make_state_tiles(lengths)).to(DEVICE)
    return StatePlan(offsets, there, first, *state_pages(table, slots, first, there, run, width), run, tiles)


def padded(plan: StatePlan, tiles: int) -> StatePlan:
    """The plan with a third row of no tokens, which has `tiles` tiles; the second row has drafts and writes no page."""
    none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert plan.tiles is not None
    return StatePlan(
        *(torch.cat((numbers, none)) for numbers in (plan.offsets, plan.lengths, plan.starts, plan.read_pages)),
        torch.cat((plan.write_pages.index_fill(0, none + 1, -1), plan.write_pages[:1] * 0)), plan.page_tokens,
        torch.cat((plan.tiles, plan.tiles.new_tensor([[2, 0]] * tiles))),
    )  # fmt: skip


def pages_of(shape: Shape, count: int, dtype: torch.dtype, ssm: torch.dtype) -> StateCache:
    """Views of one buffer of NaN, the second of two layers' in each page, with a gap behind each part."""
    parts = [shape.d_inner * (shape.d_conv - 1) * dtype.itemsize, shape.d_inner * shape.d_state * ssm.itemsize]
    sizes = [-(-part // 16) * 16 + 16 for part in parts]
    page = 2 * sum(sizes)
    buffer = torch.full((count * page,), 0xFF, dtype=torch.uint8, device=DEVICE)
    views = []
    for at, width, kind in ((sum(sizes), shape.d_conv - 1, dtype), (sum(sizes) + sizes[0], shape.d_state, ssm)):
        strides = (page // kind.itemsize, width, 1)
        views.append(buffer.view(kind).as_strided((count, shape.d_inner, width), strides, at // kind.itemsize))
    return StateCache(views[0], views[1], page_tokens=shape.run)


def step(
    rows: Sequence[Row], shape: Shape = PLAIN, dtype: torch.dtype = torch.float32, ssm: torch.dtype = torch.float32
) -> Step:  # fmt: skip
    """Pages that must not be read are NaN; the ones that rows start from are random."""
    lengths, starts = (np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in ("length", "start"))
    width = max(1, -(-int((starts + lengths).max()) // shape.run))
    table = random_table(len(rows), width)
    cache = pages_of(shape, len(rows) * width + 1, dtype, ssm)
    slots, offsets, total = np.arange(1, len(rows) + 1), np.cumsum(lengths) - lengths, int(lengths.sum())
    positions = np.concatenate([np.arange(row.start, row.start + row.length) for row in rows])
    batch = ForwardBatch(
        torch.zeros(total, dtype=torch.int64, device=DEVICE), torch.from_numpy(positions).to(DEVICE),
        torch.from_numpy(np.repeat(slots, lengths)).to(DEVICE), torch.from_numpy(offsets + lengths - 1).to(DEVICE),
        slots, starts, lengths, offsets, np.arange(len(rows)), [table],
    )  # fmt: skip
    d = shape.d_inner
    xz, numbers = random(total, 2 * d, dtype=dtype), random(total, 2 * shape.d_state, dtype=dtype, seed=1)
    made = Step(
        shape, rows, cache, batch, xz[:, :d], xz[:, d:], random(total, d, dtype=dtype, seed=2),
        numbers[:, : shape.d_state], numbers[:, shape.d_state :],
        -torch.exp(random(d, shape.d_state, seed=3)), random(d, seed=4), random(d, seed=5) - 1,
        random(d, shape.d_conv, dtype=dtype, seed=6), random(d, dtype=dtype, seed=7),
    )  # fmt: skip
    for i, row in enumerate(rows):
        if row.start:
            page = made.page(i, row.start - 1)
            cache.conv[page] = random(d, shape.d_conv - 1, dtype=dtype, seed=8 + i)
            cache.ssm[page] = random(d, shape.d_state, seed=9 + i).to(ssm)
    return made


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


class Expected(NamedTuple):
    conv: np.ndarray
    scan: np.ndarray
    conv_states: dict[int, np.ndarray]  # by page
    ssm_states: dict[int, np.ndarray]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def looped(step: Step) -> Expected:
    """Token by token, from the states that the pages hold now."""
    x, z, dt, B, C = (numpy(tensor) for tensor in (step.x, step.z, step.dt, step.B, step.C))
    A, D, bias, weight, conv_bias = (
        numpy(tensor) for tensor in (step.A, step.D, step.bias, step.weight, step.conv_bias)
    )
    found = Expected(np.zeros_like(x), np.zeros_like(x), {}, {})
    for i, row in enumerate(step.rows):
        offset = int(step.batch.offsets[i])
        window, h = np.zeros(step.cache.conv.shape[1:]), np.zeros(step.cache.ssm.shape[1:])
        if row.start:
            page = step.page(i, row.start - 1)
            window, h = numpy(step.cache.conv[page]), numpy(step.cache.ssm[page])
        for t in range(offset, offset + row.length):
            window = np.concatenate((window, x[t][:, None]), axis=1)
            found.conv[t] = silu((window * weight).sum(1) + conv_bias)
            window = window[:, 1:]
            delta = np.logaddexp(0, dt[t] + bias)
            h = np.exp(delta[:, None] * A) * h + (delta * x[t])[:, None] * B[t]
            found.scan[t] = (h @ C[t] + D * x[t]) * silu(z[t])
            page = step.page(i, row.start + t - offset)
            found.conv_states[page], found.ssm_states[page] = window, h
    return found
