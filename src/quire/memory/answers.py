"""The results that a memory returns: admissions, placements, and bytes by the categories of PagedAttention Figure 2."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.protocol.sequence import Sequence


class Admission(NamedTuple):
    """The result of an admission: the first `reused_tokens` tokens of the sequence need not be computed.

    They are in memory, or the sequence `depends_on` computes the missing ones in the same step; its slices must come
    first. So are the first `drafted_tokens` of them in the layers of a draft model, as far as that of `depends_on` has
    computed them when the sequence continues."""

    reused_tokens: int
    depends_on: Sequence | None = None
    drafted_tokens: int = 0


class EvictionLimit(NamedTuple):
    """How many tokens of prefixes that waiting sequences will find may be evicted by an admission, and by the `growth`,
    in tokens, of the sequences in memory until they end."""

    tokens: float
    growth: int


class Deferred(Enum):
    """Not admitted in this step, even if there is room: pages to share are being computed for another sequence."""

    DEFERRED = "later"


DEFERRED = Deferred.DEFERRED


class Placement(NamedTuple):
    """The slot of a sequence, and for each group the page of each logical page; 0 where none is held."""

    slot: int
    tables: tuple[tuple[int, ...], ...]


class Usage(NamedTuple):
    """Bytes of the memory by category.

    `used`: keys and values of tokens. `reserved`: set aside for tokens of a step in progress or of known length.
    `internal`: the unfilled rest of pages. `external`: unusable because of fragmentation. `cached`: prefixes that no
    sequence uses."""

    used: int
    cached: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """The sum of all categories: the size of the memory."""
        return sum(self)


class Sharing(NamedTuple):
    """How pages are shared, swapped and pinned, for metrics; in bytes and tokens.

    `copies`, `swapped_out`, `swapped_in`, `queries` and `hits` count from the start. `tables` is what the sequences in
    memory would hold without sharing, and `saved` is what sharing saves of it (PagedAttention §6.3: saved / tables)."""

    tables: int
    saved: int
    copies: int = 0  # pages copied on write
    swapped_out: int = 0
    swapped_in: int = 0
    host_pages: int = 0
    host_pages_used: int = 0
    prefixes: int = 0  # registered prefixes
    prefix_tokens: int = 0  # tokens of registered prefixes
    prefix_capacity: int = 0  # the most tokens of registered prefixes
    queries: int = 0  # prompt tokens looked up in the prefix cache
    hits: int = 0  # prompt tokens found there
    full_hits: int = 0  # prompt tokens that full-attention layers alone would have found
    encoder_runs: int = 0  # images encoded
    encoder_parts: int = 0  # parts of images encoded
    picture_hits: int = 0  # images whose pages were found


class TypeUsage(NamedTuple):
    """Bytes of the pages of one layer type, such as "full" or "window-4096" (Jenga, Figure 16).

    `used`: tokens in pages that are in use. `internal`: the rest of these pages. `cached`: prefixes that no sequence
    uses."""

    layer_type: str
    used: int
    internal: int
    cached: int


class Account(NamedTuple):
    """Memory statistics; `types` is empty where a memory has no layer types."""

    usage: Usage
    sharing: Sharing
    types: tuple[TypeUsage, ...] = ()
