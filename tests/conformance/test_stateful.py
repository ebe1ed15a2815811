"""Any sequence of calls of a memory, against a reference that shares nothing: one list of contents a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from memories import EVERY, Build, check_published, insides, is_unused, reset, total_bytes
from traces import AT_LENGTH, STEMS

from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, TableWrite

OPS = ("admit", "admit", "group", "begin", "begin", "confirm", "step", "step", "fork", "fork", "free", "read", "reset")
Content = tuple[Any, ...]  # what a position holds: the salt, and the tokens up to it


def offset(group: KVCacheGroup, position: int) -> int:
    """Where in its page a position is kept; a state takes the place of the one before it."""
    return 0 if group.kind == "state" else position % group.run_tokens


class Device:
    """Tables and pages as the journal makes them; what is written to a page is there until it is overwritten."""

    def __init__(self) -> None:
        self.tables: dict[tuple[int, int, int], int] = {}  # (slot, group, logical page) -> page
        self.cells: dict[tuple[int, int], Any] = {}  # (byte of a page, offset) -> (group, content)

    def replay(self, journal: tuple[Any, ...], groups: tuple[KVCacheGroup, ...]) -> None:
        for entry in journal:
            if isinstance(entry, TableWrite):
                for i, page in enumerate(entry.pages):
                    self.tables[entry.slot, entry.group, entry.first_page + i] = page
            elif isinstance(entry, PageCopy):
                page_bytes = groups[entry.group].page_bytes
                for offset in range(groups[entry.group].run_tokens):
                    moved = self.cells.get((entry.src * page_bytes, offset))
                    self.cells[entry.dst * page_bytes, offset] = moved


class Calls(RuleBasedStateMachine):
    """Admissions, steps (of which some stay in flight), forks and frees in any order."""

    name = "paged-4"
    makes: ClassVar[dict[str, Callable[[Build], Any]]] = EVERY
    host = 0

    def content(self, seq: Sequence, position: int) -> Content:
        return seq.cache_salt, tuple(seq.tokens[: position + 1])

    @initialize(tokens=st.integers(40, 160), chunk=st.integers(1, 20), max_seqs=st.integers(2, 6))
    def build(self, tokens: int, chunk: int, max_seqs: int) -> None:
        self.memory = self.makes[self.name](Build(tokens, chunk, max_seqs, host=self.host))
        self.chunk = chunk
        self.total = total_bytes(self.memory.kv_config)
        self.device = Device()
        self.alive: dict[int, Sequence] = {}
        self.contents: dict[int, list[Content]] = {}  # the reference
        self.born = 0
        self.after: dict[int, Sequence] = {}  # what a sequence shares is still to be computed by that one
        self.owners: dict[int, tuple[Sequence, int]] = {}  # who computes what another one shares, and how much

    def pick(self, data: st.DataObject, quiet: bool) -> Sequence | None:
        found = [seq for seq in self.alive.values() if seq.not_in_flight or not quiet]
        return data.draw(st.sampled_from(found)) if found else None

    # One rule, not one for each call: hypothesis leaves rules out of most runs, and here they only matter together.
    @rule(op=st.sampled_from(OPS), data=st.data())
    def act(self, op: str, data: st.DataObject) -> None:
        getattr(self, op)(data)

    def admit(self, data: st.DataObject) -> None:
        stem, length = data.draw(st.sampled_from(STEMS)), data.draw(st.integers(1, 30))
        tail = data.draw(st.lists(st.integers(1, 3), max_size=2))
        salt, branches = data.draw(st.sampled_from(["", "", "adapter"])), data.draw(st.integers(0, 2))
        self.born += 1
        seq = Sequence(self.born, [*stem[:length], *tail], cache_salt=salt)
        seq.num_forks = branches
        self.enter([seq])

    def group(self, data: st.DataObject) -> None:
        """Branches of a request come back: all or none of them, sharing what they have in common."""
        stem, length = data.draw(st.sampled_from(STEMS)), data.draw(st.integers(1, 24))
        salt, seqs = data.draw(st.sampled_from(["", "adapter"])), []
        for tail in data.draw(st.lists(st.lists(st.integers(1, 2), max_size=8), min_size=2, max_size=3)):
            self.born += 1
            seqs.append(Sequence(self.born, [*stem[:length], *tail], cache_salt=salt))
            seqs[-1].prompt_len = length
        self.enter(seqs)

    def enter(self, seqs: list[Sequence]) -> None:
        before = insides(self.memory)
        admitted = self.memory.admit(seqs, self.chunk)
        if not isinstance(admitted, list):
            assert insides(self.memory) == before
            return
        for seq, (reused, after, drafted) in zip(seqs, admitted):
            assert drafted <= reused < len(seq.tokens)
            seq.computed, seq.planned, seq.drafted = reused, reused, drafted
            self.alive[seq.id] = seq
            self.contents[seq.id] = [self.content(seq, i) for i in range(reused)]
            if after is not None:
                self.after[seq.id] = after
                self.owners[seq.id] = after, reused

    def waits(self, seq: Sequence) -> bool:
        """As in the scheduler: what it shares is to be computed by another one, or by that one's own."""
        owner = self.after.get(seq.id)
        if owner is None:
            return False
        if self.waits(owner) or owner.planned < seq.planned:
            return True
        del self.after[seq.id]
        return False

    def awaited(self, seq: Sequence) -> bool:
        """Another one waits for it: then it isn't forked or freed, it computes."""
        return any(self.waits(other) and self.after[other.id] is seq for other in self.alive.values())

    def begin(self, data: st.DataObject) -> Sequence | None:
        """Plan the next tokens of a sequence and write them; the result stays out. Return the sequence, if any."""
        seq = self.pick(data, quiet=False)
        if seq is None or self.waits(seq):
            return None
        end = min(seq.planned + data.draw(st.integers(1, self.chunk)), 48)
        seq.tokens += [data.draw(st.integers(1, 3))] * (end - len(seq.tokens))
        before = insides(self.memory)
        if not self.memory.grow(seq, end):
            assert insides(self.memory) == before
            return None
        self.device.replay(self.memory.take_page_ops()[0], self.memory.kv_config.groups)
        slot = self.memory.slot(seq)
        for position in range(seq.planned, end):
            content = self.content(seq, position)
            self.contents[seq.id].append(content)
            for g, group in enumerate(self.memory.kv_config.groups):  # a token is where its first byte is
                if group.is_draft:
                    continue
                if group.kind == "state" and position:  # computing goes on from what is there
                    last = self.device.tables[slot, g, group.num_full_pages(position - 1)] * group.page_bytes
                    before = self.device.cells.get((last, 0))
                    assert before == (g, self.contents[seq.id][position - 1]), f"the state before {position} is wrong"
                page = self.device.tables[slot, g, group.num_full_pages(position)]
                assert page, "a position to write has no page"
                self.device.cells[page * group.page_bytes, offset(group, position)] = (g, content)
        seq.planned = end
        return seq

    def valid(self, seq: Sequence) -> bool:
        """What it shares with others was confirmed by whoever computed it: results are taken in by steps, in order."""
        owner, shared = self.owners.get(seq.id, (seq, 0))
        return owner.computed >= shared and (owner is seq or self.valid(owner))

    def confirm(self, data: st.DataObject) -> None:
        seq = self.pick(data, quiet=False)
        if seq is not None and self.valid(seq):
            self.settle(seq, data.draw(st.integers(seq.computed, seq.planned)))

    def settle(self, seq: Sequence, computed: int) -> None:
        """Take in the results of the first `computed` tokens."""
        seq.computed = computed
        self.commit(seq)

    def commit(self, seq: Sequence) -> None:
        self.memory.commit(seq)

    def step(self, data: st.DataObject) -> None:
        """As far as possible: everybody's tokens are computed and confirmed."""
        for _ in self.alive:
            self.begin(data)
        for seq in self.alive.values():
            if self.valid(seq):
                self.settle(seq, seq.planned)

    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data, quiet=True)
        if parent is None or not parent.computed or not self.valid(parent) or self.awaited(parent):
            return
        self.born += 1
        child = parent.fork(self.born, 1, 0)
        before = insides(self.memory)
        if not self.memory.fork(parent, child):
            assert insides(self.memory) == before
            return
        self.alive[child.id] = child
        self.contents[child.id] = list(self.contents[parent.id])

    def free(self, data: st.DataObject) -> None:
        seq = self.pick(data, quiet=True)
        if seq is not None and not self.awaited(seq):
            self.after.pop(seq.id, None)
            del self.alive[seq.id], self.contents[seq.id]
            self.memory.free(seq)

    def reset(self, data: st.DataObject) -> None:
        reset(self.memory)
        assert self.memory.account().usage.cached == 0

    def read(self, data: st.DataObject | None = None) -> None:
        """Through the replayed tables, each sequence finds what the reference holds, as far as it may look back."""
        self.device.replay(self.memory.take_page_ops()[0], self.memory.kv_config.groups)
        followers = getattr(self.memory, "prefix_waiters", None)
        for seq in self.alive.values():
            if self.waits(seq) or (followers and seq.id in followers.leaders):  # which has no pages before its turn
                continue
            place = self.memory.get_placement(seq)
            for g, group in enumerate(self.memory.kv_config.groups):
                table = place.tables[g]
                assert tuple(self.device.tables[place.slot, g, i] for i in range(len(table))) == table
                first, last = group.first_visible(seq.computed), seq.planned
                if group.kind == "state":
                    first = max(seq.planned - 1, 0)
                if group.is_draft:
                    last = seq.drafted if seq.uses_draft_model else 0
                    first = group.first_visible(last)
                for position in range(first, last):
                    begin = table[group.num_full_pages(position)] * group.page_bytes
                    cell = self.device.cells.get((begin, offset(group, position)))
                    assert cell == (g, self.contents[seq.id][position]), f"position {position} of group {g} is wrong"

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check()
            check_published(self.memory, self.alive.values())
            usage = self.memory.account().usage
            assert usage.total == self.total
            assert min(usage) >= 0

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.read()
            for seq in self.alive.values():
                seq.computed = seq.planned
                self.memory.free(seq)
            self.memory.check()
            assert is_unused(self.memory)


def machine(kind: type[RuleBasedStateMachine], memory: str) -> type[RuleBasedStateMachine]:
    return type(kind.__name__, (kind,), {"name": memory, "__module__": kind.__module__})


@pytest.mark.share(8)
@pytest.mark.parametrize(("examples", "steps"), [(30, 30), pytest.param(500, 60, marks=AT_LENGTH)])
@pytest.mark.parametrize("name", EVERY)
def test_any_calls(name: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(machine(Calls, name), settings=settings(max_examples=examples, stateful_step_count=steps))
