"""What stays of the pages that left a window, and for whom. Pages of four tokens, a window of eight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from memories import Build, admit_one
from test_invariants import compute, serve, serve_once, text
from unlike import KNOWN, Kind, unlike

from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence

PAGE, WINDOW, SLACK = 4, 8, 8


def memory_of(
    retention: str, tokens: int = 2000, *, window: int = WINDOW, page: int = PAGE, **more: Any
) -> PagedMemory:
    """Full layers and layers with a window, whose pages have one size and are one pool."""
    build = Build(tokens=tokens, chunk=16, max_len=600)
    geometry = unlike(Kind(16, page), Kind(16, page, window=window))(build).kv_config
    begin = geometry.groups[0].ids.start
    ids = range(begin, begin + tokens // page)
    groups = tuple(replace(group, ids=ids) for group in geometry.groups)
    geometry = replace(geometry, groups=groups, bytes=ids.stop * groups[0].page_bytes)
    return PagedMemory(geometry, max_step_tokens=16, policies=KNOWN, retention=retention, **{"slack": SLACK, **more})


def test_with_slack_the_last_windows_stay() -> None:
    """Of 100 tokens those from 100 - 8 - 8 on can be needed by a prefix that ends at 92 or behind it."""
    memory = memory_of("slack")
    serve_once(memory, 1, text(0, 101))
    assert len(memory.page_pool.index[1]) == 4
    assert memory.page_pool.used == [0, 0]
    for end, found in ((99, 96), (97, 96), (93, 92), (91, 0)):
        assert memory.prefix_cache.find_cached(Sequence(9, [*text(0, end), 777])).tokens == found


def test_the_end_of_a_prompt_stays_however_long_the_answer_is() -> None:
    kept, forgot = memory_of("boundary"), memory_of("slack")
    for memory in (kept, forgot):
        serve_once(memory, 1, [*text(0, 60), 501, 502], answer=70)
    assert serve_once(kept, 2, [*text(0, 60), 601, 602], answer=70) == 60
    assert serve_once(kept, 3, [*text(0, 60), 701], answer=70) == 60
    assert serve_once(forgot, 2, [*text(0, 60), 601, 602], answer=70) == 0


@pytest.mark.parametrize("kind", ["window", "state"])
def test_prompts_that_part_are_found_from_the_third_on(kind: str) -> None:
    """The first two show where: full attention has what they have in common; windows and states have not."""
    make, system = (memory_of, text(0, 40)) if kind == "window" else (stateful, text(0, 42))
    for retention, found in (("boundary", [0, 0, 40, 40]), ("slack", [0, 0, 0, 0]), ("paper", [0, 40, 40, 40])):
        memory = make(retention)
        assert [serve_once(memory, id, system + text(1000 * id, 60)) for id in range(1, 5)] == found
        assert memory.page_pool.used == [0, 0]


def test_the_prefix_that_a_running_sequence_came_for_is_not_evicted_first() -> None:
    """A sequence holds its pages a 64th of the window longer than it reads them: a question and an answer shorter than
    that leave the whole window of the document in its hands."""
    left = {}
    for retention in ("paper", "slack"):
        memory = memory_of(retention, tokens=1640, window=256, page=1, slack=16)
        document = text(0, 300)
        seq = Sequence(1, [*document, 501])
        assert serve(memory, seq) == 0
        for _ in range(3):
            assert compute(memory, seq, 1)
        other = Sequence(2, text(2000, 500))
        assert serve(memory, other) == 0
        memory.free(other)
        assert serve_once(memory, 3, text(3000, 400)) == 0  # evicts all that is older
        left[retention] = admit_one(memory, Sequence(4, [*document, 601]))
    assert left == {"paper": 0, "slack": 300}


STATES, RUN = 1, 8


def stateful(retention: str) -> PagedMemory:
    """Pages of four tokens, and a state after every eight."""
    geometry = unlike(Kind(16, PAGE), Kind(64, RUN, kind="state"))(Build(tokens=2000, chunk=16, max_len=600)).kv_config
    return PagedMemory(geometry, max_step_tokens=16, policies=KNOWN, retention=retention, slack=RUN)


def checkpoints(memory: PagedMemory, tokens: list[int]) -> list[int]:
    """Lengths of the prefixes of these tokens whose states are there."""
    seq = Sequence(9, tokens)
    memory.prefix_cache.key_chain.extend(seq, len(tokens))
    found = (memory.prefix_cache.page_keys(STATES, seq.page_keys, i, i + 1)[0] for i in range(len(tokens) // RUN))
    return [RUN * (i + 1) for i, name in enumerate(found) if name in memory.page_pool.index[STATES]]


def test_states_before_the_end_of_a_prompt_stay() -> None:
    """Those that a prefix needs which ends in a prompt's last 8 tokens, or among the last 8 of all."""
    memory = stateful("boundary")
    prompt = text(0, 101)
    serve_once(memory, 1, prompt, answer=60)
    answered = [*prompt, *range(10_000, 10_060)]
    assert checkpoints(memory, answered) == [88, 96, 152, 160]
    assert serve_once(memory, 2, [*text(0, 95), 5, 5]) == 88
    assert serve_once(memory, 3, [*answered, 5]) == 160
    assert serve_once(memory, 4, [*text(0, 60), 5, 5]) == 0


def test_a_hit_makes_only_its_own_checkpoint_younger() -> None:
    """Jenga §5.3: "only the last cached token's access time is updated". The ones before it are evicted sooner."""
    memory = stateful("paper")
    serve_once(memory, 1, text(0, 40))  # checkpoints at 8, 16, 24, 32 and 40
    serve_once(memory, 2, text(1000, 40))
    serve_once(memory, 3, [*text(0, 24), 7])
    order = list(memory.page_pool.size_class_of[STATES].cached)
    seq = Sequence(9, text(0, 40))
    memory.prefix_cache.key_chain.extend(seq, 40)
    names = [memory.prefix_cache.page_keys(STATES, seq.page_keys, i, i + 1)[0] for i in range(4)]
    ages = [order.index(memory.page_pool.index[STATES][name]) for name in names]
    assert ages[2] > max(ages[0], ages[1], ages[3])
