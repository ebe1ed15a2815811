"""Prefixes that waiting sequences will find stay cached, as a whole, and admission weighs what it would evict of them.
Pages of four tokens, a window of eight."""

from __future__ import annotations

import pytest
from addresses import runner_for
from memories import MEMORIES, VOCAB, Build, admit_one, insides
from test_invariants import compute, serve, serve_once, text
from test_retention import PAGE, memory_of, stateful

from quire.core.engine import Engine
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.memory.answers import EvictionLimit
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence


def expect(memory: PagedMemory, seq: Sequence) -> Sequence:
    assert memory.prefix_demand is not None, "prefixes are cached"
    memory.prefix_demand.expect(seq)
    memory.check()
    return seq


def forget(memory: PagedMemory, seq: Sequence, admitted: bool = True) -> None:
    assert memory.prefix_demand is not None, "prefixes are cached"
    memory.prefix_demand.forget(seq, admitted)
    memory.check()


def serve_others(memory: PagedMemory, ids: range) -> None:
    """More than fits, so that what is evicted first is gone."""
    for id in ids:
        serve_once(memory, id, text(1000 * id, 41))


def hit(memory: PagedMemory, seq: Sequence) -> int:
    return memory.prefix_cache.find_cached(seq).tokens


@pytest.mark.parametrize("retention", ["paper", "slack", "boundary"])
@pytest.mark.parametrize("kind", ["window", "state"])
def test_prompts_that_part_are_found_from_the_second_on(kind: str, retention: str) -> None:
    """What the first one's window has passed stays for the others, which wait meanwhile."""
    memory = memory_of(retention) if kind == "window" else stateful(retention)
    system = text(0, 40)
    waiting = [expect(memory, Sequence(id, system + text(1000 * id, 60))) for id in range(1, 5)]
    found = []
    for seq in waiting:
        forget(memory, seq)
        found.append(serve(memory, seq))
        for _ in range(30):
            assert compute(memory, seq, 1)
        memory.check()
        memory.free(seq)
    assert found == [0, 40, 40, 40]


def test_expected_pages_are_evicted_last() -> None:
    """They are the oldest ones, and would go first. Once forgotten they do."""
    memory = memory_of("boundary", tokens=400)
    serve_once(memory, 1, text(0, 41))
    waiting = expect(memory, Sequence(2, text(0, 60)))
    for id in range(3, 20):
        serve_once(memory, id, text(1000 * id, 41))
        assert hit(memory, waiting) == 40
    assert memory.page_pool.evictions > 0
    forget(memory, waiting)
    serve_others(memory, range(20, 30))
    assert hit(memory, waiting) == 0


def test_what_a_waiting_sequence_has_in_common_with_another_one_is_expected() -> None:
    """Nothing of it is computed yet."""
    memory = memory_of("boundary", tokens=400)
    first, second = (expect(memory, Sequence(id, text(0, 40) + text(1000 * id, 20))) for id in (1, 2))
    forget(memory, first)
    assert serve(memory, first) == 0
    memory.free(first)
    serve_others(memory, range(3, 20))
    assert hit(memory, second) == 40


def test_a_prefix_is_given_up_as_a_whole_and_that_of_the_last_one_first() -> None:
    """Of four prefixes as many stay as there is room for, beside a sequence that grows."""
    memory = memory_of("boundary", tokens=400)
    waiting = []
    for id in range(1, 5):
        serve_once(memory, id, text(1000 * id, 41))
        waiting.append(expect(memory, Sequence(10 + id, text(1000 * id, 60))))
    seq, seen = Sequence(5, text(9000, 20)), []
    assert serve(memory, seq) == 0
    while compute(memory, seq, 1):
        memory.check()
        seen.append([hit(memory, one) for one in waiting])
        if len(seq.tokens) > 280:
            break
    found = list(dict.fromkeys(map(tuple, seen)))
    assert [sum(tokens == 40 for tokens in hits) for hits in found[:1]] == [4]
    assert found[-1][-1] < 40, "the last one's was given up"
    kept = [[tokens == 40 for tokens in hits] for hits in found]
    assert all(sorted(one, reverse=True) == one for one in kept), "the first one's stays longest"


def test_a_prefix_that_was_given_up_is_spared_again_once_it_is_computed() -> None:
    memory = memory_of("boundary", tokens=400)
    serve_once(memory, 1, text(0, 41))
    first, second = (expect(memory, Sequence(id, text(0, 40) + text(1000 * id, 20))) for id in (2, 3))
    assert memory.prefix_demand is not None
    assert memory.prefix_demand.give_up_one()
    assert not memory.prefix_demand.give_up_one()
    memory.prefix_cache.reset()
    forget(memory, first)
    assert serve(memory, first) == 0
    memory.free(first)
    serve_others(memory, range(4, 20))
    assert hit(memory, second) == 40


def hit_beside(length: int, in_flight: int) -> tuple[int, int]:
    """Compute a prompt in chunks of 16 tokens, up to `in_flight` of them at once. Return what a waiting sequence then
    finds, and how often the next chunk was refused until the first one in flight had ended."""
    memory = memory_of("boundary", tokens=400)
    serve_once(memory, 1, text(0, 41))
    waiting = expect(memory, Sequence(2, text(0, 60)))
    seq = Sequence(3, text(1000, length))
    assert admit_one(memory, seq, 16) == 0
    ends, refused = [], 0
    while seq.planned < length or ends:
        end = min(seq.planned + 16, length)
        grown = len(ends) < in_flight and seq.planned < length and memory.grow(seq, end)
        if grown:
            seq.planned = end
            ends.append(end)
        else:
            refused += len(ends) < in_flight and seq.planned < length
            seq.computed = ends.pop(0)
            memory.commit(seq)
        memory.take_page_ops()
        memory.check()
    return hit(memory, waiting), refused


def test_a_chunk_waits_for_what_the_one_before_frees() -> None:
    """Two chunks in flight hold 16 tokens more of the window. They do not take them from a prefix."""
    for length in (312, 320, 332, 336):
        kept = 40 if length <= 332 else 0
        assert hit_beside(length, 1) == (kept, 0)
        assert hit_beside(length, 2) == (kept, {312: 0, 320: 1}.get(length, 2))


@pytest.mark.parametrize("limit", [EvictionLimit(0, 0), EvictionLimit(1000, 0), None], ids=str)
def test_admission_evicts_expected_prefixes_only_within_its_limit(limit: EvictionLimit | None) -> None:
    memory = memory_of("boundary", tokens=400)
    serve_once(memory, 1, text(0, 41))
    waiting = expect(memory, Sequence(2, text(0, 60)))
    resident = Sequence(3, text(3000, 41))
    assert serve(memory, resident) == 0
    spared = sum(len(pool.spared) for pool in memory.page_pool.size_classes)
    room = memory.page_pool.total - sum(memory.page_pool.used) - spared
    seq = Sequence(4, text(5000, PAGE * (room - 2)))  # and some pages for its window
    before = insides(memory)
    admitted = memory.admit([seq], 16, limit)
    if limit is not None and not limit.tokens:
        assert admitted is None
        assert insides(memory) == before
        memory.free(resident)
        forget(memory, waiting)
        assert admit_one(memory, seq) == 0, "an empty memory admits all that fits"
    else:
        assert isinstance(admitted, list)
    memory.check()


def test_a_refused_request_does_not_wait_for_a_long_output() -> None:
    """A request of 2,200 tokens fits only without a prefix of 1,600 tokens, for which twelve others wait. It is
    admitted once its wait costs as much as the prefix, long before the running request has its 2,500 tokens."""
    memory = MEMORIES["paged-4"](Build(tokens=4000, max_len=3000, chunk=64, max_seqs=8))
    runner = runner_for(memory.kv_config, 1, VOCAB)
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=64, max_seqs=8, max_len=3000, eos_ids=())
    engine = Engine(scheduler, runner, EngineLimits(VOCAB, 3000, 1000), clock=lambda: 0.0)

    def add(name: str, prompt: list[int], output: int) -> None:
        engine.add(name, prompt, SamplingParams(max_tokens=output, ignore_eos=True, seed=1))

    add("first", [1] * 1600 + [2], 1)
    while engine.has_unfinished_requests:
        engine.step()
    add("long", [3] * 200, 2500)
    for _ in range(8):
        engine.step()
    add("refused", [4] * 2200, 4)
    for i in range(12):
        add(f"behind {i}", [1] * 1600 + [5 + i], 4)
    ended = list[str]()
    for _ in range(800):
        ended += [output.request_id for output in engine.step() if output.done]
    assert ended[0] == "refused"
    assert len(ended) == 13
    assert scheduler.num_preemptions == 0
