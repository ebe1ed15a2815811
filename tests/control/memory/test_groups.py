"""What a memory of unlike groups must be told right, and what must not cost more than what changes."""

from __future__ import annotations

import random

import pytest
from memories import MEMORIES, Build, admit_one
from test_invariants import compute, fill, lines_run, sequence, serve
from unlike import STATE, UNLIKE, Kind, unlike

from quire.config import EngineConfig
from quire.control.memory import Size, build_memory
from quire.control.memory.paged import PagedMemory
from quire.control.request import Sequence
from quire.vocabulary.specs import LayerSpec, ModelSpec


def test_each_size_of_pages_has_a_share_and_no_padding() -> None:
    layers = (LayerSpec(1, 4), *(LayerSpec(1, 4, window=8),) * 3)
    config = EngineConfig(page_size=4, max_num_seqs=8, swap_gib=0, page_sizes="own")
    memory = build_memory(config, ModelSpec("echo", layers, 64, 48, 4, 1, 4, 1), Size(64, 48, 2))
    full, window = memory.geometry.groups
    assert window.page_bytes == 3 * full.page_bytes
    assert len(full.ids) == len(window.ids) == 16
    ends = [(group.ids.start * group.page_bytes, group.ids.stop * group.page_bytes) for group in (full, window)]
    assert ends[0][0] >= window.page_bytes  # the scratch page of all groups
    assert ends[0][1] <= ends[1][0]
    assert ends[1][1] == memory.geometry.bytes
    assert serve(memory, sequence(1, 16)) == 0
    assert memory.account().usage.internal == 0


@pytest.mark.parametrize("name", ["mixed", "mixed-16"])
def test_a_lookup_over_full_and_window_layers_is_linear(name: str) -> None:
    """The windows' pages go first. Then every place where a prefix could end is looked at once."""

    def cost(length: int) -> int:
        memory = MEMORIES[name](Build(tokens=4 * length, chunk=length, max_len=length + 1))
        old = sequence(1, length)
        assert serve(memory, old) == 0
        memory.free(old)
        for g, group in enumerate(memory.groups):
            for page in list(memory.pages.index[g].values()) if group.window is not None else ():
                memory.pages.evict(g, page)
        again = Sequence(2, [*old.tokens[:-1], 0])
        again.keys = list(old.keys)
        lines = lines_run(lambda: memory.prefixes.cached(again))
        assert memory.prefixes.cached(again).tokens == 0
        return lines

    small, large = cost(512), cost(2048)
    assert large < 4.5 * small


def test_branches_that_come_back_cost_what_is_there_once() -> None:
    """Not each pair of branches is compared, nor each page of a prefix that they have in common for each of them."""

    def cost(count: int) -> int:
        memory = MEMORIES["paged-4"](Build(tokens=8192, chunk=8192, max_len=2048, max_seqs=128))
        stem = sequence(1, 1024)
        assert serve(memory, stem) == 0
        branches = [stem, *(stem.fork(i, i, 0) for i in range(2, count + 1))]
        for branch in branches[1:]:
            assert memory.fork(stem, branch)
        for branch in branches:
            branch.tokens.append(branch.id)
            memory.free(branch)
            branch.computed = branch.planned = 0
        return lines_run(lambda: memory.admit(branches, 8192))

    few, many = cost(8), cost(64)
    assert many < 8 * few


@pytest.mark.parametrize("name", ["paged-4", "mixed"])
def test_a_failed_swap_in_is_retried_only_after_pages_were_released(name: str) -> None:
    memory = MEMORIES[name](Build(tokens=96, max_seqs=64, host=1000))
    away = sequence(1, 20)
    serve(memory, away)
    assert memory.swap_out([away])
    residents = fill(memory)
    first = lines_run(lambda: memory.swap_in([away]))
    again = lines_run(lambda: memory.swap_in([away]))
    assert again < 10 < first
    for seq in residents:
        memory.free(seq)
    assert memory.swap_in([away])


def test_a_swapped_sequence_that_ends_costs_its_own_pages() -> None:
    def cost(count: int) -> int:
        memory = MEMORIES["paged-4"](Build(tokens=4096, max_seqs=256, host=10**6))
        seqs = [sequence(i, 9, start=100 * i) for i in range(1, count + 1)]
        for seq in seqs:
            serve(memory, seq)
            assert memory.swap_out([seq])
        return lines_run(lambda: memory.free(seqs[0]))

    assert cost(4) == cost(200)


@pytest.mark.parametrize("name", [*MEMORIES, *UNLIKE])
def test_grow_and_drop_follow_from_what_is_read_and_written(name: str) -> None:
    """Whatever a policy says of a chunk is there when it was asked for, private where it is written; and what the next
    token doesn't read is gone after it was computed."""
    memory = (MEMORIES | UNLIKE)[name](Build(tokens=512, chunk=16))
    seq = sequence(1, 44)
    assert admit_one(memory, seq, 3) == 0
    for count in (3, 1, 7, 16, 1, 12, 4):
        start, end = seq.planned, seq.planned + count
        assert compute(memory, seq, count)
        for policy, table in zip(memory.policies, memory.place(seq).tables):
            shrunk = policy.shrinks and end >= seq.prompt_len  # its pages behind what is kept are gone already
            assert len(table) >= policy.reads(seq, end if shrunk else start, end).stop
            later = policy.reads(seq, end, end + 1)
            assert not any(table[: min(later.start, len(table))]), "a page that nobody reads is still held"
            assert all(table[later.start : later.stop]), "a page that the next token reads is gone"
    memory.check()


@pytest.mark.parametrize("name", [name for name in UNLIKE if "uncached" not in name])
def test_a_hit_is_the_longest_that_every_group_can_serve(name: str) -> None:
    """Brute force over prefixes, while pages are evicted in any order, those of one group last."""
    rng, lengths = random.Random(name), set()
    for last in range(len(UNLIKE[name](Build()).groups)):
        memory, first = UNLIKE[name](Build(tokens=512, max_len=120)), sequence(1, 97)
        assert serve(memory, first) == 0
        memory.free(first)
        cached = [(g, page) for g, index in enumerate(memory.pages.index) for page in index.values()]
        rng.shuffle(cached)
        cached.sort(key=lambda at: at[0] == last)
        while cached:
            seq = sequence(2, 97)
            found = memory.prefixes.cached(seq).tokens
            assert found == max(hit for hit in range(0, 97, memory.prefixes.stride) if served(memory, seq, hit))
            lengths.add(found)
            for g, page in cached[:2]:
                memory.pages.evict(g, page)
            del cached[:2]
    assert len(lengths) > 1


def served(memory: PagedMemory, seq: Sequence, hit: int) -> bool:
    """Every group has what a prefix of `hit` tokens needs of it."""
    memory.prefixes.chain(seq, hit)
    for g, policy in enumerate(memory.policies):
        need = policy.required(seq, hit)
        names = memory.prefixes.names(g, seq.keys, need.start, need.stop) if policy.unit and need else ()
        if not all(name in memory.pages.index[g] for name in names):
            return False
    return True


def test_a_prefix_ends_where_pages_of_all_groups_do() -> None:
    memory = unlike(Kind(16, 4), Kind(24, 8), STATE, Kind(24, 8, 3))(Build(tokens=256))
    assert serve(memory, sequence(1, 30)) == 0
    assert (memory.prefixes.unit, memory.prefixes.stride) == (4, 8)
    assert serve(memory, sequence(2, 30)) == 24
    shorter = sequence(3, 30)
    shorter.tokens[13] = 999
    assert serve(memory, shorter) == 8


@pytest.mark.parametrize("name", ["paged-4", "mixed"])
def test_twins_that_were_swapped_out_come_back_to_one_page(name: str) -> None:
    """Two branches that drew the same tokens have pages of their own with the same content, of which one is cached.
    When both come back to that one it is named twice, and has two references."""
    memory = MEMORIES[name](Build(tokens=256, max_seqs=8, host=1000))
    stem = sequence(1, 6)
    assert serve(memory, stem) == 0
    twin = stem.fork(2, 1, 0)
    assert memory.fork(stem, twin)
    for seq in (stem, twin):
        seq.tokens += [7] * 8
        assert compute(memory, seq, 8)
    memory.check()
    assert memory.swap_out([stem, twin])
    memory.check()
    assert memory.swap_in([stem, twin])
    memory.check()
    for seq in (stem, twin):
        memory.free(seq)
    memory.check()
    assert memory.account().usage.used == 0
