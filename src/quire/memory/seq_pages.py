"""The pages of one sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from quire.protocol.images import ImageItem

if TYPE_CHECKING:
    pass

Tables = list[list[int]]
"""Page ids, a list a group; SCRATCH where a page was dropped or is not needed."""


class SeqPages:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = (
        "capacity",
        "drops_at",
        "first_page",
        "images",
        "is_stale",
        "needs_cow_check",
        "owner",
        "pending_encodings",
        "pending_key_range",
        "prefix_ends",
        "pruned_tokens",
        "published_tokens",
        "recent_drops",
        "requested_tokens",
        "slot",
        "tables",
    )  # fmt: skip

    def __init__(self, slot: int, tables: Tables, owner: int) -> None:
        self.slot, self.tables = slot, tables
        self.images: tuple[ImageItem, ...] = ()
        self.owner = owner  # whose pages these are, for the ledger: a sequence of its request
        # The first logical page still held, a group
        self.first_page = [next((i for i, page in enumerate(table) if page), len(table)) for table in tables]
        self.capacity = 0  # tokens that all tables have pages for
        self.requested_tokens = 0  # tokens that are or will be written, as far as asked for
        self.published_tokens = 0  # tokens whose pages were published
        self.drops_at = 0  # computed tokens from which on a page more is of no use
        self.pruned_tokens = [0] * len(tables)  # tokens of its prompt that have no place any more, a group
        self.pending_key_range = (0, 0)  # keys of its prompt that others may wait for
        self.needs_cow_check = False  # a page that will be written may be shared, or a picture's be missing
        self.is_stale = False  # prefixes were forgotten since it came: nobody else finds what it holds
        self.pending_encodings: dict[
            tuple[int, int], EncodingState
        ] = {}  # by group and which one it is: those that aren't confirmed
        # See quire.memory.jenga.retention
        self.prefix_ends: tuple[int, ...] = ()
        self.recent_drops: dict[int, deque[tuple[int, int, bytes]]] = {}


ImageRef = tuple[int, int]
"""A group, and which picture of a sequence."""


class EncodingState:
    """A picture on its way: `parts_done` of its `num_parts`, by the sequence in slot `assigned_to[0]`, whose picture
    `assigned_to[1]` it is. The sequences that need it, `num_waiting` of them, all name its `pages`; with them it is
    forgotten, unless it was kept."""

    __slots__ = ("assigned_to", "is_closed", "num_parts", "num_waiting", "pages", "parts_done")

    def __init__(self, num_parts: int, pages: Seq[int] = ()) -> None:
        self.num_parts, self.pages = num_parts, pages
        self.parts_done = self.num_waiting = 0
        self.assigned_to: ImageRef | None = None
        self.is_closed = False

    @property
    def is_complete(self) -> bool:
        """All of it is encoded by the time of the next step's rows."""
        return self.parts_done == self.num_parts
