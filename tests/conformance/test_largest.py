"""Requests as large as a memory of large pages `fits`, among smaller ones: all of them end, however their pages were
scattered before."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
from memories import VOCAB

from bench.echo_runner import EchoRunner
from quire.core.engine import Engine
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.errors import InputError
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.sampling_params import SamplingParams

SEQS, MAX_LEN = 8, 160


class Kind(NamedTuple):
    """A group: pages of a large page, tokens of a page, window."""

    ratio: int
    run: int
    window: int | None = None


def memory_of(kinds: list[Kind], count: int, chunk: int, **how) -> PagedMemory:
    large = 256 * math.lcm(*(kind.ratio for kind in kinds))
    groups = tuple(
        KVCacheGroup(
            (i,), large // ratio, large // ratio // run, -(-MAX_LEN // run), range(ratio, (count + 1) * ratio),
            range(1, count * ratio + 1), run, 1, window, "full" if window is None else "window",
        )
        for i, (ratio, run, window) in enumerate(kinds)
    )  # fmt: skip
    geometry = KVCacheConfig(KVCacheLayout.PAGED, (count + 1) * large, SEQS + 1, groups, 2, count * large, large)
    return PagedMemory(geometry, max_step_tokens=chunk, debug=True, **how)


def drawn_kinds(rng: random.Random) -> list[Kind]:
    ratios, runs = rng.choice(((12, 1), (8, 1), (6, 2), (24, 1), (3, 1))), rng.choice(((1, 8), (1, 16), (1, 4), (8, 1)))
    kinds = [Kind(ratio, run) for ratio, run in zip(ratios, runs)]
    at = rng.randrange(3)
    return [kind._replace(window=rng.choice((1, 3, 9, 17, 30))) if i == at else kind for i, kind in enumerate(kinds)]


def serve(seed: int, way: str, prefix_tokens: int = 0) -> None:
    """Requests of `n` branches of `longest` tokens and smaller ones, in just the memory that these fit in."""
    rng = random.Random(seed)
    kinds, chunk, n, longest = drawn_kinds(rng), rng.choice((3, 8, 16)), rng.choice((1, 2, 3)), rng.randint(20, 100)
    how = {
        "association": rng.choice(("bulk", "paper", "none")), "retention": rng.choice(("paper", "slack", "boundary")),
        "slack": rng.choice((4, 16)), "prefix_tokens": prefix_tokens,
    }  # fmt: skip
    count = next(c for c in range(1, 1000) if memory_of(kinds, c, chunk, **how).fits([longest] * n, longest - 1))
    memory, runner = memory_of(kinds, count, chunk, **how), EchoRunner(rng.randint(1, 3), vocab_size=VOCAB)
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=chunk, max_seqs=SEQS, max_len=MAX_LEN, preemption=way)
    engine = Engine(scheduler, runner, EngineLimits(VOCAB, MAX_LEN, 1000), clock=lambda: 0.0)
    stems = [rng.choices(range(1, VOCAB), k=MAX_LEN) for _ in range(2)]
    added = steps = served = done = 0
    while added < 12 or engine.has_unfinished_requests:
        while added < 12 and (rng.random() < 0.3 or not engine.has_unfinished_requests):
            width, length = (n, longest) if rng.random() < 0.5 else (1, rng.randint(2, longest))
            prompt = rng.randint(1, length - 1)
            params = SamplingParams(
                n=width, beam_width=width if width > 1 and rng.random() < 0.3 else None, max_tokens=length - prompt,
                ignore_eos=True, seed=1,
            )  # fmt: skip
            try:
                engine.add(str(added), rng.choice(stems)[:prompt], params)
                served += 1
            except InputError:  # less of it is prompt, which branches share, than `count` was found for
                assert width > 1
            added += 1
        if prefix_tokens and rng.random() < 0.2:
            try:
                engine.register_prefix(str(steps), rng.choices(range(1, VOCAB), k=rng.randint(1, 3)))
            except InputError:
                engine.release_prefix(rng.choice(list(engine.prefix_lengths)))
        done += sum(output.done for output in engine.step() if not output.request_id.startswith("prefix"))
        steps += 1
        assert steps < 20000, "the engine makes no progress"
        memory.check()
    assert done == served > 0


@pytest.mark.share(4)
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_tokens", [0, 12])
@pytest.mark.parametrize("seeds", [range(at, at + 15) for at in range(0, 45, 15)], ids=str)
def test_the_largest_requests_end(seeds: range, prefix_tokens: int, way: str) -> None:
    """Also beside scattered prefixes."""
    for seed in seeds:
        serve(seed, way, prefix_tokens)
