"""Large pages of one group that are used in part: where its empty small pages are, and for which request.

While a request lives, what is empty in the large pages that are associated with it is found under its id; after it, and
where none is associated, under None.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Partial:
    """`owner` is the request of each large page, by its number, as far as there is one."""

    __slots__ = ("by", "living", "owner")

    def __init__(self, count: int) -> None:
        self.owner: list[int | None] = [None] * count
        self.living: set[int] = set()
        self.by: OrderedDict[int | None, OrderedDict[int, None]] = OrderedDict()  # none of them empty

    def add(self, home: int) -> None:
        """This large page has empty pages, perhaps since before."""
        owner = self.owner[home]
        if owner is not None and owner not in self.living:
            owner = self.owner[home] = None
        found = self.by.get(owner)
        if found is None:
            found = self.by[owner] = OrderedDict()
        found[home] = None

    def remove(self, home: int) -> None:
        """It has none left, or isn't active any more; perhaps it wasn't here."""
        owner = self.owner[home]
        found = self.by.get(owner)
        if found is not None and home in found:
            del found[home]
            if not found:
                del self.by[owner]

    def first(self, owner: int | None) -> int:
        """One of this owner's; 0 if there is none."""
        found = self.by.get(owner)
        return next(iter(found)) if found else 0

    def any(self) -> int:
        """One of any owner's; 0 if there is none."""
        return next((next(iter(found)) for found in self.by.values()), 0)

    def leave(self, owner: int) -> None:
        """The request has left."""
        self.living.discard(owner)
        for home in self.by.pop(owner, ()):
            self.add(home)

    def __iter__(self) -> Iterator[tuple[int | None, int]]:
        return ((owner, home) for owner, found in self.by.items() for home in found)
