"""One request does not hold up all others: how many steps a small completion takes beside large ones."""

from __future__ import annotations

import echo_service
import pytest

from quire.core.engine import Engine
from quire.protocol.sampling_params import SamplingParams

CANARY = SamplingParams(max_tokens=2, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = list(range(1, 40))


def engine(**settings: object) -> Engine:
    return echo_service.built(**{"kv_tokens": 16384, "max_num_seqs": 16, **settings}).engine


def steps(beside: Engine, client: str = "", warm: int = 7) -> int:
    """How many steps it takes a completion of two tokens that comes after `warm` steps."""
    for _ in range(warm):
        beside.step()
    before = beside.stats.steps
    beside.add_all([("canary", [5, 6, 7])], CANARY, client=client)
    while "canary" in beside.requests:
        beside.step()
    return beside.stats.steps - before


def ordinary(**settings: object) -> Engine:
    made = engine(**settings)
    for i in range(8):
        made.add_all([(str(i), [i, *PROMPT])], LONG)
    return made


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("count", "params"),
    [(1024, SamplingParams(max_tokens=1)), (256, SamplingParams(n=4, max_tokens=60, ignore_eos=True)), (200, LONG)],
)
def test_a_batch_of_another_client_or_request(count: int, params: SamplingParams, preemption: str) -> None:
    usual = steps(ordinary(preemption=preemption))
    for client in ("", "other"):
        heavy = engine(preemption=preemption)
        heavy.add_all([(str(i), [i % 200, i // 200, *PROMPT]) for i in range(count)], params)
        assert steps(heavy, client) <= usual + 2
        for again in range(3):
            assert steps(heavy, client, warm=5 + again) <= usual + 2
        heavy.scheduler.memory.check()


def test_memory_that_a_batch_holds_is_shared_too() -> None:
    usual = steps(ordinary())
    heavy = engine(kv_tokens=640)
    heavy.add_all([(str(i), [i, *PROMPT]) for i in range(100)], LONG)
    assert steps(heavy) <= usual + 2


def test_many_requests_of_one_client_do_not_hold_up_another_one() -> None:
    usual = steps(ordinary())
    heavy = engine()
    for i in range(200):
        heavy.add_all([(str(i), [i, *PROMPT])], LONG, client="busy")
    assert steps(heavy, client="other") <= usual + 2


def test_a_client_alone_is_served_as_before() -> None:
    """Requests one by one, or at once: no one is preempted, and steps are as many."""
    counted = []
    for together in (True, False):
        made = engine()
        prompts = [(str(i), [i, *PROMPT]) for i in range(60)]
        for part in [prompts] if together else [[one] for one in prompts]:
            made.add_all(part, LONG)
        while made.has_unfinished_requests:
            made.step()
        assert made.scheduler.num_preemptions == 0
        counted.append(made.stats.steps)
    assert counted[0] == counted[1]


def test_all_of_a_batch_that_yields_ends() -> None:
    """With the tokens that it would have had alone."""
    told = []
    for canaries in (0, 40):
        made, found = engine(), dict[tuple[str, int], list[int]]()
        made.add_all(
            [(str(i), [i, *PROMPT]) for i in range(60)], SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True)
        )
        for turn in range(2000):
            if turn < canaries:
                made.add_all([(f"c{turn}", [turn])], CANARY)
            for output in made.step():
                found.setdefault((output.request_id, output.branch), []).extend(output.tokens)
            if not made.has_unfinished_requests:
                break
        assert made.scheduler.num_preemptions > 0 or not canaries
        told.append({key: tokens for key, tokens in found.items() if key[0][0] != "c"})
    assert told[0] == told[1]
