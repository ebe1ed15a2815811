"""Tokens that are taken back: a memory is then as without them, but for pages that the next tokens use."""

from __future__ import annotations

import random
from typing import Any

import pytest
from memories import CHUNKED, EVERY, MAX_LEN, Build, paged
from test_invariants import admit
from unlike import UNLIKE

from quire.memory.interface import KVMemory
from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence

WITHOUT_STATES = {name: make for name, make in {**EVERY, **UNLIKE}.items() if not {"state", "all"} & {*name.split("-")}}
MEMORIES = {name: make for name, make in WITHOUT_STATES.items() if "states" not in name and "beside" not in name}
TEXT = list(range(100, 100 + MAX_LEN))


def step(memory: KVMemory, seq: Sequence, drafts: int, accepted: int) -> None:
    """Compute the next token and `drafts` after it, of which the first `accepted` ones stay."""
    start = seq.planned
    assert memory.grow(seq, start + 1 + drafts)
    memory.take_page_ops()
    seq.planned = start + 1 + drafts
    memory.check()
    seq.computed = seq.planned = start + 1 + accepted
    seq.tokens += TEXT[len(seq.tokens) : seq.computed + 1]
    memory.commit_drafts(seq)
    memory.check()


def published(memory: KVMemory) -> list[set[bytes]]:
    """The keys of the pages of each group that can be found."""
    return [set(index) for index in memory.page_pool.index] if isinstance(memory, PagedMemory) else []


def contents(memory: KVMemory, seq: Sequence) -> Any:
    """What a memory holds, whatever the pages' ids are and how many are held ahead."""
    if not isinstance(memory, PagedMemory):
        return memory.account().usage.used
    held, ends = memory.seq_pages[seq.id], [one.reads(seq, seq.computed, seq.computed).stop for one in memory.policies]
    return (
        [[page > 0 for page in table[:end]] for table, end in zip(held.tables, ends)],
        (held.published_tokens, held.requested_tokens, held.pruned_tokens),
        memory.account().usage.used,
    )


def compare(memory: KVMemory, plain: KVMemory, seed: int, prompt: int) -> None:
    rng, seqs = random.Random(seed), [Sequence(1, TEXT[:prompt]) for _ in range(2)]
    both = list(zip((memory, plain), seqs))
    for one, seq in both:
        assert admit(one, seq, prompt) == 0
        assert one.grow(seq, prompt)
        seq.computed = seq.planned = prompt
        seq.tokens.append(TEXT[prompt])
        one.commit(seq)
    while (left := MAX_LEN - 1 - seqs[0].planned) > 0:
        drafts = min(rng.randint(0, 6), left - 1)
        accepted = rng.randint(0, drafts)
        step(memory, seqs[0], drafts, accepted)
        step(plain, seqs[1], accepted, accepted)
        assert published(memory) == published(plain), "a page of rejected tokens is published"
        assert contents(memory, seqs[0]) == contents(plain, seqs[1])
    for one, seq in both:
        one.free(seq)
        one.check()
    assert memory.account().usage == plain.account().usage
    assert len({admit(one, Sequence(2, list(TEXT)), MAX_LEN) for one, _ in both}) == 1


@pytest.mark.parametrize("name", MEMORIES)
def test_rejected_tokens_leave_nothing(name: str) -> None:
    for seed in range(3):
        prompt = 1 + 7 * seed
        compare(MEMORIES[name](Build(max_seqs=2)), MEMORIES[name](Build(max_seqs=2)), seed, prompt)


@pytest.mark.parametrize("page_size", range(1, 17))
def test_tokens_are_taken_back_at_every_place_of_a_page(page_size: int) -> None:
    make = paged((None, 6, CHUNKED), page_size=page_size, page_sizes="max")
    for seed in range(page_size):
        compare(make(Build()), make(Build()), seed, 1 + seed)


def test_surplus_pages_are_not_forked() -> None:
    memory = paged((None, 6), page_size=1)(Build())
    seq = Sequence(1, TEXT[:5])
    assert admit(memory, seq, 4) == 0
    step(memory, seq, 4, 1)
    child = seq.fork(2, 1, 0)
    assert memory.fork(seq, child)
    assert [len(table) for table in memory.get_placement(child).tables] == [child.computed] * 2
    memory.check()


def test_surplus_pages_are_swapped() -> None:
    memory = paged((None, 6), page_size=4)(Build(host=1000))
    seq = Sequence(1, TEXT[:5])
    assert admit(memory, seq, 5) == 0
    step(memory, seq, 8, 0)
    assert memory.swap_out([seq])
    memory.check()
    assert memory.swap_in([seq])
    memory.check()
    step(memory, seq, 3, 3)
    assert memory.account().usage.used == 2 * 16 * seq.computed
