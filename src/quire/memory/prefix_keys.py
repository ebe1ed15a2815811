"""The keys of cached pages, for routers: which pages a memory stores and drops, and the keys of a prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.memory.interface import KVMemory
from quire.memory.paged import PagedMemory
from quire.protocol.images import ImageItem
from quire.protocol.sequence import Sequence


class LoggedIndex(dict[bytes, int]):
    """An index of a page pool, from keys to pages, that logs its changes."""

    def __init__(self, log: list[tuple[bytes, bool]]) -> None:
        super().__init__()
        self.log = log

    def __setitem__(self, key: bytes, page: int) -> None:
        super().__setitem__(key, page)
        self.log.append((key, True))

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        self.log.append((key, False))


def routed_group(memory: KVMemory) -> int | None:
    """Return the group whose pages stand for a prefix: one that keeps all pages, if there is one. None if the memory
    caches no prefixes."""
    if not isinstance(memory, PagedMemory) or not memory.caching:
        return None
    groups = memory.prefix_cache.model_groups
    return next((g for g, policy in groups if policy in memory.retaining_policies), groups[0][0] if groups else None)


class PrefixKeys:
    """The keys of a memory's `routed_group`, each of which stands for `key_tokens` more tokens of a prefix.

    Each change is appended to `changes` from now on: (key, True) if a page was stored, (key, False) if it was dropped.
    No page may be cached yet."""

    def __init__(self, memory: KVMemory) -> None:
        self.changes, self.key_tokens = list[tuple[bytes, bool]](), 1
        self.group = routed_group(memory)
        if self.group is None:
            return
        assert isinstance(memory, PagedMemory), "it has a routed group"
        assert not memory.page_pool.index[self.group], "pages are cached already"
        self.prefix_cache = memory.prefix_cache
        memory.page_pool.index[self.group] = LoggedIndex(self.changes)
        self.key_tokens = memory.policies[self.group].group.run_tokens

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Return the changes since the last call."""
        changes = self.changes[:]
        self.changes.clear()
        return changes

    def of_prompt(self, prompt: list[int], salt: str = "", images: tuple[ImageItem, ...] = ()) -> Seq[bytes]:
        """Return the keys of the pages of a prompt that can be found: its last token is always computed."""
        if self.group is None:
            return ()
        seq, end = Sequence(0, prompt, cache_salt=salt), len(prompt) - 1
        seq.images = images
        self.prefix_cache.extend_keys(seq, end)
        pages = self.prefix_cache.policies[self.group].group.num_full_pages(end)
        return self.prefix_cache.page_keys(self.group, seq.page_keys, 0, pages)
