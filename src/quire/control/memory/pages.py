"""The pages of one pool: empty, used (referenced by tables) or cached (unreferenced, but content worth keeping).

The interface is that of Jenga's two-level allocator (§4, §5.4): `take` names the group and the owner of a page. Here
every group has pages of one size, the case that PagedAttention treats, so of the five steps two remain: an empty page,
else the least recently used cached one. No page is ever searched for: empty pages are a stack, cached ones a queue in
the order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

SCRATCH = 0


class Pages:
    """Pages 1 .. total of a pool; page 0 is scratch. `order` gives the empty pages in the order of first use."""

    def __init__(self, total: int, groups: int, order: Iterable[int] | None = None) -> None:
        self.total = total
        self.empty = list(order if order is not None else range(1, total + 1))[::-1]
        self.refs = [0] * (total + 1)
        self.keys: list[tuple[int, bytes] | None] = [None] * (total + 1)
        self.index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.cached: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self.empty) + len(self.cached)

    def take(self, group: int, owner: int) -> int:
        """A private page for `group` of sequence `owner`. The caller has checked `available`."""
        if self.empty:
            page = self.empty.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self._forget(page)
            self.evictions += 1
        assert self.refs[page] == 0, f"page {page} is given out but has {self.refs[page]} references"
        self.refs[page] = 1
        return page

    def find(self, group: int, key: bytes) -> int | None:
        """The page that holds the content `key`, used or cached."""
        return self.index[group].get(key)

    def share(self, page: int) -> None:
        """One more table names the page."""
        if self.refs[page] == 0:
            del self.cached[page]
        self.refs[page] += 1

    def share_all(self, pages: list[int]) -> None:
        """One more table names these pages, all of them used; a fork's whole cost (scratch is passed over)."""
        refs = self.refs
        for page in pages:
            refs[page] += 1
        refs[SCRATCH] = 0

    def release(self, page: int) -> None:
        """One table fewer names the page; the last one leaves it cached if it was published, else empty."""
        self.release_all((page,))

    def release_all(self, pages: Sequence[int]) -> None:
        """One table fewer names these pages (scratch is passed over). From the last to the first: of pages that were
        used equally long ago, the deeper ones are evicted first."""
        refs = self.refs
        for page in reversed(pages):
            left = refs[page] = refs[page] - 1
            if left > 0:
                continue
            if page == SCRATCH:
                refs[SCRATCH] = 0
                continue
            assert left == 0, f"page {page} is released but has no references"
            if self.keys[page] is None:
                self.empty.append(page)
            else:
                self.cached[page] = None

    def is_empty(self, page: int) -> bool:
        """Nothing names the page and its content isn't kept."""
        return self.refs[page] == 0 and self.keys[page] is None

    def publish(self, group: int, page: int, key: bytes) -> None:
        """The page's content is complete and may be found by `key`. A second page of the same content stays private."""
        if self.keys[page] is None and key not in self.index[group]:
            self.keys[page] = (group, key)
            self.index[group][key] = page

    def drop_cached(self) -> int:
        """Empty every cached page. Returns how many there were."""
        count = len(self.cached)
        for page in self.cached:
            self._forget(page)
            self.empty.append(page)
        self.cached.clear()
        return count

    def _forget(self, page: int) -> None:
        entry = self.keys[page]
        assert entry is not None, f"page {page} is cached without a key"
        del self.index[entry[0]][entry[1]]
        self.keys[page] = None

    def check(self) -> None:
        """Assert conservation: empty + cached + used = total, each page in one state."""
        used = sum(1 for refs in self.refs[1:] if refs)
        assert len(self.empty) + len(self.cached) + used == self.total, "pages are lost"
        assert len(set(self.empty)) == len(self.empty), "a page is empty twice"
        assert all(refs >= 0 for refs in self.refs), "a page has negative references"
        assert self.refs[SCRATCH] == 0, "the scratch page is referenced"
        for page in self.empty:
            assert self.refs[page] == 0, f"page {page} is empty and used"
            assert self.keys[page] is None, f"page {page} is empty and has a key"
        for page in self.cached:
            assert self.refs[page] == 0, f"page {page} is cached and used"
            assert self.keys[page] is not None, f"page {page} is cached without a key"
        named = 0
        for group, index in enumerate(self.index):
            for key, page in index.items():
                assert self.keys[page] == (group, key), f"page {page} is indexed under another key"
            named += len(index)
        assert named == sum(1 for key in self.keys if key is not None), "a keyed page is not indexed"
