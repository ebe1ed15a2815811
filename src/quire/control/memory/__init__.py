"""Memories: where the keys and values of every sequence live. One small protocol; one file an implementation.

The scheduler drives a KVMemory without knowing which one it is; the runner replays the journal that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from quire.config import EngineConfig
from quire.control.memory.paged import PagedMemory, Placement
from quire.control.memory.reserved import RULES, ReservedMemory
from quire.control.memory.usage import Sharing, Usage
from quire.control.request import Sequence
from quire.vocabulary.plan import Journal
from quire.vocabulary.specs import Geometry, ModelSpec

__all__ = ["KVMemory", "Placement", "Sharing", "Size", "Usage", "build_memory"]


class KVMemory(Protocol):
    """The interface of every memory. Shortage is a return value, and a call that reports it has changed nothing.

    Lengths are in tokens. `free` and `fork` take quiet sequences only. Deterministic: the same calls give the same
    placements and journal.
    """

    geometry: Geometry

    def fits(self, lengths: Seq[int], shared: int = 0) -> bool:
        """Could sequences of these lengths, with a common prefix of `shared` tokens, be held at once if the memory were
        otherwise idle?"""
        ...

    def admit(self, seq: Sequence, budget: int, sibling: Sequence | None = None) -> int | None:
        """Birth: reuse a prefix that is there and make room for up to `budget` more tokens. Returns the reused length
        (at most len - 1, so that one token is always computed), or None. Undone by `free`. A resident `sibling` may
        share what it has yet to compute: then the sequence's rows must not come before the sibling's."""
        ...

    def grow(self, seq: Sequence, length: int) -> bool:
        """Make tokens [seq.planned, length) writable and private to the sequence. Monotone and idempotent."""
        ...

    def commit(self, seq: Sequence) -> None:
        """tokens[:seq.computed] are valid: publish full pages, drop what no layer needs any more."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` starts with the parent's computed state."""
        ...

    def free(self, seq: Sequence) -> None:
        """Death; cached pages may outlive the sequence."""
        ...

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        """Move quiet sequences, all of a request, to host memory; they leave their slots. False if it is full."""
        ...

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        """Bring back sequences that were swapped out together, into new slots. False while memory is short."""
        ...

    def drop_swapped(self, seq: Sequence) -> None:
        """Forget a sequence that is swapped out."""
        ...

    def held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        """Bytes of the pages that these sequences hold, a shared one counted once, and the tokens in them."""
        ...

    def pin(self, name: str, seq: Sequence) -> bool:
        """Register what the sequence has computed as a prefix; False if prefixes have no room left."""
        ...

    def unpin(self, name: str) -> bool:
        """Let go of a registered prefix; False if there is none of that name."""
        ...

    def room_for_prefix(self, length: int) -> bool:
        """Could a prefix of this length be registered now?"""
        ...

    def slot(self, seq: Sequence) -> int:
        """The dense index (from 1) of a resident sequence; 0 is scratch."""
        ...

    def take_journal(self) -> tuple[Journal, Journal]:
        """Effects since the last call: before the step's writes, and while it computes."""
        ...

    def place(self, seq: Sequence) -> Placement:
        """What the replayed tables must equal. For tests; never called in a step."""
        ...

    def usage(self) -> Usage:
        """Bytes by category; they add up to the memory's size."""
        ...

    def sharing(self) -> Sharing:
        """How much is shared, swapped and pinned."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...


class Size(NamedTuple):
    """How large a memory is to be: `tokens` of capacity, for sequences of up to `max_len` tokens."""

    tokens: int
    max_len: int
    itemsize: int


def build_memory(config: EngineConfig, spec: ModelSpec, size: Size, model_id: str = "") -> KVMemory:
    """The memory that `config.memory` names, of `size`; what the config doesn't size is sized as for a CPU."""
    config = config.sized("cpu")
    if config.memory in RULES:
        return ReservedMemory.build(config, spec, size.tokens, size.max_len, size.itemsize)
    return PagedMemory.build(config, spec, size.tokens, size.max_len, size.itemsize, model_id)
