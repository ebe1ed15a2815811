"""Sequences that a draft model drafts for have pages in its layers, and others none."""

from __future__ import annotations

import pytest
from memories import MAX_LEN, Build, admit_one, insides
from test_followers import group_of
from test_invariants import admit, compute, serve
from unlike import DRAFT, DRAFTED, FULL, HEADS, WINDOW, unlike

from quire.memory.paged import PagedMemory
from quire.memory.policies import POLICIES, FullPolicy, make_policy
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy

CACHED = [name for name in DRAFTED if "uncached" not in name]
every = pytest.mark.parametrize("name", DRAFTED)
# Not those of which pages are emptied early, or where a prefix may end before a page that no layer reads.
WHOLE = [name for name in CACHED if not {"slack", "boundary", "chunked"} & {*name.split("-")}]
every_whole = pytest.mark.parametrize("name", WHOLE)
every_cached = pytest.mark.parametrize("name", CACHED)
TEXT = list(range(200, 200 + MAX_LEN))


def drafting(id: int, tokens: list[int]) -> Sequence:
    seq = Sequence(id, list(tokens))
    seq.uses_draft_model = True
    return seq


def draft(memory: PagedMemory, seq: Sequence, drafted: int) -> None:
    """Let the draft model catch up to `drafted` tokens."""
    seq.drafted = drafted
    memory.commit_drafts(seq)
    memory.check()


def reused(memory: PagedMemory, seq: Sequence) -> tuple[int, int]:
    """The tokens of a sequence that are found, of it and of its draft model; it leaves again."""
    admitted = memory.admit([seq], 64)
    assert isinstance(admitted, list)
    memory.check()
    memory.free(seq)
    return admitted[0].reused_tokens, admitted[0].drafted_tokens


class Own(FullPolicy):
    """A policy that says itself what a hit requires."""

    def required(self, seq: Sequence | None, hit: int) -> range:
        return range(min(self.group.num_pages(hit), 1))


@pytest.mark.parametrize("kind", [*POLICIES, "own"])
def test_without_drafts_no_page_is_needed(kind: str) -> None:
    group = KVCacheGroup(
        (0,), 64, 16, 99, range(99), window=6, chunk=6, budget=6, kind=kind, run_tokens=4, is_draft=True
    )
    policies = {**POLICIES, "own": Own}
    policy, plain, seq = make_policy(policies, group), policies[kind](group), Sequence(1, TEXT)
    for start in (0, 7, 30):
        asked = ((policy.reads, start, start + 9), (policy.writes, start, start + 9), (policy.required, start))
        assert [list(ask(seq, *args)) for ask, *args in asked] == [[], [], []]
        assert policy.room(seq, 0) >= 10**9
        seq.uses_draft_model = True
        for any_seq in (seq, None):
            assert policy.reads(any_seq, start, start + 9) == plain.reads(any_seq, start, start + 9)
            assert policy.required(any_seq, start) == plain.required(any_seq, start)
        assert policy.room(seq, 5) == plain.room(seq, 5)
        seq.uses_draft_model = False


@every_cached
def test_a_page_is_published_when_its_model_has_computed_it(name: str) -> None:
    memory = DRAFTED[name](Build(chunk=MAX_LEN))
    stride, unit = memory.prefix_cache.prefix_granularity, memory.key_tokens
    seq = drafting(1, TEXT[:47])
    assert admit(memory, seq) == 0
    assert compute(memory, seq, 47)
    assert memory.seq_pages[1].published_tokens == 47 // unit * unit
    longest, _ = reused(memory, Sequence(2, TEXT))
    assert longest == 47 // stride * stride
    for drafted in (0, 1, 4, 15, 16, 17, 31, 32, 46, 47):
        draft(memory, seq, drafted)
        published, ready = memory.seq_pages[1].published_drafts, drafted // unit * unit
        assert published == ready, f"{published} draft tokens are published, and {ready} are computed"
        assert reused(memory, Sequence(3, TEXT)) == (longest, 0)
        found = reused(memory, drafting(4, TEXT))
        assert found == (longest, drafted // stride * stride) or "chunked" in name  # where chunks end all is there
    memory.free(seq)
    memory.check()
    assert memory.account().usage.used == 0


@every_whole
def test_a_hit_needs_no_pages_of_the_draft_model(name: str) -> None:
    memory = DRAFTED[name](Build(chunk=MAX_LEN))
    stride = memory.prefix_cache.prefix_granularity
    plain = Sequence(1, list(TEXT))
    assert serve(memory, plain) == 0
    assert not any(table for table, group in zip(memory.get_placement(plain).tables, memory.groups) if group.is_draft)
    memory.free(plain)
    memory.check()
    longest = (MAX_LEN - 1) // stride * stride
    assert reused(memory, Sequence(2, list(TEXT))) == reused(memory, drafting(3, TEXT)) == (longest, 0)
    seq = drafting(4, TEXT)
    assert serve(memory, seq) == longest
    for table, policy in zip(memory.get_placement(seq).tables, memory.policies):
        assert all(table[policy.reads(seq, 0 if policy.group.is_draft else MAX_LEN, MAX_LEN).start :])
    draft(memory, seq, MAX_LEN)
    memory.free(seq)
    assert reused(memory, drafting(5, TEXT)) == (longest, longest)
    assert reused(memory, Sequence(6, list(TEXT))) == (longest, 0)


@every_whole
def test_siblings_of_a_sequence_whose_draft_model_lags_share_only_what_it_has(name: str) -> None:
    """Sequences that return together: the first one finds all of the prefix, of its draft model's pages only some."""
    memory = DRAFTED[name](Build(tokens=640, chunk=MAX_LEN))
    stride = memory.prefix_cache.prefix_granularity
    total = (MAX_LEN - 1) // stride * stride
    common, part = total - stride, total - 2 * stride
    for seq in (drafting(1, TEXT[:part]), Sequence(2, TEXT[:common])):
        if seq.tokens:
            assert serve(memory, seq) is not None
            draft(memory, seq, len(seq.tokens) * seq.uses_draft_model)
            memory.free(seq)
    assert reused(memory, drafting(3, TEXT[: common + 1])) == (common, part)
    group = [drafting(i, [*TEXT[:total], i]) for i in (4, 5, 6)]
    admitted = memory.admit(group, 64)
    assert isinstance(admitted, list)
    assert [one.depends_on for one in admitted] == [None, group[0], group[0]]
    memory.check()
    for seq, one in zip(group, admitted):
        seq.computed, seq.drafted = one.reused_tokens, one.drafted_tokens
    assert [seq.computed for seq in group] == [common, total, total]
    if not memory.drops_pages:
        assert [seq.drafted for seq in group] == [part] * 3
        assert all(memory.groups[g].num_pages(len(group[1].tokens)) == len(table)
                   for g, table in enumerate(memory.get_placement(group[1]).tables))  # fmt: skip
        for g, policy in enumerate(memory.policies):
            if policy.group.is_draft:
                first = policy.group.num_full_pages(part)
                tables = [memory.get_placement(seq).tables[g][first:] for seq in group]
                assert len(set().union(*tables)) == sum(map(len, tables)), "what each computes itself is shared"


def test_siblings_that_would_not_fit_without_common_draft_pages_start_anew() -> None:
    memory = unlike(FULL, DRAFT)(Build(tokens=80, chunk=64))
    assert memory.fits([40, 40], 32)
    plain = Sequence(1, TEXT[:40])
    assert serve(memory, plain) == 0
    memory.free(plain)
    admitted = memory.admit([drafting(i, [*TEXT[:36], i]) for i in (2, 3, 4)], 64)
    assert isinstance(admitted, list)
    assert [(one.reused_tokens, one.drafted_tokens) for one in admitted] == [(0, 0), (36, 36), (36, 36)]
    memory.check()


@every
def test_copies_begin_where_the_draft_model_is(name: str) -> None:
    memory = DRAFTED[name](Build(tokens=640, chunk=MAX_LEN))
    parent = drafting(1, TEXT[:40])
    assert admit(memory, parent) == 0
    assert compute(memory, parent, 40)
    draft(memory, parent, 18)
    child = parent.fork(2, 1, 0)
    assert memory.fork(parent, child)
    memory.take_page_ops()
    assert memory.grow(child, 41)
    copied = [op.group for op in memory.take_page_ops()[0] if isinstance(op, PageCopy)]
    for g, group in enumerate(memory.groups):
        start = 18 if group.is_draft else 40
        assert copied.count(g) == group.num_pages(40) - group.num_full_pages(start)
    memory.check()


@every
def test_a_sequence_fits_however_far_the_draft_model_lags(name: str) -> None:
    for lag in (0, MAX_LEN):
        memory = DRAFTED[name](Build(tokens=24, chunk=4, max_seqs=2))
        length = next(length for length in range(MAX_LEN, 0, -1) if memory.fits([length]))
        seq = drafting(1, TEXT[:length])
        assert admit(memory, seq, 4) == 0
        while seq.planned < length:
            assert memory.grow(seq, min(seq.planned + 4, length))
            seq.planned = min(seq.planned + 4, length)
            memory.check()
            seq.computed, seq.drafted = seq.planned, max(seq.planned - MAX_LEN + lag, 0)
            memory.commit_drafts(seq)
            memory.check()


def test_without_drafts_there_may_be_no_room_for_them() -> None:
    memory = unlike(FULL, WINDOW, DRAFT)(Build(tokens=64, chunk=64))
    assert admit(memory, drafting(1, TEXT[:40])) == 0
    before = insides(memory)
    assert admit_one(memory, drafting(2, TEXT[1:28])) is None
    assert insides(memory)[1:] == before[1:]
    plain = Sequence(3, TEXT[2:14])
    plain.num_forks = 3
    memory.page_pool.reserve([0, 0, 6])
    memory.page_pool.allocate(2, 6)  # all that are left
    assert admit(memory, plain) == 0
    assert compute(memory, plain, 12)
    child = plain.fork(4, 1, 0)
    assert memory.fork(plain, child)
    assert compute(memory, child, 2)


@pytest.mark.parametrize("name", [*WHOLE, "draft-uncached"])
def test_registered_prefixes_are_of_no_draft_model(name: str) -> None:
    memory = DRAFTED[name](Build(chunk=MAX_LEN, prefix_tokens=32, tokens=320))
    prefix = Sequence(1, TEXT[:30])
    assert memory.prefix_cache.can_pin(30)
    capacity = memory.prefix_cache.pinned_capacity
    assert [pages > 0 for pages in capacity] == [not group.is_draft for group in memory.groups]
    assert serve(memory, prefix) == 0
    assert memory.prefix_cache.pin("prefix", prefix)
    memory.free(prefix)
    assert reused(memory, drafting(2, TEXT)) == reused(memory, Sequence(3, list(TEXT))) == (30, 0)
    sharing = memory.account().sharing
    assert (sharing.prefix_tokens, sharing.prefix_capacity) == (30, 32)
    assert not any(memory.groups[g].is_draft for g, _ in memory.prefix_cache.pin_counts)
    memory.check()


@pytest.mark.parametrize("name", [name for name in CACHED if "window" in name or "slack" in name or "lcm" in name])
def test_waiters_draft_from_where_their_leader_does(name: str) -> None:
    """The leader passes the common tokens before its draft model does."""
    memory = DRAFTED[name](Build(tokens=640))
    group = group_of(3, 33, 6)
    for seq in group:
        seq.uses_draft_model = True
    told = memory.admit(group, 64)
    assert isinstance(told, list)
    for seq, (length, _, drafts) in zip(group, told):
        seq.computed = seq.planned = length
        seq.drafted = drafts
    leader, *waiters = group
    common, drafted = waiters[0].computed, 13
    while leader.computed < len(leader.tokens):
        assert compute(memory, leader, 3)
        draft(memory, leader, min(leader.computed, drafted))
    for seq in waiters:
        assert (seq.computed, seq.drafted) == (common, drafted)
        assert compute(memory, seq, 1)
        for policy, table in zip(memory.policies, memory.get_placement(seq).tables):
            start = seq.drafted if policy.group.is_draft else seq.computed
            assert all(table[policy.reads(seq, start, start + 1).start :])
            if policy.group.is_draft:
                first = policy.writes(seq, start, seq.planned).start
                assert all(
                    memory.page_pool.ref_count(memory.policies.index(policy), page) == 1 for page in table[first:]
                )
        assert memory.seq_pages[seq.id].published_drafts <= drafted
        draft(memory, seq, seq.computed)
    for seq in group:
        memory.free(seq)
        memory.check()


@every
def test_draft_pages_are_swapped(name: str) -> None:
    memory = DRAFTED[name](Build(chunk=MAX_LEN, host=1000))
    seqs = [drafting(1, TEXT[:33]), Sequence(2, TEXT[1:34])]
    for seq in seqs:
        assert serve(memory, seq) == 0
    draft(memory, seqs[0], 21)
    held = [[[page > 0 for page in table] for table in memory.get_placement(seq).tables] for seq in seqs]
    for seq in seqs:
        assert memory.swap_out([seq])
        memory.check()
    for seq in seqs:
        assert memory.swap_in([seq])
        memory.check()
    assert held == [[[page > 0 for page in table] for table in memory.get_placement(seq).tables] for seq in seqs]
    for seq in seqs:
        assert compute(memory, seq, 5)
    draft(memory, seqs[0], 38)


@pytest.mark.parametrize("name", [name for name in HEADS if "uncached" not in name])
def test_a_hit_of_a_sequence_with_a_speculation_head_is_of_both(name: str) -> None:
    """The head can't compute a prefix later. Other sequences reuse all that the model has."""
    memory = HEADS[name](Build(tokens=640, chunk=MAX_LEN))
    stride = memory.prefix_cache.prefix_granularity
    longest, part = (MAX_LEN - 1) // stride * stride, 2 * stride
    plain, seq = Sequence(1, list(TEXT)), drafting(2, TEXT[: part + 1])
    assert serve(memory, plain) == 0
    memory.free(plain)
    assert reused(memory, Sequence(3, list(TEXT))) == (longest, 0)
    assert reused(memory, drafting(4, TEXT)) == (0, 0)
    assert serve(memory, seq) == 0
    draft(memory, seq, part + 1)
    memory.free(seq)
    assert reused(memory, drafting(5, TEXT)) == (part, part)
    whole = drafting(6, TEXT)
    assert serve(memory, whole) == part
    draft(memory, whole, MAX_LEN)
    memory.free(whole)
    assert reused(memory, drafting(7, TEXT)) == (longest, longest)
    assert reused(memory, Sequence(8, list(TEXT))) == (longest, 0)


@pytest.mark.parametrize("name", HEADS)
def test_a_registered_prefix_is_not_reused_by_sequences_with_a_speculation_head(name: str) -> None:
    memory = HEADS[name](Build(chunk=MAX_LEN, prefix_tokens=32, tokens=320))
    prefix = Sequence(1, TEXT[:30])
    assert serve(memory, prefix) == 0
    assert memory.prefix_cache.pin("prefix", prefix)
    memory.free(prefix)
    assert reused(memory, Sequence(2, list(TEXT))) == (30, 0)
    assert reused(memory, drafting(3, TEXT)) == (0, 0)


@pytest.mark.parametrize("name", [name for name in HEADS if "uncached" not in name])
def test_siblings_share_the_pages_of_a_speculation_head(name: str) -> None:
    memory = HEADS[name](Build(tokens=640, chunk=MAX_LEN))
    stride = memory.prefix_cache.prefix_granularity
    first = drafting(1, TEXT[: stride + 1])
    assert serve(memory, first) == 0
    draft(memory, first, stride + 1)
    memory.free(first)
    plain = Sequence(2, list(TEXT))
    assert serve(memory, plain) == stride
    memory.free(plain)
    admitted = memory.admit([drafting(i, [*TEXT[: 2 * stride], i]) for i in (3, 4, 5)], 64)
    assert isinstance(admitted, list)
    memory.check()
    assert [(one.reused_tokens, one.drafted_tokens) for one in admitted] == [
        (stride, stride), (2 * stride, 2 * stride), (2 * stride, 2 * stride)
    ]  # fmt: skip
