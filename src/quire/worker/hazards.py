"""Which entries of a journal may be done at once: those of which none writes bytes that another one reads or writes.

A page of `size` bytes is the bytes [page * size, (page + 1) * size) of its memory. So pages of one size share bytes if
their numbers are equal, whatever group they are of; of unlike sizes equal numbers say nothing. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Any, NamedTuple

from quire.protocol.step_plan import PageCopy, PageOp, Poison, SwapIn, SwapOut

PageMoves = dict[int, int]
"""Page written -> page read, in whichever memory; host pages count from 0 here. Poison: the page itself."""


class PageOpBatch(NamedTuple):
    """Entries of one kind and one size of pages, in any order."""

    kind: type[PageOp]
    size: int
    moves: PageMoves


def batch_page_ops(page_ops: Sequence[PageOp], sizes: Sequence[int]) -> Iterator[PageOpBatch]:
    """What to launch, in this order, so that it has the effect of these entries (no tables) one after another. `sizes`
    are the groups' bytes of a page."""
    return _batch_one_size(page_ops, sizes[0]) if len(set(sizes)) == 1 else _batch_mixed_sizes(page_ops, sizes)


def pages_overlap(pages: AbstractSet[int], size: int, other_pages: AbstractSet[int], other_size: int) -> bool:
    """Whether a page of `pages`, of `size` bytes each, shares a byte with one of `other_pages`, of `other_size` "
    "bytes each."""
    if size == other_size:
        return not pages.isdisjoint(other_pages)
    if size < other_size:
        pages, size, other_pages, other_size = other_pages, other_size, pages, size
    return any(not other_pages.isdisjoint(_overlapping_pages(page, size, other_size)) for page in pages)


def _overlapping_pages(page: int, size: int, other_size: int) -> range:
    """Pages of `other_size` bytes that share a byte with this one of `size` bytes."""
    return range(page * size // other_size, -(-(page + 1) * size // other_size))


def _batch_one_size(page_ops: Sequence[PageOp], size: int) -> Iterator[PageOpBatch]:
    """Where all pages have one size. Of entries of one kind that write the same page the last one counts; only copies
    can read what another one of their kind wrote."""
    run: Any
    for kind, run in groupby(page_ops, key=type):
        if kind is PageCopy:
            yield from _batch_copies(run, size)
        elif kind is SwapOut:
            yield PageOpBatch(kind, size, {host - 1: page for _, page, host in run})
        elif kind is SwapIn:
            yield PageOpBatch(kind, size, {page: host - 1 for _, host, page in run})
        else:
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
    """Where sizes differ: entries of all kinds and sizes are put off, each to the launch of its like, until one comes
    that must be behind one of them."""
    put_off: dict[tuple[type[PageOp], int], PageMoves] = {}
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
            yield from (PageOpBatch(*like, moves) for like, moves in put_off.items())
            put_off, written, read = {}, (_PageSet(), _PageSet()), (_PageSet(), _PageSet())
        put_off.setdefault((kind, size), {})[to] = come
        written[target].add(to, size)
        read[source].add(come, size)
    yield from (PageOpBatch(*like, moves) for like, moves in put_off.items())


def _accesses(page_op: PageOp) -> tuple[int, int, int, int]:
    """(page written, where, page read, where); 0 is the device, 1 host memory. Poison reads what it writes."""
    match page_op:
        case PageCopy(_, src, dst):
            return dst, 0, src, 0
        case SwapOut(_, page, host):
            return host - 1, 1, page, 0
        case SwapIn(_, host, page):
            return page, 0, host - 1, 1
        case Poison(_, page):
            return page, 0, page, 0
    raise AssertionError(f"{page_op} moves nothing")
