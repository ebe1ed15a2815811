"""Bugs planted on purpose: the random traces must catch every one, and must pass without them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple

import pytest
from memories import MEMORIES
from traces import STEMS, Asked, Checked, Watched, open_trace, run_trace

from bench.echo_pages import EchoPages
from bench.echo_runner import EchoRunner
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.memory.page_keys import KeyChain
from quire.memory.page_pool import PagePool
from quire.memory.paged import PagedMemory
from quire.memory.policies import WindowPolicy
from quire.memory.prefix_cache import PrefixCache, PrefixHit
from quire.memory.swap import Swap
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, SeqSlice, SliceResult, StepPlan, StepResult, SwapIn, SwapOut, TableWrite

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
ALL, OVERLAPPED = (1, 2, 3), (2, 3)
every_depth = pytest.mark.parametrize("depth", ALL)


def left_to_full(depth: int, depths: tuple[int, ...] = ALL) -> Any:
    """The gate plants each bug at one depth: 2, as engines have by default, where the bug can show there."""
    return pytest.mark.full if depth != (2 if 2 in depths else depths[0]) else ()


planted_depths = pytest.mark.parametrize("depth", [pytest.param(depth, marks=left_to_full(depth)) for depth in ALL])


def instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make a bug of a function that is called in place of the method `name`, which it gets before the arguments."""

    def plant(changed: Callable[..., Any]) -> Plant:
        def planted(patch: Patch) -> None:
            sound = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **more: changed(sound, *args, **more))

        return planted

    return plant


def journal(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """Make a bug of a function that changes the entries of a step's journal."""

    @instead_of(PagedMemory, "take_page_ops")
    def changed(take: Any, memory: PagedMemory) -> tuple[Any, Any]:
        now, ahead = take(memory)
        return tuple(change(list(now))), ahead

    return changed


lost_copy_on_write = journal(lambda entries: [e for e in entries if not isinstance(e, PageCopy)])
swap_in_to_the_wrong_page = journal(
    lambda entries: [e._replace(page=max(1, e.page - 1)) if isinstance(e, SwapIn) else e for e in entries]
)
# Growth past a page border isn't told: the table keeps what an earlier owner of the slot left there.
stale_table = journal(lambda entries: [e for e in entries if not (isinstance(e, TableWrite) and e.first_page)])
# Pages are copied out when the step's other effects have been had, as if on a side stream without a fence.
out_after_the_reuse = journal(lambda entries: sorted(entries, key=lambda e: isinstance(e, SwapOut)))
grow_off_by_one_at_a_page_border = instead_of(PagedMemory, "grow")(
    lambda grow, memory, seq, length: grow(memory, seq, length - 1)
)
leak_of_a_page = instead_of(PagePool, "decref")(
    lambda release, ledger, group, pages: release(ledger, group, [page for page in pages if page != 5])
)


@instead_of(EchoPages, "write_state")
def write_off_by_one_at_a_page_border(put: Any, pages: EchoPages, slot: int, position: int, state: int) -> None:
    """The first token of a page is kept where the first one of the page before it is."""
    border = pages.group.num_full_pages(position) * pages.used_page_bytes == position * pages.group.token_bytes
    put(pages, slot, position - (pages.group.page_tokens if border and position else 0), state)


@instead_of(EchoRunner, "compute_row")
def last_from_the_wrong_slot(compute: Any, runner: EchoRunner, row: SeqSlice) -> SliceResult:
    sampled: SliceResult = compute(runner, row)
    other = runner.slots.get(row.slot + 1)
    if sampled.tokens and other is not None:
        other.last = sampled.tokens[0]
    return sampled


@instead_of(Scheduler, "update")
def token_of_a_wasted_row_given_out(update: Any, scheduler: Scheduler, plan: StepPlan, result: StepResult) -> Any:
    for row in plan.slices:
        _, seq = scheduler.by_slot[row.slot]
        if seq.finish_reason == "stop":
            seq.finish_reason = None
    return update(scheduler, plan, result)


@instead_of(PagedMemory, "commit")
def unconfirmed_tail_published(commit: Any, memory: PagedMemory, seq: Sequence) -> None:
    computed, seq.computed = seq.computed, seq.planned
    commit(memory, seq)
    seq.computed = computed


@instead_of(Scheduler, "_free_seq")
def rejected_tail_published(leave: Any, scheduler: Scheduler, seq: Sequence) -> None:
    if seq.finish_reason is not None:
        scheduler.memory.commit(seq)
    leave(scheduler, seq)


@instead_of(Scheduler, "_retire")
def row_freed_while_in_flight(retire: Any, scheduler: Scheduler, request: Request, seq: Sequence) -> None:
    seq.planned = seq.computed
    retire(scheduler, request, seq)


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(PagedMemory, "_copy_on_write", lambda *args: None)


@instead_of(PagedMemory, "fork")
def fork_without_share(fork: Any, memory: PagedMemory, parent: Sequence, child: Sequence) -> bool:
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(PagePool, "incref_used", lambda ledger, group, pages: None)
        return fork(memory, parent, child)


@instead_of(PagedMemory, "admit")
def hit_one_page_too_long(admit: Any, memory: PagedMemory, seqs: Seq[Sequence], budget: int, limit: Any) -> Any:
    admitted = admit(memory, seqs, budget, limit)
    if not isinstance(admitted, list):
        return admitted
    longer = [
        one._replace(reused_tokens=one.reused_tokens + memory.prefix_cache.prefix_granularity) for one in admitted
    ]
    return [
        more if one.reused_tokens and more.reused_tokens < min(seq.max_prefix_hit, len(seq.tokens)) else one
        for seq, one, more in zip(seqs, admitted, longer)
    ]


@instead_of(PrefixCache, "find_cached")
def hit_of_a_whole_prompt(longest: Any, prefixes: PrefixCache, seq: Sequence, *more: Any, **named: Any) -> PrefixHit:
    seq.tokens.append(0)
    hit = longest(prefixes, seq, *more, **named)
    seq.tokens.pop()
    return hit


@instead_of(KeyChain, "extend")
def key_without_its_parent(extend: Any, chain: KeyChain, seq: Sequence, tokens: int) -> None:
    for end in range((len(seq.page_keys) + 1) * chain.key_tokens, tokens + 1, chain.key_tokens):
        alone = Sequence(0, seq.tokens[end - chain.key_tokens : end], cache_salt=seq.cache_salt)
        extend(chain, alone, chain.key_tokens)
        seq.page_keys += alone.page_keys


@instead_of(KeyChain, "salted_root")
def key_without_its_salt(origin: Any, chain: KeyChain, salt: str) -> bytes:
    return origin(chain, "")


@instead_of(WindowPolicy, "reads")
def window_dropped_a_page_early(reads: Any, policy: WindowPolicy, seq: Sequence | None, start: int, end: int) -> range:
    span = reads(policy, seq, start, end)
    return range(span.start + (len(span) > 1), span.stop)


@instead_of(Scheduler, "_init_slot")
def child_with_its_parents_seed(born: Any, scheduler: Scheduler, request: Request, *more: Any, **named: Any) -> None:
    born(scheduler, request, *more, **named)
    scheduler.new_slots[-1] = scheduler.new_slots[-1]._replace(seed=request.seed)


@instead_of(EchoRunner, "submit")
def last_birth_of_a_step_lost(submit: Any, runner: EchoRunner, plan: StepPlan) -> int:
    return submit(runner, plan._replace(new_slots=plan.new_slots[: max(1, len(plan.new_slots) - 1)]))


def victim_that_keeps_its_progress(patch: Patch) -> None:
    @instead_of(Scheduler, "_preempt")
    def kept(preempt: Any, scheduler: Scheduler, victim: Request) -> None:
        computed = {seq.id: seq.computed for seq in victim.live_seqs}
        preempt(scheduler, victim)
        for seq in victim.live_seqs:
            seq.computed = seq.planned = computed[seq.id]

    @instead_of(PagedMemory, "admit")
    def kept_admission(admit: Any, memory: PagedMemory, seqs: Seq[Sequence], budget: int, limit: Any) -> Any:
        admitted = admit(memory, seqs, budget, limit)
        if not isinstance(admitted, list):
            return admitted
        return [one._replace(reused_tokens=max(one.reused_tokens, seq.computed)) for seq, one in zip(seqs, admitted)]

    kept(patch)
    kept_admission(patch)


@instead_of(PagedMemory, "take_page_ops")
def out_after_the_rows(take: Any, memory: PagedMemory) -> tuple[Any, Any]:
    now, ahead = take(memory)
    return tuple(e for e in now if not isinstance(e, SwapOut)), ahead + tuple(e for e in now if isinstance(e, SwapOut))


@instead_of(Scheduler, "_num_new_tokens")
def siblings_row_too_early(wanted: Any, scheduler: Scheduler, request: Request, seq: Sequence, budget: int) -> int:
    seq.prefix_source = None
    return wanted(scheduler, request, seq, budget)


@instead_of(PagedMemory, "_copy_on_write")
def registered_page_written_in_place(copy: Any, memory: PagedMemory, resident: Any, group: int, at: int) -> None:
    if (group, resident.tables[group][at]) not in memory.prefix_cache.pin_counts:
        copy(memory, resident, group, at)


@instead_of(PrefixCache, "find_registered")
def registered_prefix_of_another_salt(pinned: Any, prefixes: PrefixCache, seq: Sequence) -> PrefixHit:
    salt, keys = seq.cache_salt, seq.page_keys
    seq.cache_salt, seq.page_keys = "", []
    try:
        return pinned(prefixes, seq)
    finally:
        seq.cache_salt, seq.page_keys = salt, keys


@instead_of(PagedMemory, "swap_in")
def leak_of_a_host_page(swap_in: Any, memory: PagedMemory, seqs: Any) -> bool:
    back = swap_in(memory, seqs)
    if back:
        memory.swap.host_pool.size_classes[0].empty.pop()
    return back


@instead_of(PagedMemory, "free")
def dropped_swap_that_keeps_its_pages(free: Any, memory: PagedMemory, seq: Sequence) -> None:
    if memory.swap.seq_pages.pop(seq.id, None) is None:
        free(memory, seq)


def common_pages_not_counted(patch: Patch) -> None:
    patch.setattr(PagedMemory, "_incref_shared", lambda *args: None)


@instead_of(PagedMemory, "_find_shared_prefix")
def branch_that_shares_too_much(common: Any, memory: PagedMemory, seq: Sequence, *more: Any) -> tuple[int, int]:
    """A stride more than it has in common with the branch before it."""
    tokens, owner = common(memory, seq, *more)
    longer = tokens + memory.prefix_cache.prefix_granularity
    return (longer, owner) if tokens and longer < len(seq.tokens) else (tokens, owner)


@instead_of(PrefixCache, "resolve_pending")
def waiting_one_that_is_not_told(arrived: Any, prefixes: PrefixCache, *given: Any) -> None:
    """What a sequence waits for has come, or will never come, and it waits on."""
    awaited, prefixes.deferred_by_key = prefixes.deferred_by_key, {}
    arrived(prefixes, *given)
    prefixes.deferred_by_key = awaited


@instead_of(Swap, "_page_keys")
def swapped_page_under_another_name(names: Any, swap: Swap, *args: Any) -> dict[tuple[int, int], bytes]:
    """A sequence that comes back takes a cached page for one of its own that holds something else."""
    found = names(swap, *args)
    values = list(found.values())
    return dict(zip(found, values[1:] + values[:1]))


@instead_of(Scheduler, "_schedule_waiting")
def admitted_before_the_swapped_are_back(join: Any, scheduler: Scheduler, rows: list[SeqSlice]) -> None:
    join(scheduler, rows)
    swapped, scheduler.swapped = scheduler.swapped, deque()
    join(scheduler, rows)
    scheduler.swapped = swapped


class Planted(NamedTuple):
    """A bug, and regular expressions for how the failures that it causes begin: see `found_by`."""

    plant: Plant
    message: str
    alone: str | None = None
    """The same, where nothing is checked but the data plane; None where that does not show the bug."""
    depths: tuple[int, ...] = ALL
    """The depths at which the bug can show."""


def each_case(planted: dict[str, Planted]) -> pytest.MarkDecorator:
    """Every bug at its depths; `alone`, too, if it shows by itself."""
    cases = [
        pytest.param(name, depth, alone, marks=left_to_full(depth, bug.depths))
        for alone in (False, True)
        for name, bug in planted.items()
        if bug.alone or not alone
        for depth in bug.depths
    ]
    return pytest.mark.parametrize(("name", "depth", "alone"), cases)


class Shown(NamedTuple):
    """A bug, how the failures begin that it causes, and the name of the memory that shows it."""

    plant: Plant
    message: str
    memory: str


WRONG = r"(aborted )?request \w+, branch \d+: \[.*\]( instead of|, not) "
HIT = "a hit has another content"
REFERENCES = "reference counts differ from the tables that name the pages"
RETIRED = r"KeyError in Scheduler\.update$"
SCRATCH = r"slot \d+ uses its page \d+, which is the scratch page"
TABLE = r"the replayed table of slot \d+ is "
UNCOMPUTED = r"page \d+ is published before it is computed"

PLANTED: dict[str, Planted] = {
    "reversed journal": Planted(journal(lambda entries: entries[::-1]), TABLE, WRONG),
    "stale table after reuse of a page": Planted(stale_table, TABLE, SCRATCH),
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
    "last birth of a step lost": Planted(last_birth_of_a_step_lost, r"KeyError in EchoRunner\.compute_row$"),
    "victim that keeps its progress": Planted(victim_that_keeps_its_progress, HIT),
    "lost swap-in": Planted(journal(lambda entries: [e for e in entries if not isinstance(e, SwapIn)]), WRONG, WRONG),
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
    "a waiting one that isn't told": Planted(waiting_one_that_is_not_told, "a sequence waits for no pending key"),
    "a swapped page under another name": Planted(swapped_page_under_another_name, f"{HIT}|{WRONG}", WRONG),
}


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


def run_prefix(depth: int) -> None:
    """Three requests, one of them salted, begin with a registered prefix that ends within a page."""
    trace = open_trace(MEMORIES["paged-4"], depth=depth, prefix_tokens=8)
    trace.engine.register_prefix("p", STEMS[0][:6])
    trace.exhaust()
    for i, salt in enumerate(("", "", "adapter")):
        trace.add(asked(str(i), (*STEMS[0][:6], 50 + i), salt, max_tokens=12))
    trace.step()
    assert trace.memory.partial == 2
    trace.finish()


def run_swapped_abort(depth: int) -> None:
    """A request is aborted while it is swapped."""
    trace = open_trace(MEMORIES["paged-4"], depth=depth, preemption="swap", tokens=40, host=1000)
    for i in range(3):
        trace.add(asked(str(i), STEMS[i][:9], n=1 + i % 2, max_tokens=20))
    while not trace.scheduler.swapped:
        trace.step()
    trace.abort(trace.scheduler.swapped[0].id)
    trace.finish()


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


@every_depth
def test_the_traces_pass_without_a_bug(depth: int) -> None:
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


@each_case(PLANTED)
def test_planted_bug_is_caught(name: str, depth: int, alone: bool, monkeypatch: Patch) -> None:
    """Also with outputs only: a memory can't fool the suite with its own checks, wrong tokens come out."""
    plant, message, by_itself, _ = PLANTED[name]
    if alone:
        only_outputs(monkeypatch)
    plant(monkeypatch)
    with found_by(str(by_itself) if alone else message):
        run_all(depth)
