"""Bugs that show only where groups are unlike, where work is done ahead, where births inherit, where plans travel, or
where states run on: each is planted, and must be caught at every depth; those of states also by tokens alone."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from memories import MAX_LEN, VOCAB, Build
from test_planted import (
    HIT,
    SCRATCH,
    TABLE,
    UNCOMPUTED,
    WRONG,
    Patch,
    Shown,
    every_depth,
    found_by,
    instead_of,
    only_outputs,
    planted_depths,
)
from traces import run_trace
from unlike import FULL, STATE, UNLIKE, WINDOW, Kind, large, unlike

from bench.echo_pages import STATE_BYTES, EchoPages, RecurrentStateRule
from bench.echo_runner import EchoRunner
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_tables import PageTables
from quire.memory.paged import PagedMemory
from quire.memory.policies import BudgetPolicy, ChunkedPolicy, FullPolicy, StatePolicy, WindowPolicy
from quire.memory.prefix_cache import PrefixCache
from quire.memory.seq_pages import SeqPages
from quire.protocol import wire
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import (
    PageCopy,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    TableWrite,
)

Make = Callable[[Build], PagedMemory]
TWINS = unlike(*(Kind(8 + 8 * i, 2) for i in range(5)))
"""Pages of five sizes whose numbers overlap."""
PLAIN = unlike(FULL, Kind(24, 8))


class Traveller(EchoRunner):
    """Every message goes through its binary form."""

    def submit(self, plan: StepPlan) -> int:
        return super().submit(wire.decode_frame(wire.encode_frame(plan)))  # type: ignore[arg-type]

    def collect(self, ticket: int) -> StepResult:
        return wire.decode_frame(wire.encode_frame(super().collect(ticket)))  # type: ignore[return-value]


class Eager(PagedMemory):
    """Gets each sequence a page more than it needs, and tells of it while the step computes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.later: list[TableWrite] = []

    def grow(self, seq: Sequence, length: int) -> bool:
        if not super().grow(seq, length):
            return False
        told, resident = len(self.page_ops), self.seq_pages[seq.id]
        more = min(resident.capacity + 1, MAX_LEN)
        if (
            more > resident.capacity
            and not resident.needs_cow_check
            and self.page_pool.can_allocate([8] * len(self.groups))
        ):
            held = resident.requested_tokens
            self._grow_tables(seq, resident, more, seq.planned)
            resident.requested_tokens = held
        self.later += [entry for entry in self.page_ops[told:] if isinstance(entry, TableWrite)]
        del self.page_ops[told:]
        return True

    def _detach(self, resident: SeqPages) -> None:
        self.later = [entry for entry in self.later if entry.slot != resident.slot]
        super()._detach(resident)

    def take_page_ops(self) -> tuple[Any, Any]:
        ahead, self.later = tuple(self.later), []
        return super().take_page_ops()[0], ahead


def eager(build: Build) -> PagedMemory:
    return Eager(PLAIN(build).kv_config, max_step_tokens=build.chunk)


def run(make: Make, depth: int, runner: type[EchoRunner] = EchoRunner, **settings: Any) -> None:
    # A run with a bug ends at its first failure. Seed 26 alone finds a copy that is keyed without its group.
    for seed in (26, 0, 1, 2, 3, 4, 5, 6, 7):
        run_trace(
            make, seed=seed, depth=depth, budget=16, requests=12, aborts=0.06, runner=runner(depth, vocab_size=VOCAB),
            **{"tokens": 96, "preemption": ("swap", "recompute")[seed % 2], "host": 1000, **settings},
        )  # fmt: skip


@instead_of(PagedMemory, "take_page_ops")
def copy_keyed_without_its_group(take: Any, memory: PagedMemory) -> tuple[Any, Any]:
    now, ahead = take(memory)
    last = {entry.dst: entry for entry in now if isinstance(entry, PageCopy)}
    return tuple(e for e in now if not isinstance(e, PageCopy) or last[e.dst] is e), ahead


def state_page_shared_while_written(patch: Patch) -> None:
    patch.setattr(
        StatePolicy,
        "writes",
        lambda policy, seq, start, end: range(policy.group.num_pages(start), policy.group.num_pages(end)),
    )


@instead_of(PagedMemory, "grow")
def window_page_dropped_before_its_chunk_ran(grow: Any, memory: PagedMemory, seq: Sequence, length: int) -> bool:
    grown: bool = grow(memory, seq, length)
    if grown:
        computed, seq.computed = seq.computed, length
        memory._drop_unneeded(seq, memory.seq_pages[seq.id])
        seq.computed = computed
    return grown


@instead_of(ChunkedPolicy, "reads")
def chunk_page_dropped_one_token_early(_: Any, policy: ChunkedPolicy, seq: Any, start: int, end: int) -> range:
    assert policy.group.chunk is not None
    last = (start + 1) % policy.group.chunk == 0  # a chunk's last token still sees all of it
    return range(policy.group.num_full_pages(policy.group.first_visible(start + last)), policy.group.num_pages(end))


@instead_of(PrefixCache, "_shorten_hit")
def hit_valid_for_one_group_only(
    found: Any, prefixes: PrefixCache, group: int, seq: Sequence, names: Any, tokens: range, known: int
) -> Any:
    return found(prefixes, group, seq, names, tokens, known) if group == 0 else (tokens.stop, known)


window_one_token_short = instead_of(WindowPolicy, "reads")(
    lambda reads, policy, seq, start, end: reads(policy, seq, start + (start > 0), end)
)


@instead_of(PagedMemory, "_grow_tables")
def a_type_allocated_when_another_fails(
    extend: Any, memory: PagedMemory, seq: Sequence, resident: SeqPages, *rest: Any, **more: Any
) -> bool:
    done: bool = extend(memory, seq, resident, *rest, **more)
    for g in range(len(memory.groups)) if not done else ():
        if memory.page_pool.reserve([int(i == g) for i in range(len(memory.groups))]):
            memory.allocate_pages(g, 1, resident.owner)
    return done


@instead_of(TwoLevelPagePool, "_drop_content")
def hash_kept_on_a_rebound_page(forget: Any, pages: TwoLevelPagePool, group: int, page: int) -> None:
    key = pages.keys[group][page]
    forget(pages, group, page)
    if key is not None and not pages.used_small[page // pages.small_pages_per_large[group]]:
        pages.index[group][key] = page


@instead_of(EchoRunner, "submit")
def ahead_not_done(submit: Any, runner: EchoRunner, plan: StepPlan) -> int:
    return submit(runner, plan._replace(overlapped_page_ops=()))


@instead_of(EchoRunner, "init_slot")
def birth_that_inherits_the_wrong_rules(birth: Any, runner: EchoRunner, born: SlotInit) -> None:
    birth(runner, born._replace(sampling=DeviceSamplingParams()) if born.sampling is None else born)


@instead_of(wire, "decode_frame")
def plan_that_changes_on_its_way(decode: Any, frame: bytes) -> Any:
    message = decode(frame)
    if isinstance(message, StepPlan):
        rows = tuple(row._replace(score_tokens=row.score_tokens[:-1]) for row in message.slices)
        message = message._replace(slices=rows)
    return message


budget_a_token_short = instead_of(BudgetPolicy, "gone")(
    lambda gone, policy, seq: gone(policy, seq) + (seq.prompt_len > 5)
)


def writes_behind_a_prompt_by_position(patch: Patch) -> None:
    """What a fork writes to isn't copied."""
    patch.setattr(BudgetPolicy, "writes", FullPolicy.writes)


def prefix_found_in_pages_that_changed(patch: Patch) -> None:
    @instead_of(PagedMemory, "__init__")
    def caching(init: Any, memory: PagedMemory, *arguments: Any, **settings: Any) -> None:
        init(memory, *arguments, **settings)
        memory.caching = memory.prefix_cache.caching = True

    patch.setattr(BudgetPolicy, "unit", FullPolicy.unit)
    caching(patch)


def of(pages: EchoPages, slot: int, position: int, late: int = 0) -> int:
    """The state in the page where that after `position` tokens should be, whatever it says of itself."""
    if position == 0:
        return 0
    run = pages.group.run_tokens
    page = int(pages.table[slot, max(position - 1 - late, 0) // run])
    return int(struct.unpack("<qq", pages.pages[page, : 2 * STATE_BYTES].tobytes())[1])


def put(pages: EchoPages, slot: int, position: int, state: int, late: int = 0) -> None:
    page = int(pages.table[slot, max(position - late, 0) // pages.group.run_tokens])
    pages.pages[page] = np.resize(
        np.frombuffer(struct.pack("<qq", position + 1, state), np.uint8), pages.used_page_bytes
    )


@instead_of(EchoRunner, "compute_row")
def state_advanced_twice(compute: Any, runner: EchoRunner, row: SeqSlice) -> SliceResult:
    """A step's first token is what the step before computed last: once in a while it goes into the state again."""
    for group in runner.groups:
        if isinstance(group.rule, RecurrentStateRule) and row.start % 5 == 4:
            state = of(group, row.slot, row.start)
            put(group, row.slot, row.start - 1, RecurrentStateRule._advance(state, row.start - 1, 0))
    return compute(runner, row)


@instead_of(PageTables, "_find_shared_writes")
def fork_shares_the_running_state(shared: Any, memory: PagedMemory, *arguments: object) -> list[tuple[int, int]]:
    """What a branch goes on from isn't copied before it is written."""
    return [(g, at) for g, at in shared(memory, *arguments) if memory.groups[g].kind != "state"]


@instead_of(EchoRunner, "apply")
def lost_copy_of_a_state(replay: Any, runner: EchoRunner, entry: object) -> None:
    """Branches get pages of their own, in which nothing is."""
    if not isinstance(entry, PageCopy) or not isinstance(runner.groups[entry.group].rule, RecurrentStateRule):
        replay(runner, entry)


def checkpoint_a_token_late(patch: Patch) -> None:
    """The state goes on into the next page a token behind the border: alone, no sequence sees it."""
    patch.setattr(
        RecurrentStateRule, "_read_state", staticmethod(lambda pages, slot, position: of(pages, slot, position, late=1))
    )

    def write(rule: RecurrentStateRule, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        after = rule._advance(of(pages, slot, position, late=1), position, token)
        put(pages, slot, position, after, late=1)

    patch.setattr(RecurrentStateRule, "write", write)


def hit_without_a_checkpoint(patch: Patch) -> None:
    """A prefix may end within a run, if the state at the end of that run is there."""
    patch.setattr(StatePolicy, "unit", property(lambda policy: 4 if policy.group.run_tokens % 4 == 0 else 1))


SHOWING: dict[str, tuple[Make, type[EchoRunner]]] = {
    "twins": (TWINS, EchoRunner),
    "state, full": (unlike(STATE, FULL), EchoRunner),
    "3-to-2": (UNLIKE["3-to-2"], EchoRunner),
    "chunked": (UNLIKE["chunked"], EchoRunner),
    "large": (large(FULL, Kind(24, 4, window=8)), EchoRunner),
    "large-poisoned": (UNLIKE["large-poisoned"], EchoRunner),
    "large, state": (large(FULL, WINDOW, STATE), EchoRunner),
    "full, window, state": (unlike(FULL, WINDOW, STATE), EchoRunner),
    "budgets": (UNLIKE["budgets-uncached"], EchoRunner),
    "eager": (eager, EchoRunner),
    "plain": (PLAIN, EchoRunner),
    "plain, encoded": (PLAIN, Traveller),
}
WITH_STATES = [
    unlike(FULL, STATE), unlike(STATE, WINDOW, Kind(16, 2)), UNLIKE["large-states-34-1"], UNLIKE["states-boundary"]
]  # fmt: skip
STATES = r"slot \d+ needs the state of \d+ tokens, its page has that of \d+"

PLANTED: dict[str, Shown] = {
    "a copy keyed without its group": Shown(copy_keyed_without_its_group, WRONG, "twins"),
    "a state page shared while written": Shown(state_page_shared_while_written, STATES, "state, full"),
    "a window page dropped before its chunk ran": Shown(window_page_dropped_before_its_chunk_ran, SCRATCH, "3-to-2"),
    "a chunk's page dropped one token early": Shown(
        chunk_page_dropped_one_token_early, r"ChunkedPolicy, .* writes pages .*, and reads pages ", "chunked"
    ),
    "a window one token short": Shown(window_one_token_short, SCRATCH, "large"),
    "a window page dropped too early, in large pages": Shown(
        window_page_dropped_before_its_chunk_ran, SCRATCH, "large-poisoned"
    ),
    "a hit valid for one type only, in large pages": Shown(hit_valid_for_one_group_only, HIT, "large, state"),
    "a type allocated when another fails": Shown(
        a_type_allocated_when_another_fails, "a call that reported shortage changed the memory", "large"
    ),
    "a hash kept on a rebound page": Shown(
        hash_kept_on_a_rebound_page, "the index differs from the pages' keys", "large"
    ),
    "a hit valid for one group only": Shown(hit_valid_for_one_group_only, f"{HIT}|{WRONG}", "full, window, state"),
    "a budget a token short": Shown(budget_a_token_short, SCRATCH, "budgets"),
    "writes behind a prompt by position": Shown(writes_behind_a_prompt_by_position, WRONG, "budgets"),
    "a prefix found in pages that changed": Shown(prefix_found_in_pages_that_changed, UNCOMPUTED, "budgets"),
    "`ahead` not done": Shown(ahead_not_done, TABLE, "eager"),
    "a birth that inherits the wrong rules": Shown(birth_that_inherits_the_wrong_rules, WRONG, "plain"),
    "a plan that changes when encoded and decoded": Shown(
        plan_that_changes_on_its_way, r"the log-probabilities of the prompt of request \w+ are wrong", "plain, encoded"
    ),
    "a state advanced twice": Shown(state_advanced_twice, WRONG, "states"),
    "a fork that shares the running state": Shown(fork_shares_the_running_state, STATES, "states"),
    "a copy of a state that is lost": Shown(lost_copy_of_a_state, STATES, "states"),
    "a checkpoint a token late": Shown(checkpoint_a_token_late, WRONG, "states"),
    "a hit at a length without a checkpoint": Shown(hit_without_a_checkpoint, STATES, "states"),
}
OF_STATES = [name for name, bug in PLANTED.items() if bug.memory == "states"]


def run_shown(name: str, depth: int) -> None:
    if name == "states":
        for make in WITH_STATES:
            run(make, depth, prefix_tokens=16)
    else:
        run(SHOWING[name][0], depth, SHOWING[name][1])


@pytest.mark.share(8)
@every_depth
@pytest.mark.parametrize("name", [*SHOWING, "states"])
def test_the_traces_pass_without_a_bug(name: str, depth: int) -> None:
    run_shown(name, depth)


@planted_depths
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str, depth: int, monkeypatch: Patch) -> None:
    bug = PLANTED[name]
    bug.plant(monkeypatch)
    with found_by(bug.message):
        run_shown(bug.memory, depth)


@planted_depths
@pytest.mark.parametrize("name", [None, *OF_STATES])
def test_wrong_tokens_alone_show_a_wrong_state(name: str | None, depth: int, monkeypatch: Patch) -> None:
    """Where states say nothing of themselves, and nothing is checked of the memory or of what it gives. Without a bug
    nothing is wrong."""
    only_outputs(monkeypatch)
    monkeypatch.setattr(RecurrentStateRule, "_read_state", staticmethod(of))
    monkeypatch.setattr(EchoPages, "page_at", lambda pages, slot, logical: int(pages.table[slot, logical]))
    if name is not None:
        PLANTED[name].plant(monkeypatch)
    with found_by(WRONG) if name else nullcontext():
        run_shown("states", depth)
