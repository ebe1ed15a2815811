"""Measure the page pool alone: microseconds of CPU time to allocate and to free a page.

Two groups as in a model of Ministral's shape: a large page holds three small pages of one group and one of the other.
For comparison, a pool of one level whose pages have one size. Hashing is not included: page keys are given.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.machine import Others
from quire.errors import StartupError
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import PagePool

RATIOS = (3, 1)
PAGES = 6250  # in each group: 100,000 tokens in pages of 16
REPEATS = 9

AnyLedger = PagePool | TwoLevelPagePool


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    add_numbers(parser, "measurement", repeats=(REPEATS, "repeats, of which the median is reported"))


def two_level() -> TwoLevelPagePool:
    """Return a pool that two groups of PAGES pages almost fill."""
    return TwoLevelPagePool(RATIOS, PAGES * 4 // 3 + 10)


def one_level() -> PagePool:
    """Return a pool of pages of one size, shared by all groups."""
    return PagePool([range(1, PAGES * 2 + 10)] * 2)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each pool and case."""
    if not 1 <= args.repeats <= 1000:
        raise StartupError(f"--repeats is {args.repeats}", "Give a number from 1 to 1000")
    results = []
    for name, build in (("one level", one_level), ("two levels", two_level)):
        for case, measure in CASES.items():
            others = Others()
            times = [_alone(measure, build()) for _ in range(args.repeats)]
            results.append({
                "ledger": name, "case": case, "us_a_page": statistics.median(times),
                "cores_used_by_others": others.load(),
            })  # fmt: skip
    return results


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the microseconds per page as a table."""
    head = ("ledger", "case", "us a page", "others' cores")
    rows = [
        (one["ledger"], one["case"], short(one["us_a_page"]), f"{one['cores_used_by_others']:.2f}") for one in results
    ]
    return table(head, rows)


def _alone(measure: Callable[[AnyLedger], tuple[float, int]], ledger: AnyLedger) -> float:
    gc.collect()
    gc.disable()
    try:
        seconds, pages = measure(ledger)
    finally:
        gc.enable()
    return seconds / pages * 1e6


def _filled(ledger: AnyLedger, published: bool) -> list[list[int]]:
    ledger.reserve([PAGES, PAGES])
    tables = [ledger.allocate(group, PAGES, 1) for group in (0, 1)]
    for group, pages in enumerate(tables) if published else ():
        for page in pages:
            ledger.publish(group, page, page.to_bytes(4))
    return tables


def steady(ledger: AnyLedger) -> tuple[float, int]:
    """Decoding: allocate a page of each group for one request after another."""
    began = time.process_time()
    for i in range(PAGES):
        ledger.reserve((1, 1))
        ledger.allocate(0, 1, i & 255)
        ledger.allocate(1, 1, i & 255)
    return time.process_time() - began, 2 * PAGES


def steady_evicting(ledger: AnyLedger) -> tuple[float, int]:
    """Like `steady`, but all pages are cached and must be evicted."""
    while ledger.can_allocate((PAGES // 2, PAGES // 2)):
        ledger.reserve((PAGES // 2, PAGES // 2))
        for group in (0, 1):
            for page in ledger.allocate(group, PAGES // 2, 1):
                ledger.publish(group, page, page.to_bytes(4))
    tables: list[list[int]] = [list(set(index.values())) for index in ledger.index]
    ledger.decref_tables(tables)
    ledger.remove_owner(1)
    return steady(ledger)


def bulk(ledger: AnyLedger) -> tuple[float, int]:
    """Allocate the pages of a prompt of 100,000 tokens."""
    began = time.process_time()
    _filled(ledger, published=False)
    return time.process_time() - began, 2 * PAGES


def bulk_evicting(ledger: AnyLedger) -> tuple[float, int]:
    """Like `bulk`, but the pages of another prompt are cached and must be evicted."""
    ledger.decref_tables(_filled(ledger, published=True))
    ledger.remove_owner(1)
    return bulk(ledger)


def release(ledger: AnyLedger, published: bool = True) -> tuple[float, int]:
    """Free the prompt's pages. They stay cached if they were `published`."""
    tables = _filled(ledger, published=published)
    began = time.process_time()
    ledger.decref_tables(tables)
    ledger.remove_owner(1)
    return time.process_time() - began, 2 * PAGES


CASES: dict[str, Callable[[AnyLedger], tuple[float, int]]] = {
    "one at a time": steady, "one at a time, evicting": steady_evicting, "100,000 tokens at once": bulk,
    "100,000 tokens at once, evicting": bulk_evicting, "100,000 tokens released, cached": release,
    "100,000 tokens released": partial(release, published=False),
}  # fmt: skip
