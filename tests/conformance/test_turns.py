"""Engines over one memory that is too small for them, stepped in any order: every request ends, with the tokens that it
must have, and nothing is lost. Depth 2, in chunks, with swapping, recomputation, forks and cached prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from echo_oracle import expected_tokens
from memories import spec

from bench.echo_runner import EchoPages, EchoRunner
from quire.config import EngineConfig
from quire.core.assembly import assemble
from quire.core.engine import Engine
from quire.core.shared_memory import SharedMemoryGroup
from quire.core.validation import EngineLimits
from quire.memory.jenga.shared_pool import SharedPool
from quire.memory.page_layout import MemorySize, build_joint_kv_configs
from quire.memory.page_tables import build_page_pool
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed

VOCAB, LONGEST = 64, 48
MODELS = [((None,), 4), ((None, 6, 6), 4), ((9, 9, None), 2)]  # windows of the layers, and tokens of a page


class Beside(EchoRunner):
    """Its pages are in the bytes that others have too."""

    def __init__(self, cells: np.ndarray) -> None:
        super().__init__(2, vocab_size=VOCAB)
        self.cells = cells

    def bind(self, geometry: KVCacheConfig) -> None:
        host = np.zeros(geometry.host_bytes, dtype=np.uint8)
        self.groups = [EchoPages(group, g, self.cells, host, geometry.slots) for g, group in enumerate(geometry.groups)]


def engines(seed: int, count: int) -> list[Engine]:
    """`count` engines that could each have a long request, and hardly two."""
    ways = ("recompute", "swap", "auto")
    models = []
    for i, (windows, tokens) in enumerate(MODELS[:count]):
        config = EngineConfig(
            page_size=tokens, max_num_seqs=6, max_num_batched_tokens=16, swap_gib=2e-6, preemption=ways[(seed + i) % 3],
            prefix_tokens=0, debug=True,
        )  # fmt: skip
        models.append((config, spec(windows, LONGEST), MemorySize(0, LONGEST, 2)))
    geometries = build_joint_kv_configs(models, 2200)
    groups = tuple(group for geometry in geometries for group in geometry.groups)
    joint = KVCacheConfig(geometries[0].layout, geometries[0].bytes, 7, groups, 2, 0, geometries[0].large_bytes)
    common = SharedPool(build_page_pool(joint, [group.ids for group in groups]), geometries, [0] * count)
    cells, group, made = np.zeros(joint.bytes, dtype=np.uint8), SharedMemoryGroup(), list[Engine]()
    for i, ((config, _, _), part) in enumerate(zip(models, common.views)):
        memory, runner = PagedMemory.from_kv_config(part.kv_config, config, str(i), part), Beside(cells)
        runner.bind(memory.kv_config)
        limits = EngineLimits(VOCAB, LONGEST, 99)
        made.append(assemble(config, memory, runner, limits, clock=lambda: 0.0, shared_memory_group=group))
    return made


@pytest.mark.parametrize("count", [2, 3])
def test_all_requests_end_in_whatever_order_engines_step(count: int) -> None:
    # In the last one whoever was swapped out, with nobody of its engine left to run, has its step all the same.
    preempted, gave_way = map(sum, zip(*(run(seed, count) for seed in (*range(8), 59))))
    assert preempted > 0
    assert gave_way > 0


def run(seed: int, count: int, aborts: float = 0) -> tuple[int, int]:
    """Requests preempted, and the times that an engine let the others go on. `aborts`: how often a request is given up
    between two steps."""
    rng, made = random.Random(seed), engines(seed, count)
    must: dict[tuple[int, str, int], list[int]] = {}
    told: dict[tuple[int, str, int], list[int]] = {}
    stem = [rng.randrange(VOCAB) for _ in range(20)]
    for i, engine in enumerate(made):
        memory = engine.scheduler.memory
        for j in range(10):
            prompt = stem[: rng.randrange(20)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            length = rng.randint(1, 16)
            n = 2 if j % 3 == 0 and memory.fits([len(prompt) + length] * 2) else 1
            params = SamplingParams(max_tokens=length, n=n, seed=j, ignore_eos=True, detokenize=False)
            assert memory.fits([len(prompt) + length] * n)
            engine.add(str(j), prompt, params)
            for branch in range(n):
                seed_of = branch_seed(j, branch) if branch else j
                groups = memory.kv_config.groups
                must[i, str(j), branch] = expected_tokens(prompt, params, seed_of, vocab_size=VOCAB, groups=groups)
    short: dict[Engine, int] = {}  # who gave way, and what had ended elsewhere
    gave_way, gone = 0, set[tuple[int, str]]()
    for _ in range(4000):
        if not any(engine.has_unfinished_requests for engine in made):
            break
        i = rng.randrange(count)
        for output in made[i].step() if made[i].has_unfinished_requests else ():
            if output.tokens:
                told.setdefault((i, output.request_id, output.branch), []).extend(output.tokens)
        if rng.random() < aborts:
            i, id = rng.randrange(count), str(rng.randrange(10))
            gone |= {(i, id)} if id in made[i].requests else set()
            made[i].abort(id)
        for engine in made:
            engine.scheduler.memory.check()
            ended = sum(other.num_ended for other in made if other is not engine)
            if (
                engine.shared_memory_group is not None
                and engine in engine.shared_memory_group.blocked
                and engine not in short
            ):
                short[engine], gave_way = engine.shared_memory_group.blocked[engine], gave_way + 1
            if short.get(engine) != ended:
                short.pop(engine, None)
            elif any(other.scheduler.has_unfinished_requests for other in made if other is not engine):
                assert not engine.scheduler.running, "who was short is back before anything has ended elsewhere"
    for key, tokens in must.items():
        said = told.get(key, [])
        assert said == (tokens[: len(said)] if key[:2] in gone else tokens)
    assert all(engine.scheduler.memory.account().usage.used == 0 for engine in made)
    return sum(engine.scheduler.num_preemptions for engine in made), gave_way


def test_a_request_that_is_given_up_leaves_nothing_to_be_done_to_pages_that_others_have() -> None:
    for seed in (*range(12), 114):
        run(seed, 2 + seed % 2, aborts=0.15)
