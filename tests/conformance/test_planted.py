"""Bugs planted on purpose: the random traces must catch every one, and must pass without them."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple

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


class Planted(NamedTuple):
    """A bug, and regular expressions for how the failures that it causes begin: see `found_by`."""

    plant: Callable[[Patch], None]
    message: str
    alone: str | None = None
    """The same, where nothing is checked but the data plane; None where that does not show the bug."""
    depths: tuple[int, ...] = ALL
    """The depths at which the bug can show."""


WRONG = r"(aborted )?request \w+, branch \d+: \[.*\]( instead of|, not) "
HIT = "a hit has another content"
REFERENCES = "reference counts differ from the tables that name the pages"
RETIRED = r"KeyError in Scheduler\.update$"
SCRATCH = r"slot \d+ uses its page \d+, which is the scratch page"
TABLE = r"the replayed table of slot \d+ is "
UNCOMPUTED = r"page \d+ is published before it is computed"

PLANTED: dict[str, Planted] = {
    "reversed journal": Planted(reversed_journal, TABLE, WRONG),
    "stale table after reuse of a page": Planted(stale_table_after_reuse_of_a_page, TABLE, SCRATCH),
    "grow off by one at a page border": Planted(grow_off_by_one_at_a_page_border, SCRATCH),
    "write off by one at a page border": Planted(write_off_by_one_at_a_page_border, WRONG),
    "leak of a page": Planted(leak_of_a_page, REFERENCES),
    # Without overlap the host knows every token, and rows never hold LAST.
    "LAST from the wrong slot": Planted(last_from_the_wrong_slot, WRONG, depths=OVERLAPPED),
    # Without overlap there are no wasted rows, and nothing is planned but not computed when a result is taken in.
    "token of a wasted row given out": Planted(
        token_of_a_wasted_row_given_out, rf"request \w+ went on after its end|{WRONG}", depths=OVERLAPPED
    ),
    "unconfirmed tail published": Planted(unconfirmed_tail_published, UNCOMPUTED, depths=OVERLAPPED),
    "row freed while in flight": Planted(row_freed_while_in_flight, RETIRED, depths=OVERLAPPED),
    # The first wasted row computes the end token, which the sequence has; the second one computes a token it hasn't.
    "rejected tail published": Planted(
        rejected_tail_published, "a token that the sequence never got is published", depths=(3,)
    ),
    "lost copy on write": Planted(lost_copy_on_write, WRONG, WRONG),
    "no copy on write": Planted(no_copy_on_write, WRONG, WRONG),
    "fork without share": Planted(fork_without_share, REFERENCES, r"page \d+ is released but has no references"),
    "hit one page too long": Planted(hit_one_page_too_long, HIT, WRONG),
    "hit of a whole prompt": Planted(hit_of_a_whole_prompt, r"(\d+) of \1 tokens are reused"),
    "key without its parent": Planted(key_without_its_parent, HIT, WRONG),
    "key without its salt": Planted(key_without_its_salt, HIT),
    "window dropped a page early": Planted(
        window_dropped_a_page_early, r"WindowPolicy, .* writes pages .*, and reads pages "
    ),
    "child with its parent's seed": Planted(child_with_its_parents_seed, WRONG),
    "last birth of a step lost": Planted(last_birth_of_a_step_lost, r"KeyError in EchoRunner\.compute$"),
    "victim that keeps its progress": Planted(victim_that_keeps_its_progress, HIT),
    "lost swap-in": Planted(lost_swap_in, WRONG, WRONG),
    "swap-in to the wrong page": Planted(swap_in_to_the_wrong_page, WRONG, WRONG),
    "Out after the reuse": Planted(out_after_the_reuse, WRONG, WRONG),
    "Out after the rows": Planted(out_after_the_rows, WRONG),
    "a sibling's row too early": Planted(siblings_row_too_early, WRONG, WRONG),
    "registered prefix's partial page written in place": Planted(registered_page_written_in_place, WRONG, WRONG),
    "registered prefix of another salt": Planted(registered_prefix_of_another_salt, HIT),
    "leak of a host page": Planted(leak_of_a_host_page, "pages are lost"),
    "host pages of a dropped sequence": Planted(dropped_swap_that_keeps_its_pages, REFERENCES),
    "admitted before the swapped are back": Planted(
        admitted_before_the_swapped_are_back, "a request was admitted before a swapped one"
    ),
    "pages in common not counted": Planted(common_pages_not_counted, REFERENCES),
    "a branch that shares too much": Planted(branch_that_shares_too_much, WRONG, WRONG),
    "a waiting one that isn't told": Planted(waiting_one_that_is_not_told, "a sequence waits for nothing"),
    "a swapped page under another name": Planted(swapped_page_under_another_name, f"{HIT}|{WRONG}", WRONG),
}
CASES = [(name, depth) for name, bug in PLANTED.items() for depth in bug.depths]


@contextmanager
def found_by(message: str) -> Iterator[None]:
    """Expect a failed assert with a message that begins as this regular expression says. A key that is not there has no
    message of its own: it counts as "KeyError in " and the function that looked it up."""
    with pytest.raises((AssertionError, KeyError)) as failure:
        yield
    text = str(failure.value)
    if isinstance(failure.value, KeyError):
        *_, (frame, _) = walk_tb(failure.value.__traceback__)
        text = f"KeyError in {frame.f_code.co_qualname}"
    if not re.match(message, text):
        raise AssertionError(f"found by {text!r}, not by {message!r}") from failure.value


Runs = Seq[tuple[int, str, int, int, str, int, int]]

# Seed, memory, tokens, budget, way of preemption, host pages, tokens of prefixes. First come those that find most bugs
# in little time: a run with a bug ends at its first failure.
RUNS: Runs = (
    (4, "poisoned", 64, 8, "swap", 1000, 0),
    (2, "paged-1", 64, 16, "auto", 8, 0),
    (9, "paged-1", 56, 16, "swap", 1000, 0),
    (6, "window", 128, 16, "auto", 16, 0),
    (11, "paged-16", 256, 64, "recompute", 0, 96),
    (10, "paged-4", 256, 64, "swap", 8, 48),
    (1, "paged-4", 96, 64, "swap", 1000, 24),
    (0, "paged-4", 80, 16, "recompute", 0, 0),
    (8, "paged-1", 64, 3, "recompute", 0, 0),
    (3, "mixed", 256, 64, "swap", 8, 16),
    (7, "paged-1", 56, 3, "recompute", 0, 0),
    (5, "layer-tables", 128, 64, "swap", 1000, 48),
    (12, "paged-4", 80, 4, "recompute", 0, 0),
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
    for seed, name, tokens, budget, preemption, host, prefix_tokens in runs:
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
    bug = PLANTED[name]
    bug.plant(monkeypatch)
    with found_by(bug.message):
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


@pytest.mark.parametrize("depth", ALL)
def test_the_traces_pass_with_outputs_only(depth: int, monkeypatch: Patch) -> None:
    only_outputs(monkeypatch)
    run_all(depth)


@pytest.mark.parametrize(("name", "depth"), [case for case in CASES if PLANTED[case[0]].alone])
def test_the_data_plane_alone_sees_misplaced_content(name: str, depth: int, monkeypatch: Patch) -> None:
    """A memory can't fool the suite with checks of its own: what is misplaced comes out as wrong tokens."""
    bug = PLANTED[name]
    assert bug.alone
    only_outputs(monkeypatch)
    bug.plant(monkeypatch)
    with found_by(bug.alone):
        run_all(depth)
