"""Memories: where the keys and values of every sequence live. One small protocol; one file an implementation.

The scheduler drives a KVMemory without knowing which one it is; the runner replays the journal that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.memory.answers import Account, Admission, Deferred, Placement
from quire.memory.prefix_cache import PrefixCache
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageOps


class KVMemory(Protocol):
    """The interface of every memory. Shortage is a return value, and a call that reports it has changed nothing.

    Lengths are in tokens. `free` and `fork` take quiet sequences only. Deterministic: the same calls give the same
    placements and journal. `prefix_cache` is None where none is shared.
    """

    kv_config: KVCacheConfig

    @property
    def prefix_cache(self) -> PrefixCache | None: ...

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        """Could sequences of these lengths, with a common prefix of `shared_prefix_len` tokens and these pictures in
        it, be held at once if the memory were otherwise idle?"""
        ...

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admission] | Deferred | None:
        """Birth of all live sequences of a request: reuse prefixes that are there, and what these sequences have in
        common, and make room for up to `budget` more tokens of one sequence, for all tokens of several. At least one
        token of each is left to compute. None: no room, and trying again is of use only once something left. LATER: the
        next request may be tried, this one will find more in a step to come. Undone by `free`."""
        ...

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make tokens [seq.planned, length) writable and private to the sequence. Monotone and idempotent."""
        ...

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        """Go on encoding the pictures that tokens [seq.planned, length) need, for which `grow` has made room, with at
        most `max_parts` parts; where nothing keeps them, whole pictures, and the first one of a step whatever it has.
        Returns how far the tokens can be computed, if a journal taken next comes first, and how many parts that one
        will have encoded."""
        ...

    def undo_encoding(self) -> None:
        """Take back what `plan_encoding` said since the last journal: the step that it was for isn't done."""
        ...

    def commit(self, seq: Sequence) -> None:
        """tokens[:seq.computed] are valid: publish full pages, drop what no layer needs any more."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` starts with the parent's computed state."""
        ...

    def free(self, seq: Sequence) -> None:
        """Death, in memory or swapped out; cached pages may outlive the sequence."""
        ...

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Move quiet sequences, all of a request, to host memory; they leave their slots. False if that has no room."""
        ...

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring back sequences that were swapped out together, into new slots. False while memory is short."""
        ...

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        """Bytes of the pages that these sequences hold, a shared one counted once, and the tokens in them."""
        ...

    def slot(self, seq: Sequence) -> int:
        """The dense index (from 1) of a resident sequence; 0 is scratch."""
        ...

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        """Effects since the last call: before the step's writes, and while it computes."""
        ...

    def discard_contents(self) -> None:
        """The runner's pages are new ones, in which nothing lies. No sequence is in memory, nor a registered prefix."""
        ...

    def get_placement(self, seq: Sequence) -> Placement:
        """What the replayed tables must equal. For tests; never called in a step."""
        ...

    def account(self) -> Account:
        """Bytes by category, which add up to the memory's size; and how much is shared, swapped and pinned."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...
