"""Pages whose content waiting sequences will use: a pool evicts them after all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol


class Demand(Protocol):
    """What knows why pages are spared."""

    def give_up_one(self) -> bool:
        """Call `forget` for the pages that are least needed together. Return False if none is spared."""
        ...


class ExpectedPages(ABC):
    """Part of a pool of pages, which are named by (group, key)."""

    def __init__(self) -> None:
        self.demands = list[Demand]()
        self.expected: dict[tuple[int, bytes], int] = {}  # how many calls of `expect` name the page

    def expect(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Spare these pages, now and later, until as many calls of `forget` name them."""
        expected = self.expected
        for key in keys:
            count = expected.get(key, 0)
            expected[key] = count + 1
            if not count:
                self._requeue(*key)

    def forget(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Undo `expect` with the same keys."""
        expected = self.expected
        for key in keys:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                self._requeue(*key)

    def is_expected(self, group: int, key: bytes) -> bool:
        """Return True if the page with this content is spared."""
        return (group, key) in self.expected

    def add_demand(self, demand: Demand) -> None:
        """Ask `demand` when pages that it expects must be evicted."""
        self.demands.append(demand)

    def give_up_some(self) -> None:
        """Spare fewer pages, as there are no others to evict."""
        for demand in self.demands:
            if demand.give_up_one():
                self.demands.remove(demand)  # the others are next
                self.demands.append(demand)
                return
        raise AssertionError("pages are spared for no sequence")

    @abstractmethod
    def _requeue(self, group: int, key: bytes) -> None:
        """Put the page, if it is cached, into the queue where it belongs now."""
