"""Tokens that are taken back, and draft models, which lag behind: any calls of a memory, against the same reference,
and random traces of an engine that speculates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from memories import EVERY, Build, insides
from test_stateful import OPS, Calls, Device, machine, offset
from traces import AT_LENGTH, WAYS, open_trace
from unlike import DRAFTED, HEADS

from quire.core.speculation import Speculator
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SwapIn, SwapOut

TOLD_BACK = {name: make for name, make in {**EVERY, **DRAFTED, **HEADS}.items() if "beside" not in name}
"""The memories all of whose pages are of one model and its draft model."""


class Swapping(Device):
    """A device with host pages."""

    def replay(self, journal: tuple[Any, ...], groups: tuple[KVCacheGroup, ...]) -> None:
        for entry in journal:
            if isinstance(entry, SwapOut | SwapIn):
                group = groups[entry.group]
                page, host = entry.page * group.page_bytes, -1 - entry.host_page * group.page_bytes
                src, dst = (page, host) if isinstance(entry, SwapOut) else (host, page)
                for offset in range(group.run_tokens):
                    self.cells[dst, offset] = self.cells.get((src, offset))
            else:
                super().replay((entry,), groups)


class Drafts(Calls):
    """Calls of which results are partly taken back, of sequences with and without a draft model. It computes a prompt
    together with the target if it has all that precedes, and otherwise may lag behind."""

    makes: ClassVar[dict[str, Callable[[Build], Any]]] = TOLD_BACK
    host = 1000

    @initialize(tokens=st.integers(40, 160), chunk=st.integers(1, 20), max_seqs=st.integers(2, 6))
    def build(self, tokens: int, chunk: int, max_seqs: int) -> None:
        super().build(tokens, chunk, max_seqs)
        self.device = Swapping()
        self.has_drafts = any(group.is_draft for group in self.memory.kv_config.groups)
        self.known: dict[int, int] = {}  # tokens that are not taken back: those at the admission
        self.drafting: dict[int, int] = {}  # tokens that the draft model has computed, once they are confirmed
        self.away: dict[int, Sequence] = {}

    @rule(op=st.sampled_from((*OPS, "take_back", "take_back", "swap", "swap")), data=st.data())
    def act(self, op: str, data: st.DataObject) -> None:
        getattr(self, op)(data)

    def enter(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            seq.uses_draft_model = self.has_drafts and self.born % 3 > 0
        super().enter(seqs)
        for seq in seqs:
            self.known[seq.id] = len(seq.tokens)

    def begin(self, data: st.DataObject) -> Sequence | None:
        starts = {seq.id: seq.planned for seq in self.alive.values()}
        seq = super().begin(data)
        if seq is not None and seq.uses_draft_model and seq.planned > starts[seq.id]:
            covered = self.covered(seq)
            keeps_up = starts[seq.id] <= covered < self.known[seq.id]
            end = seq.planned if keeps_up else data.draw(st.integers(seq.drafted, seq.planned))
            self.draft(seq, end)
            self.drafting[seq.id] = max(covered, end)
        return seq

    def covered(self, seq: Sequence) -> int:
        """The tokens that the draft model has computed, or does in the steps in flight."""
        return max(self.drafting.get(seq.id, 0), seq.drafted)

    def waits(self, seq: Sequence) -> bool:
        owner, waits = self.after.get(seq.id), super().waits(seq)
        if owner is not None and not waits:
            seq.drafted = min(seq.drafted, self.covered(owner))
        return waits

    def draft(self, seq: Sequence, end: int) -> None:
        """Let the draft model read what precedes its tokens, and write those up to `end`."""
        slot, contents = self.memory.slot(seq), self.contents[seq.id]
        for g, group in enumerate(self.memory.kv_config.groups):
            if not group.is_draft:
                continue
            for position in range(group.first_visible(seq.drafted), end):
                page = self.device.tables[slot, g, group.num_full_pages(position)]
                assert page, f"position {position} of the draft model has no page"
                cell = page * group.page_bytes, offset(group, position)
                if position >= seq.drafted:
                    self.device.cells[cell] = (g, contents[position])
                assert self.device.cells.get(cell) == (g, contents[position]), f"position {position} is wrong"

    def settle(self, seq: Sequence, computed: int) -> None:
        if seq.uses_draft_model:
            seq.drafted = max(seq.drafted, min(self.drafting.get(seq.id, 0), computed))
        super().settle(seq, computed)

    def commit(self, seq: Sequence) -> None:
        self.memory.commit_drafts(seq)

    def take_back(self, data: st.DataObject) -> None:
        """Confirm some of the tokens in flight; the others are not what the sequence goes on with."""
        seq = self.pick(data, quiet=False)
        if seq is None or seq.not_in_flight or not self.valid(seq) or self.awaited(seq):
            return
        known = self.known[seq.id]
        end = data.draw(st.integers(max(seq.computed, min(known, seq.planned)), seq.planned))
        del seq.tokens[max(end, known) :], self.contents[seq.id][end:]
        self.drafting[seq.id] = min(self.drafting.get(seq.id, 0), end)
        seq.planned = end
        slot = self.memory.slot(seq)
        for g, group in enumerate(self.memory.kv_config.groups):  # the runner leaves the state after the last one kept
            if group.kind == "state" and end:
                page = self.device.tables[slot, g, group.num_full_pages(end - 1)]
                self.device.cells[page * group.page_bytes, 0] = (g, self.contents[seq.id][end - 1])
        self.settle(seq, end)
        if self.memory.prefix_cache is not None:
            assert len(seq.page_keys) * self.memory.prefix_cache.key_tokens <= max(end, known), "a key is taken back"

    def fork(self, data: st.DataObject) -> None:
        super().fork(data)
        for child in self.alive.values():
            if child.id not in self.known:
                self.known[child.id] = len(child.tokens)

    def swap(self, data: st.DataObject) -> None:
        if self.away and data.draw(st.booleans()):
            seq = data.draw(st.sampled_from(list(self.away.values())))
            before = insides(self.memory)
            if self.memory.swap_in([seq]):
                self.alive[seq.id] = self.away.pop(seq.id)
            else:
                assert insides(self.memory)[:2] == before[:2]
            return
        leaving = self.pick(data, quiet=True)
        if leaving is None or self.waits(leaving) or self.awaited(leaving) or not self.valid(leaving):
            return
        if self.memory.swap_out([leaving]):
            self.away[leaving.id] = self.alive.pop(leaving.id)

    @invariant()
    def drafts_hold(self) -> None:
        if isinstance(getattr(self, "memory", None), PagedMemory):
            for seq in self.alive.values():
                seq_pages = self.memory.seq_pages[seq.id]
                published = seq_pages.published_drafts <= seq_pages.published_tokens <= seq.computed
                if not self.waits(seq) and self.valid(seq) and seq.id not in self.memory.prefix_waiters.leaders:
                    assert published
                    assert seq_pages.published_drafts <= seq.drafted
                for table, group in zip(seq_pages.tables, self.memory.groups):
                    assert seq.uses_draft_model or not group.is_draft or not table, (
                        "a sequence without drafts has their pages"
                    )

    def read(self, data: st.DataObject | None = None) -> None:
        super().read(data)
        if isinstance(self.memory, PagedMemory):
            for g, group in enumerate(self.memory.kv_config.groups):
                is_state = group.kind == "state"
                for page in self.memory.page_pool.index[g].values() if group.run_pages == 1 else ():
                    places = range(1 if is_state else group.run_tokens)
                    cells = [self.device.cells.get((page * group.page_bytes, i)) for i in places]
                    assert all(cell and cell[0] == g for cell in cells), f"page {page} is found, and not complete"
                    assert not is_state or len(cells[0][1][1]) % group.run_tokens == 0, "it is no state of a run's end"

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for seq in self.away.values():
                self.memory.free(seq)
        super().teardown()


@pytest.mark.share(8)
@pytest.mark.parametrize(("examples", "steps"), [(20, 40), pytest.param(500, 60, marks=AT_LENGTH)])
@pytest.mark.parametrize("name", TOLD_BACK)
def test_any_calls_with_tokens_taken_back(name: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine(Drafts, name), settings=settings(max_examples=examples, stateful_step_count=steps)
    )


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 300), marks=AT_LENGTH)])
@pytest.mark.parametrize("name", DRAFTED)
def test_traces_with_a_draft_model(name: str, seeds: range) -> None:
    for seed in seeds:
        trace = open_trace(
            DRAFTED[name], seed=seed, depth=seed % 3 + 1, tokens=(96, 160)[seed % 2], budget=(16, 6, 64)[seed % 3],
            preemption=WAYS[seed % 3], host=(1000, 20)[seed % 2], prefix_tokens=(0, 24)[seed % 2],
        )  # fmt: skip
        method, most = ("draft", "both")[seed % 2], (3, 1, 6)[seed % 3]
        trace.scheduler.speculator = Speculator(method, most, lookup=(1, 3), costs=None)
        trace.run(12, 0.06)
        assert trace.engine.stats.accepted_tokens > 0
