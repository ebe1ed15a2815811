"""Large pages of one group that are used in part: where its empty small pages are, and for which request.

While a request lives, what is empty in the large pages that are associated with it is found under its id; after it, and
where none is associated, under None.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class PartialPages:
    """`owner_of` is the request of each large page, by its number, as far as there is one."""

    __slots__ = ("by_owner", "live_owners", "owner_of")

    def __init__(self, num_large: int) -> None:
        self.owner_of: list[int | None] = [None] * num_large
        self.live_owners: set[int] = set()
        self.by_owner: OrderedDict[int | None, OrderedDict[int, None]] = OrderedDict()  # none of them empty

    def add(self, large_page: int) -> None:
        """This large page has empty pages, perhaps since before."""
        owner = self.owner_of[large_page]
        if owner is not None and owner not in self.live_owners:
            owner = self.owner_of[large_page] = None
        found = self.by_owner.get(owner)
        if found is None:
            found = self.by_owner[owner] = OrderedDict()
        found[large_page] = None

    def remove(self, large_page: int) -> None:
        """It has none left, or isn't active any more; perhaps it wasn't here."""
        owner = self.owner_of[large_page]
        found = self.by_owner.get(owner)
        if found is not None and large_page in found:
            del found[large_page]
            if not found:
                del self.by_owner[owner]

    def first_of(self, owner: int | None) -> int:
        """One of this owner's; 0 if there is none."""
        found = self.by_owner.get(owner)
        return next(iter(found)) if found else 0

    def first_of_any(self) -> int:
        """One of any owner's; 0 if there is none."""
        return next((next(iter(found)) for found in self.by_owner.values()), 0)

    def remove_owner(self, owner: int) -> None:
        """The request has left."""
        self.live_owners.discard(owner)
        for home in self.by_owner.pop(owner, ()):
            self.add(home)

    def __iter__(self) -> Iterator[tuple[int | None, int]]:
        return ((owner, home) for owner, found in self.by_owner.items() for home in found)
