"""Batches of page operations that may run at once: no operation writes bytes that another one reads or writes.

A page of `size` bytes is the bytes [page * size, (page + 1) * size) of its memory. So pages of one size share bytes if
their numbers are equal, in any groups; for different sizes ranges of bytes are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Any, NamedTuple

from quire.protocol.step_plan import PageCopy, PageOp, Poison, SwapIn, SwapOut

PageMoves = dict[int, int]
"""Page written -> page read, each in its memory; host pages count from 0 here. For Poison the page itself."""


class PageOpBatch(NamedTuple):
    """Operations of one kind and one page size, which may run in any order."""

    kind: type[PageOp]
    size: int
    moves: PageMoves


def batch_page_ops(page_ops: Sequence[PageOp], sizes: Sequence[int]) -> Iterator[PageOpBatch]:
    """Yield batches that have, in this order, the effect of these operations (no table writes) one after another.
    `sizes` are the bytes of a page by group."""
    return _batch_one_size(page_ops, sizes[0]) if len(set(sizes)) == 1 else _batch_mixed_sizes(page_ops, sizes)


def pages_overlap(pages: AbstractSet[int], size: int, other_pages: AbstractSet[int], other_size: int) -> bool:
    """Return True if a page of `pages`, of `size` bytes each, shares a byte with one of `other_pages`, of `other_size`
    bytes each."""
    if size == other_size:
        return not pages.isdisjoint(other_pages)
    if size < other_size:
        pages, size, other_pages, other_size = other_pages, other_size, pages, size
    return any(not other_pages.isdisjoint(_overlapping_pages(page, size, other_size)) for page in pages)


def _overlapping_pages(page: int, size: int, other_size: int) -> range:
    """Return the pages of `other_size` bytes that share a byte with `page` of `size` bytes."""
    return range(page * size // other_size, -(-(page + 1) * size // other_size))


def _batch_one_size(page_ops: Sequence[PageOp], size: int) -> Iterator[PageOpBatch]:
    """Batch operations on pages of one size. Of operations of one kind that write the same page the last one remains.
    Only copies can read what an operation of the same kind wrote."""
    run: Any
    for kind, run in groupby(page_ops, key=type):
        if kind is PageCopy:
            yield from _batch_copies(run, size)
        elif kind is SwapOut:
            yield PageOpBatch(kind, size, {host - 1: page for _, page, host in run})
        elif kind is SwapIn:
            yield PageOpBatch(kind, size, {page: host - 1 for _, host, page in run})
        else:
            assert kind is Poison, f"{kind} changes no page"
            yield PageOpBatch(kind, size, {page: page for _, page in run})


def _batch_copies(page_ops: Iterable[PageCopy], size: int) -> Iterator[PageOpBatch]:
    at_once: PageMoves = {}
    sources: set[int] = set()
    for _, src, dst in page_ops:
        if src == dst:
            continue
        if src in at_once or dst in sources:
            yield PageOpBatch(PageCopy, size, at_once)
            at_once, sources = {}, set()
        at_once[dst] = src
        sources.add(src)
    if at_once:
        yield PageOpBatch(PageCopy, size, at_once)


class _PageSet:
    """Pages of several sizes in one memory."""

    def __init__(self) -> None:
        self.by_size: dict[int, set[int]] = {}

    def add(self, page: int, size: int) -> None:
        self.by_size.setdefault(size, set()).add(page)

    def overlaps(self, page: int, size: int) -> bool:
        for other, pages in self.by_size.items():
            if page in pages if size == other else not pages.isdisjoint(_overlapping_pages(page, size, other)):
                return True
        return False


def _batch_mixed_sizes(page_ops: Sequence[PageOp], sizes: Sequence[int]) -> Iterator[PageOpBatch]:
    """Batch operations on pages of several sizes. Operations are collected by kind and size until one depends on a
    collected one."""
    pending: dict[tuple[type[PageOp], int], PageMoves] = {}
    written, read = (_PageSet(), _PageSet()), (_PageSet(), _PageSet())  # on the device, and in host memory
    for entry in page_ops:
        kind, size = type(entry), sizes[entry.group]
        to, target, come, source = _accesses(entry)
        if kind is PageCopy and to == come:
            continue
        if (
            written[target].overlaps(to, size)
            or read[target].overlaps(to, size)
            or written[source].overlaps(come, size)
        ):
            yield from (PageOpBatch(kind, size, moves) for (kind, size), moves in pending.items())
            pending, written, read = {}, (_PageSet(), _PageSet()), (_PageSet(), _PageSet())
        pending.setdefault((kind, size), {})[to] = come
        written[target].add(to, size)
        read[source].add(come, size)
    yield from (PageOpBatch(kind, size, moves) for (kind, size), moves in pending.items())


def _accesses(page_op: PageOp) -> tuple[int, int, int, int]:
    """Return (page written, its memory, page read, its memory): 0 is the device, 1 the host. Poison reads its page."""
    match page_op:
        case PageCopy(_, src, dst):
            return dst, 0, src, 0
        case SwapOut(_, page, host):
            return host - 1, 1, page, 0
        case SwapIn(_, host, page):
            return page, 0, host - 1, 1
        case Poison(_, page):
            return page, 0, page, 0
    raise AssertionError(f"{page_op} moves no page")
