"""Forgetting cached prefixes while requests run: nobody running is disturbed, and nobody new gets what was there."""

from __future__ import annotations

import random

import pytest
from memories import MEMORIES, VOCAB, Build
from test_gallery import Served, memory, picture, prompt
from traces import Asked, Trace

from quire.core.request import Request, RequestStatus
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence

PROMPT = tuple(random.Random(7).choices(range(1, VOCAB), k=37))
NAMES = ("paged-4", "poisoned", "mixed", "large-16", "large-poisoned", "boundary", "states", "virtual-4")


def ask(trace: Trace, id: str, *tail: int, n: int = 1) -> Request:
    params = SamplingParams(n=n, seed=1, max_tokens=20, ignore_eos=True)
    trace.add(Asked(id, (*PROMPT, *tail), params, ""))
    return trace.engine.requests[id]


def pages_of(made: PagedMemory, *seqs: Sequence) -> set[tuple[int, int]]:
    tables = [made.get_placement(seq).tables for seq in seqs]
    return {(g, page) for found in tables for g, table in enumerate(found) for page in table if page}


@pytest.mark.parametrize("how", ["running", "swap", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_from_before_is_found(name: str, how: str) -> None:
    made = MEMORIES[name](Build(tokens=800, chunk=16, host=400))
    trace = Trace(made, seed=0, depth=1, budget=16, max_seqs=8)
    old = ask(trace, "old", n=2)
    while len(old.live_seqs) < 2:
        trace.step()
    held = pages_of(made, *old.live_seqs)
    assert any(made.page_pool.index), "nothing is there to be forgotten"
    if how != "running":
        trace.scheduler.preemption = how
        trace.scheduler._preempt(old)
    made.prefix_cache.reset()
    assert not any(made.page_pool.index), "a page has a name still"
    made.check()
    new = ask(trace, "new", 5)
    while new.status is RequestStatus.WAITING:
        trace.step()
    if how == "recompute":  # the old one computes it anew, and shares it
        assert new.cached_tokens > 0
    else:
        assert new.cached_tokens == 0
        here = [seq for seq in old.live_seqs if seq.id in made.seq_pages]
        assert not pages_of(made, *new.live_seqs) & (pages_of(made, *here) if how == "swap" else held)
    trace.exhaust()
    newer = ask(trace, "newer", 5)
    trace.finish()  # every output is what it must be
    assert newer.cached_tokens > 0, "what was computed since isn't found"


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_nor_what_its_sequences_compute_since(steps: int, swapped: bool) -> None:
    """Before they fork (at the third step) and behind, in memory and out of it."""
    made = MEMORIES["paged-4"](Build(tokens=800, chunk=16, host=400))
    trace = Trace(made, seed=0, depth=1, budget=16, max_seqs=8, preemption="swap")
    old = ask(trace, "old", n=2)
    for _ in range(steps):
        trace.step()
    if swapped:
        trace.scheduler._preempt(old)
    made.prefix_cache.reset()
    trace.exhaust()
    assert not any(made.page_pool.index)
    assert not made.account().usage.cached
    new = ask(trace, "new", 5)
    trace.finish()
    assert new.cached_tokens == 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_picture_on_its_way_is_its_own_request_s(steps: int) -> None:
    """In parts: whoever comes after the reset has it encoded again."""
    made = memory()
    served = Served(made, budget=8)
    served.add("old", prompt(), picture(0, 2, parts=4), max_tokens=8)
    for _ in range(steps):
        served.step()
    made.prefix_cache.reset()
    made.check()
    served.add("new", prompt(), picture(0, 2, parts=4))
    served.drain()
    assert made.account().sharing.encoder_runs == 2
    served.add("newer", prompt(), picture(0, 2, parts=4))
    served.drain()
    assert made.account().sharing.encoder_runs == 2
    assert made.encoder_cache.encodings == {}
