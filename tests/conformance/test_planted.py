"""Bugs planted on purpose: the random traces must catch every one, and must pass without them."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from memories import MEMORIES, Build
from traces import STEMS, Asked, Checked, Trace, Watched, run_trace

from quire.control.memory import Admitted, Later
from quire.control.memory.arrivals import Arrivals
from quire.control.memory.paged import PagedMemory
from quire.control.memory.pages import Ledger
from quire.control.memory.policies import WindowPolicy
from quire.control.memory.prefix import Prefixes, Reuse
from quire.control.memory.swap import Swap
from quire.control.request import Request, Sequence
from quire.control.scheduler import Event, Scheduler
from quire.sim.cells import Pages
from quire.sim.echo import EchoRunner
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Copy, In, Out, Row, Sampled, StepPlan, StepResult, Table

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
    """The first token of a page is kept where the first one of the page before it is."""
    put = Pages.put

    def behind(pages: Pages, slot: int, position: int, state: int) -> None:
        border = pages.group.whole(position) * pages.full == position * pages.group.token_bytes
        put(pages, slot, position - (pages.group.page_tokens if border and position else 0), state)

    patch.setattr(Pages, "put", behind)


def leak_of_a_page(patch: Patch) -> None:
    release = Ledger.release
    patch.setattr(
        Ledger, "release", lambda ledger, group, pages: release(ledger, group, [page for page in pages if page != 5])
    )


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
            inner.setattr(Ledger, "share_all", lambda ledger, group, pages: None)
            return fork(memory, parent, child)

    patch.setattr(PagedMemory, "fork", unshared)


def hit_one_page_too_long(patch: Patch) -> None:
    admit = PagedMemory.admit

    def generous(memory: PagedMemory, seqs: Seq[Sequence], budget: int) -> list[Admitted] | Later | None:
        admitted = admit(memory, seqs, budget)
        if not isinstance(admitted, list):
            return admitted
        longer = [one._replace(reused=one.reused + memory.prefixes.stride) for one in admitted]
        return [
            more if one.reused and more.reused < min(seq.reusable, len(seq.tokens)) else one
            for seq, one, more in zip(seqs, admitted, longer)
        ]

    patch.setattr(PagedMemory, "admit", generous)


def hit_of_a_whole_prompt(patch: Patch) -> None:
    longest = Prefixes.cached

    def whole(prefixes: Prefixes, seq: Sequence, known: int = 0) -> Reuse:
        seq.tokens.append(0)
        hit = longest(prefixes, seq, known)
        seq.tokens.pop()
        return hit

    patch.setattr(Prefixes, "cached", whole)


def keys(patch: Patch, salted: bool, chained: bool) -> None:
    def chain(prefixes: Prefixes, seq: Sequence, tokens: int) -> None:
        size = prefixes.unit
        root = hashlib.sha256(prefixes.root + (seq.salt.encode() if salted else b"")).digest()
        while len(seq.keys) < tokens // size:
            i = len(seq.keys)
            parent = seq.keys[-1] if i and chained else root
            page = array("q", seq.tokens[i * size : (i + 1) * size])
            seq.keys.append(hashlib.sha256(parent + page.tobytes()).digest())

    patch.setattr(Prefixes, "chain", chain)


def key_without_its_parent(patch: Patch) -> None:
    keys(patch, salted=True, chained=False)


def key_without_its_salt(patch: Patch) -> None:
    keys(patch, salted=False, chained=True)


def window_dropped_a_page_early(patch: Patch) -> None:
    reads = WindowPolicy.reads

    def narrow(policy: WindowPolicy, seq: Sequence | None, start: int, end: int) -> range:
        span = reads(policy, seq, start, end)
        return range(span.start + (len(span) > 1), span.stop)

    patch.setattr(WindowPolicy, "reads", narrow)


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

    def kept_admission(memory: PagedMemory, seqs: Seq[Sequence], budget: int) -> list[Admitted] | Later | None:
        admitted = admit(memory, seqs, budget)
        if not isinstance(admitted, list):
            return admitted
        return [one._replace(reused=max(one.reused, seq.computed)) for seq, one in zip(seqs, admitted)]

    patch.setattr(PagedMemory, "admit", kept_admission)


def lost_swap_in(patch: Patch) -> None:
    journal(patch, lambda entries: [e for e in entries if not isinstance(e, In)])


def swap_in_to_the_wrong_page(patch: Patch) -> None:
    journal(patch, lambda entries: [e._replace(page=max(1, e.page - 1)) if isinstance(e, In) else e for e in entries])


def out_after_the_reuse(patch: Patch) -> None:
    """The pages are copied out when the step's other effects have been had, as if on a side stream without a fence."""
    journal(patch, lambda entries: sorted(entries, key=lambda e: isinstance(e, Out)))


def out_after_the_rows(patch: Patch) -> None:
    take = PagedMemory.take_journal

    def late(memory: PagedMemory) -> tuple[Any, Any]:
        now, ahead = take(memory)
        return tuple(e for e in now if not isinstance(e, Out)), ahead + tuple(e for e in now if isinstance(e, Out))

    patch.setattr(PagedMemory, "take_journal", late)


def siblings_row_too_early(patch: Patch) -> None:
    wanted = Scheduler._wanted

    def hasty(scheduler: Scheduler, request: Request, seq: Sequence, budget: int) -> int:
        seq.sibling = None
        return wanted(scheduler, request, seq, budget)

    patch.setattr(Scheduler, "_wanted", hasty)


def registered_page_written_in_place(patch: Patch) -> None:
    copy = PagedMemory._copy_on_write

    def careless(memory: PagedMemory, resident: Any, group: int, at: int) -> None:
        if (group, resident.tables[group][at]) not in memory.prefixes.pins:
            copy(memory, resident, group, at)

    patch.setattr(PagedMemory, "_copy_on_write", careless)


def registered_prefix_of_another_salt(patch: Patch) -> None:
    pinned = Prefixes.pinned

    def unsalted(prefixes: Prefixes, seq: Sequence) -> Reuse:
        salt, seq.salt = seq.salt, ""
        keys, seq.keys = seq.keys, []
        try:
            return pinned(prefixes, seq)
        finally:
            seq.salt, seq.keys = salt, keys

    patch.setattr(Prefixes, "pinned", unsalted)


def leak_of_a_host_page(patch: Patch) -> None:
    swap_in = PagedMemory.swap_in

    def leaky(memory: PagedMemory, seqs: Any) -> bool:
        back = swap_in(memory, seqs)
        if back:
            memory.swap.host.pools[0].empty.pop()
        return back

    patch.setattr(PagedMemory, "swap_in", leaky)


def dropped_swap_that_keeps_its_pages(patch: Patch) -> None:
    free = PagedMemory.free

    def forgetful(memory: PagedMemory, seq: Sequence) -> None:
        if memory.swap.residents.pop(seq.id, None) is None:
            free(memory, seq)

    patch.setattr(PagedMemory, "free", forgetful)


def common_pages_not_counted(patch: Patch) -> None:
    patch.setattr(PagedMemory, "_share_common", lambda *args: None)


def branch_that_shares_too_much(patch: Patch) -> None:
    """A stride more than it has in common with the branch before it."""
    common = Arrivals._common

    def generous(door: Arrivals, seq: Sequence, index: int, owners: dict[bytes, int]) -> tuple[int, int]:
        tokens, owner = common(door, seq, index, owners)
        longer = tokens + door.memory.prefixes.stride
        return (longer, owner) if tokens and longer < len(seq.tokens) else (tokens, owner)

    patch.setattr(Arrivals, "_common", generous)


def waiting_one_that_is_not_told(patch: Patch) -> None:
    """What a sequence waits for has come, or will never come, and it waits on."""
    arrived = Prefixes.arrived

    def silent(prefixes: Prefixes, seq: Sequence, start: int, end: int) -> None:
        awaited, prefixes.awaited = prefixes.awaited, {}
        arrived(prefixes, seq, start, end)
        prefixes.awaited = awaited

    patch.setattr(Prefixes, "arrived", silent)


def swapped_page_under_another_name(patch: Patch) -> None:
    """A sequence that comes back takes a cached page for one of its own that holds something else."""
    names = Swap._names

    def rotated(swap: Swap, *args: Any) -> dict[tuple[int, int], bytes]:
        found = names(swap, *args)
        values = list(found.values())
        return dict(zip(found, values[1:] + values[:1]))

    patch.setattr(Swap, "_names", rotated)


def admitted_before_the_swapped_are_back(patch: Patch) -> None:
    join = Scheduler._join

    def rude(scheduler: Scheduler, rows: list[Row]) -> None:
        join(scheduler, rows)
        swapped, scheduler.swapped = scheduler.swapped, deque()
        join(scheduler, rows)
        scheduler.swapped = swapped

    patch.setattr(Scheduler, "_join", rude)


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
    "lost swap-in": (lost_swap_in, ALL),
    "swap-in to the wrong page": (swap_in_to_the_wrong_page, ALL),
    "Out after the reuse": (out_after_the_reuse, ALL),
    "Out after the rows": (out_after_the_rows, ALL),
    "a sibling's row too early": (siblings_row_too_early, ALL),
    "registered prefix's partial page written in place": (registered_page_written_in_place, ALL),
    "registered prefix of another salt": (registered_prefix_of_another_salt, ALL),
    "leak of a host page": (leak_of_a_host_page, ALL),
    "host pages of a dropped sequence": (dropped_swap_that_keeps_its_pages, ALL),
    "admitted before the swapped are back": (admitted_before_the_swapped_are_back, ALL),
    "pages in common not counted": (common_pages_not_counted, ALL),
    "a branch that shares too much": (branch_that_shares_too_much, ALL),
    "a waiting one that isn't told": (waiting_one_that_is_not_told, ALL),
    "a swapped page under another name": (swapped_page_under_another_name, ALL),
}
CASES = [(name, depth) for name, (_, depths) in PLANTED.items() for depth in depths]


Runs = Seq[tuple[str, int, int, str, int, int]]

RUNS = (  # memory, tokens, budget, way of preemption, host pages, tokens of prefixes
    ("paged-4", 80, 16, "recompute", 0, 0),
    ("paged-4", 96, 64, "swap", 1000, 24),
    ("paged-1", 64, 16, "auto", 8, 0),
    ("mixed", 256, 64, "swap", 8, 16),
    ("poisoned", 64, 8, "swap", 1000, 0),
    ("layer-tables", 128, 64, "swap", 1000, 48),
    ("window", 128, 16, "auto", 16, 0),
    ("paged-1", 56, 3, "recompute", 0, 0),
    ("paged-1", 64, 3, "recompute", 0, 0),
    ("paged-1", 56, 16, "swap", 1000, 0),
    ("paged-4", 256, 64, "swap", 8, 48),
    ("paged-16", 256, 64, "recompute", 0, 96),
    ("paged-4", 80, 4, "recompute", 0, 0),
)


def asked(id: str, prompt: Seq[int], salt: str = "", **params: Any) -> Asked:
    return Asked(id, tuple(prompt), SamplingParams(seed=1, ignore_eos=True, **params), salt)


def opened(depth: int, budget: int, preemption: str, **build: int) -> Trace:
    memory = MEMORIES["paged-4"](Build(chunk=budget, **build))
    return Trace(memory, seed=0, depth=depth, budget=budget, max_seqs=8, preemption=preemption)


def drain(trace: Trace) -> None:
    while trace.engine.unfinished:
        trace.step()
    trace.drained()


def run_prefix(depth: int) -> None:
    """Three requests, one of them salted, begin with a registered prefix that ends within a page."""
    trace = opened(depth, 64, "recompute", prefix_tokens=8)
    trace.engine.register_prefix("p", STEMS[0][:6])
    while trace.engine.unfinished:
        trace.step()
    for i, salt in enumerate(("", "", "adapter")):
        trace.add(asked(str(i), (*STEMS[0][:6], 50 + i), salt, max_tokens=12))
    trace.step()
    assert trace.memory.partial == 2
    drain(trace)


def run_swapped_abort(depth: int) -> None:
    """A request is aborted while it is swapped."""
    trace = opened(depth, 64, "swap", tokens=40, host=1000)
    for i in range(3):
        trace.add(asked(str(i), STEMS[i][:9], n=1 + i % 2, max_tokens=20))
    while not trace.scheduler.swapped:
        trace.step()
    trace.abort(trace.scheduler.swapped[0].id)
    drain(trace)


def run_each(runs: Runs, depth: int) -> None:
    for seed, (name, tokens, budget, preemption, host, prefix_tokens) in enumerate(runs):
        run_trace(
            MEMORIES[name], seed=seed, depth=depth, budget=budget, tokens=tokens, requests=20, preemption=preemption,
            host=host, prefix_tokens=prefix_tokens, aborts=0.08,
        )  # fmt: skip


def run_all(depth: int) -> None:
    """The traces that every planted bug must fail, and a sound engine must pass."""
    run_prefix(depth)
    run_swapped_abort(depth)
    run_each(RUNS, depth)


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
    "lost swap-in",
    "swap-in to the wrong page",
    "Out after the reuse",
    "a sibling's row too early",
    "registered prefix's partial page written in place",
    "a branch that shares too much",
    "a swapped page under another name",
)


@pytest.mark.share(8)
@pytest.mark.parametrize("depth", ALL)
@pytest.mark.parametrize("name", SHOWN)
def test_the_data_plane_alone_sees_misplaced_content(name: str, depth: int, monkeypatch: Patch) -> None:
    """A memory can't fool the suite with checks of its own: what is misplaced comes out as wrong tokens."""
    only_outputs(monkeypatch)
    run_all(depth)
    PLANTED[name][0](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        run_all(depth)
