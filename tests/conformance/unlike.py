"""Memories whose layer groups have little in common: pages of other sizes, other numbers of tokens in them, or not even
whole ones; a running state; a group with a length of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from memories import Build, paged
from sink import WITH_SINKS

from quire.memory.jenga.shared_pool import SharedPool
from quire.memory.page_tables import build_page_pool
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, place_page_ids
from quire.protocol.sequence import Sequence

Make = Callable[[Build], PagedMemory]
KNOWN = WITH_SINKS
"""The policies of the engine, and those of the tests."""


QUERIES = 3
"""Tokens at the end of a prompt that are computed in one step, where layers have budgets."""


class Kind(NamedTuple):
    """A group: `run` tokens of `token_bytes` fill `pages` pages, behind which `padding` bytes are left; or, of the kind
    "state", a state of `token_bytes` for each run."""

    token_bytes: int
    run: int
    pages: int = 1
    window: int | None = None
    kind: str = ""
    padding: int = 0
    chunk: int | None = None
    budget: int | None = None
    is_draft: bool = False
    reads_hidden_states: bool = False

    @property
    def page_bytes(self) -> int:
        if self.kind == "state":
            return self.token_bytes + self.padding
        return self.run * self.token_bytes // self.pages + self.padding

    def group(self, i: int, build: Build, ids: range, host_ids: range) -> KVCacheGroup:
        """That of layer `i` alone."""
        return KVCacheGroup(
            (i,), self.page_bytes, self.token_bytes, -(-build.max_len * self.pages // self.run), ids, host_ids,
            self.run, self.pages, self.window, self.kind or ("full" if self.window is None else "window"),
            chunk=self.chunk, budget=self.budget, is_draft=self.is_draft,
            reads_hidden_states=self.reads_hidden_states,
        )  # fmt: skip


def ending(kinds: tuple[Kind, ...]) -> tuple[int, int]:
    """A geometry's least budget, and the queries at the end of a prompt."""
    least = min((kind.budget for kind in kinds if kind.budget is not None), default=0)
    return least, min(least, QUERIES)


def unlike(*kinds: Kind, caching: bool = True, debug: bool = False, **more: Any) -> Make:
    """A memory of these groups, each with room for the tokens that are asked for."""

    def make(build: Build) -> PagedMemory:
        counts = [-(-build.tokens * kind.pages // kind.run) for kind in kinds]
        for i, kind in enumerate(kinds):
            if kind.kind == "state" and kind.run >= build.max_len:  # one for good, a sequence
                counts[i] = build.max_seqs + 1
        sizes = [kind.page_bytes for kind in kinds]
        ids, end = place_page_ids(list(zip(sizes, counts)), max(sizes))
        rows, host_end = place_page_ids([(size, min(build.host, count)) for size, count in zip(sizes, counts)], 0)
        groups = tuple(
            kind.group(i, build, ids[i], range(rows[i].start + 1, rows[i].stop + 1)) for i, kind in enumerate(kinds)
        )
        geometry = KVCacheConfig(KVCacheLayout.PAGED, end, build.max_seqs + 1, groups, 2, host_end, 0, *ending(kinds))
        return PagedMemory(
            geometry, max_step_tokens=build.chunk, caching=caching, debug=debug, prefix_tokens=build.prefix_tokens,
            policies=KNOWN, **more,
        )  # fmt: skip

    return make


def large(
    *kinds: Kind, caching: bool = True, debug: bool = False, association: str = "bulk", beside: int = 0, **more: Any
) -> Make:
    """A memory of these groups in large pages, with room for the tokens that are asked for in each of them. The first
    `beside` of them are another model's, with all that there is in common."""
    whole = math.lcm(*(kind.page_bytes for kind in kinds))
    ratios = [whole // kind.page_bytes for kind in kinds]

    def make(build: Build) -> PagedMemory:
        pages = [-(-build.tokens * kind.pages // kind.run) for kind in kinds]
        count = sum(-(-many // ratio) for many, ratio in list(zip(pages, ratios))[beside:])
        hosts = min(build.host, count)
        groups = tuple(
            kind.group(i, build, range(ratio, (count + 1) * ratio), range(1, hosts * ratio + 1))
            for i, (kind, ratio) in enumerate(zip(kinds, ratios))
        )
        slots = build.max_seqs + 1
        geometry = KVCacheConfig(
            KVCacheLayout.PAGED, (count + 1) * whole, slots, groups, 2, hosts * whole, whole, *ending(kinds)
        )  # fmt: skip
        part = None
        if beside:
            both = [replace(geometry, groups=some) for some in (groups[:beside], groups[beside:])]
            ledger = build_page_pool(geometry, [group.ids for group in groups], association)
            first, part = SharedPool(ledger, both, [0, build.prefix_tokens]).views
            crowd(
                PagedMemory(first.kv_config, max_step_tokens=build.chunk, policies=KNOWN, view=first),
                min(build.max_len, build.chunk),
            )
            geometry = part.kv_config
        return PagedMemory(
            geometry, max_step_tokens=build.chunk, caching=caching, debug=debug, prefix_tokens=build.prefix_tokens,
            policies=KNOWN, association=association, view=part, **more,
        )  # fmt: skip

    return make


def crowd(memory: PagedMemory, length: int) -> None:
    """Leave pages in it that are cached, and nobody's: any of them can be had."""
    seq = Sequence(1, list(range(length)))
    assert isinstance(memory.admit([seq], length), list)
    assert memory.grow(seq, length)
    seq.computed = seq.planned = length
    memory.commit(seq)
    memory.free(seq)


def parts(*kinds: tuple[int, int, int | None], large_bytes: int = 1920) -> list[Kind]:
    """Kinds of (pages of a large page, tokens of a page, window)."""
    return [Kind(large_bytes // ratio // run, run, window=window) for ratio, run, window in kinds]


def mamba(many: int, few: int, page: int) -> list[Kind]:
    """Attention and a state, of whose pages so many are in a large page: as Jamba's are, exactly and padded."""
    return [Kind(16, page), Kind(16 * page * many // few, 16, kind="state")]


BUDGETS = [Kind(16, 4, kind="budget", budget=budget) for budget in (9, 5, 3)]
FULL, WINDOW = Kind(48, 4), Kind(32, 4, window=6)
CHUNKED = Kind(24, 4, kind="chunked", chunk=12)
STATE, SINK = Kind(64, 8, kind="state"), Kind(16, 2, kind="sink")
UNLIKE: dict[str, Make] = {
    "3-to-2": unlike(WINDOW, FULL),
    "84-to-1": unlike(Kind(8, 1, window=5), Kind(84 * 8, 1)),
    "1-and-16-tokens": unlike(Kind(16, 16), Kind(16, 1), Kind(16, 4, window=6)),
    "4-and-8-tokens": unlike(Kind(16, 4), Kind(24, 8), debug=True),
    "not-whole": unlike(Kind(24, 8, 3)),
    "not-whole-window": unlike(Kind(24, 8, 3, window=7), Kind(16, 4)),
    "padded": unlike(Kind(16, 4, padding=32), Kind(16, 2, padding=16, window=3)),
    "state": unlike(FULL, STATE),
    "state-uncached": unlike(STATE, WINDOW, caching=False, debug=True),
    "sink": unlike(SINK, FULL),
    "budgets-uncached": unlike(*BUDGETS, debug=True),
    "budgets-unlike-uncached": unlike(BUDGETS[2], FULL, WINDOW, Kind(24, 8, 3, kind="budget", budget=6)),
    "large-84-1": large(Kind(8, 1, window=5), Kind(84 * 8, 1)),
    "large-1-84": large(Kind(84 * 16, 1), Kind(16, 16, kind="state"), association="paper"),
    "large-6-10-15": large(*parts((6, 4, None), (10, 1, 6), (15, 16, 9))),
    "large-8-12-1-3": large(*parts((8, 1, None), (12, 4, 6), (1, 16, None), (3, 8, 2)), association="none"),
    "large-uncached": large(*parts((6, 16, 9), (1, 4, None), (4, 1, 3)), caching=False, debug=True),
    "large-poisoned": large(WINDOW, FULL, debug=True),
    "large-state": large(FULL, STATE, SINK, WINDOW),
    "large-budgets-uncached": large(
        Kind(32, 4, kind="budget", budget=9), Kind(16, 2, kind="budget", budget=5), FULL, WINDOW, debug=True
    ),
    "large-chunked": large(CHUNKED, FULL, Kind(8, 8, kind="chunked", chunk=4)),
    "large-beside-another": large(WINDOW, FULL, Kind(16, 2, window=5), Kind(96, 4), beside=2),
    "large-beside-states": large(STATE, *parts((6, 16, 9), (1, 16, None)), beside=1, association="paper"),
    "large-not-whole": large(Kind(24, 8, 3, window=7), Kind(16, 4)),
    "states-alone": unlike(Kind(48, 8, kind="state"), debug=True),
    "large-states-34-1": large(*mamba(34, 1, 4), association="paper"),
    "large-states-133-4": large(*mamba(133, 4, 1), debug=True),
    "large-states-of-16": large(*mamba(34, 1, 16), association="none"),
    "large-states-windows": large(*mamba(133, 4, 4), Kind(16, 4, window=9), debug=True),
    "large-states-beside-another": large(WINDOW, *mamba(8, 1, 4), beside=1),
    "states-boundary": unlike(FULL, STATE, WINDOW, retention="boundary", slack=8),
    "large-states-slack": large(*mamba(34, 1, 4), Kind(16, 4, window=9), retention="slack", slack=16),
    "states-for-good-uncached": unlike(FULL, Kind(64, 48, kind="state"), caching=False, debug=True),
    "large-states-one-uncached": large(FULL, Kind(96, 48, kind="state"), WINDOW, caching=False, debug=True),
    "chunked": unlike(CHUNKED, FULL),
    "chunks-across-pages": unlike(Kind(24, 4, kind="chunked", chunk=10), FULL, Kind(8, 8, kind="chunked", chunk=4)),
    "not-whole-chunked": unlike(Kind(24, 8, 3, kind="chunked", chunk=7), FULL, debug=True),
    "all": unlike(WINDOW, CHUNKED, STATE, SINK, Kind(24, 8, 3), Kind(84 * 8, 1)),
}

DRAFT, DRAFT_WINDOW = Kind(16, 4, is_draft=True), Kind(8, 4, window=5, is_draft=True)
DRAFT_LAYERS = LayerSpec(1, 4, is_draft=True), LayerSpec(1, 4, 6, is_draft=True)
DRAFTED: dict[str, Make] = {
    "draft": unlike(FULL, DRAFT),
    "draft-window": unlike(FULL, WINDOW, DRAFT_WINDOW, debug=True),
    "draft-of-windows": unlike(WINDOW, DRAFT),
    "draft-windows-alone": unlike(WINDOW, DRAFT_WINDOW),
    "draft-chunked": unlike(CHUNKED, FULL, Kind(24, 4, kind="chunked", chunk=10, is_draft=True)),
    "draft-1-and-16-tokens": unlike(Kind(16, 16), Kind(16, 1, is_draft=True)),
    "draft-16-and-1-tokens": unlike(Kind(16, 1), Kind(16, 16, is_draft=True), WINDOW),
    "draft-not-whole": unlike(FULL, Kind(24, 8, 3, is_draft=True)),
    "draft-boundary": unlike(FULL, WINDOW, DRAFT_WINDOW, retention="boundary", slack=5),
    "draft-uncached": unlike(WINDOW, FULL, DRAFT, caching=False, debug=True),
    "draft-state": unlike(FULL, STATE, DRAFT, debug=True),
    "draft-states-alone": unlike(Kind(48, 4, kind="state"), DRAFT_WINDOW),
    "large-draft-state": large(WINDOW, STATE, DRAFT),
    "large-draft": large(FULL, DRAFT),
    "large-draft-window": large(WINDOW, FULL, DRAFT, DRAFT_WINDOW, association="paper"),
    "large-draft-6-10-15": large(*parts((6, 4, None), (10, 1, 6)), Kind(1920 // 15 // 16, 16, is_draft=True)),
    "large-draft-slack": large(WINDOW, FULL, DRAFT_WINDOW, retention="slack", slack=3),
    "large-draft-beside-another": large(WINDOW, FULL, Kind(96, 4), DRAFT, DRAFT_WINDOW, beside=2),
    "draft-lcm": paged((None, 6, None, *DRAFT_LAYERS), page_size=4),
    "draft-max": paged((None, 6, *DRAFT_LAYERS), page_size=16, page_sizes="max"),
    "draft-gcd": paged((None, None, 6, 6, *DRAFT_LAYERS), page_size=1, page_sizes="gcd"),
    "draft-own": paged((6, None, *DRAFT_LAYERS), page_size=4, page_sizes="own"),
    "draft-tables": paged((None, 6, *DRAFT_LAYERS), page_size=4, table_scope="layer", page_sizes="max"),
}
"""Memories of a target and its draft model: some sequences have pages in the draft model's layers, others none."""

HEAD = DRAFT._replace(reads_hidden_states=True)
HEAD_LAYER = replace(DRAFT_LAYERS[0], reads_hidden_states=True)
HEADS: dict[str, Make] = {
    "head": unlike(FULL, HEAD),
    "head-window": unlike(FULL, WINDOW, HEAD),
    "head-of-windows": unlike(WINDOW, HEAD, debug=True),
    "head-1-and-16-tokens": unlike(Kind(16, 16), Kind(16, 1, is_draft=True, reads_hidden_states=True)),
    "head-16-and-1-tokens": unlike(Kind(16, 1), Kind(16, 16, is_draft=True, reads_hidden_states=True), WINDOW),
    "head-not-whole": unlike(FULL, Kind(24, 8, 3, is_draft=True, reads_hidden_states=True)),
    "head-uncached": unlike(WINDOW, FULL, HEAD, caching=False, debug=True),
    "large-head-window": large(WINDOW, FULL, HEAD, association="paper"),
    "head-lcm": paged((None, 6, None, HEAD_LAYER), page_size=4),
}
"""Memories of a target and a speculation head: a sequence that drafts reuses only what is cached of both."""
