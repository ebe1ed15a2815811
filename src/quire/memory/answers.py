"""What a memory answers: whether sequences came in, where they are, and what its bytes are used for, in the terms of
PagedAttention Figure 2."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.protocol.sequence import Sequence


class Admission(NamedTuple):
    """A sequence came in. Its first `reused_tokens` tokens needn't be computed: they have been; or, if it names one, a
    sequence `depends_on` computes what is missing of them, and its rows must come first."""

    reused_tokens: int
    depends_on: Sequence | None = None


class Deferred(Enum):
    """Not in this step, though there may be room: what could be shared is being computed for another."""

    DEFERRED = "later"


DEFERRED = Deferred.DEFERRED


class Placement(NamedTuple):
    """Where a sequence's tokens are: for each group the page of each logical page; 0 where none is held."""

    slot: int
    tables: tuple[tuple[int, ...], ...]


class Usage(NamedTuple):
    """Bytes. `used` holds tokens' keys and values; `reserved` is set aside for tokens of a step under way or of known
    length; `internal` is the unfilled rest of pages; `external` can't be used for want of contiguity; `cached` holds
    prefixes that no sequence uses; `free` is free."""

    used: int
    cached: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """All categories together: the size of the memory."""
        return sum(self)


class Sharing(NamedTuple):
    """How pages are shared, swapped and pinned, for metrics. Bytes and tokens; `copies`, `swapped_out`, `swapped_in`,
    `queries` and `hits` count from the start. `tables` is what the sequences in memory would hold if none shared a
    page, `saved` what they hold less than that (PagedAttention §6.3: the memory saved is saved / tables)."""

    tables: int
    saved: int
    copies: int = 0  # pages copied on write
    swapped_out: int = 0
    swapped_in: int = 0
    host_pages: int = 0
    host_pages_used: int = 0
    prefixes: int = 0  # registered ones
    prefix_tokens: int = 0  # in them
    prefix_capacity: int = 0  # tokens that may be
    queries: int = 0  # tokens of prompts looked up among cached prefixes
    hits: int = 0  # and found
    full_hits: int = 0  # and found as far as layers are asked that see all tokens; windows may have less
    encoder_runs: int = 0  # pictures that were encoded
    encoder_parts: int = 0  # and parts of pictures
    picture_hits: int = 0  # times that a picture was wanted whose pages were there


class TypeUsage(NamedTuple):
    """Bytes of the pages of one layer type, "full" or "window-4096": what tokens take of pages that are in use, the
    rest of these pages, and cached prefixes that no sequence uses (Jenga, Figure 16)."""

    layer_type: str
    used: int
    internal: int
    cached: int


class LargePageStats(NamedTuple):
    """Large pages (Jenga §4): free ones, those bound to groups, a group, and what happened to them from the start."""

    free: int
    active: list[int]
    reclaimable: list[int]
    evicted_large: int  # reclaimable ones that were taken
    evicted_small: int  # cached small pages that were taken, one at a time
    rebound: int  # large pages that went from one group to another


class Account(NamedTuple):
    """All of it; `types` where layers of several kinds may have pages."""

    usage: Usage
    sharing: Sharing
    types: tuple[TypeUsage, ...] = ()
