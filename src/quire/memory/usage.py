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
