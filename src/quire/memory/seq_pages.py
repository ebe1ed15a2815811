"""The page tables of one sequence, and the images that it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from quire.protocol.images import ImageItem

Tables = list[list[int]]
"""Page ids: one list for each group. SCRATCH where a page was dropped or is not needed."""

ImageRef = tuple[int, int]
"""A group, and the index of an image in its sequence."""


class EncodingState:
    """An image whose encoding is not confirmed: `parts_done` of its `num_parts` parts are encoded or planned.

    `assigned_to` is the slot of the sequence that encodes it, and the image's index there. The `num_waiting` sequences
    that need the image all name its `pages`. Without them the state is discarded, unless the image was published."""

    __slots__ = ("assigned_to", "is_closed", "num_parts", "num_waiting", "pages", "parts_done")

    def __init__(self, num_parts: int, pages: Seq[int] = ()) -> None:
        self.num_parts, self.pages = num_parts, pages
        self.parts_done = self.num_waiting = 0
        self.assigned_to: ImageRef | None = None
        self.is_closed = False

    @property
    def is_complete(self) -> bool:
        """True if all of it is encoded before the slices of the next step are computed."""
        return self.parts_done == self.num_parts


class SeqPages:
    """A sequence in memory: its slot, its tables, and cursors over them."""

    __slots__ = (
        "capacity", "drops_at", "first_page", "images", "is_stale", "needs_cow_check", "owner", "pending_encodings",
        "pending_key_range", "prefix_ends", "pruned_tokens", "published_drafts", "published_tokens", "recent_drops",
        "requested_tokens", "slot", "tables",
    )  # fmt: skip

    def __init__(self, slot: int, tables: Tables, owner: int, images: tuple[ImageItem, ...] = ()) -> None:
        self.slot, self.tables, self.images = slot, tables, images
        self.owner = owner  # for the page pool: the id of a sequence of the same request
        # Of each group the first logical page that is still held
        self.first_page = [next((i for i, page in enumerate(table) if page), len(table)) for table in tables]
        self.capacity = 0  # tokens for which all tables have pages
        self.requested_tokens = 0  # tokens that are or will be written: the largest length passed to `grow`
        self.published_tokens = 0  # tokens whose pages were published
        self.published_drafts = 0  # the same of a draft model's pages
        self.drops_at = 0  # number of computed tokens at which another page can be dropped
        self.pruned_tokens = [0] * len(tables)  # of each group: prompt tokens that were removed from its pages
        self.pending_key_range = (0, 0)  # keys of its prompt that other sequences may wait for
        self.needs_cow_check = False  # a page that will be written may be shared, or an image's pages be missing
        self.is_stale = False  # the prefix cache was reset since its admission: its pages are not published
        self.pending_encodings: dict[ImageRef, EncodingState] = {}  # not confirmed yet
        # See quire.memory.jenga.retention
        self.prefix_ends: tuple[int, ...] = ()
        self.recent_drops: dict[int, deque[tuple[int, int, bytes]]] = {}

    def copy_progress(self, other: SeqPages) -> None:
        """Copy the progress of `other`: a fork's parent, or this sequence before it was swapped out."""
        self.published_tokens, self.published_drafts = other.published_tokens, other.published_drafts
        self.drops_at = other.drops_at
        self.pruned_tokens, self.prefix_ends = list(other.pruned_tokens), other.prefix_ends
        self.is_stale = other.is_stale
