"""Memory by category, in the terms of PagedAttention Figure 2."""

from __future__ import annotations

from typing import NamedTuple


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
    """How pages are shared, swapped and pinned, for metrics. Bytes and tokens; `copies`, `swapped_out` and `swapped_in`
    count from the start. `tables` is what the sequences in memory would hold if none shared a page, `saved` what they
    hold less than that (PagedAttention §6.3: the memory saved is saved / tables)."""

    tables: int
    saved: int
    copies: int  # pages copied on write
    swapped_out: int
    swapped_in: int
    host_pages: int
    host_pages_used: int
    prefixes: int  # registered ones
    prefix_tokens: int  # in them
    prefix_capacity: int  # tokens that may be
