"""Prompts whose tokens attend both ways, on the kernels: tiles whose queries see all of a row, and steps that have such
rows beside others, which equal the reference's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from small_models import WIDTH, a_model, a_runner
from test_paged_attention import DEVICE, DTYPES, Shape, assert_close, filled, random
from torch import Tensor

from quire.data.kernels.triton.prompt import make_tiles, prompt, tile_queries
from quire.data.runner.model_runner import ModelRunner
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Birth, Row, StepPlan, Table

LENGTHS = (9, 1, 20, 130)


def everything(q: Tensor, both: Tensor, softcap: float | None) -> Tensor:
    """Attention of q [n, heads, dim] to all of [2, n, kv_heads, dim], in fp64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in both)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [Shape(), Shape(7, 1, window=5), Shape(chunk=8, page=4), Shape(softcap=0.7, dim=32)])
@pytest.mark.parametrize("small", [False, True])
def test_every_query_of_a_tile_sees_all(shape: Shape, small: bool, dtype: torch.dtype) -> None:
    memory = filled(shape, LENGTHS, dtype)
    lengths = np.array(LENGTHS, dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    queries = tile_queries(shape.heads, shape.kv_heads, shape.dim, dtype.itemsize, small)
    tiles = make_tiles(np.arange(len(lengths)) + 1, np.zeros_like(lengths), lengths, offsets, queries)
    tiles[:, 3] = lengths[tiles[:, 0] - 1] - 1
    q = random(sum(LENGTHS), shape.heads, shape.dim, dtype=dtype, seed=99)
    got = prompt(q, memory.cache, memory.tables, torch.from_numpy(tiles).to(DEVICE), small=small, whole=True)
    for (a, b), both in zip(pairwise([*offsets.tolist(), len(q)]), memory.histories):
        assert_close(got[a:b], everything(q[a:b], both, shape.softcap))


small = cache(lambda: a_model("gemma-2-2b"))


def runner_of(attention: str) -> ModelRunner:
    model, spec = small()
    runner = a_runner(model, spec, attention)
    runner.bind(replace(runner.store.geometry, both_ways=True))
    runner.store.views[0][1:].fill_(torch.nan)
    return runner


def plans() -> list[StepPlan]:
    """Prompts alone, beside rows that decode, behind tokens that are there; each of their last layers is asked for the
    last token alone, and one prompt scores all of its tokens."""
    params = SamplingParams(temperature=0, max_tokens=20).sampling()
    births = [Birth(slot, slot, -1, params, 0, prompt) for slot, prompt in ((1, 9), (2, 1), (3, 12), (4, 10))]
    tables = tuple(Table(slot, 0, 0, tuple(range(1 + slot * WIDTH, 1 + (slot + 1) * WIDTH))) for slot in (1, 2, 3, 4))
    return [
        StepPlan(tuple(births), tables, (Row(1, tuple(range(9)), 0, 1), Row(2, (11,), 0, 1)), ()),
        StepPlan((), (), (Row(1, (40,), 9, 1), Row(3, tuple(range(20, 32)), 0, 1), Row(2, (41, 42), 1, 1)), ()),
        StepPlan((), (), (Row(3, (43,), 12, 1), Row(1, (44,), 10, 1), Row(2, (45,), 3, 1)), ()),
        StepPlan((), (), (Row(4, tuple(range(6)), 0, 0), Row(3, (46,), 13, 1)), ()),
        StepPlan((), (), (Row(4, (6, 7, 8, 9), 6, 1), Row(1, (47,), 11, 1)), ()),
    ]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_steps_equal_the_reference(attention: str) -> None:
    runners = runner_of("reference"), runner_of(attention)
    seen = []
    for plan in plans():
        for runner in runners:
            logits = runner.model.logits
            runner.model.logits = lambda hidden, of=logits: seen.append(of(hidden)) or seen[-1]
            runner.collect(runner.submit(plan))
            runner.model.logits = logits
        torch.testing.assert_close(seen[-1], seen[-2], atol=2e-4, rtol=2e-4)
        assert seen[-1].std() > 0.1
    assert len(seen) == 2 * len(plans())


def test_a_later_token_of_the_prompt_counts() -> None:
    """The first token's scores depend on the last token of a prompt, and not where it isn't of the prompt."""
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1).sampling()
    for length, differs in ((8, True), (4, False)):
        found = []
        for last in (1, 2):
            runner = runner_of("triton")
            table = Table(1, 0, 0, tuple(range(1, 1 + WIDTH)))
            rows = (Row(1, (5, 6, 7, 8), 0, 0, (6, 7, 8)),) if length == 4 else ()
            tail = (9, 10, 11, last)
            row = Row(1, tail, 4, 1) if rows else Row(1, (5, 6, 7, 8, *tail), 0, 0, (6, 7, 8))
            birth = Birth(1, 1, -1, params, 0, length)
            for plan in (StepPlan((birth,), (table,), rows, ()), StepPlan((), (), (row,), ())):
                result = runner.collect(runner.submit(plan))
                found += [top.logprob for sample in result.samples for top in sample.scores]
        half = len(found) // 2
        assert (found[:half] != found[half:]) == differs
