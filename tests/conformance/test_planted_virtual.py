"""Bugs of mappings, planted on purpose: addresses that change too early or too late, pages that lie where they may not.
The random traces must catch every one, also where the driver asserts nothing but that what is touched is mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from addresses import Addressed, AddressedRunner
from memories import VIRTUAL
from test_planted import (
    OVERLAPPED,
    RETIRED,
    STEMS,
    UNCOMPUTED,
    WRONG,
    Patch,
    Planted,
    Runs,
    asked,
    each_case,
    every_depth,
    found_by,
    grow_off_by_one_at_a_page_border,
    instead_of,
    lost_copy_on_write,
    no_copy_on_write,
    only_outputs,
    out_after_the_rows,
    row_freed_while_in_flight,
    run_each,
)
from traces import open_trace

from bench.fake_driver import FakeDriver
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOp, TableWrite
from quire.worker.virtual.driver import PageRun


@instead_of(VirtualMemory, "_premap_next_slot")
def mapped_anew_under_a_step(_: Any, memory: VirtualMemory) -> list[TableWrite]:
    """What is mapped ahead goes to a place that a sequence in memory uses."""
    resident = next(iter(memory.seq_pages.values()), None)
    held = resident is not None and resident.tables[0][:1] not in ([], [0])
    page = next(iter(memory.page_pool.size_class_of[0].empty), 0)
    return [TableWrite(resident.slot, 0, 0, (page,))] if resident is not None and held and page else []


def slot_given_on_in_flight(patch: Patch) -> None:
    """What is mapped ahead goes to the slot of a sequence whose last step is under way."""
    seqs: dict[int, Sequence] = {}

    @instead_of(VirtualMemory, "grow")
    def noted(grow: Any, memory: VirtualMemory, seq: Sequence, length: int) -> bool:
        seqs[seq.id] = seq
        return grow(memory, seq, length)

    @instead_of(VirtualMemory, "_premap_next_slot")
    def hasty(_: Any, memory: VirtualMemory) -> list[TableWrite]:
        ending = [id for id in memory.seq_pages if id in seqs and not seqs[id].not_in_flight and last(seqs[id])]
        page = next(iter(memory.page_pool.size_class_of[0].empty), 0)
        return [TableWrite(memory.seq_pages[ending[0]].slot, 0, 0, (page,))] if ending and page else []

    def last(seq: Sequence) -> bool:
        return bool(seq.max_total_len) and seq.planned >= seq.max_total_len - 1

    noted(patch)
    hasty(patch)


@instead_of(AddressedRunner, "claim")
def page_not_awaited_on_its_way_out(claim: Any, runner: AddressedRunner, extent: tuple[int, int] | None) -> None:
    """Nothing that writes a page waits until a swap has read it."""
    if extent is None:
        claim(runner, None)


@instead_of(Addressed, "lay")
def page_of_an_earlier_owner_still_mapped(lay: Any, group: Addressed, slot: int, at: int, page: int) -> None:
    """A place where something lies is left alone, though that page is others' now."""
    if not group.lying[slot, at]:
        lay(group, slot, at, page)


@instead_of(VirtualMemory, "choose_pages")
def page_that_was_given_out_meanwhile(
    pick: Any, memory: VirtualMemory, group: int, count: int, owner: int, slot: int, at: int
) -> list[int]:
    """A slot's next owner gets the page that was mapped there ahead, though another sequence has got it."""
    lying, pages = memory.mapped_pages[group][slot], list[int]()
    for place in range(at, at + count):
        page = lying[place] if place < len(lying) else 0
        if page and memory.page_pool.ref_count(group, page):
            memory.page_pool.incref(group, page)
            pages.append(page)
        else:
            pages += pick(memory, group, 1, owner, slot, place)
    return pages


@instead_of(VirtualMemory, "take_page_ops")
def mapped_behind_the_rows(take: Any, memory: VirtualMemory) -> tuple[Any, Any]:
    """What a step needs is mapped with what is for later."""
    now, ahead = take(memory)
    growth = tuple(entry for entry in now if isinstance(entry, TableWrite) and entry.first_page)
    return tuple(entry for entry in now if entry not in growth), growth + ahead


@instead_of(Addressed, "runs")
def one_buffer_forgotten(runs: Any, group: Addressed, slot: int, at: int, page: int) -> Iterator[PageRun]:
    every = list(runs(group, slot, at, page))
    return iter(every[:-1] if slot else every)


def ahead_as_if_it_were_there(patch: Patch) -> None:
    """What is mapped ahead is remembered, and never mapped."""

    @instead_of(AddressedRunner, "_map")
    def forgetful(submit: Any, runner: AddressedRunner, journal: Iterable[PageOp]) -> None:
        if runner.submitted not in runner.holds:
            submit(runner, journal)

    @instead_of(VirtualMemory, "take_page_ops")
    def shorter(take: Any, memory: VirtualMemory) -> tuple[Any, Any]:
        before = [[list(places) for places in slots] for slots in memory.mapped_pages]
        now, ahead = take(memory)
        return tuple(entry for entry in now if not isinstance(entry, TableWrite) or not there(before, entry)), ahead

    def there(lying: list[list[list[int]]], entry: TableWrite) -> bool:
        return (
            tuple(lying[entry.group][entry.slot][entry.first_page : entry.first_page + len(entry.pages)]) == entry.pages
        )

    forgetful(patch)
    shorter(patch)


@instead_of(VirtualMemory, "admit")
def shared_token_written_again(admit: Any, memory: VirtualMemory, seqs: Any, budget: int, limit: Any) -> Any:
    """A sequence that found a prefix computes its last token once more, into a page that it shares."""
    admitted = admit(memory, seqs, budget, limit)
    if not isinstance(admitted, list) or len(seqs) > 1:
        return admitted
    return [one._replace(reused_tokens=max(one.reused_tokens - 1, 0)) for one in admitted]


UNMAPPED = "access to 0x[0-9a-f]+, where nothing is mapped"
HELD = "an unmap of .* is held"
TWICE = r"page \d+ is written or read at .* by one kernel"
LIE = r"in slot \d+ lie pages "

PLANTED: dict[str, Planted] = {
    "a place mapped anew under a step": Planted(mapped_anew_under_a_step, HELD, WRONG),
    "a slot given on while a step in flight uses it": Planted(slot_given_on_in_flight, HELD, WRONG),
    "a row freed while in flight": Planted(row_freed_while_in_flight, RETIRED, RETIRED, OVERLAPPED),
    "a page not awaited on its way out": Planted(page_not_awaited_on_its_way_out, WRONG, WRONG),
    "a page that leaves behind the rows": Planted(out_after_the_rows, WRONG, WRONG),
    "a fork without its tail copied": Planted(lost_copy_on_write, WRONG, WRONG),
    "an alias written after sharing": Planted(no_copy_on_write, TWICE, WRONG),
    # Seen only by a driver that knows the rules: what is written is what is there.
    "a shared token written again": Planted(shared_token_written_again, f"{TWICE}|{UNCOMPUTED}"),
    "a page of an earlier owner still mapped": Planted(page_of_an_earlier_owner_still_mapped, LIE, WRONG),
    "a page that was given out meanwhile": Planted(page_that_was_given_out_meanwhile, f"{TWICE}|{UNCOMPUTED}", WRONG),
    "a page mapped one token late": Planted(grow_off_by_one_at_a_page_border, UNMAPPED, UNMAPPED),
    "a page mapped behind the rows": Planted(mapped_behind_the_rows, UNMAPPED, UNMAPPED),
    "a page mapped in all buffers but one": Planted(one_buffer_forgotten, UNMAPPED, UNMAPPED),
    "a page that was said to be mapped ahead": Planted(ahead_as_if_it_were_there, LIE, UNMAPPED),
}

RUNS: Runs = (  # as in test_planted.py
    (4, "virtual-poisoned", 64, 8, "swap", 1000, 0),
    (1, "virtual-4", 96, 64, "swap", 1000, 24),
    (0, "virtual-4", 80, 16, "recompute", 0, 0),
    (2, "virtual-1", 64, 16, "auto", 8, 0),
    (6, "virtual-late", 64, 8, "auto", 1000, 0),
    (7, "virtual-16", 256, 64, "recompute", 0, 96),
    (3, "virtual-mixed", 128, 64, "swap", 8, 16),
    (8, "virtual-one-pool", 96, 16, "recompute", 0, 0),
    (5, "virtual-not-whole", 96, 16, "swap", 1000, 0),
)


def run_all(depth: int) -> None:
    """In the end, requests that share all of their prompts but a token compute side by side."""
    run_each(RUNS, depth)
    trace = open_trace(VIRTUAL["virtual-4"], depth=depth)
    for i in range(4):
        trace.add(asked(str(i), (*STEMS[0][:16], 50 + i), max_tokens=12))
        trace.step()
    trace.finish()


@pytest.mark.share(6)
@every_depth
def test_the_traces_pass_without_a_bug(depth: int) -> None:
    run_all(depth)


def no_rules(patch: Patch) -> None:
    """The driver asserts nothing but that what is read and written is mapped."""
    only_outputs(patch)
    patch.setattr("traces.AddressedRunner", type(None))  # mappings aren't compared
    patch.setattr(FakeDriver, "kernel", lambda driver: nullcontext())

    @instead_of(FakeDriver, "pin")
    def released(hold: Any, driver: FakeDriver, address: int, nbytes: int) -> int:
        token: int = hold(driver, address, nbytes)
        driver.unpin(token)
        return token

    released(patch)


@each_case(PLANTED)
def test_planted_bug_is_caught(name: str, depth: int, alone: bool, monkeypatch: Patch) -> None:
    """Also by addresses that fault and tokens that are wrong alone."""
    plant, message, by_itself, _ = PLANTED[name]
    if alone:
        no_rules(monkeypatch)
    plant(monkeypatch)
    with found_by(str(by_itself) if alone else message):
        run_all(depth)
