"""The large pages of one group that are partly used, by the request that they are associated with.

While a request lives, the empty small pages of its large pages are found by its id. Afterwards, and if a large page has
no request, they are found by None."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class PartialPages:
    """`owner_of` has the request of each large page, by its number, or None."""

    __slots__ = ("by_owner", "live_owners", "owner_of")

    def __init__(self, num_large: int) -> None:
        self.owner_of: list[int | None] = [None] * num_large
        self.live_owners: set[int] = set()
        self.by_owner: OrderedDict[int | None, OrderedDict[int, None]] = OrderedDict()  # without empty values

    def add(self, large_page: int) -> None:
        """Add a large page that has empty pages; it may be present already."""
        owner = self.owner_of[large_page]
        if owner is not None and owner not in self.live_owners:
            owner = self.owner_of[large_page] = None
        large_pages = self.by_owner.get(owner)
        if large_pages is None:
            large_pages = self.by_owner[owner] = OrderedDict()
        large_pages[large_page] = None

    def remove(self, large_page: int) -> None:
        """Remove a large page that has no empty pages or is not active any more; it may be absent."""
        owner = self.owner_of[large_page]
        large_pages = self.by_owner.get(owner)
        if large_pages is not None and large_page in large_pages:
            del large_pages[large_page]
            if not large_pages:
                del self.by_owner[owner]

    def first_of(self, owner: int | None) -> int:
        """Return a large page of this owner; 0 if there is none."""
        large_pages = self.by_owner.get(owner)
        return next(iter(large_pages)) if large_pages else 0

    def first_of_any(self) -> int:
        """Return a large page of any owner; 0 if there is none."""
        return next((next(iter(large_pages)) for large_pages in self.by_owner.values()), 0)

    def remove_owner(self, owner: int) -> None:
        """Make the large pages of a finished request available to all."""
        self.live_owners.discard(owner)
        for large_page in self.by_owner.pop(owner, ()):
            self.add(large_page)

    def __iter__(self) -> Iterator[tuple[int | None, int]]:
        return ((owner, large_page) for owner, large_pages in self.by_owner.items() for large_page in large_pages)
