"""Which entries of a journal may be done at once: those of which none writes bytes that another one reads or writes.

A page of `size` bytes is the bytes [page * size, (page + 1) * size) of its memory. So pages of one size share bytes if
their numbers are equal, whatever group they are of; of unlike sizes equal numbers say nothing. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Any, NamedTuple

from quire.vocabulary.plan import Copy, Entry, In, Out, Poison

Moves = dict[int, int]
"""Page written -> page read, in whichever memory; host pages count from 0 here. Poison: the page itself."""


class Launch(NamedTuple):
    """Entries of one kind and one size of pages, in any order."""

    kind: type[Entry]
    size: int
    moves: Moves


def launches(entries: Sequence[Entry], sizes: Sequence[int]) -> Iterator[Launch]:
    """What to launch, in this order, so that it has the effect of these entries (no tables) one after another. `sizes`
    are the groups' bytes of a page."""
    return _alike(entries, sizes[0]) if len(set(sizes)) == 1 else _unlike(entries, sizes)


def overlap(some: AbstractSet[int], size: int, others: AbstractSet[int], other: int) -> bool:
    """Whether a page of `some`, of `size` bytes each, shares a byte with one of `others`, of `other` bytes each."""
    if size == other:
        return not some.isdisjoint(others)
    if size < other:
        some, size, others, other = others, other, some, size
    return any(not others.isdisjoint(_touched(page, size, other)) for page in some)


def _touched(page: int, size: int, other: int) -> range:
    """Pages of `other` bytes that share a byte with this one of `size` bytes."""
    return range(page * size // other, -(-(page + 1) * size // other))


def _alike(entries: Sequence[Entry], size: int) -> Iterator[Launch]:
    """Where all pages have one size. Of entries of one kind that write the same page the last one counts; only copies
    can read what another one of their kind wrote."""
    run: Any
    for kind, run in groupby(entries, key=type):
        if kind is Copy:
            yield from _copies(run, size)
        elif kind is Out:
            yield Launch(kind, size, {host - 1: page for _, page, host in run})
        elif kind is In:
            yield Launch(kind, size, {page: host - 1 for _, host, page in run})
        else:
            yield Launch(kind, size, {page: page for _, page in run})


def _copies(entries: Iterable[Copy], size: int) -> Iterator[Launch]:
    at_once: Moves = {}
    sources: set[int] = set()
    for _, src, dst in entries:
        if src == dst:
            continue
        if src in at_once or dst in sources:
            yield Launch(Copy, size, at_once)
            at_once, sources = {}, set()
        at_once[dst] = src
        sources.add(src)
    if at_once:
        yield Launch(Copy, size, at_once)


class _Pages:
    """Pages of several sizes in one memory."""

    def __init__(self) -> None:
        self.by_size: dict[int, set[int]] = {}

    def add(self, page: int, size: int) -> None:
        self.by_size.setdefault(size, set()).add(page)

    def meet(self, page: int, size: int) -> bool:
        for other, pages in self.by_size.items():
            if page in pages if size == other else not pages.isdisjoint(_touched(page, size, other)):
                return True
        return False


def _unlike(entries: Sequence[Entry], sizes: Sequence[int]) -> Iterator[Launch]:
    """Where sizes differ: entries of all kinds and sizes are put off, each to the launch of its like, until one comes
    that must be behind one of them."""
    put_off: dict[tuple[type[Entry], int], Moves] = {}
    written, read = (_Pages(), _Pages()), (_Pages(), _Pages())  # on the device, and in host memory
    for entry in entries:
        kind, size = type(entry), sizes[entry.group]
        to, target, come, source = _move(entry)
        if kind is Copy and to == come:
            continue
        if written[target].meet(to, size) or read[target].meet(to, size) or written[source].meet(come, size):
            yield from (Launch(*like, moves) for like, moves in put_off.items())
            put_off, written, read = {}, (_Pages(), _Pages()), (_Pages(), _Pages())
        put_off.setdefault((kind, size), {})[to] = come
        written[target].add(to, size)
        read[source].add(come, size)
    yield from (Launch(*like, moves) for like, moves in put_off.items())


def _move(entry: Entry) -> tuple[int, int, int, int]:
    """(page written, where, page read, where); 0 is the device, 1 host memory. Poison reads what it writes."""
    match entry:
        case Copy(_, src, dst):
            return dst, 0, src, 0
        case Out(_, page, host):
            return host - 1, 1, page, 0
        case In(_, host, page):
            return page, 0, host - 1, 1
        case Poison(_, page):
            return page, 0, page, 0
    raise AssertionError(f"{entry} moves nothing")
