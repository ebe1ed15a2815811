"""The log of cached pages: what it says of pages agrees with the sequences that they came from."""

from __future__ import annotations

import random

import echo_service
import pytest
from echo_service import Echo

from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.core.recovery import RunnerRestarter
from quire.errors import RanksLost
from quire.memory.cache_log import PageContent
from quire.memory.interface import KVMemory
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepResult


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("model", [None, "gemma-2-2b"])
def test_the_chain_of_contents_is_the_cached_prefix(model: str | None, preemption: str) -> None:
    """Little memory, so that pages are dropped and stored again and sequences are swapped. At every step the known
    pages are those in the index, and the contents from the first page on make the keys that of_prompt makes."""
    more = {} if model is None else {"model_config": model}
    config = EngineConfig.of(kv_tokens=3_000, max_model_len=1024, preemption=preemption, swap_gib=4.0, **more)
    engine = read_deployment(config, "h200-llama3-8b").simulation().engine
    memory = engine.scheduler.memory
    assert isinstance(memory, PagedMemory)
    log, group = memory.prefix_cache.log(with_contents=True), memory.prefix_cache.routed_group()
    assert log is not None
    assert group is not None
    known, ever, rng = dict[bytes, PageContent](), set[bytes](), random.Random(1)
    for i in range(40):
        prompt = [100 + i % 3] * 256 + [rng.randrange(5000, 9000) for _ in range(rng.randrange(16, 64))]
        engine.add(str(i), prompt, SamplingParams(max_tokens=rng.randrange(8, 200), ignore_eos=True))
    dropped = 0
    while engine.has_unfinished_requests:
        engine.step()
        changes = log.take()
        assert set(changes.contents) == set(changes.stored)
        for key in changes.dropped:
            del known[key]
        dropped += len(changes.dropped)
        known |= changes.contents
        ever |= set(changes.stored)
        assert set(known) == set(memory.page_pool.index[group])
    assert dropped
    assert engine.scheduler.num_preemptions
    for key, content in known.items():
        tokens, parent = list(content.tokens), content.parent
        while parent in known:
            tokens, parent = [*known[parent].tokens, *tokens], known[parent].parent
        if parent is None:
            assert log.keys.of_prompt([*tokens, 0])[-1] == key
        else:
            assert parent in ever, "a page before it was cached once"


def test_the_log_goes_on_over_another_memory() -> None:
    """As when a runner was lost: the pages of the former memory are gone, and those of the new one are logged."""
    lost = True

    class Losing(Echo):
        def collect(self, ticket: int) -> StepResult:
            nonlocal lost
            if self.collected == 3 and lost:
                lost = False
                raise RanksLost("rank 1 is gone")
            return super().collect(ticket)

    def another() -> tuple[Echo, KVMemory]:
        engine = echo_service.built(Echo()).engine
        return engine.runner, engine.scheduler.memory  # type: ignore[return-value]

    engine = echo_service.built(Losing(), restarter=RunnerRestarter(another)).engine
    first = engine.scheduler.memory
    assert isinstance(first, PagedMemory)
    log, known = first.prefix_cache.log(), set[bytes]()
    assert log is not None
    for i in range(4):
        engine.add(str(i), [3 + i] * 40, SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_unfinished_requests:
            engine.step()
            changes = log.take()
            known = known - {*changes.dropped} | {*changes.stored}
    second = engine.scheduler.memory
    assert second is not first
    assert isinstance(second, PagedMemory)
    assert known == set(second.page_pool.index[0])
    assert known
