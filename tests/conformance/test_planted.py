"""Bugs planted on purpose: the random traces must catch every one, and must pass without them."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from memories import MEMORIES
from traces import Checked, Watched, run_trace

from quire.memory.paged import PagedMemory
from quire.memory.pages import Pages
from quire.memory.policies import WindowPolicy
from quire.plan import Copy, Row, Sampled, StepPlan, StepResult, Table
from quire.request import Request, Sequence
from quire.scheduler import Event, Scheduler
from quire.sim.echo import EchoRunner

Patch = pytest.MonkeyPatch
ALL, OVERLAPPED = (1, 2, 3), (2, 3)


def journal(patch: Patch, change: Callable[[list[Any]], list[Any]]) -> None:
    take = PagedMemory.take_journal

    def changed(memory: PagedMemory) -> tuple[Any, Any]:
        now, ahead = take(memory)
        return tuple(change(list(now))), ahead

    patch.setattr(PagedMemory, "take_journal", changed)


def reversed_journal(patch: Patch) -> None:
    journal(patch, lambda entries: entries[::-1])


def stale_table_after_reuse_of_a_page(patch: Patch) -> None:
    """Growth past a page border isn't told: the table keeps what an earlier owner of the slot left there."""
    journal(patch, lambda entries: [e for e in entries if not (isinstance(e, Table) and e.at)])


def lost_copy_on_write(patch: Patch) -> None:
    journal(patch, lambda entries: [e for e in entries if not isinstance(e, Copy)])


def grow_off_by_one_at_a_page_border(patch: Patch) -> None:
    grow = PagedMemory.grow
    patch.setattr(PagedMemory, "grow", lambda memory, seq, length: grow(memory, seq, length - 1))


def write_off_by_one_at_a_page_border(patch: Patch) -> None:
    address = EchoRunner.address

    def behind(runner: EchoRunner, table: Any, slot: int, position: int) -> tuple[int, int]:
        size = runner.cells.shape[1]
        if position % size == 0 and position:
            return address(runner, table, slot, position - 1)[0], 0
        return address(runner, table, slot, position)

    patch.setattr(EchoRunner, "address", behind)


def leak_of_a_page(patch: Patch) -> None:
    release = Pages.release

    def leaky(pages: Pages, page: int) -> None:
        if page != 5:
            release(pages, page)

    patch.setattr(Pages, "release", leaky)


def last_from_the_wrong_slot(patch: Patch) -> None:
    compute = EchoRunner.compute

    def misplaced(runner: EchoRunner, row: Row) -> Sampled:
        sampled = compute(runner, row)
        other = runner.slots.get(row.slot + 1)
        if sampled.tokens and other is not None:
            other.last = sampled.tokens[0]
        return sampled

    patch.setattr(EchoRunner, "compute", misplaced)


def token_of_a_wasted_row_given_out(patch: Patch) -> None:
    update = Scheduler.update

    def generous(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> list[Event]:
        for row in plan.rows:
            _, seq = scheduler.by_slot[row.slot]
            if seq.finish == "stop":
                seq.finish = None
        return update(scheduler, plan, result)

    patch.setattr(Scheduler, "update", generous)


def unconfirmed_tail_published(patch: Patch) -> None:
    commit = PagedMemory.commit

    def early(memory: PagedMemory, seq: Sequence) -> None:
        computed, seq.computed = seq.computed, seq.planned
        commit(memory, seq)
        seq.computed = computed

    patch.setattr(PagedMemory, "commit", early)


def rejected_tail_published(patch: Patch) -> None:
    leave = Scheduler._leave

    def committed(scheduler: Scheduler, seq: Sequence) -> None:
        if seq.finish is not None:
            scheduler.memory.commit(seq)
        leave(scheduler, seq)

    patch.setattr(Scheduler, "_leave", committed)


def row_freed_while_in_flight(patch: Patch) -> None:
    retire = Scheduler._retire

    def impatient(scheduler: Scheduler, request: Request, seq: Sequence) -> None:
        seq.planned = seq.computed
        retire(scheduler, request, seq)

    patch.setattr(Scheduler, "_retire", impatient)


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(PagedMemory, "_copy_on_write", lambda *args: None)


def fork_without_share(patch: Patch) -> None:
    fork = PagedMemory.fork

    def unshared(memory: PagedMemory, parent: Sequence, child: Sequence) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Pages, "share", lambda pages, page: None)
            return fork(memory, parent, child)

    patch.setattr(PagedMemory, "fork", unshared)


def hit_one_page_too_long(patch: Patch) -> None:
    admit = PagedMemory.admit

    def generous(memory: PagedMemory, seq: Sequence, budget: int) -> int | None:
        reused = admit(memory, seq, budget)
        longer = (reused or 0) + memory.page_tokens
        return longer if reused and longer < min(seq.reusable, len(seq.tokens)) else reused

    patch.setattr(PagedMemory, "admit", generous)


def hit_of_a_whole_prompt(patch: Patch) -> None:
    longest = PagedMemory._longest_hit

    def whole(memory: PagedMemory, seq: Sequence) -> int:
        seq.tokens.append(0)
        hit = longest(memory, seq)
        seq.tokens.pop()
        return hit

    patch.setattr(PagedMemory, "_longest_hit", whole)


def keys(patch: Patch, salted: bool, chained: bool) -> None:
    def chain(memory: PagedMemory, seq: Sequence, count: int) -> None:
        size = memory.page_tokens
        root = hashlib.sha256(memory.root + (seq.salt.encode() if salted else b"")).digest()
        while len(seq.keys) < count:
            i = len(seq.keys)
            parent = seq.keys[-1] if i and chained else root
            page = array("q", seq.tokens[i * size : (i + 1) * size])
            seq.keys.append(hashlib.sha256(parent + page.tobytes()).digest())

    patch.setattr(PagedMemory, "_chain", chain)


def key_without_its_parent(patch: Patch) -> None:
    keys(patch, salted=True, chained=False)


def key_without_its_salt(patch: Patch) -> None:
    keys(patch, salted=False, chained=True)


def window_dropped_a_page_early(patch: Patch) -> None:
    live = WindowPolicy.live

    def narrow(policy: WindowPolicy, start: int, end: int) -> range:
        span = live(policy, start, end)
        return range(span.start + (len(span) > 1), span.stop)

    patch.setattr(WindowPolicy, "live", narrow)


def child_with_its_parents_seed(patch: Patch) -> None:
    born = Scheduler._born

    def same(scheduler: Scheduler, request: Request, seq: Sequence, parent: int = -1) -> None:
        born(scheduler, request, seq, parent)
        scheduler.births[-1] = scheduler.births[-1]._replace(seed=request.seed)

    patch.setattr(Scheduler, "_born", same)


def last_birth_of_a_step_lost(patch: Patch) -> None:
    submit = EchoRunner.submit
    patch.setattr(
        EchoRunner,
        "submit",
        lambda runner, plan: submit(runner, plan._replace(births=plan.births[: max(1, len(plan.births) - 1)])),
    )


def victim_that_keeps_its_progress(patch: Patch) -> None:
    preempt = Scheduler._preempt

    def kept(scheduler: Scheduler, victim: Request) -> None:
        computed = {seq.id: seq.computed for seq in victim.live}
        preempt(scheduler, victim)
        for seq in victim.live:
            seq.computed = seq.planned = computed[seq.id]

    patch.setattr(Scheduler, "_preempt", kept)
    admit = PagedMemory.admit
    patch.setattr(PagedMemory, "admit", lambda memory, seq, budget: _kept_admission(admit, memory, seq, budget))


def _kept_admission(admit: Callable[..., int | None], memory: PagedMemory, seq: Sequence, budget: int) -> int | None:
    kept = seq.computed
    reused = admit(memory, seq, budget)
    return reused if reused is None else max(reused, kept)


PLANTED: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "reversed journal": (reversed_journal, ALL),
    "stale table after reuse of a page": (stale_table_after_reuse_of_a_page, ALL),
    "grow off by one at a page border": (grow_off_by_one_at_a_page_border, ALL),
    "write off by one at a page border": (write_off_by_one_at_a_page_border, ALL),
    "leak of a page": (leak_of_a_page, ALL),
    # Without overlap the host knows every token, and rows never hold LAST.
    "LAST from the wrong slot": (last_from_the_wrong_slot, OVERLAPPED),
    # Without overlap there are no wasted rows, and nothing is planned but not computed when a result is taken in.
    "token of a wasted row given out": (token_of_a_wasted_row_given_out, OVERLAPPED),
    "unconfirmed tail published": (unconfirmed_tail_published, OVERLAPPED),
    "row freed while in flight": (row_freed_while_in_flight, OVERLAPPED),
    # The first wasted row computes the end token, which the sequence has; the second one computes a token it hasn't.
    "rejected tail published": (rejected_tail_published, (3,)),
    "lost copy on write": (lost_copy_on_write, ALL),
    "no copy on write": (no_copy_on_write, ALL),
    "fork without share": (fork_without_share, ALL),
    "hit one page too long": (hit_one_page_too_long, ALL),
    "hit of a whole prompt": (hit_of_a_whole_prompt, ALL),
    "key without its parent": (key_without_its_parent, ALL),
    "key without its salt": (key_without_its_salt, ALL),
    "window dropped a page early": (window_dropped_a_page_early, ALL),
    "child with its parent's seed": (child_with_its_parents_seed, ALL),
    "last birth of a step lost": (last_birth_of_a_step_lost, ALL),
    "victim that keeps its progress": (victim_that_keeps_its_progress, ALL),
}
CASES = [(name, depth) for name, (_, depths) in PLANTED.items() for depth in depths]


def run_all(depth: int) -> None:
    """The traces that every planted bug must fail, and a sound engine must pass."""
    for seed, name in enumerate(("paged-4", "paged-1", "mixed", "layer-tables", "paged-4", "window", "paged-1")):
        rng = random.Random(seed)
        tokens = 256 if name == "mixed" else rng.choice((56, 96))
        run_trace(MEMORIES[name], seed=seed, depth=depth, budget=rng.choice((8, 16, 64)), tokens=tokens)


@pytest.mark.parametrize("depth", ALL)
def test_the_traces_pass_without_a_bug(depth: int) -> None:
    run_all(depth)


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_planted_bug_is_caught(name: str, depth: int, monkeypatch: Patch) -> None:
    PLANTED[name][0](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        run_all(depth)


def only_outputs(patch: Patch) -> None:
    """Take every check away but those of the data plane itself: its addresses, and the tokens that come out."""
    patch.setattr(Watched, "_prefix", lambda *args: None)
    patch.setattr(PagedMemory, "check", lambda memory: None)
    patch.setattr("traces.check_published", lambda *args: None)
    patch.setattr("traces.insides", lambda *args: None)

    def collect(checked: Checked, ticket: int) -> StepResult:
        checked.memory.placed.popleft()
        return checked.runner.collect(ticket)

    patch.setattr(Checked, "collect", collect)


SHOWN = (
    "reversed journal",
    "stale table after reuse of a page",
    "lost copy on write",
    "no copy on write",
    "fork without share",
    "hit one page too long",
    "key without its parent",
)


@pytest.mark.parametrize("depth", ALL)
@pytest.mark.parametrize("name", SHOWN)
def test_the_data_plane_alone_sees_misplaced_content(name: str, depth: int, monkeypatch: Patch) -> None:
    """A memory can't fool the suite with checks of its own: what is misplaced comes out as wrong tokens."""
    only_outputs(monkeypatch)
    run_all(depth)
    PLANTED[name][0](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        run_all(depth)
